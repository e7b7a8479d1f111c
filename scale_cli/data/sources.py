"""Whether a source of text can be read at all: found out without reading it."""

from __future__ import annotations

from scale_cli.config.sources import TextSource
from scale_cli.data.documents import dataset_splits
from scale_cli.data.files import source_files
from scale_cli.errors import CorpusError


def check_source(source: TextSource) -> None:
    """Find out whether a source is there: every file of it opened, or the hub (or its cache) asked."""
    if source.dataset is not None:
        splits = dataset_splits(source)
        if splits and source.split not in splits:
            known = ", ".join(splits)
            raise CorpusError(f"{source.name}: the dataset {source.dataset} has no split {source.split!r} ({known})")
        return
    for file in source_files(source):
        try:
            if file.store is None:  # a store has been asked for it; to open it there is to fetch it
                with file.open():
                    pass
        except OSError as error:
            raise CorpusError(f"{source.name}: {file} cannot be read ({error.strerror or error})") from None
