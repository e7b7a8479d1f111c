"""Datasets on the hub, by the library `datasets`, which takes seconds to import: only hub sources need it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from scale_cli.config.sources import TextSource
from scale_cli.errors import CorpusError


@contextmanager
def named_dataset_errors(source: TextSource) -> Iterator[None]:
    """Tell in one line what went wrong with a dataset."""
    import datasets

    try:
        yield
    except (OSError, RuntimeError, ValueError, datasets.exceptions.DatasetsError) as error:
        message = (str(error).splitlines() or [type(error).__name__])[0]
        raise CorpusError(f"{source.name}: the dataset {source.dataset} cannot be loaded: {message}") from None


def dataset_rows(source: TextSource) -> Iterable[dict[str, Any]]:
    """Return the rows of a dataset's split, read as they are needed."""
    import datasets

    rows: Iterable[dict[str, Any]] = datasets.load_dataset(
        source.dataset, source.subset, split=source.split, revision=source.revision, streaming=True
    )
    return rows


def dataset_commit(source: TextSource) -> str:
    """Return what names the content of a hub dataset: the commit its revision stands for, by datasets' own look-up."""
    return str(_builder(source).hash)


def check_dataset(source: TextSource) -> None:
    """Find out whether a dataset is there, with its split as far as that is known before it is loaded."""
    splits = [str(split) for split in _builder(source).config.data_files or ()]
    if splits and source.split not in splits:
        known = ", ".join(splits)
        raise CorpusError(f"{source.name}: the dataset {source.dataset} has no split {source.split!r} ({known})")


def _builder(source: TextSource) -> Any:
    import datasets

    with named_dataset_errors(source):
        return datasets.load_dataset_builder(source.dataset, source.subset, revision=source.revision)
