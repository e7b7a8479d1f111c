"""`scale_cli.methods.register`, and the tests of what `scripts/research/` registers."""

import subprocess
import sys
from pathlib import Path

import pytest

from scale_cli.methods import register
from scale_cli.methods.full import Full

ROOT = Path(__file__).parents[2]


def run_python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT)


def test_nothing_is_registered_once_the_schema_has_read_the_tables() -> None:
    import scale_cli.config.schema  # noqa: F401

    with pytest.raises(RuntimeError, match="before scale_cli"):
        register(Full())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("methods.full.Full()", "there is a method full"),
        ("methods.recipes.BoundedRows", "there is a recipe embedding_norm"),
    ],
)
def test_a_name_that_is_taken_is_refused(given: str, told: str) -> None:
    ended = run_python("-c", f"from scale_cli import methods; methods.register({given})")
    assert ended.returncode and told in ended.stderr


def test_what_is_registered_runs_as_its_own_tests_say() -> None:
    """In a process of its own, with the registered tables: the schema reads them once."""
    plugins = "-p scripts.research.registered -p no:cacheprovider"
    ended = run_python("-m", "pytest", "-q", *plugins.split(), "tests/research/registered")
    assert ended.returncode == 0, ended.stdout[-4000:]


def test_the_launcher_is_scale_with_more_methods_and_keys(tmp_path: Path) -> None:
    config = str(ROOT / "configs" / "petitions.yaml")
    places = f"output_dir={tmp_path / 'run'}", "model.base=nowhere"
    for given in ("train.lookahead={every_steps: 2}", "method={variant: osf}"):
        for module in ("scripts.research", "scale_cli"):
            told = run_python("-m", module, "upscale", config, given, *places).stderr
            assert ("nowhere" in told) == (module == "scripts.research"), told
