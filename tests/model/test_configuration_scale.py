import runpy
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from scale_cli.model import cache_scale, configuration_scale


@pytest.mark.parametrize("version", ["4.57.6", "5.19.1"])
def test_under_an_older_transformers_a_self_contained_folder_names_the_one_it_needs(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = SimpleNamespace(__version__=version)  # and none of the names that the file imports
    monkeypatch.setitem(sys.modules, "transformers", old)
    with pytest.raises(
        ImportError, match=rf"needs transformers 5\.20 or newer; installed is {version}$"
    ):
        runpy.run_path(configuration_scale.__file__)


def test_pyproject_allows_the_versions_of_transformers_that_the_code_takes() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    least = ".".join(map(str, configuration_scale.LEAST_TRANSFORMERS))
    first_untested = "{}.{}".format(*cache_scale.FIRST_UNTESTED)
    assert f"transformers>={least},<{first_untested}" in project["dependencies"]
