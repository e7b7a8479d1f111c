"""Steps with everything asked for at once, against AdamW on one big batch through `tests/plain_torch.py`."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.data.batches import Batches, MicroBatch, PackedWindows
from scale_cli.methods.recipes import trainable_parameters
from scale_cli.methods.starts.start import TextToLearn
from scale_cli.upscale.building import NewPieces, start_model
from tests.plain_torch import logits_of, shared_with_new_tokens
from tests.steps import Steps
from tests.widening import as_if_trained, tiny_llama

OLD, NEW = 57, NewPieces(["7 8", "3 7", "10 11", "3 10"], own_pieces=[7, 10])
FIRST = [7, 3, 10, 3]
NUM_STEPS, GLOBAL_BATCH, REPLAY = 6, 6, 1
DISTILLED = 1.5
# Large enough that rounding of a small gradient is no step of its own.
EPSILON = 1e-3
WIDENED = {
    "embedding_norm": "bounded",
    "lr": 1e-3,
    "lr_multipliers": {"embedding": 3.0, "gains": 0.3},
    "activation_checkpointing": True,
}
FULL = {"lr_multipliers": {"head": 0.5}}


def settings(**more: Any) -> TrainConfig:
    train = {
        "lr": 1e-2,
        "warmup_steps": 2,
        "weight_decay": 0.2,
        "max_grad_norm": 0.25,
        "adam_epsilon": EPSILON,
    }
    return TrainConfig.model_validate({"max_steps": NUM_STEPS, **train, **more})


def batches_of(micro_batch_size: int, distilled: float) -> Batches:
    """Windows of isolated documents of two sources, the second of which is replay."""
    numbers = np.random.default_rng(0)
    sources = []
    for length in (300, 150):
        offsets = np.concatenate([[0], np.cumsum(numbers.integers(3, 20, size=length)), [10**6]])
        offsets = np.append(offsets[offsets < length], length)
        ids = numbers.integers(0, OLD + len(FIRST), size=length)
        sources.append(PackedWindows(ids, 16, offsets=offsets))
    return Batches(
        sources,
        [0.6, 0.4],
        num_steps=NUM_STEPS,
        seed=1,
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=micro_batch_size,
        distillation=[0.0, distilled],
    )


class InPlainTorch:
    """The same in float64, all of a global batch at once, every recipe as its paper writes it."""

    def __init__(self, model: Any, train: TrainConfig, *, widened: bool) -> None:
        self.config = copy.deepcopy(tiny_llama(vocab_size=OLD).config)
        self.frozen = {
            name: tensor.detach().double().clone() for name, tensor in model.named_parameters()
        }
        trained = trainable_parameters(model)
        self.leaves = {name: self.frozen[name].clone().requires_grad_() for name in trained}
        self.widened, self.train = widened, train
        self.bound = model.config.start["embedding_rms"] if widened else math.inf
        groups = []
        for name, leaf in self.leaves.items():
            kinds = {"embed_tokens": "embedding", "lm_head": "head"}
            kind = next((kind for part, kind in kinds.items() if part in name), "matrix")
            kind = "gains" if leaf.ndim == 1 else kind
            # The rates of codes, unless the config says.
            rate = {"head": 10.0, "matrix": 1.5} if widened else {}
            rate |= train.lr_multipliers.model_dump(exclude_none=True)
            decay = 0.0 if kind in ("embedding", "gains") else train.weight_decay
            groups.append({"params": [leaf], "weight_decay": decay, "rate": rate.get(kind, 1.0)})
        betas = (train.adam_beta1, train.adam_beta2)
        self.optimiser = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=EPSILON, foreach=False)

    def said(self, ids: Tensor, documents: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the logits of what trains, and the probabilities of the base where it is beside it."""
        if not self.widened:
            return logits_of(self.config, self.leaves, None, ids, documents), None
        base, added = (
            {
                name.removeprefix(prefix): tensor
                for name, tensor in (self.frozen | self.leaves).items()
                if name.startswith(prefix)
            }
            for prefix in ("base.", "expansion.")
        )
        rows = tuple(added["new_tokens.embed_tokens.weight"])
        of_base = logits_of(self.config, base, None, ids, documents, rows)
        return logits_of(self.config, base, added, ids, documents), shared_with_new_tokens(
            of_base, FIRST, [7, 10]
        )

    def step(
        self, index: int, batch: MicroBatch, distilled: float
    ) -> tuple[float, float, list[float]]:
        train = self.train
        assert batch.position_ids is not None
        logits, base = self.said(batch.input_ids, (batch.position_ids == 0).cumsum(1))
        losses = F.cross_entropy(logits.transpose(1, 2), batch.targets, reduction="none")
        if base is not None:
            divergence = (base * (base.log() - logits.log_softmax(-1))).sum(-1)
            of_replay = (batch.sources == REPLAY)[:, None] & (batch.targets != -100)
            losses = losses + distilled * divergence * of_replay
        loss = losses.sum() / (batch.targets != -100).sum()
        self.optimiser.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.leaves.values(), train.max_grad_norm)
        warm, last = train.warmup_steps, NUM_STEPS - 1
        cosine = 0.5 * (1 + math.cos(math.pi * (index - warm) / (last - warm)))
        lr = train.peak_lr * ((index + 1) / warm if index < warm else 0.1 + 0.9 * cosine)
        for group in self.optimiser.param_groups:
            group["lr"] = lr * group["rate"]
        with torch.no_grad():
            self.optimiser.step()
            if self.widened:
                codes = self.leaves["expansion.embed_tokens.weight"]
                codes /= (codes.square().mean(1, keepdim=True).sqrt() / self.bound).clamp(min=1.0)
        of_sources = [losses[batch.sources == source].sum().item() for source in (0, REPLAY)]
        return loss.item(), norm.item(), of_sources


@pytest.mark.parametrize("widened", [True, False])
def test_steps_with_everything_asked_for_are_adamws_on_one_big_batch(widened: bool) -> None:
    distilled, train = (DISTILLED, settings(**WIDENED)) if widened else (0.0, settings(**FULL))
    keys: dict[str, Any] = {"variant": "full"}
    if widened:
        keys = {"variant": "route", "distillation": {"weight": distilled}}
    method = MethodConfig.model_validate(keys)
    shares = torch.ones(OLD + 4).double() / (OLD + 4)
    text = TextToLearn(shares, torch.tensor([[OLD, 3]]))
    model: Any = start_model(tiny_llama(vocab_size=OLD), method, 0, NEW, text)
    if widened:
        of_tokens = (model.expansion.new_tokens.embed_tokens, model.expansion.embed_tokens)
        started = [embedding.weight.clone() for embedding in of_tokens]
        as_if_trained(model)
        for embedding, weight in zip(of_tokens, started, strict=True):
            embedding.weight.data = weight
    reference = InPlainTorch(model, train, widened=widened)
    in_parts, whole = (batches_of(size, distilled) for size in (2, GLOBAL_BATCH))
    steps = Steps(model, train, in_parts)
    for index in range(NUM_STEPS):
        ours = steps.take(index).result()
        (batch,) = whole.of_step(index).micro_batches
        loss, norm, by_source = reference.step(index, batch, distilled)
        assert ours.loss == pytest.approx(loss, rel=1e-5)
        assert ours.grad_norm == pytest.approx(norm, rel=1e-4) and norm > train.max_grad_norm
        assert [of_source for of_source, _ in ours.by_source] == pytest.approx(by_source, rel=1e-5)
    trained = trainable_parameters(model)
    assert trained.keys() == reference.leaves.keys()
    for name, parameter in trained.items():
        expected = reference.leaves[name].detach()
        torch.testing.assert_close(parameter.double(), expected, rtol=1e-4, atol=1e-5, msg=name)
