from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scale_cli.data.ledger import Ledger, TokenLedger
from scale_cli.errors import StorageError
from scale_cli.storage.records import BaseRecord, BranchPoint, Cost, ExportRecord, RunRecord, TrainState

RECORDS: list[type[RunRecord]] = [BaseRecord, TrainState, BranchPoint, Cost, ExportRecord, Ledger, TokenLedger]


@settings(max_examples=5, deadline=None)
@given(st.data())
@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_a_record_is_read_as_it_was_written(
    kind: type[RunRecord], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
    folder, record = tmp_path_factory.mktemp("records"), data.draw(st.from_type(kind))
    assert kind.load_if_there(folder) is None
    record.save(folder)
    assert kind.load(folder) == record


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("content", ["[]", "null", '{"tensors": 1, "step": "x", "read": 2, "sources": []}', "{"])
def test_what_is_no_record_is_an_error_that_names_the_file(kind: type[RunRecord], content: str, tmp_path: Path) -> None:
    (tmp_path / kind.FILE).write_text(content, encoding="utf-8")
    with pytest.raises(StorageError, match=kind.FILE):
        kind.load(tmp_path)
