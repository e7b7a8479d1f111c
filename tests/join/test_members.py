from __future__ import annotations

from pathlib import Path

from scale_cli.config.schema import RunConfig
from scale_cli.join.members import join_runs
from scale_cli.join.report import score_corpora
from scale_cli.upscale.tokenizer import load_tokenizer
from tests.join.conftest import trained

Runs = dict[str, RunConfig]


def test_of_two_runs_with_one_name_the_second_gets_a_number(runs: Runs, shared_data: Path, tmp_path: Path) -> None:
    namesake = trained(shared_data, tmp_path / "korean", expansion={"ratio": 0.5})
    base = trained(shared_data, tmp_path / "base", expansion={"init": "normal"})
    joined = join_runs([config.output_dir for config in (runs["korean"], namesake, base)], None, 0.0)
    assert joined.model.config.head_names == ["base", "korean", "korean-2", "base-2"]


def test_the_same_corpus_is_opened_once_and_another_of_its_name_beside_it(runs: Runs) -> None:
    config = runs["korean"]
    tiny, petitions = config.evaluation.perplexity
    fewer = [tiny.model_copy(update={"max_documents": 1}), petitions]
    other = runs["writer"].model_copy(update={"evaluation": config.evaluation.model_copy(update={"perplexity": fewer})})
    model = join_runs([config.output_dir], None, 0.0).model
    scored = score_corpora(model, [config, config, other], load_tokenizer(config.model))
    assert [corpus.name for corpus in scored] == ["tiny", "petitions-held-out", "tiny (writer)"]
    assert [corpus.num_documents for corpus in scored] == [2, 2, 1]
