"""`scale serve`: which server it starts, with which flags, and what it says before."""

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

from scale_cli.commands.serve import serve
from scale_cli.config.schema import ModelConfig
from scale_cli.config.vocabulary import Script
from scale_cli.errors import ScaleError
from scale_cli.export.dense import dense_model
from scale_cli.export.plain_folder import router_keys, write_plain
from scale_cli.methods.widened import RouterConfig
from scale_cli.runs.method_folder import set_router
from scale_cli.storage.atomic import read_json, write_json
from scale_cli.upscale.base import load_base
from scale_cli.upscale.base_tokenizer import load_tokenizer
from tests.command_line import refused
from tests.widening import as_if_trained, tiny_llama, widen

FREE = ["--port", "0"]


def write_routed(checkpoint: Path, folder: Path) -> None:
    """Write the plain export of a real small model, widened as if it had been trained, with its router."""
    base = ModelConfig(base=str(checkpoint))
    model = as_if_trained(widen(load_base(base), "route"))
    set_router(model, RouterConfig(), Script.named("hangul"))
    write_plain(
        dense_model(model, "float32"), load_tokenizer(base), base, folder, router_keys(model)
    )


@pytest.fixture(scope="module")
def folder(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    export = tmp_path_factory.mktemp("run") / "export" / "plain"
    export.mkdir(parents=True)
    write_routed(stories, export)
    return export


def test_vllm_is_started_where_only_what_it_brings_is_installed(folder: Path) -> None:
    """Its environment has an older transformers, and no accelerate, datasets or PEFT."""
    code = """
import os, sys
from pathlib import Path
for name in ("accelerate", "datasets", "pyarrow", "peft", "lm_eval", "matplotlib"):
    sys.modules[name] = None
import transformers
transformers.__version__ = "5.19.0"
from scale_cli.commands import serve
serve.is_installed = lambda module: module == "vllm"
def become(path, command, environment):
    sys.exit(" ".join(command))
os.execve = become
serve.serve(Path(sys.argv[1]), None, ["--port", "0"])
"""
    ended = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False
    )
    assert "ScaleRoutedLlamaForCausalLM" in ended.stderr and "Traceback" not in ended.stderr


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What of the engines looks as if it were installed."""
    present = {"fastapi", "uvicorn"}
    monkeypatch.setattr("scale_cli.commands.serve.is_installed", lambda module: module in present)
    monkeypatch.setattr("scale_cli.errors.is_installed", lambda module: module in present)
    return present


class Became(Exception):
    """Raised where this process would have become a server."""


@pytest.fixture
def said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[list[str], Any]]:
    """Return a function that serves, and says what was printed and which server there would be."""

    def become(*server: Any) -> None:
        raise Became(server)

    monkeypatch.setattr("os.execve", lambda _path, *server: become(*server))
    monkeypatch.setattr("scale_cli.generation.server.run_server", become)
    monkeypatch.setattr("signal.signal", lambda *_: None)

    def serve_and_listen(
        path: Path, engine: Any = None, options: Any = FREE, head: Any = None
    ) -> Any:
        with pytest.raises(Became) as became:
            serve(path, engine, options, head)
        return capsys.readouterr().out.splitlines(), became.value.args[0]

    return serve_and_listen


def test_vllm_is_taken_where_it_is_and_told_the_routed_class(
    folder: Path, installed: set[str], said: Callable[..., Any]
) -> None:
    installed.add("vllm")
    options = ["--port", "9000", "--max-model-len", "64"]
    (promise, model, ask), (command, environment) = said(folder, None, options)
    engine = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    override = json.dumps({"architectures": ["ScaleRoutedLlamaForCausalLM"]})
    assert command == [*engine, "--hf-overrides", override, *options]
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"  # the other tells no prompts
    plain, environment = said(folder, None, [], "trained")[1]
    assert plain == engine and "VLLM_USE_V2_MODEL_RUNNER" not in environment
    assert "in vllm: the trained model's answers, up to rounding" in promise
    assert "0.693 nats over its best head" in promise
    assert str(folder) in model and "curl http://localhost:9000/v1/completions" in ask


def test_vllm_routes_a_copys_export_or_serves_it_plainly(
    tmp_path: Path, installed: set[str], said: Callable[..., Any]
) -> None:
    installed.add("vllm")
    router = {"kind": "copy", "base": "some/base", "prior": 0.5}
    config = {"architectures": ["MistralForCausalLM"], "scale_router": router}
    write_json(tmp_path / "export" / "plain" / "config.json", config)
    for path in (tmp_path, tmp_path / "export" / "plain"):
        lines, (command, _) = said(path)
        assert "ScaleRoutedMistralForCausalLM" in command[6]
        assert "--enforce-eager" not in command  # compiled, as the other kinds are
        assert "routed with its base, in vllm: " in lines[0]
    lines, (command, _) = said(path, None, [], "trained")
    assert command[4:] == [str(path)] and "trained head alone" in lines[0]


LINEAR = {"target_modules": ["q_proj", "down_proj"]}


@pytest.fixture
def exported(tmp_path: Path) -> Callable[..., Path]:
    """A function that lets PEFT write an adapter of a tiny Llama, as an export is routed."""

    def write(**settings: Any) -> Path:
        folder = tmp_path / "run" / "export" / "adapter"
        base = tiny_llama(tie_word_embeddings=settings.get("ensure_weight_tying", False))
        asked: Any = {"task_type": "CAUSAL_LM", "r": 2, **settings}
        get_peft_model(base, LoraConfig(**asked)).save_pretrained(str(folder))
        router = {"kind": "adapter", "base": "some/base", "prior": 0.5}
        keys = {"architectures": ["Qwen3ForCausalLM"], "scale_router": router}
        write_json(folder / "config.json", keys)
        return folder

    return write


@pytest.mark.parametrize(
    "settings",
    [
        LINEAR,
        {**LINEAR, "use_rslora": True},
        {**LINEAR, "modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": r".*layers\.\d+\..*_proj"},
    ],
)
def test_vllm_routes_loras_export_and_a_run_stands_for_it(
    settings: dict[str, Any],
    exported: Callable[..., Path],
    installed: set[str],
    said: Callable[..., Any],
) -> None:
    installed.add("vllm")
    adapter = exported(**settings)
    for path in (adapter.parents[1], adapter):
        (promise, *_), (command, environment) = said(path)
        override = json.dumps({"architectures": ["ScaleRoutedQwen3ForCausalLM"]})
        assert command[4:] == [str(adapter), "--hf-overrides", override, *FREE]
        assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
        assert "routed with its base, in vllm: " in promise and "0.693 nats" in promise
    for head in ("trained", "base"):
        with refused(ScaleError, "^--engine vllm: serves plain exports"):
            serve(adapter, "vllm", [], head)


@pytest.mark.parametrize(
    "settings",
    [
        {**LINEAR, "modules_to_save": ["lm_head", "norm"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "lm_head"], "ensure_weight_tying": True},
        {"target_modules": r".*(q_proj|lm_head)"},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {**LINEAR, "use_dora": True},
        {**LINEAR, "lora_bias": True},
        {**LINEAR, "trainable_token_indices": [3]},
        {"target_parameters": ["mlp.down_proj.weight"], "target_modules": ["q_proj"]},
    ],
)
def test_vllm_is_not_asked_for_more_than_linear_layers_and_whole_heads(
    settings: dict[str, Any], exported: Callable[..., Path], installed: set[str]
) -> None:
    installed.add("vllm")
    with refused(ScaleError, "^--engine vllm: .* beside linear layers"):
        serve(exported(**settings), "vllm", [])


def test_a_router_that_nobody_knows_is_refused_and_not_left_out(
    tmp_path: Path, installed: set[str]
) -> None:
    installed.add("vllm")
    router = {"kind": "mixture", "base": "some/base", "prior": 0.5}
    for keys, told in (
        ({}, "scale_router.kind is 'mixture'; known are adapter and copy"),
        ({"kind": "copy", "prior": 2.0}, "scale_router: prior: "),
    ):
        config = {"architectures": ["LlamaForCausalLM"], "scale_router": router | keys}
        write_json(tmp_path / "config.json", config)
        with refused(ScaleError, told):
            serve(tmp_path, None, [])


def test_else_transformers_and_a_run_stands_for_its_plain_export(
    folder: Path, installed: set[str], said: Callable[..., Any]
) -> None:
    lines, (generator, *_) = said(folder.parents[1])
    assert f"{folder}, with its router, in transformers" in lines[0] and generator.head_names
    lines, (generator, *_) = said(folder, "transformers", FREE, "trained")
    assert "trained head alone" in lines[0] and not generator.head_names


def with_config(folder: Path, copy: Path, **keys: Any) -> Path:
    shutil.copytree(folder, copy)
    write_json(copy / "config.json", {**read_json(copy / "config.json"), **keys})
    return copy


def test_the_bound_of_a_prior_is_promised(
    folder: Path, tmp_path: Path, installed: set[str], said: Callable[..., Any]
) -> None:
    keys = read_json(folder / "config.json")["scale_router"]
    leaning = with_config(folder, tmp_path / "leaning", scale_router={**keys, "prior": 0.9})
    assert "2.303 nats" in said(leaning)[0][0]
    assert keys["script"] == [[0xAC00, 0xD7A3]]
    assert "0.693 nats over its best head, or 3.912 where" in said(folder)[0][0]
    unknown = {name: value for name, value in keys.items() if not name.startswith("script")}
    of_one_prior = with_config(folder, tmp_path / "one prior", scale_router=unknown)
    assert "3.912" not in said(of_one_prior)[0][0]
    installed.add("vllm")
    assert "in vllm" in said(folder)[0][0] and "3.912 where" in said(folder)[0][0]


def test_what_cannot_be_served_routed_is_refused_in_one_line(
    folder: Path, tmp_path: Path, installed: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    plain = with_config(folder, tmp_path / "plain", scale_router=None)
    other = with_config(folder, tmp_path / "other", architectures=["Olmo2ForCausalLM"])
    several = tmp_path / "several"
    for name in ("plain", "plain-bfloat16"):
        shutil.copytree(folder, several / "export" / name)
    no_export = with_config(folder, tmp_path / "final", architectures=None)
    listening = socket.create_server(("127.0.0.1", 0))
    taken = ["--port", str(listening.getsockname()[1]), "--host", "127.0.0.1"]
    cases: list[tuple[Path, Any, list[str], str]] = [
        (several, None, [], "several exports"),
        (tmp_path, None, [], "contains neither a trained model .* nor an export"),
        (no_export, "vllm", [], "^--engine vllm: serves plain exports"),
        (other, "vllm", [], "only transformers can route Olmo2ForCausalLM"),
        (folder, "vllm", [], "needs vLLM, in an environment of its own: pip install vllm"),
        (folder, None, ["--continuous-batching"], "^--continuous-batching: .*; remove it$"),
        (folder, None, ["--prot", "1"], r"^--prot: .*; did you mean --port\?$"),
        (folder, None, ["--port", "many"], "^--port: "),
        (folder, None, ["--host", "no such host"], "^--host no such host, --port 8000: "),
        (folder, None, taken, "Address already in use"),
    ]
    with refused(ScaleError, "has no scale_router, so .*--head trained"):
        serve(plain, None, [], "routed")
    with listening:
        for path, engine, options, told in cases:
            with refused(ScaleError, told):
                serve(path, engine, options)
    assert capsys.readouterr().out == ""
    installed.discard("uvicorn")
    with pytest.raises(ScaleError, match=r"uvicorn: pip install 'scale-cli\[serve\]'"):
        serve(folder, None, [])
