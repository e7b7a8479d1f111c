"""`scale join`: one model of several runs, what it is held to, and what is refused."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import scale_cli.commands.join as commands_join
from scale_cli.commands.export import export
from scale_cli.commands.join import join
from scale_cli.commands.upscale import upscale
from scale_cli.commands.verify import check_folders
from scale_cli.config.load import dump_config
from scale_cli.config.schema import EvaluationConfig, ModelConfig, RunConfig
from scale_cli.errors import (
    BaseModelError,
    ConfigError,
    PreservationError,
    RunFolderError,
    ScaleError,
)
from scale_cli.generation import Generator, Sampling
from scale_cli.joining.members import join_runs
from scale_cli.joining.report import score_corpora
from scale_cli.model.joined_scale import JoinedForCausalLM
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.storage.atomic import new_folder, read_json
from scale_cli.upscale.base_tokenizer import load_tokenizer
from tests.command_line import Scale, refused
from tests.export.conftest import configured
from tests.join.conftest import at_its_start
from tests.widening import load_widened, lower_stories, random_ids

Runs = dict[str, RunConfig]


@pytest.fixture(scope="module")
def joined(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("joining") / "all"
    join([config.output_dir for config in runs.values()], output, prior=None)
    return output


def test_the_report_has_every_head_and_routing_is_within_ln_4_of_the_best_on_every_document(
    joined: Path,
) -> None:
    report = read_json(joined / "report.json")
    assert [member["name"] for member in report["members"]] == ["korean", "writer", "wider"]
    assert report["max_cost_nats"] == pytest.approx(math.log(4))
    assert [corpus["name"] for corpus in report["corpora"]] == ["tiny", "petitions-held-out"], (
        "each once"
    )
    for corpus in report["corpora"]:
        assert list(corpus["heads"]) == ["base", "korean", "writer", "wider"]
        assert 0.0 <= corpus["worst_document_nats"] <= math.log(4) + 1e-6
        assert sum(head["share"] for head in corpus["heads"].values()) == pytest.approx(1.0)
        best = min(head["nats_per_token"] for head in corpus["heads"].values())
        allowed = math.log(4) * corpus["num_documents"] / corpus["num_tokens"]
        assert corpus["routed"]["nats_per_token"] <= best + allowed


@torch.no_grad()
def test_the_written_model_has_the_bases_logits_and_every_runs_bit_for_bit(
    runs: Runs, joined: Path
) -> None:
    model = JoinedForCausalLM.from_pretrained(joined, dtype="auto").eval()
    ids = random_ids(2, 40, below=512, lowest=3)
    base, *members = model.routed_logits(model.final_states(ids, preserved=True))
    plain = AutoModelForCausalLM.from_pretrained(runs["korean"].model.base).eval()
    assert torch.equal(base, plain(ids, use_cache=False).logits)
    for config, logits in zip(runs.values(), members, strict=True):
        alone = load_widened(config.output_dir / "final", config.model)
        assert torch.equal(logits, alone.trained_logits(alone.final_states(ids, preserved=False)))
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_run_that_is_given_twice_is_refused(runs: Runs) -> None:
    folder = runs["korean"].output_dir
    with pytest.raises(RunFolderError, match="given twice"):
        join_runs([folder, folder / "final"], prior=None)


def test_a_run_that_is_named_as_a_rule_of_the_router_gets_another_name(
    shared_data: Path, tmp_path: Path
) -> None:
    run = at_its_start(configured(shared_data, tmp_path / "posterior", {"variant": "route"}))
    assert join_runs([run.output_dir], None).model.config.head_names == ["base", "posterior-2"]


def test_two_heads_cost_what_the_report_of_the_run_says(runs: Runs) -> None:
    from scale_cli.commands.evaluate import evaluate

    config = runs["writer"]
    report = evaluate(config)
    joined = join_runs([config.output_dir], prior=None)
    scored = score_corpora(joined.model, [joined.members[0].run], joined.tokenizer)
    for wanted, got in zip(report.corpora, scored, strict=True):
        assert got.heads["base"].nats_per_token == pytest.approx(
            wanted.heads["base"].nats_per_token
        )
        assert got.heads["writer"].bits_per_byte == pytest.approx(
            wanted.heads["trained"].bits_per_byte
        )
        assert got.routed.nats_per_token == pytest.approx(wanted.heads["posterior"].nats_per_token)
        assert got.heads["base"].share == pytest.approx(wanted.heads["posterior"].base_share)


def test_the_verb_prints_a_table_and_the_folder_is_whole_and_speaks(
    runs: Runs, joined: Path, tmp_path: Path, scale: Scale
) -> None:
    assert (
        "0.693 at most"
        in scale("join", runs["korean"].output_dir, "--output", tmp_path / "out").stdout
    )
    done = scale("generate", joined, "--prompt", "Lily", "--max-new-tokens", "3", "--show-heads")
    assert "shares of the heads in" in done.stderr
    (check,) = check_folders(joined)
    assert (check.held, check.failed) == (["hashes", "base and its preservation"], [])
    (continued,) = Generator(joined).continue_all(["Once upon a time"], Sampling(max_new_tokens=8))
    for token in continued.tokens:
        assert token.shares is not None and list(token.shares) == [
            "base",
            "korean",
            "writer",
            "wider",
        ]
        assert sum(token.shares.values()) == pytest.approx(1.0)


def test_an_adapter_is_joined_as_its_run_and_has_the_licence_of_the_base(
    shared_data: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(lower_stories(shared_data), base)
    (base / "LICENSE").write_text("do as you like")
    (base / "README.md").write_text("---\nlicense: mit\n---\n# Base\n")
    run = configured(shared_data, tmp_path / "run", {"variant": "route"})
    run = at_its_start(run.model_copy(update={"model": ModelConfig(base=str(base))}))
    adapter = export(
        run.model_copy(update={"export": run.export.model_copy(update={"format": "adapter"})})
    ).folder
    report = join([adapter], tmp_path / "out", prior=None)
    (of_run,) = join_runs([run.output_dir], None).members
    assert [(member["name"], member["sha256"]) for member in report.members] == [
        (of_run.name, of_run.sha256)
    ]
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.license, card.data.language) == ("mit", ["en", "ko"])
    assert f"`{of_run.sha256[:12]}`" in card.text and card.text.count("| nats/token |") == 2
    assert "trust_remote_code=True" in card.text and str(tmp_path) not in card.text
    assert (tmp_path / "out" / "LICENSE").read_text() == "do as you like"
    assert "not known" in card.text, "an adapter holds no ledger"


def test_a_joined_folder_whose_base_is_another_is_found(joined: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with new_folder(folder) as partial:
        shutil.copytree(joined, partial, dirs_exist_ok=True)
        tensors = load_file(partial / "model.safetensors")
        tensors["base.model.norm.weight"] += 1.0
        save_file(tensors, partial / "model.safetensors", {"format": "pt"})
    (check,) = check_folders(folder)
    assert "its base has SHA-256" in check.failed[0]


def test_a_joined_model_and_a_run_open_by_the_code_that_lies_beside_them(
    runs: Runs, joined: Path
) -> None:
    """That code imports torch and transformers alone, as the contracts of `make layers` hold it to."""
    config = runs["wider"].model_copy(
        update={"export": runs["wider"].export.model_copy(update={"format": "transformers"})}
    )
    ids = random_ids(2, 40, below=512, lowest=3)
    greedy: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    for folder, ours in ((joined, JoinedForCausalLM), (export(config).folder, ScaleForCausalLM)):
        model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        assert type(model) is not ours and type(model).__name__ == ours.__name__
        assert "scale_cli" not in "".join(file.read_text() for file in folder.glob("*.py"))
        with torch.no_grad():
            expected = ours.from_pretrained(folder).eval()(input_ids=ids, use_cache=False).logits
            torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, expected)
        said = [model.generate(ids[:, :12], **greedy, use_cache=cached) for cached in (True, False)]
        assert torch.equal(*said)


def test_a_run_on_another_base_is_refused_naming_the_tensor(
    runs: Runs, shared_data: Path, tmp_path: Path
) -> None:
    other = AutoModelForCausalLM.from_pretrained(lower_stories(shared_data))
    with torch.no_grad():
        other.model.layers[2].mlp.up_proj.weight[3, 5] += 1e-3
    other.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(shared_data / "ckpt-stories260K" / "hf").save_pretrained(
        tmp_path / "other"
    )
    stranger = configured(shared_data, tmp_path / "stranger", {"variant": "route"})
    stranger = at_its_start(
        stranger.model_copy(update={"model": ModelConfig(base=str(tmp_path / "other"))})
    )
    with pytest.raises(
        BaseModelError, match=r"stranger: stands on another base than .*layers\.2\.mlp\.up_proj"
    ):
        join([runs["korean"].output_dir, stranger.output_dir], tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


def test_unfinished_runs_other_folders_baselines_and_runs_that_measured_nothing_are_refused(
    runs: Runs, shared_data: Path, tmp_path: Path
) -> None:
    begun = configured(shared_data, tmp_path / "begun", {"variant": "route"})
    upscale(begun)
    at_its_start(configured(shared_data, tmp_path / "plain", {"variant": "freeze"}))
    config = runs["korean"].model_copy(update={"evaluation": EvaluationConfig()})
    with new_folder(tmp_path / "bare") as partial:
        shutil.copytree(config.output_dir / "final", partial, dirs_exist_ok=True)
        (partial / "scale.yaml").write_text(dump_config(config))
    refused: list[tuple[str, type[ScaleError], str]] = [
        ("begun", RunFolderError, r"begun: not finished, as it has no final/"),
        ("nothing", RunFolderError, r"nothing: not a finished run"),
        ("plain", RunFolderError, r"plain: has no expansion \(method\.variant: freeze\)"),
        ("bare", ConfigError, r"^evaluation\.perplexity: "),
    ]
    for name, error, message in refused:
        with pytest.raises(error, match=message):
            join([tmp_path / name], tmp_path / "out", None)


def test_a_head_that_computes_something_else_than_its_run_leaves_nothing_behind(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = JoinedForCausalLM.routed_logits

    def off_by_a_bit(model: JoinedForCausalLM, states: object) -> list[torch.Tensor]:
        *others, last = exact(model, states)  # type: ignore[arg-type]
        return [*others, torch.nextafter(last, last + 1)]

    monkeypatch.setattr(JoinedForCausalLM, "routed_logits", off_by_a_bit)
    with pytest.raises(
        PreservationError,
        match="the head korean computes other logits in the joined model than alone",
    ):
        join([runs["korean"].output_dir], tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


def test_a_plain_join_is_held_to_its_runs_and_says_what_it_is_without_its_router(
    runs: Runs, tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    join(
        [runs[name].output_dir for name in ("korean", "wider")],
        plain,
        None,
        folder_format="llama",
    )
    assert check_folders(plain)[0].held == ["hashes", "routed logits"]
    assert "adds up the outputs of all expansions" in " ".join(
        (plain / "README.md").read_text().split()
    )
    with pytest.raises(ConfigError, match=r"--format llama: writer writes into the base's stream"):
        join(
            [runs["writer"].output_dir],
            tmp_path / "none",
            prior=None,
            folder_format="llama",
        )


def test_streams_that_the_heads_of_one_plain_llama_do_not_divide_are_refused_before_anything_is_measured(
    runs: Runs, shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each run alone they do; a Llama's configuration takes no other sizes."""
    expansion = {"ratio": 0.25, "hidden_ratio": 0.7}
    wide = at_its_start(
        configured(shared_data, tmp_path / "korean", {"variant": "route", "expansion": expansion})
    )
    names = [runs["korean"].output_dir, wide.output_dir]
    assert join_runs(names, None).model.config.head_names == ["base", "korean", "korean-2"]
    monkeypatch.setattr(commands_join, "score_corpora", None)
    with refused(
        ConfigError, r"^--format llama: the runs have \d+ channels and \d+ heads in total"
    ):
        join(names, tmp_path / "out", None, folder_format="llama")
    assert not (tmp_path / "out").exists()


def test_the_same_corpus_is_opened_once_and_another_of_its_name_beside_it(runs: Runs) -> None:
    config = runs["korean"]
    tiny, petitions = config.evaluation.perplexity
    fewer = [tiny.model_copy(update={"max_documents": 1}), petitions]
    others = [
        runs["writer"].model_copy(
            update={"evaluation": config.evaluation.model_copy(update={"perplexity": asked})}
        )
        for asked in (fewer, [tiny.model_copy(update={"max_documents": 3})])
    ]
    model = join_runs([config.output_dir], None).model
    scored = score_corpora(model, [config, config, *others], load_tokenizer(config.model))
    assert [corpus.name for corpus in scored] == [
        "tiny",
        "petitions-held-out",
        "tiny (writer)",
        "tiny (writer)-2",
    ]
    assert [corpus.num_documents for corpus in scored] == [2, 2, 1, 3]
