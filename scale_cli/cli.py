"""The command line: one function per verb.

Each function imports its own code, so that `scale --help` is fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Exit, Option, Typer, echo

from scale_cli.console import (
    Verbs,
    ask,
    ended_in_one_message,
    import_libraries,
    load,
    parse_share,
    quieten_libraries,
    read,
    run_folder,
)
from scale_cli.errors import ConfigError, UsageError
from scale_cli.processes import on_main, refuse_several, without_collections
from scale_cli.terminal import accept_any_encoding, choose_form, log, print_json, show

app = Typer(
    name="scale",
    help="Teach a pretrained language model a new language without losing what it knows.",
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# Parameters of several verbs
Config = Annotated[
    Path, Argument(metavar="CONFIG", help="The YAML file that all verbs share, or a run's folder.")
]
Overrides = Annotated[
    list[str] | None, Argument(metavar="KEY.SUB=VALUE", help="Override config keys.")
]
Runs = Annotated[
    list[Path], Argument(metavar="RUN", help="Folders of finished runs, or their configs.")
]
Accepted = Annotated[
    list[str] | None,
    Option(
        "--accept", metavar="KEY", help="Continue although KEY has changed: train.max_steps, ..."
    ),
]
FailAbove = Annotated[
    float | None,
    Option(metavar="BITS", min=0.0, help="Exit with code 3 if more bits per byte are forgotten."),
]
TrustTasks = Annotated[
    bool,
    Option(
        "--trust-tasks", help="Read the files of tasks that the config names; they may run code."
    ),
]
AnsweringHead = Annotated[
    Literal["base", "trained", "routed"] | None,
    Option(
        "--head",
        help="What answers. By default, base and trained model, mixed by the router; without one, the trained model.",
    ),
]
LearnedLanguage = Annotated[
    str | None, Option(metavar="CODE", help="Language of that text: ko, de, ...")
]
RetentionLanguage = Annotated[str, Option(metavar="CODE", help="Language of that text.")]
Base = Annotated[
    str | None,
    Option(
        metavar="BASE",
        help="Folder or hub id of the base; PATH is then an adapter of it (PEFT), or a model that was "
        "fine-tuned from it, in a folder or on the hub.",
    ),
]

_FORMS = "Print only figures, one JSON object per line; or only warnings and errors."
Form = Annotated[
    bool | None, Option("--json/--quiet", callback=choose_form, show_default=False, help=_FORMS)
]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        echo(f"scale {version('scale-cli')}")
        raise Exit


@app.callback()
def _common(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def plan(
    config: Config,
    overrides: Overrides = None,
    flops: Annotated[
        float | None,
        Option(
            metavar="FLOP/S",
            min=1.0,
            max=1e20,
            help="Speed of one device; by default it is measured.",
        ),
    ] = None,
    num_processes: Annotated[
        int, Option(metavar="N", min=1, help="Processes that share a step, each on its own device.")
    ] = 1,
    compared: Annotated[bool, Option("--all", help="Show every other method beside it.")] = False,
    _form: Form = None,
) -> None:
    """Estimate the cost of a run.

    It needs no weights.
    """
    checked = load(config, overrides, "plan")
    if not checked.method.definition.trains:
        told = f"nothing trains: `scale run` measures {checked.method.model} beside its base"
        log(f"given          {told}, and exports it")
        return
    from scale_cli.commands.plan import plan

    on_main(lambda: show(plan(checked, flops, num_processes, compared=compared)))


@app.command()
def init(
    file: Annotated[Path, Argument(metavar="CONFIG", help="A new YAML file.")] = Path("scale.yaml"),
    base: Annotated[
        str | None, Option(metavar="MODEL", help="The base: a hub id or a folder.")
    ] = None,
    corpus: Annotated[
        str | None,
        Option(
            metavar="TEXT",
            help="Text to learn: files (a pattern in quotes), or OWNER/DATASET[:SUBSET[:SPLIT]].",
        ),
    ] = None,
    language: LearnedLanguage = None,
    retention: Annotated[
        str | None,
        Option(
            metavar="TEXT",
            help="Text that the base knows, given like --corpus: its beginning measures what is kept, the rest is "
            "replay.",
        ),
    ] = None,
    retention_language: RetentionLanguage = "en",
    text_field: Annotated[
        str, Option(metavar="NAME", help="Column or key that holds the text of --corpus.")
    ] = "text",
    retention_text_field: Annotated[
        str, Option(metavar="NAME", help="The same for --retention.")
    ] = "text",
    method: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="What trains: route, lora, full, ... (docs/concepts.md). If not given: lora where the base knows some "
            "of the text, else route.",
        ),
    ] = None,
    minutes: Annotated[
        float, Option(metavar="N", min=0.1, max=1e6, help="Time to plan for, of the whole run.")
    ] = 5.0,
    _form: Form = None,
) -> None:
    """Write a first config for a base and text of your own.

    Its sizes fit the device. At a terminal, this verb asks for flags that are not given.
    """
    refuse_several("init")
    base = base or ask("--base", "the base: a hub id or a folder")
    corpus = corpus or ask("--corpus", "text to learn: files, or OWNER/DATASET[:SUBSET[:SPLIT]]")
    language = language or ask("--language", "language of that text: ko, de, ...")
    retention = retention or ask("--retention", "text that the base knows, to measure forgetting")
    with without_collections():
        from scale_cli.commands.flags import check_init, checked_method, source_of

        corpus_source = source_of("corpus", corpus, language, text_field)
        retention_source = source_of("replay", retention, retention_language, retention_text_field)
        check_init(file, base, corpus_source, retention_source)
        chosen = None if method is None else checked_method(method)
        quieten_libraries()
        from scale_cli.commands.init import init

        init(file, base, corpus_source, retention_source, method=chosen, minutes=minutes)


@app.command()
def schema() -> None:
    """Print the JSON Schema of the config, for editors."""
    from scale_cli.config.load import json_schema_text

    echo(json_schema_text(), nl=False)


@app.command()
def upscale(config: Config, overrides: Overrides = None, _form: Form = None) -> None:
    """Prepare the model to train, without changing what it computes."""
    checked = load(config, overrides, "upscale")
    from scale_cli.commands.upscale import nothing_to_prepare, upscale

    if not checked.method.definition.trains:
        log(nothing_to_prepare(checked))
        return
    if (upscaled := on_main(lambda: upscale(checked))) is not None:
        print_json({"folder": upscaled.path, "base": upscaled.record})


@app.command()
def prepare(
    config: Config,
    overrides: Overrides = None,
    part: Annotated[
        str | None,
        Option(
            metavar="I/N",
            help="Only this share of the files; a last call without --part joins the shares.",
        ),
    ] = None,
    _form: Form = None,
) -> None:
    """Tokenise every corpus ahead of training.

    After a stop or a kill, the same command continues.
    """
    share = None if part is None else parse_share("--part", part)
    checked = load(config, overrides, "prepare")
    from scale_cli.commands.prepare import prepare, prepare_part

    print_json(on_main(lambda: prepare(checked) if share is None else prepare_part(checked, share)))


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    resume: Annotated[
        str | None,
        Option(metavar="auto|PATH", help="Continue from the newest checkpoint, or from PATH."),
    ] = None,
    accept: Accepted = None,
    _form: Form = None,
) -> None:
    """Train what the method trains, and nothing else.

    Uses one process, or several under `accelerate launch -m scale_cli`.
    """
    checked = load(config, overrides, "train")
    from scale_cli.commands.train import train

    print_json(train(checked, resume, log, accept or ()))


@app.command()
def evaluate(
    config: Config,
    overrides: Overrides = None,
    fail_above: FailAbove = None,
    base: Base = None,
    corpus: Annotated[
        str | None,
        Option(metavar="TEXT", help="With no config: held-out text of what was learned."),
    ] = None,
    language: LearnedLanguage = None,
    retention: Annotated[
        str | None, Option(metavar="TEXT", help="With no config: text that the base knows.")
    ] = None,
    retention_language: RetentionLanguage = "en",
    output: Annotated[
        Path | None,
        Option(metavar="DIR", help="With no config: where to write; by default runs/NAME."),
    ] = None,
    trust_tasks: TrustTasks = False,
    _form: Form = None,
) -> None:
    """Compare base and trained model: the forgetting report.

    Uses held-out text, and benchmarks if the config names any. Given a checkpoint, measures it.
    Given an adapter or a model that others trained, measures it on --corpus and --retention.
    """
    from scale_cli.runs.folder import of_checkpoint

    checkpoint = config if of_checkpoint(config) else None
    if corpus or retention:
        from scale_cli.commands.flags import texts_to_measure

        texts = texts_to_measure(corpus, language, retention, retention_language)
        import_libraries()
        from scale_cli.starter.measured import measured

        checked = measured(config, base, texts, output, overrides or [], fail_above)
    elif base or output or (config / "adapter_config.json").is_file():
        raise UsageError("--corpus, --retention: give at least one text to measure on")
    else:
        verb = "evaluate a checkpoint" if checkpoint else "evaluate"
        checked = load(config, overrides, verb, fail_above)
    from scale_cli.commands.evaluate import check_forgetting, evaluate
    from scale_cli.commands.train import train

    if not checked.method.definition.trains:
        train(checked, None, log)  # which copies what is measured
    report = evaluate(checked, checkpoint, trust_tasks=trust_tasks)
    print_json(report.to_json())
    check_forgetting(report, fail_above)


app.command("eval", hidden=True, help="The same as evaluate.")(evaluate)


@app.command()
def export(
    config: Config,
    overrides: Overrides = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Option(help="Of the written weights; by default export.dtype, or the base's own."),
    ] = None,
    push_to_hub: Annotated[
        str | None,
        Option(metavar="OWNER/NAME", help="Hub repository for the export; needs --no-dry-run."),
    ] = None,
    dry_run: Annotated[
        bool, Option(help="With --push-to-hub, only list what would be sent.")
    ] = True,
    _form: Form = None,
) -> None:
    """Write the trained model as a folder that other tools load.

    Formats, by export.format: plain (needs no custom code), transformers (an expansion with its router),
    adapter (only what was trained; for LoRA PEFT's folder).
    """
    asked = [] if dtype is None else [f"export.dtype={dtype}"]
    checked = load(config, [*(overrides or ()), *asked], "export")
    from scale_cli.commands.export import export_all

    for exported in on_main(lambda: export_all(checked, push_to_hub, dry_run=dry_run)) or ():
        print_json(exported)


@app.command()
def compare(
    runs: Runs,
    output: Annotated[
        Path, Option(metavar="DIR", help="A new folder, or an earlier comparison to replace.")
    ],
    _form: Form = None,
) -> None:
    """Put any number of finished runs into one report."""
    folders = [run_folder(path) for path in runs]
    from scale_cli.commands.compare import compare

    on_main(lambda: show(compare(folders, output)))


@app.command()
def generate(
    path: Annotated[Path, Argument(metavar="PATH", help="A run, a checkpoint, or an export.")],
    prompt: Annotated[
        list[str] | None,
        Option(metavar="TEXT", help="Prompt to continue; may be given several times."),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        Option(metavar="N", min=1, help="Default: 128; with --samples, corpus.sequence_length."),
    ] = None,
    temperature: Annotated[
        float | None, Option(metavar="T", min=0.0, help="Default: 0 (greedy); with --samples, 1.")
    ] = None,
    top_p: Annotated[
        float,
        Option(
            metavar="P", min=0.0, max=1.0, help="Sample from the likeliest tokens up to this share."
        ),
    ] = 1.0,
    seed: Annotated[
        int, Option(metavar="N", min=0, max=2**32 - 1, help="Seed of the sampling.")
    ] = 0,
    chat: Annotated[
        bool, Option("--chat", help="Use the chat template; at a terminal, hold a conversation.")
    ] = False,
    show_heads: Annotated[
        bool, Option("--show-heads", help="Name each head where it takes over.")
    ] = False,
    head: AnsweringHead = None,
    base: Base = None,
    as_json: Annotated[
        bool, Option("--json", help="Print a JSON object per prompt, with the heads' shares.")
    ] = False,
    samples: Annotated[
        int | None,
        Option(metavar="N", min=1, help="Let the base write N texts; PATH is then a config."),
    ] = None,
    output: Annotated[
        Path | None, Option(metavar="FILE", help="With --samples: a new .jsonl file.")
    ] = None,
) -> None:
    """Continue prompts with a trained model and its router.

    Without --prompt, each line of standard input is a prompt; with --samples, texts start from an
    empty prompt.
    """
    if samples is None and output is None:
        folder = path if base else run_folder(path)
        import_libraries()
        from scale_cli.commands.generate import generate
        from scale_cli.generation.generator import Sampling

        sampling = Sampling(max_new_tokens or 128, temperature or 0.0, top_p, seed)
        on_main(
            lambda: generate(
                folder,
                prompt,
                sampling,
                chat=chat,
                as_json=as_json,
                show_heads=show_heads,
                head=head,
                base=base,
            )
        )
        return
    if samples is None or output is None or chat or show_heads or as_json or head or base:
        raise ConfigError(
            "--samples, --output: give both or neither, and without --chat, --show-heads, --json, "
            "--head and --base"
        )
    config = read(path, None)
    import_libraries()
    from scale_cli.commands.generate import write_samples
    from scale_cli.generation.generator import Sampling

    length = max_new_tokens or config.corpus.sequence_length
    sampling = Sampling(length, 1.0 if temperature is None else temperature, top_p, seed)
    on_main(lambda: write_samples(config, samples, output, prompt or [""], sampling))


@app.command(context_settings={"ignore_unknown_options": True})  # the engine checks its own options
def serve(
    path: Annotated[
        Path,
        Argument(metavar="PATH", help="A run or an export."),
    ],
    options: Annotated[
        list[str] | None, Argument(metavar="[-- OPTION...]", help="Options for the engine itself.")
    ] = None,
    engine: Annotated[
        Literal["vllm", "transformers"] | None,
        Option(help="By default vLLM, if it is installed and can serve the model."),
    ] = None,
    head: AnsweringHead = None,
    base: Base = None,
) -> None:
    """Serve a run or an export as an OpenAI endpoint, with its router."""
    refuse_several("serve")
    folder = path if base else run_folder(path)
    import_libraries()
    from scale_cli.commands.serve import serve

    serve(folder, engine, options or [], head, base)


@app.command()
def verify(
    path: Annotated[Path, Argument(metavar="PATH", help="A run, one folder of it, or its config.")],
    base: Base = None,
    _form: Form = None,
) -> None:
    """Check one folder that scale wrote, or all folders of a run.

    Checks hashes, and compares exports with the trained model.
    """
    folder = path if base else run_folder(path)
    import_libraries()
    from scale_cli.commands.verify import verify

    on_main(lambda: verify(folder, base))


@app.command("run")
def run_all(
    config: Config,
    overrides: Overrides = None,
    fail_above: FailAbove = None,
    accept: Accepted = None,
    trust_tasks: TrustTasks = False,
    _form: Form = None,
) -> None:
    """Upscale, train, evaluate and export; skip what is done.

    Exits with code 3 if what was to be learned got worse.
    """
    checked = load(config, overrides, "run", fail_above)
    from scale_cli.commands.evaluate import check_forgetting, check_learned
    from scale_cli.commands.run import run_pipeline

    report = run_pipeline(checked, accept or (), trust_tasks=trust_tasks)
    if report is not None:  # may be None on processes other than the main one
        print_json(report.to_json())
        check_learned(report)
        check_forgetting(report, fail_above)


def main() -> None:
    """Run the command line.

    A user error prints one message, without a traceback, and sets its exit code.
    """
    accept_any_encoding()
    with ended_in_one_message():
        app()
