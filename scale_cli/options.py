"""What the command line takes: arguments and options, by the names of what they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"scale {version('scale-cli')}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
]
Json = Annotated[bool, typer.Option("--json", help="Print figures alone, a JSON object a line.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print warnings and errors alone.")]
Config = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="The YAML file that all verbs share, or a run's folder.")
]
NewConfig = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file to write; never one that is there.")]
Base = Annotated[str | None, typer.Option("--base", metavar="MODEL", help="The base: a hub id or a folder.")]
Corpus = Annotated[
    str | None,
    typer.Option("--corpus", metavar="TEXT", help="What it shall learn: files, or OWNER/DATASET[:SUBSET[:SPLIT]]."),
]
CorpusLanguage = Annotated[str | None, typer.Option("--language", metavar="CODE", help="Of that text: ko, de, ...")]
Retention = Annotated[
    str | None, typer.Option("--retention", metavar="TEXT", help="Text of what the base knows, to see that it stays.")
]
RetentionLanguage = Annotated[str, typer.Option("--retention-language", metavar="CODE", help="Of that text.")]
HeldOut = Annotated[
    str | None,
    typer.Option("--held-out", metavar="TEXT", help="More of the corpus to measure on; else a part of it."),
]
Minutes = Annotated[float, typer.Option(metavar="N", min=0.1, max=1e6, help="To train for, by `scale plan`'s speed.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY.SUB=VALUE", help="Override config keys.")]
Swept = Annotated[
    list[str] | None, typer.Argument(metavar="KEY.SUB=A,B,C", help="Values to train with; with one value, an override.")
]
MaxRuns = Annotated[int | None, typer.Option(metavar="N", min=1, help="At most so many, drawn from all by chance.")]
Paired = Annotated[
    bool, typer.Option("--paired", help="First values together, then second ones; else every combination.")
]
Resume = Annotated[
    str | None, typer.Option(metavar="auto|PATH", help="Continue from the newest whole checkpoint, or from this one.")
]
Accepted = Annotated[
    list[str] | None,
    typer.Option("--accept", metavar="KEY", help="May have changed since the run was begun: train.max_steps, ..."),
]
MaxForgetting = Annotated[
    float | None,
    typer.Option(metavar="BITS", min=0.0, help="Exit 3 if a retention corpus loses more bits per byte than this."),
]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of finished runs, or their configs.")]
Checked = Annotated[Path, typer.Argument(metavar="PATH", help="A run, one folder of it, or its config.")]
Generating = Annotated[
    Path, typer.Argument(metavar="PATH", help="A run, its final/, a checkpoint, an export, or a joined folder.")
]
Served = Annotated[Path, typer.Argument(metavar="PATH", help="A plain export (llama), or a run that has one.")]
ServingEngine = Annotated[
    Literal["vllm", "transformers"] | None, typer.Option("--engine", help="vLLM where it is installed, if not given.")
]
Plainly = Annotated[bool, typer.Option("--plain", help="Without the router.")]
EngineOptions = Annotated[
    list[str] | None, typer.Argument(metavar="[-- OPTION...]", help="The engine's own, such as --port 8001.")
]
Prompts = Annotated[list[str] | None, typer.Option("--prompt", metavar="TEXT", help="May be given several times.")]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="At most so many each.", show_default="128; with --samples a window's"),
]
Temperature = Annotated[
    float | None,
    typer.Option(metavar="T", min=0.0, help="0 takes the likeliest token.", show_default="0; with --samples 1"),
]
TopP = Annotated[float, typer.Option(metavar="P", min=0.0, max=1.0, help="Sample among the likeliest, this share.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=NUMBER", help="Of transformers' GenerationConfig: top_k=40 ..."),
]
Samples = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Let the untrained base write so many texts, for replay; PATH: a config."),
]
SamplesFile = Annotated[Path | None, typer.Option("--output", metavar="FILE", help="With --samples: a new .jsonl.")]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Of the sampling.")]
Chat = Annotated[
    bool,
    typer.Option("--chat", help="Prompts are a user's, in the base's chat template; at a terminal, one after one."),
]
ShowHeads = Annotated[
    bool,
    typer.Option("--show-heads", help="Show which head spoke: in colours, or by its name where nothing shows colours."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a prompt, every token with every head's share.")]
Output = Annotated[Path, typer.Option(metavar="DIR", help="A new folder, or an earlier comparison to replace.")]
JoinedFormat = Annotated[
    Literal["transformers", "llama"],
    typer.Option("--format", help="transformers: every head bit for bit; llama: one plain model, routed by vLLM too."),
]
JoinRule = Annotated[
    Literal["posterior", "mean"],
    typer.Option(help="posterior: among the base and every run's head; mean: the base and the mean of those heads."),
]
Ratios = Annotated[
    str, typer.Option("--ratios", metavar="A,B,...", help="Shares of new text to run, above 0 and at most 1.")
]
Tolerance = Annotated[
    float, typer.Option(metavar="BITS", min=0.0, help="Bits per byte of the base's text that may be lost.")
]
Budgets = Annotated[
    str | None,
    typer.Option("--steps", metavar="A,B,...", help="Budgets to run every share for; the config's own if none."),
]
PredictSteps = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="A longer budget to predict, run and compare; with --steps.")
]
Averaged = Annotated[
    list[Path], typer.Argument(metavar="CHECKPOINT", help="Checkpoints, final/ folders or finished runs, two or more.")
]
AveragedFolder = Annotated[Path, typer.Option("--output", metavar="DIR", help="A new run's folder.")]
Weights = Annotated[
    str | None, typer.Option("--weights", metavar="A,B,...", help="One for each, relative to the others; all the same.")
]
JoinedFolder = Annotated[Path, typer.Option("--output", metavar="DIR", help="A new folder, or an earlier join.")]
Prior = Annotated[
    float | None,
    typer.Option(
        metavar="P", min=0.001, max=0.999, help="Weight of the base head at the start; an even share if none."
    ),
]
SwitchRate = Annotated[
    float, typer.Option(metavar="ALPHA", min=0.0, max=0.999, help="Lets the router change its mind within a document.")
]
Flops = Annotated[
    float | None,
    typer.Option(
        metavar="FLOP/S",
        min=1.0,
        help="What a device sustains, about 0.4 of its peak; else the one at hand is measured.",
    ),
]
Processes = Annotated[int, typer.Option(metavar="N", min=1, help="That share a step, each on a device of its own.")]
Repository = Annotated[
    str | None, typer.Option("--push-to-hub", metavar="OWNER/NAME", help="Also send it there; a dry run, unless ...")
]
DryRun = Annotated[bool, typer.Option(help="... --no-dry-run is given too.")]
