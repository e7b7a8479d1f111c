from pathlib import Path

import pytest
import yaml

from scripts import demo


def test_the_demo_runs_in_an_empty_folder_and_shows_three_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make demo`, with fewer people and steps."""
    config = yaml.safe_load(demo.CONFIG.read_text())
    config["train"] |= {"max_steps": 4, "warmup_steps": 1}
    short = tmp_path / "demo.yaml"
    short.write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "CONFIG", short)
    monkeypatch.setattr(demo, "NUM_TRAIN", 300)
    monkeypatch.setattr(demo, "NUM_VALID", 20)
    few = demo.BASE_TRAIN.model_copy(update={"max_steps": 4, "warmup_steps": 1})
    monkeypatch.setattr(demo, "BASE_TRAIN", few)
    demo.main()
    assert "base" in capsys.readouterr().out.split("unseen people")[1]
    assert (tmp_path / "runs/demo/export/plain/README.md").is_file()
