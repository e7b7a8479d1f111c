"""`scale serve`: the engine's own server, started with the flags that make it route, and asked as its users ask it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from scale_cli.cli import main
from scale_cli.commands.serve import serving
from scale_cli.config.schema import ModelConfig
from scale_cli.errors import ScaleError
from scale_cli.export.dense import dense_model
from scale_cli.export.plain_folder import write_plain
from scale_cli.export.router_keys import routed_class, router_keys
from scale_cli.upscale.base import load_base
from scale_cli.upscale.tokenizer import load_tokenizer
from tests.widening import as_if_trained, widen

PROMPTS = ["Once upon a time", "학교에서", "Lily saw a big"]
FLAGS = ["--trust-remote-code"]


@pytest.fixture(scope="module")
def folder(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plain export of a real small model, widened as if it had been trained."""
    base, run = ModelConfig(base=str(shared_data / "ckpt-stories260K" / "hf")), tmp_path_factory.mktemp("run")
    model = as_if_trained(widen(load_base(base), "route"))
    export = run / "export" / "llama"
    export.mkdir(parents=True)
    write_plain(dense_model(model, "float32"), load_tokenizer(base), base, export, router_keys(model))
    return export


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What of the engines looks as if it were installed."""
    present = {"openai", "fastapi", "uvicorn", "transformers"}
    monkeypatch.setattr("scale_cli.commands.serve.is_installed", lambda module: module in present)
    monkeypatch.setattr("scale_cli.extras.is_installed", lambda module: module in present)
    return present


def test_vllm_is_taken_where_it_is_and_told_the_routed_class(folder: Path, installed: set[str]) -> None:
    installed.add("vllm")
    server = serving(folder, None, ["--port", "9000"], plainly=False)
    engine = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    override = json.dumps({"architectures": ["ScaleRoutedLlamaForCausalLM"]})
    assert server.command == [*engine, "--hf-overrides", override, "--port", "9000"]
    assert "in vllm: what the trained model says, to rounding" in server.promise
    assert "0.693 nats over its best head" in server.promise
    assert serving(folder, None, [], plainly=True).command == engine


def test_else_transformers_and_a_run_stands_for_its_plain_export(folder: Path, installed: set[str]) -> None:
    server = serving(folder.parents[1], None, [], plainly=False)
    assert server.command[1:] == ["-m", "transformers.cli.transformers", "serve", str(folder), *FLAGS]
    plainly = serving(folder, "transformers", [], plainly=True)
    assert plainly.command[-1] == str(folder) and "trained head alone" in plainly.promise


def changed(folder: Path, copy: Path, **keys: Any) -> Path:
    shutil.copytree(folder, copy)
    config = {**json.loads((copy / "config.json").read_text(encoding="utf-8")), **keys}
    told = {name: value for name, value in config.items() if value is not None}
    (copy / "config.json").write_text(json.dumps(told), encoding="utf-8")
    return copy


def test_a_router_that_may_switch_is_promised_no_bound(folder: Path, tmp_path: Path, installed: set[str]) -> None:
    keys = json.loads((folder / "config.json").read_text(encoding="utf-8"))["scale_router"]
    switching = changed(folder, tmp_path / "switching", scale_router={**keys, "switch_rate": 0.01})
    assert "nats" not in serving(switching, None, [], plainly=False).promise
    leaning = changed(folder, tmp_path / "leaning", scale_router={**keys, "prior": 0.9})
    assert "2.303 nats" in serving(leaning, None, [], plainly=False).promise


def test_what_cannot_be_served_routed_is_refused_in_one_line(folder: Path, tmp_path: Path, installed: set[str]) -> None:
    plain = changed(folder, tmp_path / "plain", scale_router=None)
    foreign = changed(folder, tmp_path / "foreign", auto_map={"AutoModelForCausalLM": "elsewhere--other.Model"})
    edited = changed(folder, tmp_path / "edited")
    (edited / "routing.py").write_text("print('mine')", encoding="utf-8")
    several = tmp_path / "several"
    for name in ("llama", "llama-bfloat16"):
        shutil.copytree(folder, several / "export" / name)
    refused: list[tuple[Path, Any, list[str], str]] = [
        (plain, None, [], "has no scale_router: .*--plain"),
        (foreign, None, [], "not this version's"),
        (edited, None, [], "not this version's"),
        (several, None, [], "several exports"),
        (tmp_path, None, [], "holds no plain export"),
        (folder, "vllm", [], r"needs vllm: pip install 'scale-cli\[vllm\]'"),
        (folder, None, ["--continuous-batching"], "take --engine vllm"),
    ]
    for path, engine, options, told in refused:
        with pytest.raises(ScaleError, match=told) as error:
            serving(path, engine, options, plainly=False)
        assert "\n" not in str(error.value)
    installed.discard("uvicorn")
    with pytest.raises(ScaleError, match=r"uvicorn: pip install 'scale-cli\[serve\]'"):
        serving(folder, None, [], plainly=False)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    """`scale serve`, as a user starts it, on a port of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "scale_cli", "serve", str(folder), "--engine", "transformers"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(folder.parent / "modules")}
    log = folder.parent / "log"
    with log.open("w", encoding="utf-8") as written:
        options = ["--", "--port", str(port), "--host", "127.0.0.1", "--device", "cpu"]
        started = subprocess.Popen([*command, *options], env=environment, stdout=written, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and started.poll() is None:
            with socket.socket() as asked:
                if asked.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        told = log.read_text(encoding="utf-8")
        assert started.poll() is None, told
        assert "with its router, in transformers" in told
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        started.terminate()
        started.wait(timeout=30)


def test_an_openai_client_is_answered_by_the_router(server: str, folder: Path) -> None:
    client = openai.OpenAI(base_url=server, api_key="none")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    loader = routed_class(folder)
    routed, plain = loader.from_pretrained(folder), loader.__bases__[1].from_pretrained(folder)
    differ = False
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        said = [
            tokenizer.decode(model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :], True)
            for model in (routed, plain)
        ]
        asked: Any = {"model": str(folder), "prompt": prompt, "max_tokens": 16, "temperature": 0.0}
        assert client.completions.create(**asked).choices[0].text == said[0]
        streamed = "".join(part.choices[0].text or "" for part in client.completions.create(**asked, stream=True))
        assert streamed == said[0]
        differ = differ or said[0] != said[1]
    assert differ, "the plain model says something else"


def test_the_verb_says_what_it_promises_and_becomes_the_server(
    folder: Path, installed: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr("os.execve", lambda _path, command, _environment: ran.append(command))
    monkeypatch.setattr("sys.argv", ["scale", "serve", str(folder), "--", "--port", "9"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert ran[0][-2:] == ["--port", "9"]
    assert capsys.readouterr().out.startswith(f"serving        {folder}, with its router")
