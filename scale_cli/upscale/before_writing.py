"""What can be known before a verb writes anything: by the config, the base's config.json and a look for the texts.

No weight is loaded and no text is read, so it takes a moment, and every verb asks first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from scale_cli.config.schema import RunConfig, TextSource
from scale_cli.data.sources import check_source
from scale_cli.data.tokens import DocumentMarkers
from scale_cli.errors import BaseModelError
from scale_cli.storage.layout import RunFolder, check_folder
from scale_cli.upscale.base import check_tokenizer_fits, load_base_config, load_tokenizer
from scale_cli.upscale.folder import any_base_without_weights
from scale_cli.upscale.method import build_model
from scale_cli.upscale.sizes import check_context, check_processes


def check_before_writing(config: RunConfig, sources: Sequence[TextSource], num_processes: int = 1) -> None:
    """Refuse what is certain to fail later on.

    Args:
        config: the resolved config.
        sources: the texts that the verb reads, or a verb after it.
        num_processes: that will share a step.

    Raises:
        RunFolderError: something is in the way of what will be written, or it cannot be written there.
        BaseModelError: the base is not there, or not supported; or its tokenizer has no mark that isolates documents.
        ConfigError: windows, batches or the method's sizes do not fit the base or the processes.
        CorpusError: a source is not there, or cannot be read.
    """
    RunFolder(config.output_dir).check()
    if config.corpus.cache_dir is not None and not config.corpus.cache_dir.is_dir():
        check_folder("corpus.cache_dir", config.corpus.cache_dir)
    base_config = load_base_config(config.model)
    check_context(config, base_config)
    check_processes(config, num_processes)
    with torch.device("meta"):
        build_model(any_base_without_weights(config.model), config.method, config.seed)
    tokenizer = load_tokenizer(config.model)
    check_tokenizer_fits(tokenizer, config.model, base_config.vocab_size)
    if config.corpus.isolate_documents and DocumentMarkers.of(tokenizer).context is None:
        raise BaseModelError(
            f"corpus.isolate_documents: the tokenizer of {config.model.base} has neither BOS nor EOS, so a document's "
            "first token would be predicted from the document before"
        )
    for source in sources:
        check_source(source)
