"""The command line. Verbs import what they need inside, so that `scale --help` is instant."""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Protocol

import typer
from safetensors import SafetensorError

from scale_cli.errors import ConfigError, EndedElsewhere, Interrupted, RunError, ScaleError, StorageError, UsageError
from scale_cli.options import (
    Accepted,
    AsJson,
    Base,
    Checked,
    Config,
    Corpus,
    CorpusLanguage,
    Documents,
    DryRun,
    EngineOptions,
    Flops,
    Generating,
    HeldOut,
    JoinedFolder,
    MaxForgetting,
    MaxNewTokens,
    MaxRuns,
    Minutes,
    NewConfig,
    Options,
    Output,
    Overrides,
    Paired,
    Plainly,
    PlanFile,
    Prior,
    Processes,
    Prompts,
    Repository,
    Resume,
    Retention,
    RetentionLanguage,
    Runs,
    Samples,
    SamplesFile,
    SchemaOf,
    Seed,
    Served,
    ServingEngine,
    ShowHeads,
    Swept,
    SwitchRate,
    Temperature,
    TopP,
    Utilisation,
)
from scale_cli.printable import printable, without_passwords
from scale_cli.processes import leave, lost_peers_named, on_main, refuse_several

if TYPE_CHECKING:
    from scale_cli.config.schema import RunConfig

app = typer.Typer(
    name="scale",
    help="Teach a pretrained language model a new language without losing what it knows.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"scale {version('scale-cli')}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
]


@app.callback()
def _common(version: Version = False) -> None:
    pass


class Summary(Protocol):
    """What a verb returns, on the process that speaks."""

    def lines(self) -> list[str]:
        """Return the lines to print."""


@app.command()
def plan(
    config: Config,
    overrides: Overrides = None,
    flops: Flops = None,
    utilisation: Utilisation = None,
    num_processes: Processes = 1,
    output: PlanFile = None,
) -> None:
    """Tell what a run and every other method will cost.

    Of the base it needs the config.json only.
    """
    checked = _load(config, overrides)
    from scale_cli.planning import render, run

    if output is not None and output.is_dir():
        raise UsageError(f"--output {output}: is a folder; give a file")

    def plan_and_write() -> None:
        made = run.plan(checked, flops, utilisation, num_processes)
        if output is not None:
            run.write_plan(made, output)
        for line in render.plan_lines(made):
            _say(line)

    on_main(plan_and_write)


@app.command()
def init(
    file: NewConfig = Path("scale.yaml"),
    base: Base = None,
    corpus: Corpus = None,
    language: CorpusLanguage = None,
    retention: Retention = None,
    retention_language: RetentionLanguage = "en",
    held_out: HeldOut = None,
    minutes: Minutes = 5.0,
) -> None:
    """Write a first config for a base and text of your own.

    In sizes for the device at hand. It asks for what no flag says, where there is a terminal.
    """
    refuse_several("init")
    model = base or _asked("--base", "the base: a hub id or a folder")
    learned = corpus or _asked("--corpus", "what it shall learn: files, or OWNER/DATASET[:SUBSET[:SPLIT]]")
    spoken = language or _asked("--language", "of that text: ko, de, ...")
    kept = retention or _asked("--retention", "text of what the base knows, to see that it stays")
    _quieten_libraries()
    from scale_cli import starter

    _show(starter.init(starter.Answers(model, learned, spoken, kept, retention_language, held_out, minutes), file))


@app.command()
def schema(of: SchemaOf = "run") -> None:
    """Print the JSON Schema of the config, for editors.

    It lies in docs/ too, beside a page with every key.
    """
    from scale_cli.config.biography import BiographyConfig
    from scale_cli.config.json_schema import json_schema_text
    from scale_cli.config.schema import RunConfig

    typer.echo(json_schema_text(RunConfig if of == "run" else BiographyConfig), nl=False)


@app.command()
def upscale(config: Config, overrides: Overrides = None) -> None:
    """Widen the base model; nothing it computes changes."""
    checked = _load(config, overrides)
    from scale_cli.upscale import run

    _show(on_main(lambda: run.upscale(checked)))


@app.command()
def prepare(config: Config, overrides: Overrides = None) -> None:
    """Tokenise every corpus ahead of training.

    Stopped or killed, the same command goes on where it was.
    """
    checked = _load(config, overrides)
    from scale_cli.training.prepare import prepare

    _show(on_main(lambda: prepare(checked)))


@app.command()
def train(config: Config, overrides: Overrides = None, resume: Resume = None, accept: Accepted = None) -> None:
    """Train what the method trains, and nothing else.

    In one process, or in several under `accelerate launch -m scale_cli`.
    """
    checked = _load(config, overrides)
    from scale_cli.training import run

    _show(run.train(checked, resume, _say, accept or ()))


@app.command()
def evaluate(config: Config, overrides: Overrides = None, max_forgetting: MaxForgetting = None) -> None:
    """Compare base and trained model: the forgetting report.

    On held-out text, and on benchmarks where the config names some.
    """
    checked = _load(config, overrides)
    from scale_cli.evaluation import run

    if max_forgetting is not None:
        run.check_gate(checked)
    summary = run.evaluate(checked)
    _show(summary)
    if max_forgetting is not None:
        run.check_forgetting(summary.report, max_forgetting)


app.command("eval", hidden=True, help="The same as evaluate.")(evaluate)


@app.command()
def export(config: Config, overrides: Overrides = None, push_to_hub: Repository = None, dry_run: DryRun = True) -> None:
    """Write the trained model as a folder that other tools load.

    With its model card.
    """
    checked = _load(config, overrides)
    from scale_cli.export import publish, run

    if push_to_hub is not None:
        publish.check_repository(push_to_hub, checked.export.formats)

    def export_and_push() -> None:
        run.check_format(checked)
        for one in run.one_by_one(checked):
            summary = run.export(one)
            _show(summary)
            if push_to_hub is not None:
                send = publish.planned if dry_run else publish.publish
                _show(send(summary.folder, push_to_hub))

    on_main(export_and_push)


@app.command()
def sweep(config: Config, values: Swept = None, max_runs: MaxRuns = None, paired: Paired = False) -> None:
    """Train a config with several values of some keys.

    Ranks the runs by what they learned; goes on where it was.
    """
    refuse_several("sweep")
    from scale_cli.config.grid import parse_grid

    grid = parse_grid(values or [], paired=paired)
    _load(config, grid.shared)
    from scale_cli import sweep as sweeping

    _show(sweeping.sweep(config, grid, max_runs, _say))


@app.command()
def calibrate(config: Config, overrides: Overrides = None, documents: Documents = 32) -> None:
    """Find a threshold for the cosine rule on held-out samples.

    Prints its frontier: what each threshold costs on either kind of text.
    """
    checked = _load(config, overrides)
    from scale_cli.evaluation import calibration

    _show(calibration.calibrate(checked, documents))


@app.command()
def compare(runs: Runs, output: Output) -> None:
    """Put any number of finished runs into one report."""
    folders = [_run_folder(path) for path in runs]
    from scale_cli.comparison import run

    _show(on_main(lambda: run.compare(folders, output)))


@app.command()
def join(runs: Runs, output: JoinedFolder, prior: Prior = None, switch_rate: SwitchRate = 0.0) -> None:
    """Put finished runs on the same base into one routed model.

    It routes among the base head and the heads of all runs.
    """
    folders = [_run_folder(path) for path in runs]
    _quieten_libraries()
    from scale_cli.join import run

    _show(on_main(lambda: run.join(folders, output, prior, switch_rate)))


@app.command()
def generate(
    path: Generating,
    prompt: Prompts = None,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    options: Options = None,
    show_heads: ShowHeads = False,
    as_json: AsJson = False,
    samples: Samples = None,
    output: SamplesFile = None,
) -> None:
    """Continue prompts with a trained model, router and all.

    Without --prompt, every line of standard input is one; with --samples, texts of the base begin with nothing.
    """
    if (samples is None) != (output is None):
        raise ConfigError("--samples, --output: each needs the other")
    if samples is not None and output is not None:
        config = _load(path, None)
        from scale_cli import replay
        from scale_cli.generate import Sampling, parsed_options

        length = max_new_tokens or config.corpus.sequence_length
        drawn = Sampling(
            length, 1.0 if temperature is None else temperature, top_p, seed, parsed_options(options or [])
        )
        _show(on_main(lambda: replay.write_samples(config.model, samples, output, drawn, prompt or [""])))
        return
    folder = _run_folder(path)
    lines = sys.stdin or ()  # closed
    prompts = prompt or [line.rstrip("\r\n") for line in lines if line.strip()]
    if not prompts:
        raise ConfigError("--prompt: none given, and nothing on standard input")
    _quieten_libraries()
    from scale_cli import generate as generation

    further = generation.parsed_options(options or [])
    sampling = generation.Sampling(max_new_tokens or 128, temperature or 0.0, top_p, seed, further)
    streams = len(prompts) == 1 and not as_json and "num_beams" not in sampling.options

    def continue_and_print() -> None:
        generator = generation.Generator(folder)
        streamer = generator.streamer(prompts[0], show_heads=show_heads) if streams else None
        continuations = generator.continue_all(prompts, sampling, streamer)
        if streamer is None:
            for line in generation.told(continuations, as_json=as_json, show_heads=show_heads):
                typer.echo(line)  # coloured, where that was asked for
        if not as_json:
            for line in generation.summary(continuations, show_heads=show_heads):
                typer.echo(line, err=True)

    on_main(continue_and_print)


@app.command()
def serve(path: Served, options: EngineOptions = None, engine: ServingEngine = None, plain: Plainly = False) -> None:
    """Serve an export as an OpenAI endpoint, with its router.

    By the server of vLLM or of transformers.
    """
    refuse_several("serve")
    from scale_cli.serve import serving

    server = serving(_run_folder(path), engine, options or [], plainly=plain)
    _say(f"serving        {server.promise}")
    sys.stdout.flush()
    # vLLM reports how it is used, unless it is told not to.
    os.execve(server.command[0], server.command, {"VLLM_NO_USAGE_STATS": "1", **os.environ})


@app.command()
def verify(path: Checked) -> None:
    """Check a folder of ours, or all folders of a run.

    Hashes, preservation, ledgers, exports.
    """
    folder = _run_folder(path)
    _quieten_libraries()
    from scale_cli import verify as verification

    def verify_and_require() -> None:
        checked = verification.verify(folder)
        _show(checked)
        checked.require()

    on_main(verify_and_require)


@app.command()
def biography(config: Config, overrides: Overrides = None) -> None:
    """Teach synthetic people to every method, task after task.

    Draws what each method forgets.
    """
    refuse_several("biography")
    from scale_cli.config.biography import BiographyConfig
    from scale_cli.config.load import load_checked

    checked = load_checked(BiographyConfig, config, overrides)
    _check_output(checked.output_dir)
    _quieten_libraries()
    from scale_cli.biography import run

    _show(run.run_biography(checked, _say))


@app.command(name="run")
def run_all(
    config: Config, overrides: Overrides = None, max_forgetting: MaxForgetting = None, accept: Accepted = None
) -> None:
    """Upscale, train, evaluate and export, unless done already."""
    checked = _load(config, overrides)
    from scale_cli.evaluation.run import check_forgetting, check_gate
    from scale_cli.pipeline import run_pipeline

    if max_forgetting is not None:
        check_gate(checked)
    report = run_pipeline(checked, _say, accept or ())
    if max_forgetting is not None and report is not None:
        check_forgetting(report, max_forgetting)


def _asked(flag: str, meaning: str) -> str:
    """Ask for what a flag would have said, or refuse where nobody can answer."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(f"{flag}: not given ({meaning}), and there is no terminal to ask at")
    answer: str = typer.prompt(f"{flag}, {meaning}")
    return answer


def _load(path: Path, overrides: list[str] | None) -> RunConfig:
    from scale_cli.config.load import load_config
    from scale_cli.storage.layout import RunFolder

    if path.is_dir():  # of a run: its own config, wherever it lies now
        overrides = [f"output_dir={json.dumps(str(path))}", *(overrides or [])]
        path = RunFolder(path).config
    config = load_config(path, overrides)
    _check_output(config.output_dir)
    _quieten_libraries()
    return config


def _run_folder(path: Path) -> Path:
    """Return the folder of the run that a config is of, or the folder that was given itself."""
    if not path.is_file():
        return path
    from scale_cli.config.load import load_config

    return load_config(path).output_dir


def _check_output(output_dir: Path) -> None:
    from scale_cli.storage.layout import RunFolder

    RunFolder(output_dir).check()


def _quieten_libraries() -> None:
    """Silence what libraries say to each other; after a config has been found good: its errors must not wait for it."""
    warnings.simplefilter("ignore", FutureWarning)
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    hub_logging.set_verbosity_error()
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _show(summary: Summary | None) -> None:
    for line in () if summary is None else summary.lines():
        _say(line)


def _say(line: str) -> None:
    # Every process of `accelerate launch` runs the verb; one of them speaks.
    if os.environ.get("RANK", "0") == "0":
        typer.echo(printable(line))


def main() -> None:
    """Run the command line; user errors end in one message and their exit code, without a traceback."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        with lost_peers_named():
            _run_verb()
    except Interrupted as stopped:
        from scale_cli.training.interruption import command_to_go_on

        again = command_to_go_on(sys.argv[1:], os.environ)
        typer.echo(printable(without_passwords(f"{stopped}\ncontinue with: {again}")), err=True)
        sys.exit(stopped.exit_code)
    except EndedElsewhere as ended:
        sys.exit(ended.exit_code)
    except ScaleError as error:
        _fail(error)
    except (OSError, SafetensorError) as error:
        place = getattr(error, "filename", None) or "input/output"
        _fail(StorageError(f"{place}: {getattr(error, 'strerror', None) or error}"))
    except MemoryError:
        _fail(RunError("out of memory"))


def _run_verb() -> None:
    try:
        app()
    except SystemExit as ended:
        if not ended.code:
            leave()
        raise


def _stop(number: int, _frame: FrameType | None) -> None:
    """End at once, outside the training loop, which has its own way: what is half-written is never taken for whole."""
    typer.echo(
        f"stopped by {signal.Signals(number).name}; the same command starts what was not finished again", err=True
    )
    raise SystemExit(128 + number)


def _fail(error: ScaleError) -> None:
    typer.echo(f"error: {printable(without_passwords(str(error)))}", err=True)
    sys.exit(error.exit_code)
