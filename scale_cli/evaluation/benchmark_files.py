"""Benchmarks in local files: minimal pairs and multiple choice, in .jsonl, .tsv or a .zip of .jsonl.

What a file holds is told by its columns:

| columns | is | prompt and metrics of |
|---|---|---|
| sentence_good, sentence_bad | minimal pairs | BLiMP: which of the two is more probable |
| query, choices (in .tsv: choice1, choice2, ...), gold (from 0) | multiple choice | the config's `prompt` |
| those of KoBEST's five TSVs | KoBEST | lm-eval's own KoBEST task |
"""

from __future__ import annotations

import csv
import glob
import io
import json
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from scale_cli.config.sources import BenchmarkSource
from scale_cli.errors import CorpusError

Row = dict[str, Any]
_SUFFIXES = (".jsonl", ".tsv", ".zip")
_MAX_MEMBER_BYTES = 1 << 28  # of a file in a .zip, read whole


@dataclass(frozen=True)
class LocalItems:
    """The items of a benchmark's files."""

    task: str  # what they are: `minimal_pairs`, `multiple_choice`, or lm-eval's name of a KoBEST task
    rows: list[Row]  # items, with the fields that the task's prompt reads
    files: list[str]  # of each item, the stem of the file that it came from


@dataclass(frozen=True)
class _Form:
    """A task, the columns by which its files are known, and how one of their rows becomes an item."""

    task: str
    columns: frozenset[str]
    convert: Callable[[Row], Row]


def find_files(source: BenchmarkSource) -> list[Path]:
    """Return the files of a benchmark; those of a task of lm-eval's are not ours to look for."""
    if source.path is None:
        return []
    paths = sorted(Path(name) for name in glob.glob(source.path, recursive=True) if Path(name).is_file())
    if not paths:
        raise CorpusError(f"{source.name}: no file matches {source.path}")
    return paths


def read_items(source: BenchmarkSource) -> LocalItems:
    """Read a benchmark's files; what is wrong with a line names file:line."""
    assert source.path is not None
    form: _Form | None = None
    rows: list[Row] = []
    files: list[str] = []
    for name, lines in (pair for path in find_files(source) for pair in _open(path)):
        for place, row in islice(lines, source.limit):
            form = form or _recognise(row, place)
            try:
                rows.append(form.convert(row))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                problem = f"no column {error}" if isinstance(error, KeyError) else str(error)
                raise CorpusError(f"{place}: not an item of {form.task} ({problem})") from None
            files.append(name)
    if form is None:
        raise CorpusError(f"{source.name}: no item in {source.path}")
    return LocalItems(form.task, rows, files)


def _open(path: Path) -> Iterator[tuple[str, Iterator[tuple[str, Row]]]]:
    """Yield the stem of a file, or of each .jsonl in a .zip, and its rows with the place of each."""
    if path.suffix not in _SUFFIXES:
        raise CorpusError(f"{path}: not a benchmark format (known: {', '.join(_SUFFIXES)})")
    try:
        if path.suffix != ".zip":
            text = path.read_text(encoding="utf-8-sig")
            yield path.stem, (_read_tsv if path.suffix == ".tsv" else _read_jsonl)(str(path), text)
            return
        with zipfile.ZipFile(path) as archive:
            for member in sorted(archive.namelist()):
                # macOS adds a "._" twin of every file, which is no text.
                if not member.endswith(".jsonl") or Path(member).name.startswith("._"):
                    continue
                if archive.getinfo(member).file_size > _MAX_MEMBER_BYTES:
                    raise CorpusError(f"{path}/{member}: unpacks to more than {_MAX_MEMBER_BYTES:,} bytes")
                yield Path(member).stem, _read_jsonl(f"{path}/{member}", archive.read(member).decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path}: not UTF-8 ({error.reason})") from None
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError) as error:
        raise CorpusError(f"{path}: cannot be read ({error})") from None


def _read_jsonl(name: str, text: str) -> Iterator[tuple[str, Row]]:
    # Not str.splitlines: JSON strings may hold U+2028 and its like as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{name}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"{place}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise CorpusError(f"{place}: not a JSON object")
        yield place, row


def _read_tsv(name: str, text: str) -> Iterator[tuple[str, Row]]:
    # KoBEST's sentences hold quotation marks that quote nothing.
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter="\t", quoting=csv.QUOTE_NONE, restkey="")
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise CorpusError(f"{name}:{reader.line_num + 1}: not TSV ({error})") from None
        place = f"{name}:{reader.line_num}"
        if "" in row or None in row.values():
            raise CorpusError(f"{place}: not as many columns as the first line has")
        yield place, row


def _recognise(row: Row, place: str) -> _Form:
    for form in _FORMS:
        if form.columns <= row.keys():
            return form
    raise CorpusError(
        f"{place}: neither minimal pairs (sentence_good, sentence_bad) nor multiple choice (query, choices or "
        f"choice1, choice2, ..., gold) nor KoBEST (it has: {', '.join(map(str, row))})"
    )


def _minimal_pair(row: Row) -> Row:
    return {key: _text(row[key]) for key in ("sentence_good", "sentence_bad")}


def _multiple_choice(row: Row) -> Row:
    choices = row.get("choices")
    if choices is None:
        names = [name for name in row if re.fullmatch(r"choice[1-9]\d*", name)]
        choices = [row[name] for name in sorted(names, key=lambda name: int(name[6:]))]
    if not isinstance(choices, list) or len(choices) < 2:
        raise ValueError("choices is no list of at least two")
    if not isinstance(row["query"], str):
        raise ValueError(f"{row['query']!r} is no text")
    return {"query": row["query"], "choices": [_text(c) for c in choices], "gold": _index(row["gold"], len(choices))}


def _boolq(row: Row) -> Row:
    return {"paragraph": row["Text"], "question": row["Question"], "label": _truth(row["Answer"])}


def _copa(row: Row) -> Row:
    question = row["question"].strip()
    if question not in ("원인", "결과"):
        raise ValueError(f"{question!r} is neither 원인 (cause) nor 결과 (effect)")
    label = _index(row["Answer"], 3) - 1
    if label < 0:
        raise ValueError("the answer is neither 1 nor 2")
    alternatives = {"alternative_1": _text(row["1"]), "alternative_2": _text(row["2"])}
    return {"premise": row["sentence"], "question": question, **alternatives, "label": label}


def _hellaswag(row: Row) -> Row:
    endings = {f"ending_{number}": _text(row[f"choice{number}"]) for number in (1, 2, 3, 4)}
    return {"context": row["context"], **endings, "label": _index(row["label"], 4)}


def _sentineg(row: Row) -> Row:
    return {"sentence": row["Text"], "label": _index(row["Label"], 2)}


def _wic(row: Row) -> Row:
    contexts = {"context_1": row["SENTENCE1"], "context_2": row["SENTENCE2"]}
    return {"word": row["Target"], **contexts, "label": _truth(row["ANSWER"])}


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is no text")
    return value


def _index(value: Any, size: int) -> int:
    if isinstance(value, bool) or int(value) not in range(size) or (isinstance(value, float) and value % 1):
        raise ValueError(f"{value!r} is not one of 0 to {size - 1}")
    return int(value)


def _truth(value: str) -> int:
    return ("false", "true").index(value.strip().lower())


_FORMS = (
    _Form("minimal_pairs", frozenset({"sentence_good", "sentence_bad"}), _minimal_pair),
    _Form("multiple_choice", frozenset({"query", "choices", "gold"}), _multiple_choice),
    _Form("multiple_choice", frozenset({"query", "choice1", "choice2", "gold"}), _multiple_choice),
    _Form("kobest_boolq", frozenset({"Text", "Question", "Answer"}), _boolq),
    _Form("kobest_copa", frozenset({"sentence", "question", "1", "2", "Answer"}), _copa),
    _Form("kobest_hellaswag", frozenset({"context", "choice1", "choice4", "label"}), _hellaswag),
    _Form("kobest_sentineg", frozenset({"ID", "Label", "Text"}), _sentineg),
    _Form("kobest_wic", frozenset({"Target", "SENTENCE1", "SENTENCE2", "ANSWER"}), _wic),
)
