"""`scale join`: one model of several runs, what it is held to, and what is refused."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from scale_cli.commands.evaluate import evaluate
from scale_cli.commands.join import join
from scale_cli.commands.serve import serve
from scale_cli.commands.upscale import upscale
from scale_cli.commands.verify import check_folders
from scale_cli.config.load import dump_config
from scale_cli.config.schema import RunConfig
from scale_cli.errors import (
    BaseModelError,
    ConfigError,
    PreservationError,
    RunFolderError,
    ScaleError,
    UsageError,
)
from scale_cli.generation.generator import Generator, Sampling
from scale_cli.joining.members import join_runs
from scale_cli.joining.report import score_corpora
from scale_cli.model.joined_scale import JoinedForCausalLM
from scale_cli.storage.atomic import new_folder, read_json
from tests.command_line import Scale
from tests.small_runs import at_its_start, changed, export, petitions_run
from tests.widening import load_widened, lower_stories, random_ids

Runs = dict[str, RunConfig]
HEADS = ["base", "korean", "writer", "wider"]


@pytest.fixture(scope="module")
def joined(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("joining") / "all"
    join([config.output_dir for config in runs.values()], output, prior=None)
    return output


@pytest.fixture
def base(shared_data: Path, tmp_path: Path) -> Path:
    """A copy of the runs' base that may be changed."""
    return Path(shutil.copytree(lower_stories(shared_data), tmp_path / "base"))


def test_routing_is_within_ln_4_of_the_best_head_on_every_document(joined: Path) -> None:
    report = read_json(joined / "report.json")
    assert [member["name"] for member in report["members"]] == HEADS[1:]
    assert report["max_cost_nats"] == pytest.approx(math.log(4))
    assert [corpus["name"] for corpus in report["corpora"]] == ["tiny", "petitions-held-out"]
    for corpus in report["corpora"]:
        assert list(corpus["heads"]) == HEADS
        assert 0.0 <= corpus["worst_document_nats"] <= math.log(4) + 1e-6
        assert sum(head["share"] for head in corpus["heads"].values()) == pytest.approx(1.0)
        best = min(head["nats_per_token"] for head in corpus["heads"].values())
        allowed = math.log(4) * corpus["num_documents"] / corpus["num_tokens"]
        assert corpus["routed"]["nats_per_token"] <= best + allowed


@torch.no_grad()
def test_the_written_model_has_the_logits_of_the_base_and_of_every_run_bitwise(
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


def test_a_run_named_as_a_rule_of_the_router_gets_another_name(
    shared_data: Path, tmp_path: Path
) -> None:
    run = at_its_start(petitions_run(shared_data, tmp_path / "posterior"))
    assert join_runs([run.output_dir], None).model.config.head_names == ["base", "posterior-2"]


def test_two_heads_cost_what_the_report_of_the_run_says(runs: Runs) -> None:
    config = runs["writer"]
    report = evaluate(config)
    joined = join_runs([config.output_dir], prior=None)
    scored = score_corpora(joined, [joined.members[0].run])
    for told, got in zip(report.corpora, scored, strict=True):
        pairs = {"base": got.heads["base"], "trained": got.heads["writer"], "posterior": got.routed}
        for head, figures in pairs.items():
            assert figures.bits_per_byte == pytest.approx(told.heads[head].bits_per_byte)
        assert got.heads["base"].share == pytest.approx(told.heads["posterior"].base_share)


def test_the_verb_prints_a_table_and_the_folder_speaks_with_every_head(
    runs: Runs, joined: Path, tmp_path: Path, scale: Scale
) -> None:
    done = scale("join", runs["korean"].output_dir, "--output", tmp_path / "out")
    assert "0.693 at most" in done.stdout
    (continued,) = Generator(joined).continue_all(["Once upon a time"], Sampling(max_new_tokens=8))
    for token in continued.tokens:
        assert token.shares is not None and list(token.shares) == HEADS
        assert sum(token.shares.values()) == pytest.approx(1.0)


def test_a_join_is_served_by_its_own_router(joined: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr("scale_cli.generation.server.run_server", lambda *of: served.extend(of))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    lines: list[str] = []
    serve(joined, None, ["--port", "0"], lines.append)
    assert "no document costs more than 1.386 nats over its best head" in lines[0]
    assert served[0].head_names == HEADS
    with pytest.raises(UsageError, match="a join is served routed"):
        serve(joined, "vllm", [], lines.append)


def test_an_adapter_is_joined_as_its_run_and_has_the_licence_of_the_base(
    shared_data: Path, base: Path, tmp_path: Path
) -> None:
    (base / "LICENSE").write_text("do as you like")
    (base / "README.md").write_text("---\nlicense: mit\n---\n# Base\n")
    run = petitions_run(shared_data, tmp_path / "run")
    run = at_its_start(changed(run, f"model.base={base}", "export.format=adapter"))
    report = join([export(run).folder], tmp_path / "out", prior=None)
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


def test_a_joined_folder_is_held_to_its_base(joined: Path, tmp_path: Path) -> None:
    (check,) = check_folders(joined)
    assert (check.held, check.failed) == (["hashes", "base and its preservation"], [])
    folder = tmp_path / "out"
    with new_folder(folder) as partial:
        shutil.copytree(joined, partial, dirs_exist_ok=True)
        tensors = load_file(partial / "model.safetensors")
        tensors["base.model.norm.weight"] += 1.0
        save_file(tensors, partial / "model.safetensors", {"format": "pt"})
    (check,) = check_folders(folder)
    assert "its base has SHA-256" in check.failed[0]


def test_a_joined_model_opens_by_the_code_that_lies_beside_it(joined: Path) -> None:
    """That code imports torch and transformers alone, as the contracts of `make layers` hold it to."""
    ids = random_ids(2, 40, below=512, lowest=3)
    greedy: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    model: Any = AutoModelForCausalLM.from_pretrained(joined, trust_remote_code=True)
    assert type(model) is not JoinedForCausalLM and type(model).__name__ == "JoinedForCausalLM"
    assert "scale_cli" not in "".join(file.read_text() for file in joined.glob("*.py"))
    with torch.no_grad():
        expected = JoinedForCausalLM.from_pretrained(joined).eval()(ids, use_cache=False).logits
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected)
    said = [model.generate(ids[:, :12], **greedy, use_cache=cached) for cached in (True, False)]
    assert torch.equal(*said)


def test_a_run_on_another_base_is_refused_naming_the_tensor(
    runs: Runs, shared_data: Path, base: Path, tmp_path: Path
) -> None:
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][3, 5] += 1e-3
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    stranger = petitions_run(shared_data, tmp_path / "stranger")
    stranger = at_its_start(changed(stranger, f"model.base={base}"))
    with pytest.raises(BaseModelError, match=r"^.*stranger: .*layers\.2\.mlp\.up_proj"):
        join([runs["korean"].output_dir, stranger.output_dir], tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_joined_is_refused_by_its_name(
    runs: Runs, shared_data: Path, tmp_path: Path
) -> None:
    upscale(petitions_run(shared_data, tmp_path / "begun"))
    at_its_start(petitions_run(shared_data, tmp_path / "plain", variant="freeze"))
    korean = runs["korean"].output_dir
    with new_folder(tmp_path / "bare") as partial:
        shutil.copytree(korean / "final", partial, dirs_exist_ok=True)
        unmeasured = changed(runs["korean"], "evaluation.perplexity=[]")
        (partial / "scale.yaml").write_text(dump_config(unmeasured))
    cases: list[tuple[list[Path], type[ScaleError], str]] = [
        ([korean, korean / "final"], RunFolderError, "given twice"),
        ([tmp_path / "begun"], RunFolderError, "begun: not finished"),
        ([tmp_path / "nothing"], RunFolderError, "nothing: not a finished run"),
        ([tmp_path / "plain"], RunFolderError, r"plain: .*method\.variant: freeze"),
        ([tmp_path / "bare"], ConfigError, r"^evaluation\.perplexity: "),
    ]
    for folders, error, message in cases:
        with pytest.raises(error, match=message):
            join(folders, tmp_path / "out", None)


def test_a_head_that_computes_something_else_than_its_run_leaves_nothing_behind(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = JoinedForCausalLM.routed_logits

    def off_by_a_bit(model: JoinedForCausalLM, states: Any) -> list[torch.Tensor]:
        *others, last = exact(model, states)
        return [*others, torch.nextafter(last, last + 1)]

    monkeypatch.setattr(JoinedForCausalLM, "routed_logits", off_by_a_bit)
    with pytest.raises(PreservationError, match="the head korean"):
        join([runs["korean"].output_dir], tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


def test_a_corpus_is_opened_once_and_another_of_its_name_beside_it(runs: Runs) -> None:
    config = runs["korean"]
    fewer, more = (
        changed(runs["writer"], f"evaluation.perplexity.0.max_documents={number}")
        for number in (1, 3)
    )
    joined = join_runs([config.output_dir], None)
    scored = score_corpora(joined, [config, config, fewer, more])
    assert [(corpus.name, corpus.num_documents) for corpus in scored] == [
        ("tiny", 2),
        ("petitions-held-out", 2),
        ("tiny (writer)", 1),
        ("tiny (writer)-2", 3),
    ]
