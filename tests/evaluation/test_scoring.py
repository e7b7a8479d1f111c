"""Losses are transformers' own arithmetic, whatever the windows, batches and processes."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scale_cli.config.schema import ModelConfig
from scale_cli.config.sources import EvaluationSource
from scale_cli.data.documents import CorpusReader
from scale_cli.data.encoding import Document
from scale_cli.data.tokens import TokenCache, TokenisedCorpus
from scale_cli.evaluation.scoring import (
    DocumentLosses,
    Passes,
    batches_of,
    beginnings,
    num_tokens_read,
    same_beginnings,
    score_corpus,
    scored_lengths,
)
from scale_cli.methods.widened import RouterConfig
from scale_cli.model.heads import ModelPair
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.upscale.base_tokenizer import load_tokenizer
from tests.threads_as_processes import in_processes
from tests.widening import as_if_trained, real_base, routed_heads, widen

OpenCorpus = Callable[..., TokenisedCorpus]
NUM_DOCUMENTS = 6


def source(shared_data: Path, name: str) -> EvaluationSource:
    path = (
        shared_data
        / {"en": "en-tinystories/tinystories_val.txt", "ko": "ko-petitions/valid.txt.xz"}[name]
    )
    language = name
    return EvaluationSource(
        name=name, path=str(path), language=language, role="retention", max_documents=NUM_DOCUMENTS
    )


@pytest.fixture(scope="module")
def open_corpus(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> OpenCorpus:
    cache = tmp_path_factory.mktemp("tokens")

    def opened(checkpoint: str, name: str) -> TokenisedCorpus:
        tokenizer = load_tokenizer(ModelConfig(base=str(shared_data / checkpoint / "hf")))
        return TokenCache(cache / checkpoint, tokenizer).open(source(shared_data, name))

    return opened


@pytest.fixture
def corpus(open_corpus: OpenCorpus) -> TokenisedCorpus:
    return open_corpus("ckpt-stories260K", "en")


@pytest.fixture(scope="module")
def model(shared_data: Path) -> ScaleForCausalLM:
    """A head that is better here and worse there, so that routing has something to decide."""
    return as_if_trained(
        widen(real_base(shared_data, "ckpt-stories260K"), "route", "top:1"), std=0.05
    )


def score(model: ScaleForCausalLM, corpus: TokenisedCorpus, **settings: Any) -> DocumentLosses:
    router = RouterConfig(**settings.pop("router", {}))
    passes: dict[str, Any] = {
        "context": 48,
        "sequence_length": 48,
        "batch_size": 4,
        "mixed_precision": "no",
    }
    passes |= {name: settings.pop(name) for name in passes if name in settings}
    return score_corpus(model, corpus, router, Passes(**passes), **settings)


def whole(corpus: TokenisedCorpus, index: int) -> list[int]:
    """A document after its boundary."""
    ids: list[int] = corpus.document(index).tolist()
    if corpus.markers.bos is not None:
        return ids
    assert corpus.markers.eos is not None
    return [corpus.markers.eos, *ids]


def windows(corpus: TokenisedCorpus, index: int, context: int) -> list[tuple[torch.Tensor, int]]:
    """A document in windows of a context, and how many tokens at the end of each are scored."""
    ids = whole(corpus, index)
    cut: list[tuple[list[int], int]] = []
    for place in range(1, len(ids)):  # of a token to score
        steps = max(0, -(-(place - context) // (context // 2)))
        end = min(context + steps * (context // 2), len(ids) - 1)
        read = ids[: end + 1] if end <= context else [ids[0], *ids[end - context + 1 : end + 1]]
        if cut and cut[-1][0] == read:
            cut[-1] = read, cut[-1][1] + 1
        else:
            cut.append((read, 1))
    return [(torch.tensor([read]), num_scored) for read, num_scored in cut]


@torch.no_grad()
def transformers_loss(model: Any, corpus: TokenisedCorpus, index: int, context: int) -> float:
    nats = 0.0
    for ids, num_scored in windows(corpus, index, context):
        labels = ids.clone()
        labels[:, :-num_scored] = -100
        nats += model(input_ids=ids, labels=labels, use_cache=False).loss.item() * num_scored
    return nats


# The second has no BOS: the first token is scored after the EOS that ends documents.
@pytest.mark.parametrize(
    ("checkpoint", "context"),
    [("ckpt-stories260K", 16), ("ckpt-stories260K", 512), ("ckpt-eltec", 31), ("ckpt-eltec", 512)],
)
def test_the_bases_loss_is_transformers_own_document_by_document(
    shared_data: Path, open_corpus: OpenCorpus, checkpoint: str, context: int
) -> None:
    """Within the context a document is one pass from its first token on; training's windows do not
    matter."""
    model = widen(real_base(shared_data, checkpoint), "preserve")
    corpus = open_corpus(checkpoint, "en")
    losses = score(model, corpus, context=context)
    expected = [transformers_loss(model.base, corpus, index, context) for index in range(3)]
    np.testing.assert_allclose(losses.nats["base"][:3], expected, rtol=1e-5)
    given = 0 if corpus.markers.bos is None else 1  # the token that begins a document
    assert losses.num_tokens[:3].tolist() == [
        len(corpus.document(index)) - given for index in range(3)
    ]


def recursion(base: np.ndarray, trained: np.ndarray, prior: float) -> tuple[float, float]:
    """Routed loss and the base's share of a document, one token at a time."""
    weight = prior
    loss = share = 0.0
    for said_base, said_trained in zip(np.exp(base), np.exp(trained), strict=True):
        mixed = weight * said_base + (1.0 - weight) * said_trained
        loss -= math.log(mixed)
        share += weight
        weight = weight * said_base / mixed
    return loss, share


@torch.no_grad()
def test_the_routers_weight_carries_over_from_window_to_window(
    model: ScaleForCausalLM, corpus: TokenisedCorpus
) -> None:
    length = 32
    router = {"prior": 0.3, "threshold": 0.97}
    losses = score(model, corpus, router=router, context=length)
    for index in range(3):
        said: list[list[np.ndarray]] = [[], []]
        cosines = []
        for ids, num_scored in windows(corpus, index, length):
            heads = [logits[:, -num_scored:] for logits in routed_heads(model, ids[:, :-1])]
            ids = ids[:, -num_scored - 1 :]
            for head, logits in enumerate(heads):
                log_probs = torch.log_softmax(logits.double(), -1).gather(-1, ids[:, 1:, None])[
                    0, :, 0
                ]
                said[head].append(log_probs.numpy())
            cosines.append(torch.cosine_similarity(heads[0], heads[1], dim=-1)[0].numpy())
        base, trained = (np.concatenate(parts) for parts in said)
        loss, share = recursion(base, trained, 0.3)
        assert losses.nats["trained"][index] == pytest.approx(-trained.sum(), rel=1e-5)
        assert losses.nats["posterior"][index] == pytest.approx(loss, rel=1e-5)
        assert losses.served["posterior"][0][index] == pytest.approx(share, rel=1e-3)
        serves_base = np.concatenate(cosines) >= 0.97
        assert losses.served["cosine"][0][index] == pytest.approx(serves_base.sum(), abs=1)
        assert losses.nats["cosine"][index] == pytest.approx(
            -np.where(serves_base, base, trained).sum(), rel=1e-2
        )


@pytest.mark.parametrize("kind", ["widened", "two models"])
def test_a_document_is_read_in_parts_where_it_is_long_and_costs_the_same(
    model: ScaleForCausalLM, shared_data: Path, corpus: TokenisedCorpus, kind: str
) -> None:
    base = real_base(shared_data, "ckpt-stories260K")
    scored: Any = {"widened": model, "two models": ModelPair(base, model.base).eval()}[kind]
    at_once = score(scored, corpus, context=512, sequence_length=512)
    in_parts = score(scored, corpus, context=512, sequence_length=37, batch_size=1)
    for name, nats_N in at_once.nats.items():
        np.testing.assert_allclose(in_parts.nats[name], nats_N, rtol=1e-5)


def test_what_is_read_is_what_the_windows_hold(corpus: TokenisedCorpus) -> None:
    for context in (2, 16, 31, 512):
        held = [
            ids.shape[1] - 1
            for index in range(len(corpus))
            for ids, _ in windows(corpus, index, context)
        ]
        assert num_tokens_read(corpus, context) == sum(held)


def test_a_bounded_evaluation_reads_the_beginning_of_each_document(
    model: ScaleForCausalLM, corpus: TokenisedCorpus, shared_data: Path
) -> None:
    length = 16
    whole = score(model, corpus)
    documents = CorpusReader(source(shared_data, "en"), 10**6)
    texts = [document.text for document in documents if isinstance(document, Document)]
    assert whole.num_bytes.tolist() == [len(text.encode()) for text in texts]
    assert scored_lengths(corpus).sum() == whole.num_tokens.sum()
    lengths_N = beginnings(corpus, length, 40)
    cut = score(model, corpus, lengths_N=lengths_N)
    assert cut.num_tokens.tolist() == [16, 16, 8]
    assert lengths_N.sum() == 40
    assert beginnings(corpus, length, 10**6).sum() == 16 * NUM_DOCUMENTS
    np.testing.assert_allclose(
        cut.num_bytes, whole.num_bytes[:3] * cut.num_tokens / whole.num_tokens[:3]
    )
    ids, _ = windows(corpus, 1, length)[0]
    base = model.base
    expected = base(input_ids=ids, labels=ids, use_cache=False).loss.item() * length
    assert cut.nats["base"][1] == pytest.approx(expected, rel=1e-5)


def test_a_beginning_by_the_same_tokens_is_exactly_as_long(corpus: TokenisedCorpus) -> None:
    whole_N = scored_lengths(corpus)
    for length in range(1, whole_N.max() + 1):
        lengths_N = whole_N.clip(max=length)
        np.testing.assert_array_equal(same_beginnings(lengths_N, corpus, corpus), lengths_N)


def test_batches_hold_as_many_rows_as_have_so_many_tokens() -> None:
    lengths = [3, 90, 2, 60, 3, 500]
    assert batches_of(lengths, 180) == [[5], [1, 3], [0, 4, 2]]
    assert batches_of(lengths, 1) == [[5], [1], [3], [0], [4], [2]]


def test_a_broken_trained_head_costs_the_prior_once_a_document_and_no_more(
    shared_data: Path, corpus: TokenisedCorpus
) -> None:
    model = widen(real_base(shared_data, "ckpt-stories260K"), "route", "top:1")
    with torch.no_grad():
        for parameter in model.expansion.parameters():
            parameter.fill_(math.nan)
    losses = score(model, corpus)
    np.testing.assert_allclose(
        losses.nats["posterior"], losses.nats["base"] + math.log(2), rtol=1e-12
    )
    np.testing.assert_array_equal(losses.nats["cosine"], losses.nats["base"])
    assert np.isposinf(losses.nats["trained"]).all()
    np.testing.assert_array_equal(losses.served["posterior"][0], losses.num_tokens - 0.5)


@pytest.mark.parametrize("num_processes", [2, 3])
def test_the_figures_do_not_hang_on_how_many_processes_share_the_documents(
    model: ScaleForCausalLM,
    corpus: TokenisedCorpus,
    monkeypatch: pytest.MonkeyPatch,
    num_processes: int,
) -> None:
    alone = score(model, corpus)
    for together in in_processes(
        monkeypatch, num_processes, lambda share: score(model, corpus, share=share)
    ):
        for name, values in vars(alone).items():
            np.testing.assert_equal(getattr(together, name), values)
