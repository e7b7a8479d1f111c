"""What each head, and each routing rule, generates is what it says is likeliest."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from scale_cli.evaluation.around_generate import padded_left
from scale_cli.model.adapter_pair import AdapterPair, CacheOfBothRows, without_copies
from scale_cli.model.heads import ModelPair, Streams
from scale_cli.model.routing import (
    log_prior,
    logit_cosine,
    mix_log_probs,
    posterior_log_weights,
)
from scale_cli.model.script_prior import PriorByScript
from scale_cli.model.two_streams import Router, TwoStreams
from scale_cli.upscale.building import NewPieces
from tests.widening import as_if_trained, tiny_llama, widen

ROUTER = Router(prior=PriorByScript(0.3), threshold=0.2)
NEW = NewPieces([f"{index} {index + 1}" for index in range(5)], [0, 2])


def of_adapter() -> Streams:
    """A base, and LoRA by PEFT on its own weights."""
    base = tiny_llama()
    targets = ["q_proj", "o_proj", "down_proj", "lm_head"]
    asked = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    torch.manual_seed(0)
    return AdapterPair(base, get_peft_model(without_copies(base), asked)).eval()


MODELS: dict[str, Callable[[], Streams]] = {
    "route": lambda: as_if_trained(widen(tiny_llama(), "route", "top:2"), std=0.4, seed=0),
    "preserve": lambda: as_if_trained(widen(tiny_llama(), "preserve"), std=0.4),
    "new tokens": lambda: as_if_trained(widen(tiny_llama(), "route", new=NEW), std=0.4),
    "adapter": of_adapter,
    "two models": lambda: ModelPair(tiny_llama(), tiny_llama(seed=1)).eval(),
}


@torch.no_grad()
def likeliest(model: Streams, ids_T: Tensor, head: str, heads: list[str]) -> Tensor:
    """The likeliest token after each, by one pass over all of them, without a cache or padding."""
    logits = [of_head.float() for of_head in model.head_logits(ids_T[None])(slice(None))]
    if head in heads:
        return logits[heads.index(head)][0].argmax(dim=-1)
    log_probs_KBTV = torch.stack(logits).log_softmax(dim=-1).double()
    if head == "cosine":
        serves_base_BT = logit_cosine(logits[0], logits[-1]) >= ROUTER.threshold
        log_weights_KBT = torch.stack([serves_base_BT, ~serves_base_BT]).double().log()
    else:
        next_BT = torch.cat([ids_T[1:], ids_T[:1]])[
            None
        ]  # what follows the last one weighs nothing that is read
        said_KBT = log_probs_KBTV.gather(
            -1, next_BT.expand(len(logits), -1, -1).unsqueeze(-1)
        ).squeeze(-1)
        prior_K = log_prior(ROUTER.prior.otherwise)
        log_weights_KBT = posterior_log_weights(said_KBT, prior_K)[..., :-1]
    return mix_log_probs(log_weights_KBT.unsqueeze(-1), log_probs_KBTV)[0].argmax(dim=-1)


@pytest.mark.parametrize("name", MODELS)
def test_what_a_head_generates_is_what_it_says_is_likeliest(
    name: str,
) -> None:
    model = MODELS[name]()
    heads = ["base", "trained"]
    answers = TwoStreams(model, ROUTER)
    assert answers.heads == heads
    vocab_size = model.config.vocab_size
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, vocab_size, (length,), generator=generator) for length in (9, 4, 1)]
    ids, mask = padded_left(prompts, padding=0)
    said = {}
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    for head in [*heads, "posterior", "cosine"]:
        answers.head = head
        new = answers.answers(ids, mask, **options)
        for row, prompt in enumerate(prompts):
            whole = torch.cat([prompt, new[row]])
            expected = likeliest(model, whole, head, heads)[len(prompt) - 1 : -1]
            assert whole[len(prompt) :].tolist() == expected.tolist(), head
        said[head] = new.tolist()
    assert said["base"] != said["trained"] and said["posterior"] != said["base"], (
        "heads that differ"
    )
    assert answers.answers(ids, mask, num_beams=2, **options).shape == new.shape, (
        "the cache follows its beams"
    )


@torch.no_grad()
def test_where_both_decode_a_base_and_its_adapter_pass_as_rows_of_one_batch() -> None:
    model = of_adapter()
    assert model.decoding_cache is CacheOfBothRows
    ids_BT = torch.randint(0, model.config.vocab_size, (3, 7))
    wanted = model.head_logits(ids_BT)(slice(None))
    cache: Any = model.decoding_cache()
    begun = model.head_logits(ids_BT[:, :4], cache=cache)(slice(None))
    rest = model.head_logits(ids_BT[:, 4:], cache=cache)(slice(None))
    assert cache.layers[0].keys.shape[0] == 6 and cache.get_seq_length() == 7
    for of_head, *parts in zip(wanted, begun, rest, strict=True):
        assert torch.allclose(torch.cat(parts, dim=1), of_head, atol=1e-5)
    base, trained = wanted
    assert torch.equal(base, model.base(input_ids=ids_BT).logits), "nothing is added elsewhere"
    assert not torch.allclose(trained, base, atol=1e-2)
