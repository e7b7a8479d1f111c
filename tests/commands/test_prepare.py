from pathlib import Path

import pytest

from scale_cli.commands.prepare import prepare, prepare_part
from scale_cli.config.schema import RunConfig
from scale_cli.data import tokens
from scale_cli.errors import CorpusError
from scale_cli.processes import Share
from tests.small_runs import changed, held_out, small_run

GOOD = ['{"text": "A cat sat."}'] * 3


def prepared_from(folder: Path, stories: Path, lines: list[str]) -> RunConfig:
    """Return a config of a .jsonl to train on, and of two documents held out."""
    (folder / "news.jsonl").write_text("\n".join(lines) + "\n")
    tales = held_out("tales", folder / "news.txt")
    path = f"corpus.sources.0.path={folder / 'news.jsonl'}"
    return small_run(folder, stories, path, evaluation={"perplexity": [tales]})


def test_shares_of_the_files_are_prepared_one_by_one_then_joined_and_not_tokenised_again(
    tmp_path: Path, stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = prepared_from(tmp_path, stories, GOOD)
    shares = [prepare_part(config, Share(index, 2)) for index in range(2)]
    monkeypatch.setattr(tokens, "tokenise", None)
    joined = prepare(config)["corpora"]
    assert {name: [share[name].kept.documents for share in shares] for name in joined} == {
        "news (trained on)": [3, 0],
        "tales (evaluated on)": [2, 0],
    }
    assert [corpus["ledger"].kept.documents for corpus in joined.values()] == [3, 2]
    assert prepare(config)["corpora"] == joined


def test_what_was_dropped_is_said(
    tmp_path: Path,
    stories: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "scale_cli.terminal._form", "lines"
    )  # a verb before this test may have chosen another
    config = prepared_from(tmp_path, stories, [*GOOD, "{"])
    with pytest.raises(CorpusError, match=r"news\.jsonl:4"):
        prepare(config)
    prepare(changed(config, "corpus.max_bad_fraction=0.25"))
    lines = capsys.readouterr().out.splitlines()
    (dropped,) = [line for line in lines if line.startswith("dropped")]
    assert dropped.endswith(f"1 not JSON: {tmp_path / 'news.jsonl'}:4")
