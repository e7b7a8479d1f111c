from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scale_cli.planning.beginnings import Beginning
from tests.data.corpus_files import source_of


@pytest.mark.parametrize("columns", [["text"], ["text", "other"], ["other", "text"]])
def test_the_size_of_a_table_is_known_by_its_rows_wherever_its_text_stands(
    tmp_path: Path, columns: list[str]
) -> None:
    texts = [f"{number} " * 200 for number in range(1_000, 2_000)]
    table = {"text": texts, "other": [f"{number}" * 900 for number in range(1_000, 2_000)]}
    file = tmp_path / "texts.parquet"
    pq.write_table(pa.table({name: table[name] for name in columns}), file, row_group_size=100)
    beginning = Beginning.of(source_of(file), 100_000)
    assert not beginning.is_whole
    assert beginning.num_bytes == pytest.approx(sum(map(len, texts)), rel=0.02)
