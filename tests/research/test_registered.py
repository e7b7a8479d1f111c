"""`scale_cli.methods.register`, and the tests of what `scripts/research/` registers."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scale_cli.methods import register
from scale_cli.methods.full import Full
from scale_cli.methods.recipes import BoundedRows
from tests.command_line import Scale

ROOT = Path(__file__).parents[2]
LONG = "test_biography or test_rivals"


def run_python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT)


def run_registered(chosen: str) -> None:
    """Run tests in a process of its own, with the registered tables: the schema reads them once."""
    plugins = "-p scripts.research.registered -p no:cacheprovider"
    folder = "tests/research/registered"
    ended = run_python("-m", "pytest", "-q", *plugins.split(), folder, "-k", chosen)
    assert ended.returncode == 0, ended.stdout[-4000:]


def test_nothing_is_registered_once_the_schema_has_read_the_tables() -> None:
    import scale_cli.config.schema  # noqa: F401

    with pytest.raises(RuntimeError, match="before scale_cli"):
        register(Full())


@pytest.mark.parametrize(
    ("given", "told"),
    [(Full(), "there is a method full"), (BoundedRows, "there is a recipe embedding_norm")],
)
def test_a_name_that_is_taken_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: Any, told: str
) -> None:
    monkeypatch.delitem(sys.modules, "scale_cli.config.training")
    with pytest.raises(RuntimeError, match=told):
        register(given)


def test_what_is_registered_runs_as_its_own_tests_say() -> None:
    """The benchmark and the table of rivals, which take longer, are in `make proofs`."""
    run_registered(f"not ({LONG})")


def test_the_launcher_is_scale_with_more_methods_and_keys(tmp_path: Path, scale: Scale) -> None:
    config = str(ROOT / "configs" / "petitions.yaml")
    places = f"output_dir={tmp_path / 'run'}", "model.base=./nowhere"
    keys = "train.lookahead={every_steps: 2}", "method={variant: osf}"
    launched = run_python("-m", "scripts.research", "upscale", config, *keys, *places)
    assert "nowhere" in launched.stderr
    for key in keys:
        assert "nowhere" not in scale("upscale", config, key, *places).error()
