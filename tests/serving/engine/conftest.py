from __future__ import annotations

import copy
import json
import lzma
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from scale_cli.config.schema import ModelConfig
from scale_cli.export.dense import plain_model
from scale_cli.export.plain_folder import router_keys, write_plain
from scale_cli.generation.opening import open_model
from scale_cli.methods.method import PROJECTIONS
from scale_cli.upscale.base import load_base
from scale_cli.upscale.base_tokenizer import load_tokenizer
from tests.small_runs import changed, export, petitions_run, train_run
from tests.torture.attacker import edit_json
from tests.widening import train_steps, widen

# A processor's engine, in one process, that compiles nothing. It imports this checkout.
ENVIRONMENT = {
    "PYTHONPATH": str(Path(__file__).parents[3]),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_PLUGINS": "scale",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "3600",  # a first step compiles, on a busy machine too
    "HF_HUB_OFFLINE": "1",
}

# of each language
DOCUMENTS = 200
DOCUMENT_LENGTH = 160
PROMPTS = 200
PROMPT_LENGTH = 40

Ask = Callable[[dict[str, Any], Path], dict[str, Any]]


@pytest.fixture(scope="session")
def vllm() -> Path:
    """The Python of an environment with vLLM: `make serving` makes one."""
    python = Path(os.environ.get("VLLM", ""))
    assert python.is_file(), "VLLM: no Python; run `make serving`"
    return python


@pytest.fixture(scope="session")
def ask(vllm: Path) -> Ask:
    """Put jobs to engines in the other environment (see ask.py), with files in a folder."""

    def answers_to(jobs: dict[str, Any], folder: Path) -> dict[str, Any]:
        questions, answers, log = (
            folder / name for name in ("questions.json", "answers.json", "log.txt")
        )
        questions.write_text(json.dumps(jobs))
        command = [vllm, Path(__file__).parent / "ask.py", questions, answers]
        with log.open("w") as told:
            environment = {**os.environ, **ENVIRONMENT}
            ran = subprocess.run(command, stdout=told, stderr=subprocess.STDOUT, env=environment)
        assert ran.returncode == 0, log.read_text()
        return json.loads(answers.read_text())

    return answers_to


@dataclass(frozen=True)
class Trained:
    model: Any  # routes; transformers does not annotate its generate() for us
    tokenizer: PreTrainedTokenizerBase
    folder: Path  # its export
    documents: Tensor
    prompts: Tensor


def random_adapter(
    base: PreTrainedModel,
    folder: Path,
    at: Path,
    *,
    whole: Sequence[str] = (),
    stabilised: bool = False,
    **router: Any,
) -> PeftModel:
    """Write a random LoRA adapter of a base that lies `at` a folder, with what routes it; `whole`
    are modules that it has instead of the base's.
    """
    torch.manual_seed(1)
    settings = LoraConfig(
        r=4,
        lora_alpha=16,
        use_rslora=stabilised,
        target_modules=[*PROJECTIONS],
        init_lora_weights=False,
        rank_pattern={"down_proj": 7, "layers.1.self_attn.k_proj": 2},
        alpha_pattern={"o_proj": 9},
        task_type="CAUSAL_LM",
        modules_to_save=[*whole] or None,
        ensure_weight_tying="lm_head" in whole and base.config.tie_word_embeddings,
    )
    trained = get_peft_model(copy.deepcopy(base), settings).eval()
    for name, parameter in trained.named_parameters():
        if "modules_to_save" in name:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    trained.save_pretrained(str(folder))
    base.config.save_pretrained(folder)
    keys = {
        "kind": "adapter",
        "base": str(at),
        "revision": None,
        "dtype": "float32",
        "sha256": None,
    }
    edit_json(folder / "config.json", {"scale_router": {**keys, **router}})
    return trained


def ids_of(
    shared_data: Path, tokenizer: PreTrainedTokenizerBase, file: str, characters: int
) -> Tensor:
    with lzma.open(shared_data / file, "rt") as text:
        return torch.tensor(
            tokenizer(text.read(characters), add_special_tokens=False, verbose=False).input_ids
        )


def widened_to(folder: Path, shared_data: Path, base: ModelConfig, documents: Tensor) -> Any:
    """Train an expansion, and write its plain export."""
    tokenizer = load_tokenizer(base)
    torch.manual_seed(0)
    model = widen(load_base(base), "route")
    train_steps(
        model,
        ids_of(shared_data, tokenizer, "ko-petitions/train.txt.xz", 100_000),
        num_steps=80,
        lr=3e-3,
    )
    plain = plain_model(model, "float32", [documents[::40, :64]])
    write_plain(plain, tokenizer, base, folder, router_keys(model))
    return model


def adapted_to(folder: Path, shared_data: Path, base: ModelConfig, _documents: Tensor) -> Any:
    """Train LoRA by a run, and export it as it is."""
    run = petitions_run(shared_data, folder / "run", variant="lora", router={"script_prior": None})
    korean = shared_data / "ko-petitions" / "train.txt.xz"
    source = f"{{name: petitions, path: {korean}, language: ko, max_documents: 100}}"
    overrides = [f"model.base={base.base}", f"corpus.sources=[{source}]", "export.format=adapter"]
    config = train_run(changed(run, *overrides, "train.max_steps=80", "train.lr=0.01"))
    shutil.copytree(export(config).folder, folder, dirs_exist_ok=True)
    return open_model(folder, None, None).model


KINDS = {"expansion": widened_to, "adapter": adapted_to}


@pytest.fixture(scope="session", params=[*KINDS])
def trained(
    request: pytest.FixtureRequest, shared_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    base = ModelConfig(base=str(shared_data / "ckpt-eltec" / "hf"))
    tokenizer = load_tokenizer(base)
    held_out = [
        ids_of(shared_data, tokenizer, file, 400_000)[: DOCUMENTS * DOCUMENT_LENGTH].view(
            DOCUMENTS, -1
        )
        for file in ("en-eltec/valid.txt.xz", "ko-petitions/valid.txt.xz")
    ]
    documents = torch.cat(held_out)
    folder = tmp_path_factory.mktemp(request.param)
    model = KINDS[request.param](folder, shared_data, base, documents)
    return Trained(
        model, tokenizer, folder, documents, documents[:: 2 * DOCUMENTS // PROMPTS, :PROMPT_LENGTH]
    )
