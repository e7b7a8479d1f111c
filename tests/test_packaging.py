"""What a wheel holds, as setuptools would fill it, and what its page says; `make wheel` builds and installs one."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import yaml
from setuptools import Distribution

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_a_wheel_holds_every_file_of_the_package(monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    distribution = Distribution({"script_name": "setup.py"})
    distribution.parse_config_files()
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    modules = {Path(path) for _, _, path in build.find_all_modules()}
    data = {Path(folder, name) for _, folder, _, names in build.data_files for name in names}
    listed = subprocess.run(
        ["git", "ls-files", "scale_cli"], capture_output=True, text=True, check=True
    ).stdout
    packaged = {
        path if not path.is_absolute() else path.relative_to(ROOT) for path in modules | data
    }
    assert {Path(line) for line in listed.splitlines()} <= packaged
    assert Path("scale_cli/py.typed") in packaged


def test_readme_installs_the_tested_version_of_torch_by_name() -> None:
    (named,) = re.findall(r"pip install torch==(\S+) ", (ROOT / "README.md").read_text())
    assert f"\ntorch=={named}\n" in (ROOT / "constraints.txt").read_text()


def test_the_page_of_the_index_leads_nowhere_that_only_a_checkout_has() -> None:
    page = (ROOT / PROJECT["readme"]).read_text()
    assert all(link.startswith("https://") for link in re.findall(r"\]\((.*?)\)", page))
    assert set(PROJECT["optional-dependencies"]) - {"dev"} == set(
        re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    )


def test_every_dependency_has_its_reason_and_a_version_that_is_tested() -> None:
    reasons = (ROOT / "CONTRIBUTING.md").read_text().partition("## Dependencies")[2]
    locked = (ROOT / "constraints.txt").read_text().lower().replace("_", "-")
    extras = PROJECT["optional-dependencies"]
    installed = [
        *PROJECT["dependencies"],
        *(line for of_extra in extras.values() for line in of_extra),
    ]
    for requirement in installed:
        name = re.split(r"[^\w-]", requirement)[0]
        if name == "scale-cli":
            continue
        assert re.search(rf"^{name}==", locked, re.MULTILINE), name
        versions = requirement.removeprefix(name).replace(",", ", ")
        assert re.search(rf"^\| (\w+: )?{name} \| {versions} \|", reasons, re.MULTILINE), name


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert citation["authors"] and "arXiv:2511.03270" in str(citation["identifiers"])
