"""Any run's trained model, routed with its base as two models in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from scale_cli.commands.serve import serve
from scale_cli.config.schema import RunConfig
from scale_cli.errors import RunFolderError
from scale_cli.generation.generator import Generator, Sampling
from scale_cli.storage.atomic import load_tensors
from tests.command_line import Scale
from tests.small_runs import export, petitions_run, train_run

PROMPTS = ["Once upon a time", "학교에서", "Lily saw a big"]
GREEDY = Sampling(max_new_tokens=8)


def trained(shared_data: Path, folder: Path, variant: str) -> RunConfig:
    return train_run(petitions_run(shared_data, folder / "run", variant=variant))


@pytest.fixture(scope="module")
def lora(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return trained(shared_data, tmp_path_factory.mktemp("beside"), "lora")


def test_a_widened_run_beside_its_base_is_the_routed_run(shared_data: Path, tmp_path: Path) -> None:
    run = trained(shared_data, tmp_path, "route").output_dir
    beside = Generator(run, beside_base=True).continue_all(PROMPTS, GREEDY)
    alone = Generator(run).continue_all(PROMPTS, GREEDY)
    assert [c.completion for c in beside] == [c.completion for c in alone]
    for ours, theirs in zip(beside, alone, strict=True):
        for token, other in zip(ours.tokens, theirs.tokens, strict=True):
            assert token.shares == pytest.approx(other.shares, abs=1e-9)


@torch.no_grad()
def mixed(models: list[Any], prior: float, ids_T: Tensor, num_new: int) -> tuple[Tensor, Tensor]:
    """Return greedy tokens of the posterior mixture of plain models, and the base's last weight."""
    log_weights_K = torch.tensor([prior, 1.0 - prior], dtype=torch.float64).log()
    read = 0
    while True:
        log_probs_KTV = torch.stack(
            [model(ids_T[None]).logits[0].double().log_softmax(-1) for model in models]
        )
        for at in range(read, len(ids_T) - 1):
            log_weights_K = log_weights_K + log_probs_KTV[:, at, ids_T[at + 1]]
        read = len(ids_T) - 1
        weights_K = log_weights_K.softmax(0)
        if num_new == 0:
            return ids_T, weights_K[0]
        best = (weights_K[:, None] * log_probs_KTV[:, -1].exp()).sum(0).argmax()
        ids_T, num_new = torch.cat([ids_T, best[None]]), num_new - 1


def test_a_run_that_widens_nothing_is_mixed_with_its_base_by_the_posterior(lora: RunConfig) -> None:
    generator = Generator(lora.output_dir, beside_base=True)
    folder = export(lora).folder
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()
        for path in (lora.model.base, folder)
    ]
    framed = [generator.framed(prompt) for prompt in PROMPTS]
    assert [prompt.base_prior for prompt in framed] == [0.98, 0.02, 0.98]
    generated = generator.generate(framed, GREEDY)
    for prompt, new_T in zip(framed, generated, strict=True):
        assert prompt.base_prior is not None
        expected, weight = mixed(models, prompt.base_prior, prompt.ids_T, GREEDY.max_new_tokens)
        assert torch.cat([prompt.ids_T, new_T]).tolist() == expected.tolist()
        with torch.no_grad():
            shares = generator.head_shares(prompt, torch.cat([new_T, new_T[-1:]]))
        assert shares[-1] is not None and shares[-1]["base"] == pytest.approx(float(weight))


def test_the_weights_that_lora_leaves_frozen_lie_in_memory_once(lora: RunConfig) -> None:
    beside: Any = Generator(lora.output_dir, beside_base=True).model
    held = {weight.data_ptr(): weight.numel() for weight in beside.parameters()}
    trained = load_tensors(lora.output_dir / "final" / "trained.safetensors")
    of_base = AutoModelForCausalLM.from_pretrained(lora.model.base).num_parameters()
    assert sum(held.values()) == of_base + sum(tensor.numel() for tensor in trained.values())


def test_what_does_not_name_its_base_is_refused(lora: RunConfig) -> None:
    with pytest.raises(RunFolderError, match=r"does not name its base.*--beside-base"):
        Generator(Path(lora.model.base), beside_base=True)


def test_the_server_says_its_bound(lora: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr(
        "scale_cli.generation.server.run_server", lambda *server: served.extend(server)
    )
    monkeypatch.setattr("signal.signal", lambda *_: None)
    lines: list[str] = []
    serve(lora.output_dir, None, ["--port", "0"], lines.append, beside_base=True)
    assert "0.693 nats over its best head, or 3.912 where" in lines[0]
    assert served[0].head_names == ["base", "trained"]

    served[0].model.config.router_rule = "cosine"
    monkeypatch.setattr("scale_cli.commands.serve.Generator", lambda *_, **__: served[0])
    serve(lora.output_dir, None, ["--port", "0"], lines.append, beside_base=True)
    assert lines[3].endswith("the cosine rule promises no bound")


def test_two_models_are_not_for_vllm(scale: Scale) -> None:
    for option in ("--plain", "--engine vllm"):
        told = scale("serve", "runs/x", "--beside-base", *option.split()).error()
        assert told.startswith("--beside-base: ")
