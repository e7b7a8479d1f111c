"""What an export keeps of what was learned: an independent computation, refusals, and what is said."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from transformers import AutoModelForCausalLM

from scale_cli.commands.export import check_written_export
from scale_cli.errors import ExportParityError
from scale_cli.export.formats import Plain
from scale_cli.export.learned import Learned, Retained
from scale_cli.export.records import ExportRecord, Losses, Parity
from scale_cli.runs.opened import Run
from tests.export.conftest import TrainedRun
from tests.small_runs import changed, export, petitions_run, train_run
from tests.widening import random_ids

LORA = {"variant": "lora"}


def test_base_run_and_export_cost_what_plain_transformers_and_peft_say(
    trained_run: TrainedRun,
) -> None:
    config = trained_run(LORA)
    adapter = export(changed(config, "export.format=adapter"))
    merged = export(changed(config, "export.format=plain", "export.dtype=bfloat16"))
    final = Run(config).open_final()
    learned = Learned.of(final, final.load_to_export())
    assert learned is not None
    (corpus,) = learned.text.corpora
    documents = [
        torch.from_numpy(corpus.with_boundary(place)[: length + 1].astype("int64"))[None]
        for place, length in enumerate(learned.text.lengths[0])
    ]
    assert all(int(ids[0, 0]) == corpus.markers.context for ids in documents)

    @torch.no_grad()
    def costs(model: Any) -> float:
        nats = [F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]) for ids in documents]
        sizes = [ids.shape[1] - 1 for ids in documents]
        return float(sum(map(torch.mul, nats, sizes))) / sum(sizes)

    base = AutoModelForCausalLM.from_pretrained(config.model.base, dtype=torch.float32)
    rounded = AutoModelForCausalLM.from_pretrained(merged.folder, dtype=torch.float32)
    wanted = {"base": costs(base), "merged": costs(rounded)}
    wanted["run"] = costs(PeftModel.from_pretrained(base, adapter.folder))
    for of_export, name in ((adapter, "run"), (merged, "merged")):
        losses = of_export.parity.losses
        assert losses is not None
        told = (losses.base, losses.run, losses.export)
        assert told == pytest.approx((wanted["base"], wanted["run"], wanted[name]), abs=1e-4)


@pytest.mark.parametrize("export_format", ["plain", "transformers", "adapter"])
def test_every_format_keeps_all_that_was_learned_by_the_head_and_by_the_router(
    trained_run: TrainedRun, export_format: str
) -> None:
    config = trained_run({"variant": "route"}, format=export_format)
    parity = export(changed(config, "evaluation.batch_size=1")).parity  # read in parts, by a cache
    assert (parity.routed is not None) == (export_format == "plain")
    for way in (parity, parity.routed or parity):
        assert way.losses is not None and way.losses.kept == pytest.approx(1.0, abs=1e-3)
        assert str(way) == "keeps 100.0 % of what was learned"


def test_a_merged_export_that_loses_what_a_short_run_learned_is_refused_and_its_remedies_hold(
    shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rounding to 16 bits is as large as what a rate of 1e-6 changes."""
    given = petitions_run(shared_data, tmp_path / "run", **LORA)
    short = ("train.max_steps=6", "train.lr=1e-6", "train.optimiser=adamw")
    config = train_run(changed(given, *short))
    remedies = "set export.dtype=float32 or export.format=adapter export.dtype=null"
    with pytest.raises(ExportParityError, match=f"of what was learned, .*{remedies}") as caught:
        export(changed(config, "export.dtype=bfloat16"))
    assert caught.value.exit_code == 3
    assert not any((config.output_dir / "export").iterdir())
    for remedy in (["export.dtype=float32"], ["export.format=adapter", "export.dtype=null"]):
        assert export(changed(config, "export.dtype=bfloat16", *remedy)).folder.is_dir()
    assert "parity         good: keeps 100.0 % of what was learned" in capsys.readouterr().out

    folder = config.output_dir / "export"
    (folder / "plain-float32").rename(folder / "plain-bfloat16")
    model = AutoModelForCausalLM.from_pretrained(folder / "plain-bfloat16", dtype=torch.bfloat16)
    model.save_pretrained(folder / "plain-bfloat16")
    with pytest.raises(ExportParityError, match="of what was learned"):
        check_written_export(changed(config, "export.dtype=bfloat16"), folder / "plain-bfloat16")


def test_a_16_bit_export_of_a_float32_run_is_judged_by_its_weights_alone(
    trained_run: TrainedRun,
) -> None:
    """What 16-bit activations round is not the export's: a sensitive position is 8 nats off by it."""
    config = changed(trained_run(LORA), "export.format=plain", "export.dtype=bfloat16")
    folder = export(config).folder
    same = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    parity = Plain(config).prove(folder, same, [random_ids(1, 60)], None, None)
    assert 0.0 <= parity.nats < 1e-9


@pytest.mark.parametrize(
    ("losses", "kept", "good"),
    [
        (Losses(base=3.0, run=2.0, export=2.04), "96.0 %", True),
        (Losses(base=3.0, run=2.0, export=2.06), "94.0 %", False),
        (Losses(base=3.0, run=2.0, export=3.1), "nothing", False),
        (Losses(base=3.0, run=2.0, export=float("nan")), "nothing", False),
    ],
)
def test_less_than_95_percent_of_what_was_learned_is_too_little(
    trained_run: TrainedRun, losses: Losses, kept: str, good: bool
) -> None:
    plain = Plain(trained_run(LORA))
    assert str(losses) == f"keeps {kept} of what was learned"
    if good:
        plain.check_kept(losses)
    else:
        with pytest.raises(ExportParityError, match=f"{kept} of what was learned, less than 95 %"):
            plain.check_kept(losses)


def test_where_nothing_was_learned_the_logits_alone_are_compared_and_the_line_says_so(
    trained_run: TrainedRun,
) -> None:
    for run in (3.0, 2.9995, 3.2):
        losses = Losses(base=3.0, run=run, export=3.1)
        assert losses.kept is None
        Plain(trained_run(LORA)).check_kept(losses)
        said = str(Parity(1e-7, 60, losses))
        assert said.startswith("its predictions at 60 positions are 1.0e-07 nats from")
        assert f"learned nothing that could be lost: held-out text costs {run:.4f}" in said


def test_without_held_out_text_to_be_learned_the_line_says_that_no_share_is_known(
    trained_run: TrainedRun,
) -> None:
    config = changed(trained_run(LORA, format="adapter"), "evaluation.perplexity.1.role=retention")
    exported = export(config)
    assert exported.parity.losses is None
    assert "no held-out text of the role acquisition" in str(exported.parity)
    assert ExportRecord.load(exported.folder).losses is None


def test_a_plain_export_whose_base_head_is_not_the_base_on_retained_text_is_refused(
    trained_run: TrainedRun, tmp_path: Path
) -> None:
    """A u of 1e12 times x at one token, which no prompt has, counts in the norms of both streams."""
    config = trained_run({"variant": "route"}, format="plain")
    final = Run(config).open_final()
    model: Any = final.load_to_export()
    plain = Plain(config)
    retained = Retained(final, model)
    assert retained.text is not None
    (corpus,) = retained.text.corpora
    rare = int(corpus.with_boundary(1)[20])
    prompts = [torch.tensor([[3, 4, 5, 6]])]
    assert rare not in prompts[0]

    def prove(name: str, retained: Retained) -> Parity:
        plain.write(tmp_path / name, model, final, prompts)
        return plain.prove(tmp_path / name, model, prompts, None, retained)

    prove("good", retained)
    with torch.no_grad():
        model.expansion.embed_tokens.weight[rare] *= 1e12
    again = Retained(final, model)
    (before,), (after,) = retained.losses_of_run, again.losses_of_run
    assert before.nats["base"].tolist() == after.nats["base"].tolist()
    refused = (
        r"base head is not the base: of \w+, document \d+ costs it .* nats more, allowed: 0.05; "
        "set export.format=transformers, or train again"
    )
    with pytest.raises(ExportParityError, match=refused):
        prove("bad", again)


@pytest.mark.parametrize(
    ("method", "export_format", "num_asked"),
    [
        ({"variant": "route"}, "plain", 1),
        ({"variant": "route"}, "transformers", 0),
        ({"variant": "preserve"}, "plain", 0),
        (LORA, "plain", 0),
    ],
)
def test_only_a_plain_export_with_both_streams_in_one_is_asked_for_the_base(
    trained_run: TrainedRun,
    monkeypatch: pytest.MonkeyPatch,
    method: dict[str, Any],
    export_format: str,
    num_asked: int,
) -> None:
    config = trained_run(method, format=export_format)
    folder = export(config).folder
    asked: list[float] = []

    def refuse(_retained: Any, _exported: Any, allowed: float, _remedy: str) -> None:
        asked.append(allowed)
        raise ExportParityError("as asked")

    monkeypatch.setattr(Retained, "check", refuse)
    try:
        check_written_export(config, folder)
    except ExportParityError as error:
        assert str(error) == "as asked"
    assert len(asked) == num_asked


def test_what_rounding_to_16_bits_costs_the_base_head_is_allowed(trained_run: TrainedRun) -> None:
    for dtype in ("float16", "bfloat16"):
        config = trained_run({"variant": "route"}, format="plain", dtype=dtype)
        assert export(config).parity.routed is not None
