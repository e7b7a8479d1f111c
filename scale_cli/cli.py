"""The command line, a function for each verb. Imports are inside, so that `scale --help` is instant."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from scale_cli import options as take
from scale_cli.console import (
    Verbs,
    asked,
    ended_in_one_message,
    load,
    log,
    numbers,
    print_json,
    quieten_libraries,
    reporting,
    run_folder,
    show,
    typed,
)
from scale_cli.errors import ConfigError
from scale_cli.processes import on_main, refuse_several

app = typer.Typer(
    name="scale",
    help="Teach a pretrained language model a new language without losing what it knows.",
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def _common(version: take.Version = False) -> None:
    pass


@app.command()
@reporting
def plan(
    config: take.Config,
    overrides: take.Overrides = None,
    flops: take.Flops = None,
    num_processes: take.Processes = 1,
) -> None:
    """Tell what a run and every other method will cost.

    Of the base it needs the config.json only.
    """
    checked = load(config, overrides)
    from scale_cli.commands.plan import plan

    show(on_main(lambda: plan(checked, flops, num_processes)))


@app.command()
@reporting
def init(
    file: take.NewConfig = Path("scale.yaml"),
    base: take.Base = None,
    corpus: take.Corpus = None,
    language: take.CorpusLanguage = None,
    retention: take.Retention = None,
    retention_language: take.RetentionLanguage = "en",
    held_out: take.HeldOut = None,
    minutes: take.Minutes = 5.0,
) -> None:
    """Write a first config for a base and text of your own.

    In sizes for the device at hand. It asks for what no flag says, where there is a terminal.
    """
    refuse_several("init")
    model = base or asked("--base", "the base: a hub id or a folder")
    learned = corpus or asked("--corpus", "what it shall learn: files, or OWNER/DATASET[:SUBSET[:SPLIT]]")
    spoken = language or asked("--language", "of that text: ko, de, ...")
    kept = retention or asked("--retention", "text of what the base knows, to see that it stays")
    quieten_libraries()
    from scale_cli.commands.init import Answers, init

    show(init(Answers(model, learned, spoken, kept, retention_language, held_out, minutes), file))


@app.command()
def schema() -> None:
    """Print the JSON Schema of the config, for editors.

    It lies in docs/ too, beside a page with every key.
    """
    from scale_cli.config.load import json_schema_text

    typer.echo(json_schema_text(), nl=False)


@app.command()
@reporting
def upscale(config: take.Config, overrides: take.Overrides = None) -> None:
    """Widen the base model; nothing it computes changes."""
    checked = load(config, overrides)
    from scale_cli.commands.upscale import upscale

    show(on_main(lambda: upscale(checked)))


@app.command()
@reporting
def prepare(config: take.Config, overrides: take.Overrides = None) -> None:
    """Tokenise every corpus ahead of training.

    Stopped or killed, the same command goes on where it was.
    """
    checked = load(config, overrides)
    from scale_cli.commands.prepare import prepare

    show(on_main(lambda: prepare(checked)))


@app.command()
@reporting
def train(
    config: take.Config, overrides: take.Overrides = None, resume: take.Resume = None, accept: take.Accepted = None
) -> None:
    """Train what the method trains, and nothing else.

    In one process, or in several under `accelerate launch -m scale_cli`.
    """
    checked = load(config, overrides)
    from scale_cli.commands.train import train

    show(train(checked, resume, log, accept or ()))


@app.command()
@reporting
def evaluate(config: take.Config, overrides: take.Overrides = None, max_forgetting: take.MaxForgetting = None) -> None:
    """Compare base and trained model: the forgetting report.

    On held-out text, and on benchmarks where the config names some.
    """
    checked = load(config, overrides)
    from scale_cli.commands.evaluate import check_forgetting, check_gate, evaluate

    check_gate(checked.evaluation, max_forgetting)
    summary = evaluate(checked)
    show(summary)
    check_forgetting(summary.report, max_forgetting)


app.command("eval", hidden=True, help="The same as evaluate.")(evaluate)


@app.command()
@reporting
def export(
    config: take.Config,
    overrides: take.Overrides = None,
    push_to_hub: take.Repository = None,
    dry_run: take.DryRun = True,
) -> None:
    """Write the trained model as a folder that other tools load.

    With its model card.
    """
    checked = load(config, overrides)
    from scale_cli.commands.export import export_all

    on_main(lambda: export_all(checked, push_to_hub, show, dry_run=dry_run))


@app.command()
@reporting
def sweep(
    config: take.Config, values: take.Swept = None, max_runs: take.MaxRuns = None, paired: take.Paired = False
) -> None:
    """Train a config with several values of some keys.

    Ranks the runs by what they learned; goes on where it was.
    """
    refuse_several("sweep")
    from scale_cli.config.load import parse_grid

    grid = parse_grid(values or [], paired=paired)
    load(config, grid.shared)
    from scale_cli.commands import sweep as sweeping

    show(sweeping.sweep(config, grid, max_runs, log))


@app.command()
@reporting
def mixture(
    config: take.Config,
    overrides: take.Overrides = None,
    ratios: take.Ratios = "0.33,0.5,0.75,1",
    tolerance: take.Tolerance = 0.05,
    steps: take.Budgets = None,
    predict_steps: take.PredictSteps = None,
) -> None:
    """Find how much new text a run takes before it forgets too much.

    By runs at several shares, and budgets if asked, a law fitted to them, and what it predicts measured beside it.
    """
    refuse_several("mixture")
    load(config, overrides)
    shares = numbers("--ratios", ratios)
    budgets = numbers("--steps", steps) if steps is not None else []
    from scale_cli.commands.mixture import mixture

    show(mixture(config, overrides or [], shares, tolerance, log, budgets, predict_steps))


@app.command()
@reporting
def average(checkpoints: take.Averaged, output: take.AveragedFolder, weights: take.Weights = None) -> None:
    """Average what several checkpoints or runs have trained.

    Into a folder that evaluate and export take as a run's.
    """
    folders = [run_folder(path) for path in checkpoints]
    shares = None if weights is None else numbers("--weights", weights)
    quieten_libraries()
    from scale_cli.commands.average import average

    show(on_main(lambda: average(folders, output, shares)))


@app.command()
@reporting
def compare(runs: take.Runs, output: take.Output) -> None:
    """Put any number of finished runs into one report."""
    folders = [run_folder(path) for path in runs]
    from scale_cli.commands.compare import compare

    show(on_main(lambda: compare(folders, output)))


@app.command()
@reporting
def join(
    runs: take.Runs,
    output: take.JoinedFolder,
    prior: take.Prior = None,
    switch_rate: take.SwitchRate = 0.0,
    folder_format: take.JoinedFormat = "transformers",
    rule: take.JoinRule = "posterior",
) -> None:
    """Put finished runs on the same base into one routed model.

    It routes among the base head and the heads of all runs, or their mean.
    """
    folders = [run_folder(path) for path in runs]
    quieten_libraries()
    from scale_cli.commands.join import join

    show(on_main(lambda: join(folders, output, prior, switch_rate, folder_format, rule)))


@app.command()
def generate(
    path: take.Generating,
    prompt: take.Prompts = None,
    max_new_tokens: take.MaxNewTokens = None,
    temperature: take.Temperature = None,
    top_p: take.TopP = 1.0,
    seed: take.Seed = 0,
    options: take.Options = None,
    chat: take.Chat = False,
    show_heads: take.ShowHeads = False,
    as_json: take.AsJson = False,
    samples: take.Samples = None,
    output: take.SamplesFile = None,
) -> None:
    """Continue prompts with a trained model, router and all.

    Without --prompt, every line of standard input is one; with --samples, texts of the base begin with nothing.
    """
    if (samples is None) != (output is None):
        raise ConfigError("--samples, --output: each needs the other")
    if samples is not None and chat:
        raise ConfigError("--samples, --chat: one or the other")
    if samples is not None and output is not None:
        config = load(path, None)
        from scale_cli.commands.generate import write_samples
        from scale_cli.generation.generator import Sampling, parse_options

        length, usual = max_new_tokens or config.corpus.sequence_length, 1.0 if temperature is None else temperature
        drawn = Sampling(length, usual, top_p, seed, parse_options(options or []))
        show(on_main(lambda: write_samples(config.model, samples, output, drawn, prompt or [""])))
        return
    folder = run_folder(path)
    talks = chat and not prompt and not as_json and sys.stdin is not None and sys.stdin.isatty()
    lines = typed() if talks else sys.stdin or ()  # closed
    prompts = [] if talks else prompt or [line.rstrip("\r\n") for line in lines if line.strip()]
    if not prompts and not talks:
        raise ConfigError("--prompt: none given, and nothing on standard input")
    quieten_libraries()
    from scale_cli.commands.generate import continue_and_print, converse
    from scale_cli.generation.generator import Generator, Sampling, parse_options

    chosen = Sampling(max_new_tokens or 128, temperature or 0.0, top_p, seed, parse_options(options or []))

    def speak() -> None:
        generator = Generator(folder)
        if talks:
            converse(generator, lines, chosen, show_heads=show_heads)
        else:
            continue_and_print(generator, prompts, chosen, as_json=as_json, show_heads=show_heads, chat=chat)

    on_main(speak)


@app.command(context_settings={"ignore_unknown_options": True})  # they are the engine's, which refuses what it lacks
def serve(
    path: take.Served,
    options: take.EngineOptions = None,
    engine: take.ServingEngine = None,
    plain: take.Plainly = False,
) -> None:
    """Serve an export as an OpenAI endpoint, with its router.

    By vLLM's server, or with transformers by our own.
    """
    refuse_several("serve")
    quieten_libraries()
    from scale_cli.commands.serve import serve

    serve(run_folder(path), engine, options or [], log, plainly=plain)


@app.command()
@reporting
def verify(path: take.Checked) -> None:
    """Check a folder of ours, or all folders of a run.

    Hashes, preservation, the log, exports.
    """
    folder = run_folder(path)
    quieten_libraries()
    from scale_cli.commands.verify import verify

    def verify_and_require() -> None:
        checked = verify(folder)
        show(checked)
        checked.require()

    on_main(verify_and_require)


@app.command("run")
@reporting
def run_all(
    config: take.Config,
    overrides: take.Overrides = None,
    max_forgetting: take.MaxForgetting = None,
    accept: take.Accepted = None,
) -> None:
    """Upscale, train, evaluate and export, unless done already."""
    checked = load(config, overrides)
    from scale_cli.commands.evaluate import check_forgetting, check_gate
    from scale_cli.commands.run import run_pipeline

    check_gate(checked.evaluation, max_forgetting)
    report = run_pipeline(checked, log, accept or ())
    if report is not None:  # of the process that speaks
        print_json(report)
        check_forgetting(report, max_forgetting)


def main() -> None:
    """Run the command line; user errors end in one message and their exit code, without a traceback."""
    with ended_in_one_message():
        app()
