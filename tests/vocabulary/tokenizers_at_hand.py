"""Tokenizers of the kinds whose vocabulary can grow, small, and learned on English alone."""

import functools
import json
from collections.abc import Callable

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

ENGLISH = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, "
    "it was the epoch of belief; we're all going direct to Heaven, don't you know, in 1775. "
) * 20
KOREAN = (
    "안녕하세요 모든 국민은 법 앞에 평등하다. 누구든지 성별 종교 또는 사회적 신분에 의하여 차별을 받지 아니한다. "
    "국민 여러분 안녕하세요, the law는 국민의 것이다. 대한민국의 주권은 국민에게 있고, 모든 권력은 국민으로부터 나온다."
)
RUSSIAN = (
    "Все люди рождаются свободными и равными в своём достоинстве и правах. Они наделены разумом и совестью и должны "
    "поступать в отношении друг друга в духе братства, the law и права людей: каждый человек имеет право на жизнь."
)
# Llama 3's and Qwen's, but for their digits.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIALS = ["<|begin|>", "<|end|>"]


@functools.cache
def _byte_level(*, ignore_merges: bool, nfc: bool) -> str:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([ENGLISH], trainer)
    tokenizer.add_special_tokens(
        [AddedToken(content, special=True, normalized=False) for content in _SPECIALS]
    )
    return tokenizer.to_str()


def llama_3() -> Tokenizer:
    """Byte-level, with whole words taken from the vocabulary before any merge; specials that the
    model lacks.
    """
    return Tokenizer.from_str(_byte_level(ignore_merges=True, nfc=False))


def qwen() -> Tokenizer:
    """Byte-level, on composed characters."""
    return Tokenizer.from_str(_byte_level(ignore_merges=False, nfc=True))


# Bytes that SmolLM2's tokenizer has no token for: UTF-8 never has the last 12, and text hardly the
# others.
RARE_BYTES = [*range(2, 9), 0x0B, 0x0E, 0xC0, 0xC1, 0xF1, *range(0xF5, 0x100)]


def smollm2() -> Tokenizer:
    """Byte-level, without tokens for some bytes that its text never had."""
    described = json.loads(llama_3().to_str())
    spelling = bytes_to_unicode()
    vocabulary = described["model"]["vocab"]
    for byte in RARE_BYTES:
        del vocabulary[spelling[byte]]
    old_ids = sorted(vocabulary, key=vocabulary.__getitem__)
    described["model"]["vocab"] = {token: index for index, token in enumerate(old_ids)}
    for index, added in enumerate(described["added_tokens"]):
        added["id"] = len(old_ids) + index
    return Tokenizer.from_str(json.dumps(described))


MARKS = ["<s>", "</s>", "<unk>"]
LETTERS = "<>/[]0xsunkSEPA_ab"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_DECODED = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def unigram() -> Tokenizer:
    """SentencePiece's other model, of few pieces; the model alone knows its `<unk>`."""
    pieces = [*MARKS, *BYTES, "▁", *LETTERS, "▁a", "ab"]
    scores = [(piece, -float(len(pieces) - len(piece))) for piece in pieces]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=2, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence(_DECODED)
    tokenizer.add_special_tokens(MARKS[:2])
    return tokenizer


def _with_byte_fallback() -> Tokenizer:
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace()
    learned.train_from_iterator([ENGLISH], trainers.BpeTrainer(vocab_size=120, show_progress=False))
    model = json.loads(learned.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *model["vocab"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[(left, right) for left, right in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.decoder = decoders.Sequence([*_DECODED, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def llama_2() -> Tokenizer:
    """SentencePiece's BPE with byte fallback, spaces made by the normalizer."""
    tokenizer = _with_byte_fallback()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return tokenizer


def mistral() -> Tokenizer:
    """The same, spaces made by the pre-tokenizer."""
    tokenizer = _with_byte_fallback()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


KINDS: list[Callable[[], Tokenizer]] = [llama_3, qwen, smollm2, llama_2, mistral]


def with_another_familys_steps() -> Tokenizer:
    """As transformers makes of a configuration that names another family: its steps around this
    one's tokens.
    """
    tokenizer = llama_2()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = qwen().pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    model = json.loads(tokenizer.to_str())
    model["model"]["unk_token"] = None
    return Tokenizer.from_str(json.dumps(model))


def without_the_bytes_that_it_falls_back_to() -> Tokenizer:
    """It says byte_fallback, and has neither tokens of bytes nor one for what it does not know."""
    model = json.loads(llama_2().to_str())
    vocab = {
        token: index
        for token, index in model["model"]["vocab"].items()
        if not token.startswith("<0x")
    }
    model["model"] |= {"vocab": vocab, "unk_token": None}
    return Tokenizer.from_str(json.dumps(model))


BROKEN = [
    with_another_familys_steps,
    without_the_bytes_that_it_falls_back_to,
]  # of which each drops Hangul
