"""Open the corpora of a config: training batches, held-out documents, and warnings."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path, PurePath

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from scale_cli.config.idle import idle_settings
from scale_cli.config.schema import RunConfig
from scale_cli.config.sources import (
    CORPORA,
    TOKENS,
    CorpusConfig,
    CorpusSource,
    ReadingConfig,
    TextSource,
)
from scale_cli.data.batches import Batches, PackedWindows
from scale_cli.data.documents import CorpusReader
from scale_cli.data.encoding import Document, Ids, encoder_of, gives_all_back
from scale_cli.data.ledger import Ledger, check_bad_fraction, check_unknown_fraction
from scale_cli.data.overlap import shared_texts
from scale_cli.data.tokens import TokenCache, TokenisedCorpus, with_boundary
from scale_cli.errors import CorpusError, RunFolderError
from scale_cli.methods.starts.start import TextToLearn
from scale_cli.processes import is_main, main_first
from scale_cli.report import percent
from scale_cli.storage.atomic import read_json
from scale_cli.values import counted

# The first 4 epochs on a text teach nearly as much as new text; an epoch after 16 teaches less than
# half of that (Muennighoff et al., arXiv 2305.16264).
_OFTEN = 16
_FEW_LOST = 1e-4
_SAMPLE_RECORDS = 1 << 10
_SAMPLE_CHARACTERS = 1 << 17
# Of each source: tokens whose shares the start asks for, and tokens that the base is tried on.
_TOKENS_COUNTED = 1 << 20
_TOKENS_SAMPLED = 512
# How text is cut into windows. In 1, windows cut inside a document began without BOS.
WINDOWS = 2
_LARGE_DOCUMENT_BYTES = 1 << 16
# The bootstrap's intervals are too narrow for some more, but plainly so below this.
_FEWEST_HELD_OUT = 4


def cache_dir(config: RunConfig) -> Path:
    return config.corpus.cache_dir or config.output_dir / TOKENS


def cache_of(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> TokenCache:
    return TokenCache(cache_dir(config), tokenizer, config.corpus, show_progress=is_main())


def training_sources(config: RunConfig) -> list[TextSource]:
    """Return every source that training reads, for training or for periodic evaluations."""
    return every_source(config) if config.train.eval_every_steps else [*config.corpus.sources]


def every_source(config: RunConfig) -> list[TextSource]:
    return [*config.corpus.sources, *config.evaluation.perplexity]


def open_sources(
    config: RunConfig, sources: Sequence[TextSource], tokenizer: PreTrainedTokenizerBase
) -> list[TokenisedCorpus]:
    cache = cache_of(config, tokenizer)
    return [cache.open(source) for source in sources]


def text_to_learn(
    sources: Sequence[CorpusSource], corpora: Sequence[TokenisedCorpus], vocab_size: int
) -> TextToLearn:
    """Return what a start asks of the new sources: how each begins, and how often it has each
    token.
    """
    texts = [
        (source.weight, beginning_to_learn(corpus.ids, corpus.markers.context, vocab_size))
        for source, corpus in zip(sources, corpora, strict=True)
        if source.role == "new"
    ]
    shares = torch.stack([weight * text.token_shares for weight, text in texts]).sum(0)
    _, largest = max(texts, key=lambda text: text[0])
    return TextToLearn(shares / shares.sum(), largest.sample_ids)


def beginning_to_learn(ids: Ids, boundary: int | None, vocab_size: int) -> TextToLearn:
    """Return what a start asks of one text, by its first ids; `boundary` precedes every document."""
    counted = torch.from_numpy(ids[:_TOKENS_COUNTED].astype(np.int64))
    counts = counted.bincount(minlength=vocab_size).double()
    sample = with_boundary(ids[:_TOKENS_SAMPLED], boundary)
    return TextToLearn(counts / counts.sum(), torch.from_numpy(sample.astype(np.int64))[None])


def held_out_in_cache(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> list[TokenisedCorpus | None]:
    """Open every evaluation source that the cache holds; None for one that it does not hold or that
    is missing.
    """
    cache = cache_of(config, tokenizer)
    corpora = list[TokenisedCorpus | None]()
    for source in config.evaluation.perplexity:
        corpora.append(None)
        with suppress(CorpusError):
            corpora[-1] = cache.open_if_there(source)
    return corpora


def check_sample(
    source: TextSource, tokenizer: PreTrainedTokenizerBase, reading: ReadingConfig
) -> None:
    """Raise CorpusError if a tokenizer loses text from the beginning of a source's paths; fetch
    nothing remote.
    """
    is_folder = source.dataset is not None and Path(source.dataset).is_dir()
    if not source.is_local and not is_folder:
        return
    is_lossless = gives_all_back(tokenizer.backend_tokenizer)
    ledger = Ledger()
    is_whole = True
    parts = [source.model_copy(update={"path": path}) for path in source.paths] or [source]
    for part in parts:
        reader = CorpusReader(part, reading.max_document_bytes, tokenizer)
        room = _SAMPLE_CHARACTERS
        sample = []
        for record in islice(reader, _SAMPLE_RECORDS):
            if isinstance(record, Document):
                text = record.text[:room]
                sample.append(Document(text, len(text.encode())))
                room -= len(text)
            if not room:
                break
        is_whole = is_whole and room > 0 and reader.ledger.read.documents < _SAMPLE_RECORDS
        ledger.take(reader.ledger)
        if not is_lossless:
            encoder = encoder_of(tokenizer, conversations=source.messages_field is not None)
            ledger.round_trip += encoder.encode(sample).round_trip
    all_skipped = ledger.num_skipped > 0 and len(parts) == 1
    too_bad = ledger.bad_fraction > reading.max_bad_fraction
    if not ledger.kept.documents and (all_skipped or too_bad):
        check_bad_fraction(source, ledger, reading.max_bad_fraction)
    check_unknown_fraction(
        source, ledger.round_trip, reading.max_unknown_fraction, is_whole=is_whole
    )


def windows_of(config: CorpusConfig, corpus: TokenisedCorpus) -> PackedWindows:
    offsets = corpus.offsets if config.isolate_documents else None
    # Without BOS, the token before predicts a document's first token.
    lead = int(corpus.markers.bos is None)
    return PackedWindows(
        corpus.ids,
        config.sequence_length,
        corpus.learned,
        offsets,
        lead=lead,
        boundary=corpus.markers.context,
    )


def build_batches(
    config: RunConfig, corpora: Sequence[TokenisedCorpus], num_processes: int
) -> Batches:
    """Return the batches of a whole run, for this many processes."""
    of_replay = config.method.distillation.weight
    sources = config.corpus.sources
    return Batches(
        [windows_of(config.corpus, corpus) for corpus in corpora],
        [source.weight for source in sources],
        num_steps=config.train.max_steps,
        seed=config.seed,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.sequences_at_once(num_processes),
        distillation=[of_replay if source.role == "replay" else 0.0 for source in sources],
    )


def open_held_out(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, of_base: PreTrainedTokenizerBase
) -> tuple[list[TokenisedCorpus], list[TokenisedCorpus]]:
    """Open the held-out corpora, and if the run has new tokens the same by the base's own; on the
    main process first, which tokenises what is not in the cache.
    """
    sources = config.evaluation.perplexity
    held_out = main_first(lambda: open_sources(config, sources, tokenizer))
    if config.method.vocabulary is None:
        return held_out, []
    return held_out, main_first(lambda: open_sources(config, sources, of_base))


def trained_on(
    config: RunConfig, folder: Path, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[CorpusSource, TokenisedCorpus]] | None:
    """Return the text that a state was trained on; None if the cache does not hold it any more."""
    cache = cache_of(config, tokenizer)
    found = []
    for source, name in zip(config.corpus.sources, read_json(folder / CORPORA), strict=True):
        if (corpus := cache.open_named(name, source)) is None:
            return None
        found.append((source, corpus))
    return found


def check_same_text(folder: Path, names: Sequence[str]) -> None:
    """Refuse text of other names, which hash it, than a state was trained on."""
    for before, now in zip(read_json(folder / CORPORA), names, strict=True):
        if before != now:
            raise RunFolderError(
                f"{folder}: the training text has changed: {before} -> {now} (source and hash); restore "
                "the text, or start anew in another output_dir"
            )


def corpus_warnings(
    config: RunConfig,
    training: Sequence[TokenisedCorpus],
    held_out: Sequence[TokenisedCorpus | None],
) -> list[str]:
    """Return a warning for everything doubtful about the corpora; a held-out corpus that is not
    open is None.
    """
    trained = list(zip(config.corpus.sources, training, strict=True))
    lines = idle_settings(config)
    for (source, corpus), share in zip(trained, config.corpus.shares, strict=True):
        num_windows = len(windows_of(config.corpus, corpus))  # the last may be mostly padding
        often = share * config.train.max_steps * config.train.global_batch_size / num_windows
        if often > _OFTEN:
            lines.append(
                f"corpus {source.name}: its {len(corpus.ids):,} tokens are read {often:,.0f} times; after "
                f"{_OFTEN} times a text teaches little but itself. Give more text, a lower weight, fewer "
                "train.max_steps, or many times the train.weight_decay"
            )
        lines += _text_warnings(source, corpus)
    for held, opened in zip(config.evaluation.perplexity, held_out, strict=True):
        if opened is None:
            continue
        lines += _text_warnings(held, opened)
        lines += [
            f"corpus {held.name}: {shared}: results on them measure memorisation"
            for shared in shared_texts(opened, trained)
        ]
        if len(opened) < _FEWEST_HELD_OUT:
            intervals = "its confidence intervals are too narrow"
            if len(opened) == 1:
                intervals = "it has no confidence intervals"
            lines.append(
                f"corpus {held.name}: {intervals}, with only {counted(len(opened), 'document')} to "
                "resample; give more text, separate documents in a .txt by blank lines, or set "
                "`documents: line`"
            )
    return lines


def _text_warnings(source: TextSource, corpus: TokenisedCorpus) -> list[str]:
    """Warn if the tokenizer loses text, and if large .txt files are not split into documents."""
    lost = corpus.ledger.round_trip
    kept = corpus.ledger.kept
    lines = []
    if lost.lost_fraction > _FEW_LOST:
        share = percent(lost.lost_fraction, 2)
        lines.append(
            f"corpus {source.name}: the tokenizer loses {share} of its text, as in {lost.example!r}"
        )
    changed = {
        "CR or CRLF line end": corpus.ledger.num_line_ends,
        "byte order mark": corpus.ledger.num_byte_order_marks,
    }
    if found := [counted(number, what) for what, number in changed.items() if number]:
        lines.append(
            f"corpus {source.name}: has {' and '.join(found)}; lines are read as ended by LF, without "
            "marks"
        )
    is_txt = any(".txt" in PurePath(path).suffixes for path in source.paths)
    parted = (
        kept.documents > corpus.ledger.files
        or kept.num_bytes < kept.documents * _LARGE_DOCUMENT_BYTES
    )
    if source.documents == "paragraph" and is_txt and not parted:
        lines.append(
            f"corpus {source.name}: {counted(kept.documents, 'document')} of {kept.num_bytes:,} "
            "bytes in all: documents are separated by blank lines, and these files have none; set `documents: line` "
            "if every line is a document, or `documents: file` if every file is"
        )
    return lines
