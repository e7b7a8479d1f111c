"""The folders that bring their own code, opened where this package is not: in a fresh process, somewhere else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from scale_cli.commands.export import check_written_export
from scale_cli.data.encoding import prompt_ids
from scale_cli.errors import ExportParityError
from scale_cli.generation.generator import Generator, Sampling
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.storage.atomic import read_json
from tests.export.conftest import TrainedRun
from tests.small_runs import export
from tests.torture.attacker import edit_json
from tests.widening import load_widened, trained_head

ONE_FOLDER = {"variant": "route"}
WRITING = {
    "variant": "route",
    "collaboration": {"layers": "top:2"},
    "router": {"prior": 0.7},
}
EXPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "posterior": (WRITING, "transformers"),
    "cosine": ({"variant": "route", "router": {"rule": "cosine"}}, "transformers"),
    "one-folder": (ONE_FOLDER, "plain"),
}
IDS = torch.randint(3, 512, (2, 40), generator=torch.Generator().manual_seed(0))

_OPEN_AND_ANSWER = """
import sys
sys.modules["scale_cli"] = None  # importing it is an error from here on
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert not model.training and type(model).__module__.startswith("transformers_modules")
    assert not hasattr(model, "root") or not any(parameter.requires_grad for parameter in model.base.parameters())
    ids = load_file(f"{folder}/ids.safetensors")["ids"]
    answers = {"logits": model(input_ids=ids, use_cache=False).logits.detach()}
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for use_cache in (True, False):
        answers[f"generated_{use_cache}"] = model.generate(ids[:, :12], use_cache=use_cache, **options)
    save_file(answers, f"{folder}/answers.safetensors")
    assert len(AutoTokenizer.from_pretrained(folder, trust_remote_code=False)("Once upon a time").input_ids) > 3
assert not [name for name in sys.modules if name.startswith("scale_cli.")]
"""


def test_it_answers_as_trained_in_a_fresh_process_without_this_package(
    trained_run: TrainedRun, tmp_path: Path
) -> None:
    configs = {name: trained_run(method, format=kind) for name, (method, kind) in EXPORTED.items()}
    folders = {name: tmp_path / "elsewhere" / name for name in configs}
    for name, config in configs.items():
        shutil.copytree(export(config).folder, folders[name])
        save_file({"ids": IDS}, folders[name] / "ids.safetensors")
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "HF_"))
    }
    environment |= {
        "HF_HOME": str(tmp_path / "hub"),
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "HF_HUB_OFFLINE": "1",
    }
    result = subprocess.run(
        [sys.executable, "-I", "-c", _OPEN_AND_ANSWER, *map(str, folders.values())],
        cwd=tmp_path / "elsewhere",
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert "trust_remote_code" not in result.stdout, "the tokenizer asks about code"
    for name, config in configs.items():
        answers = load_file(folders[name] / "answers.safetensors")
        trained = load_widened(config.output_dir / "final", config.model)
        with torch.no_grad():
            expected = trained(input_ids=IDS, use_cache=False).logits
        rounding = 1e-4 if name == "one-folder" else 1e-6
        torch.testing.assert_close(answers["logits"], expected, rtol=rounding, atol=rounding)
        assert torch.equal(answers["generated_True"], answers["generated_False"])
        greedy = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        assert torch.equal(answers["generated_True"], trained.generate(IDS[:, :12], **greedy))


def test_loaded_for_further_training_the_base_is_frozen_and_its_bits_are_the_bases(
    trained_run: TrainedRun,
) -> None:
    config = trained_run({"variant": "adapt"}, "bfloat16", format="transformers", dtype="bfloat16")
    folder = export(config).folder
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    loaded = ScaleForCausalLM.from_pretrained(folder, dtype="auto")
    trained = load_widened(config.output_dir / "final", config.model)
    base = dict(trained.base.named_parameters())
    for name, parameter in loaded.base.named_parameters():
        assert torch.equal(parameter, base[name])
    for name, parameter in loaded.named_parameters():
        assert parameter.requires_grad == name.startswith("expansion.")
    assert loaded.generation_config.eos_token_id == trained.base.generation_config.eos_token_id
    assert loaded.base.lm_head.weight is loaded.base.model.embed_tokens.weight, "tied stays tied"


@pytest.mark.parametrize(
    ("method", "code"),
    [(WRITING, set()), (ONE_FOLDER, {"cache_scale.py", "routed_scale.py", "routing.py"})],
)
def test_a_plain_export_answers_as_trained_to_who_trusts_no_code_and_nobody_is_asked(
    trained_run: TrainedRun,
    monkeypatch: pytest.MonkeyPatch,
    method: dict[str, Any],
    code: set[str],
) -> None:
    config = trained_run(method, format="plain")
    folder = export(config).folder
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    plain: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert type(plain) is LlamaForCausalLM
    files = [file for file in folder.rglob("*") if file.suffix in (".py", ".bin", ".pt", ".pkl")]
    assert {file.name for file in files} == code
    assert ("auto_map" in read_json(folder / "config.json")) == bool(code)
    trained = load_widened(config.output_dir / "final", config.model)
    expected = trained_head(trained, IDS)
    torch.testing.assert_close(plain(IDS).logits, expected, rtol=0.0, atol=1e-4)
    assert (expected - trained.base(IDS).logits).abs().max() > 0.1
    text, original = "Once upon a time, 옛날에", AutoTokenizer.from_pretrained(config.model.base)
    ids = AutoTokenizer.from_pretrained(folder)(text).input_ids
    assert ids == prompt_ids(original, text)


def test_the_proof_of_an_export_is_of_its_router_too(trained_run: TrainedRun) -> None:
    config = trained_run(ONE_FOLDER, format="plain")
    summary = export(config)
    assert summary.parity.routed is not None
    nats = summary.parity.routed.nats
    told = read_json(summary.folder / "parity.json")
    assert 0.0 < told["routed"]["nats"] == nats <= 1e-6
    check_written_export(config, summary.folder)
    router = read_json(summary.folder / "config.json")["scale_router"]
    edit_json(summary.folder / "config.json", {"scale_router": {**router, "prior": 0.7}})
    with pytest.raises(ExportParityError):
        check_written_export(config, summary.folder)


def test_generate_routes_with_one_folder_as_with_the_run(
    trained_run: TrainedRun,
) -> None:
    config = trained_run(ONE_FOLDER, format="plain")
    folder = export(config).folder
    wanted, got = (
        Generator(path).continue_all(["Once upon a time", "학교에서"], Sampling(max_new_tokens=12))
        for path in (config.output_dir, folder)
    )
    for one, other in zip(wanted, got, strict=True):
        assert other.completion == one.completion
        for expected, token in zip(one.tokens, other.tokens, strict=True):
            assert token.shares == pytest.approx(expected.shares, rel=1e-3, abs=1e-6)
