from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
from httpx2 import ConnectError, Request, Response
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from scale_cli.errors import RunError, UsageError
from scale_cli.export import publishing
from scale_cli.storage.atomic import write_json


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "README.md").write_text("card")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x.json").write_text("{}")
    return tmp_path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hub's client, every call held to its signature, none of them made."""
    api = create_autospec(HfApi, instance=True)
    monkeypatch.setattr(publishing, "HfApi", lambda: api)
    monkeypatch.setattr(publishing, "get_token", lambda: "hf_planted")
    return api


def test_a_dry_run_lists_what_would_be_sent_and_touches_no_hub(folder: Path, hub: Any) -> None:
    """What tells of this machine stays here, but for what an adapter needs."""
    for name in ("scale.yaml", "parity.json", "manifest.json"):
        (folder / name).write_text("output_dir: /home/me")
    lines = publishing.publish(folder, "me/model", dry_run=True)
    assert [line.split()[-1] for line in lines[1:-2]] == ["README.md", "sub/x.json"]
    assert "nothing was sent" in lines[-1]
    for base, tells in (("owner/base", False), ("/home/me/base", True)):
        write_json(folder / "config.json", {"scale_router": {"base": base}})
        told = " ".join(publishing.publish(folder, "me/model", dry_run=True))
        assert ("config.json contain the paths of folders" in told) == tells
    (folder / "base.json").write_text("{}")
    adapter = "\n".join(publishing.publish(folder, "me/model", dry_run=True))
    assert "scale.yaml\n" in adapter and "base.json\n" in adapter
    assert "scale.yaml and base.json and config.json contain the paths" in adapter
    assert not hub.mock_calls


def test_what_is_sent_is_the_folder_to_a_private_repository(folder: Path, hub: Any) -> None:
    sent = publishing.publish(folder, "me/model", dry_run=False)
    hub.create_repo.assert_called_once_with("me/model", private=True, exist_ok=True)
    call = hub.upload_folder.call_args.kwargs
    assert (call["repo_id"], call["folder_path"]) == ("me/model", folder)
    assert sorted(call["ignore_patterns"]) == ["manifest.json", "parity.json", "scale.yaml"]
    assert "hf_planted" not in "".join(sent)
    gone = {
        "adapter_config.json",
        "base.json",
        "scale.yaml",
        "model-00001-of-00002.safetensors",
        "trained.safetensors",
    }
    kept = {"README.md", "LICENSE", "config.json", "picture.png"}
    removed = {
        name
        for name in gone | kept
        for pattern in call["delete_patterns"]
        if fnmatchcase(name, pattern)
    }
    assert removed == gone


def test_a_refusal_of_the_hub_is_one_line_and_without_a_token_nothing_is_tried(
    folder: Path, hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    response = Response(403, request=Request("POST", "https://huggingface.co/api"))
    for refusal, told in (
        (HfHubHTTPError("403\nForbidden", response=response), "403 Forbidden"),
        (ConnectError("[Errno 111] Connection refused"), r"\[Errno 111\] Connection refused"),
    ):
        hub.create_repo.side_effect = refusal
        with pytest.raises(RunError, match=f"me/model: {told}"):
            publishing.publish(folder, "me/model", dry_run=False)
    hub.reset_mock()
    monkeypatch.setattr(publishing, "get_token", lambda: None)
    with pytest.raises(RunError, match="not logged in"):
        publishing.publish(folder, "me/model", dry_run=False)
    assert not hub.mock_calls


@pytest.mark.parametrize("name", ["model", "me/mo del"])
def test_what_is_no_repository_of_one_model_is_refused_before_anything_is_exported(
    name: str,
) -> None:
    with pytest.raises(UsageError, match="--push-to-hub"):
        publishing.check_repository(name, ["plain"])
    with pytest.raises(
        UsageError, match=r"exports plain and transformers; choose one: export\.format=transformers"
    ):
        publishing.check_repository("me/model", ["plain", "transformers"])
