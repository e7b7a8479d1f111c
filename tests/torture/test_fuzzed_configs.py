"""Configs that were written by nobody: each is a valid run, or one clean error before the model loads."""

import copy
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import scale_cli.commands.plan
import scale_cli.runs.early
from scale_cli.config.schedule import SCHEDULES
from scale_cli.methods import METHODS
from scale_cli.runs.opened import Run
from tests.command_line import Outcome, Scale, model_loads
from tests.small_runs import held_out, write_config

Record = Callable[[str, object], None]
Examples = Callable[[int, int], settings]
REPOSITORY = Path(__file__).resolve().parents[2]
SHIPPED = [path.read_text() for path in sorted((REPOSITORY / "configs").glob("*.yaml"))]
OF_A_RUN = (REPOSITORY / "configs" / "petitions.yaml").read_text()
TREES = [yaml.safe_load(text) for text in SHIPPED]
# What takes a config, and what of it is called first with the base: from there on it is a run.
VERBS = ("plan", "prepare", "run", "upscale")


@pytest.fixture
def scale_here(monkeypatch: pytest.MonkeyPatch, scale: Scale) -> Scale:
    """The command line, up to the model."""
    monkeypatch.setattr(scale_cli.commands.plan, "load_base_config", model_loads)
    monkeypatch.setattr(scale_cli.runs.early, "check_config_file", model_loads)
    monkeypatch.setattr(Run, "check", model_loads)
    return scale


# Values that a key may be given instead of its own, as YAML
JUNK_TEXT = r"""
0 | -1 | 1e400 | -.inf | .nan | 1e12 | 0o17 | 017 | 1_000 | 1:30:00 | '' | ' ' | '\0' | "\0" | "\ud800" | ~ |
~/x | ~nobody-here/x | null | no | On | 한국어 | "\x1b[31mred" | ../../x | /dev/null |
https://user:hunter2@host/x | {{7*7}} | $HOME | [] | {} | [[]] | [1, a, {b: c}] | {a: {b: {c: d}}} |
2024-02-30 | !!binary aGk= | ? [a] | !!python/object/apply:os.system [id] | !!set {a, b} | !!omap [a: 1] |
!x y | !!int x | !!float [] | *nowhere | &a [*a] | {<<: [1]} | !!timestamp x | !!str
"""
LONG = ("9" * 400, "0x" + "f" * 5000, "a" * 5000, "a/" * 3000)
JUNK = st.sampled_from([*re.split(r" \|\s", JUNK_TEXT.strip()), "", *LONG]) | st.text(max_size=30)


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key and index of a tree."""
    children = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    return [
        place for key, child in children for place in ((*path, key), *places(child, (*path, key)))
    ]


@st.composite
def mutated_trees(draw: st.DrawFn) -> str:
    """A shipped config with a few of its keys gone, renamed, doubled, moved or given other values."""
    tree = copy.deepcopy(draw(st.sampled_from(TREES)))
    junk: dict[str, str] = {}
    for number in range(draw(st.integers(1, 3))):
        *above, last = draw(st.sampled_from(places(tree) or [("output_dir",)]))
        node = tree
        for key in above:
            node = node[key]
        ways = "drop rename replace replace replace move wrap number"
        how = draw(st.sampled_from(ways.split()))
        if how == "replace" or last not in (node if isinstance(node, dict) else range(len(node))):
            junk[f"JUNK{number}KNUJ"] = draw(JUNK)
            node[last] = f"JUNK{number}KNUJ"
        elif how == "drop":
            del node[last]
        elif how == "rename" and isinstance(node, dict):
            node[draw(st.text(max_size=12))] = node.pop(last)
        elif how == "move":
            tree[draw(st.sampled_from([*tree, "extra"]))] = copy.deepcopy(node[last])
        elif how == "number":
            node[last] = draw(st.integers() | st.floats())
        else:
            wrapped = [[node[last]], {str(last): node[last]}, str(node[last])]
            node[last] = draw(st.sampled_from(wrapped))
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    return re.sub(r"JUNK\dKNUJ", lambda found: junk[found[0]], text)


def laughs(levels: int, width: int) -> str:
    """Lists of aliases of lists of aliases: width ** levels values."""
    names = [
        f"x{level}: &x{level} [{', '.join([f'*x{level - 1}'] * width)}]"
        for level in range(1, levels)
    ]
    return "\n".join(["x0: &x0 [" + ", ".join(["ha"] * width) + "]", *names])


CONTENTS = (
    mutated_trees().map(lambda text: text.encode(errors="surrogatepass"))
    | st.binary(max_size=200)
    | st.sampled_from([OF_A_RUN.encode()[: 50 * end] for end in range(20)])
)
KEYS = [
    "train.lr",
    "train",
    "output_dir",
    "corpus.sources.0.path",
    "corpus.sources.9",
    "method",
    "a.b",
    "",
]
OVERRIDES = st.lists(
    st.sampled_from(KEYS)
    .flatmap(lambda key: JUNK.map(lambda value: f"{key}={value}"))
    .filter(lambda override: not override.startswith("-") and "\0" not in override),
    max_size=2,
)


def check_outcome(outcome: Outcome) -> bool:
    """Hold one outcome to the promise; return whether the config was taken."""
    stderr, lines = outcome.stderr, outcome.stderr.splitlines()
    if outcome.exit_code is None:
        assert stderr == ""
        return True
    assert outcome.exit_code == 2
    assert lines[0].startswith("error: ") and len(lines) <= 11
    assert all(len(line) < 6_000 and line.isprintable() for line in lines)
    assert "hunter2" not in stderr  # the password in a URL
    # The line, the key, or the file itself: whoever reads it knows where to look.
    assert all(
        re.match(r"(error: )?(.*config\.yaml(:\d+)?: |override |[a-z_]+[ :.])", line)
        for line in lines
    )
    return False


# What is tried by itself: a config, an override and a verb.
EXAMPLES = [
    (OF_A_RUN, [], "run"),
    (OF_A_RUN + "\n" + laughs(9, 9), [], "upscale"),
    (OF_A_RUN + "\nseed: 1\nseed: 2\n", [], "upscale"),
    ("x: " + "[" * 100_000, [], "plan"),
    ("a" * 1_000_000, [], "plan"),
    ("", [], "plan"),
    ("\xff\xfe", [], "plan"),
    (OF_A_RUN, ["output_dir=config.yaml"], "upscale"),
    (OF_A_RUN, ["output_dir=config.yaml/x"], "upscale"),
    (OF_A_RUN, ["output_dir=/dev/null"], "upscale"),
    (OF_A_RUN, ["train.max_steps=1000000000000"], "plan"),
    (OF_A_RUN, ["train.max_steps=10000000", "train.global_batch_size=1048576"], "plan"),
    (OF_A_RUN, ["corpus.sequence_length=1000000000"], "plan"),
    (OF_A_RUN, ['corpus.sources.0.path="a\\0b"'], "prepare"),
]


def test_fuzzed_configs_run_or_end_in_one_clean_error(
    scale_here: Scale, examples: Examples, record_property: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[bool] = []

    def try_config(content: bytes, overrides: list[str], verb: str) -> None:
        with tempfile.TemporaryDirectory() as folder, monkeypatch.context() as patch:
            patch.chdir(folder)
            Path("config.yaml").write_bytes(content)
            taken.append(check_outcome(scale_here(verb, "config.yaml", *overrides)))
            assert [path.name for path in Path().rglob("*")] == ["config.yaml"]

    for text, overrides, verb in EXAMPLES:
        try_config(text.encode("latin-1", errors="replace"), overrides, verb)
    examples(1000, 60)(given(CONTENTS, OVERRIDES, st.sampled_from(VERBS))(try_config))()
    record_property("fuzzed configs, and of them taken", f"{len(taken)}, {sum(taken)}")
    assert 0 < sum(taken) < len(taken)


@st.composite
def good_overrides(draw: st.DrawFn) -> list[str]:
    """Keys of a good config with other good values."""
    values = {
        "seed": st.integers(0, 2**32 - 1),
        "method.variant": st.sampled_from([*METHODS]),
        "method.expansion.ratio": st.floats(1e-3, 1.0),
        "method.expansion.hidden_ratio": st.floats(1e-3, 1.0),
        "method.expansion.mlp_ratio": st.floats(1e-3, 1.0),
        "method.freeze.num_layers": st.integers(0, 4),
        "corpus.sequence_length": st.integers(2, 64),
        "corpus.isolate_documents": st.sampled_from(["true", "false"]),
        "corpus.sources.0.weight": st.floats(1e-6, 1e6),
        "train.lr": st.floats(1e-12, 1e-2),
        "train.schedule": st.sampled_from([*SCHEDULES]),
        "train.optimiser": st.sampled_from(["adamw", "muon"]),
        "train.decay_steps": st.sampled_from(["null", "0", "2"]),
        "train.micro_batch_size": st.sampled_from([1, 2, 4]),
        "train.adam_epsilon": st.floats(1e-12, 1.0),
        "train.max_grad_norm": st.floats(1e-3, 1e30),
        "train.eval_every_steps": st.sampled_from(["null", "1", "10000000"]),
        "train.keep_checkpoints": st.integers(1, 1_000_000),
        "evaluation.batch_size": st.sampled_from([1, 7, 2**20]),
        "evaluation.sequence_length": st.sampled_from(["null", "2", "63"]),
    }
    keys = draw(st.lists(st.sampled_from(sorted(values)), unique=True, max_size=8))
    return [f"{key}={draw(values[key])}" for key in keys]


def test_configs_that_are_taken_run_to_their_end(
    scale: Scale, stories: Path, examples: Examples, record_property: Record
) -> None:
    num_runs, steps = 0, {"max_steps": 2, "global_batch_size": 4, "micro_batch_size": 2}

    @examples(25, 2)
    @given(good_overrides())
    def run(overrides: list[str]) -> None:
        nonlocal num_runs
        with tempfile.TemporaryDirectory() as name:
            news = Path(name) / "news.txt"
            news.write_text("Once upon a time.\n\nThe cat was happy.\n" * 5)
            evaluation = {"perplexity": [held_out("kept", news)], "bootstrap_resamples": 100}
            config = write_config(Path(name), stories, train=steps, evaluation=evaluation)
            done = scale("run", config, "corpus.num_workers=1", *overrides)
            assert done.exit_code == 0, (overrides, done.stderr)
            assert (Path(name) / "run" / "export").is_dir()
        num_runs += 1

    run()
    record_property("taken configs that ran to their end", num_runs)
