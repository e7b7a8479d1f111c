from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from scale_cli.commands.evaluate import evaluate
from scale_cli.commands.export import check_written_export, export_is_finished
from scale_cli.config.load import load_config
from scale_cli.config.schema import ModelConfig, RunConfig
from scale_cli.data.encoding import prompt_ids
from scale_cli.errors import BaseModelError, ExportParityError
from scale_cli.export.dense import plain_model
from scale_cli.export.formats import formats_of
from scale_cli.runs.opened import Run
from scale_cli.storage.atomic import load_tensors, read_json
from scale_cli.upscale.preservation import sample_ids
from tests.export.conftest import TrainedRun
from tests.small_runs import changed, export
from tests.widening import load_model, load_widened, random_ids

ROUTE = {"variant": "route", "collaboration": {"layers": "top:1"}}
IDS = random_ids(2, 40, below=512, lowest=3)


def is_finished(config: RunConfig) -> bool:
    (export_format,) = formats_of(Run(config).config)
    return export_is_finished(export_format)


@torch.no_grad()
def answered(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return logits


def test_an_adapter_holds_the_expansion_alone_and_loads_onto_its_base_alone(
    trained_run: TrainedRun, shared_data: Path
) -> None:
    config = trained_run(ROUTE, format="adapter")
    folder = export(config).folder
    trained = load_widened(config.output_dir / "final", config.model)
    base_size = sum(parameter.numel() for parameter in trained.base.parameters())
    (tensors,) = folder.glob("*.safetensors")
    num_held = sum(tensor.numel() for tensor in load_tensors(tensors).values())
    assert num_held == sum(parameter.numel() for parameter in trained.parameters()) - base_size
    assert torch.equal(answered(load_model(folder, config.model)), answered(trained))
    for other in (
        ModelConfig(base=str(shared_data / "ckpt-eltec" / "hf")),
        ModelConfig(base=config.model.base, dtype="bfloat16"),
    ):
        with pytest.raises(BaseModelError, match="not the base that the run began with"):
            load_model(folder, other)


@pytest.mark.parametrize("embeddings", [False, True])
def test_a_lora_adapter_is_loaded_by_peft_and_by_us_as_what_was_trained(
    trained_run: TrainedRun, monkeypatch: pytest.MonkeyPatch, embeddings: bool
) -> None:
    config = trained_run({"variant": "lora", "lora": {"embeddings": embeddings}}, format="adapter")
    monkeypatch.setattr("scale_cli.evaluation.around_generate.answer_end", lambda _: 7)
    folder = export(config).folder
    expected = answered(load_model(config.output_dir / "final", config.model))
    base = AutoModelForCausalLM.from_pretrained(config.model.base)
    assert (answered(base) - expected).abs().max() > 0.01
    assert torch.equal(answered(PeftModel.from_pretrained(base, folder)), expected)
    assert torch.equal(answered(load_model(folder, config.model)), expected)
    text, original = "Once upon a time", AutoTokenizer.from_pretrained(config.model.base)
    assert AutoTokenizer.from_pretrained(folder)(text).input_ids == prompt_ids(original, text)
    assert "library_name: peft" in (folder / "README.md").read_text()
    ends = GenerationConfig.from_pretrained(folder).eos_token_id
    assert ends == [original.eos_token_id, 7]


def test_an_export_that_is_not_the_trained_model_leaves_nothing_behind(
    trained_run: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = trained_run(ROUTE)

    def corrupted(*given: Any) -> Any:
        model = plain_model(*given)
        model.get_parameter("model.norm.weight").data[7] *= 1.01
        return model

    monkeypatch.setattr("scale_cli.export.formats.plain_model", corrupted)
    with pytest.raises(ExportParityError, match="does not compute what the trained model computes"):
        export(config)
    assert not any((config.output_dir / "export").iterdir())


def test_an_export_has_the_dtype_of_the_base_and_those_of_others_lie_beside_it(
    trained_run: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = trained_run(ROUTE)
    for dtype in ("float32", "bfloat16", "float16"):
        each = changed(config, f"export.dtype={dtype}")
        assert not is_finished(each)
        folder = export(each).folder
        assert folder.name == f"plain-{dtype}" and is_finished(each)
        check_written_export(each, folder)
        tensors = load_tensors(folder / "model.safetensors").values()
        assert {tensor.dtype for tensor in tensors} == {getattr(torch, dtype)}
        assert read_json(folder / "config.json")["dtype"] == dtype
    with monkeypatch.context() as patch:
        patch.setattr("scale_cli.export.formats.dtype_of_files", lambda _: "bfloat16")
        of_base = export(config).folder
    assert of_base.name == "plain" and read_json(of_base / "config.json")["dtype"] == "bfloat16"
    monkeypatch.setattr("scale_cli.commands.export.trained_sha256", lambda _: "of another training")
    assert not is_finished(config)


def test_an_export_is_finished_until_its_report_is_another(
    trained_run: TrainedRun,
) -> None:
    config = trained_run(ROUTE)
    folder = export(config).folder
    assert "Not measured" in (folder / "README.md").read_text()
    fewer = changed(config, "evaluation.perplexity.1.max_documents=1")
    for now in (config, fewer):
        report = evaluate(now)
        assert not is_finished(now)
        assert export(now).folder == folder and is_finished(now)
        card = (folder / "README.md").read_text()
        for corpus in report.corpora:
            assert f"| {corpus.name} | " in card and f"| {corpus.num_documents} | " in card
            assert f"{corpus.heads['trained'].bits_per_byte:.3f}" in card
        assert load_config(folder / "scale.yaml") == Run(now).config
    assert is_finished(config), "its card has the report that is there, on less text"
    check_written_export(fewer, folder)
    absent = changed(fewer, "evaluation.perplexity.0.path=nowhere.txt")
    check_written_export(absent, folder)
    without = changed(config, "evaluation.perplexity=[]")
    assert export(without).parity.num_positions == sum(
        ids.shape[1] for ids in sample_ids(Run(without).tokenizer)
    )
