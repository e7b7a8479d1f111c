"""The commands of docs/given.md, with a small base in the place of the hub's."""

import re
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model

from tests.generation.test_given_models import TARGETS, disturb
from tests.generation.test_routed_runs import plain
from tests.serving_page import PAGE, run

TEXT = PAGE.with_name("given.md").read_text("utf-8")
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def folder(stories: Path, shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    (folder / BASE).parent.mkdir()
    (folder / BASE).symlink_to(stories)
    model = get_peft_model(
        plain(stories), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=TARGETS)
    )
    disturb(model)
    model.save_pretrained(str(folder / "my-adapter"))
    english = (shared_data / "en-tinystories" / "tinystories_val.txt").read_text("utf-8")[:6_000]
    for name, text in (("new", english[:3_000]), ("old", english[3_000:])):
        (folder / f"{name}.txt").write_text(text, "utf-8")
    return folder


def test_every_command_of_the_page_runs_as_written(folder: Path) -> None:
    evaluate, generate, export, serve = re.findall(r"```bash\n(.*?)```", TEXT, flags=re.DOTALL)
    assert "report: runs/my-adapter/evaluation/report.html" in run(evaluate, folder)
    assert "Once upon a time" in run(generate, folder)
    assert "runs/my-adapter/export/adapter" in run(export, folder)
    assert serve.split()[2] == "runs/my-adapter/export/adapter"
    assert (folder / serve.split()[2] / "adapter_config.json").is_file()
    (config,) = re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.DOTALL)
    (folder / "given.yaml").write_text(config.replace("runs/my-adapter", "runs/by-config"))
    assert "parity" in run("scale train given.yaml\nscale export given.yaml\n", folder)
