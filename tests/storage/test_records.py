"""What the folders of a run say."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scale_cli.data.ledger import Ledger, TokenLedger
from scale_cli.errors import StorageError
from scale_cli.export.records import ExportRecord
from scale_cli.storage.records import RunRecord
from scale_cli.training.records import BranchPoint, Cost, TrainState
from scale_cli.upscale.base_files import BaseRecord

RECORDS: list[type[RunRecord]] = [
    BaseRecord,
    TrainState,
    BranchPoint,
    Cost,
    ExportRecord,
    Ledger,
    TokenLedger,
]


@settings(max_examples=5)
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
def test_what_is_no_record_is_an_error_that_names_the_file(
    kind: type[RunRecord], tmp_path: Path
) -> None:
    for content in ("[]", "null", '{"tensors": 1, "step": "x", "read": 2, "sources": []}', "{"):
        (tmp_path / kind.FILE).write_text(content)
        with pytest.raises(StorageError, match=kind.FILE):
            kind.load(tmp_path)
