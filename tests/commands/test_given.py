"""Models that others trained, from a config and from the command line: measured, exported, refused."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from peft import LoraConfig, PrefixTuningConfig, get_peft_model

from scale_cli.evaluation.results import Report
from scale_cli.generation.generator import Generator
from scale_cli.storage.atomic import read_json, verify_folder
from tests.command_line import Scale
from tests.generation.test_given_models import (
    GREEDY,
    TARGETS,
    adapter,
    changed_copy,
    disturb,
    plain,
    tuned,
)
from tests.generation.test_routed_runs import PROMPTS
from tests.torture.attacker import edit_json

__all__ = ["adapter", "tuned"]
MakeAdapter = Callable[[str], Path]


@pytest.fixture(scope="module")
def texts(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Some English and some Korean text, documents between blank lines."""
    folder = tmp_path_factory.mktemp("texts")
    english = (shared_data / "en-tinystories" / "tinystories_val.txt").read_text("utf-8")[:2_000]
    korean = "\n\n".join(["국민의 청원에 답합니다.", "학교에서 배웁니다.", "날씨가 좋습니다."])
    written = {"tales": english, "petitions": korean}
    for name, text in written.items():
        (folder / f"{name}.txt").write_text(text, "utf-8")
    return {name: folder / f"{name}.txt" for name in written}


def config_of(folder: Path, base: Path, given: Path, text: Path) -> Path:
    path = folder / "given.yaml"
    held = {"name": "tales", "path": str(text), "language": "en", "role": "retention"}
    sections = {
        "output_dir": str(folder / "run"),
        "model": {"base": str(base)},
        "method": {"variant": "given", "model": str(given)},
        "evaluation": {"perplexity": [held]},
    }
    path.write_text(json.dumps(sections))
    return path


def said(folder: Path, base: Path | None = None) -> list[str]:
    generator = Generator(folder, base=None if base is None else str(base))
    assert generator.head_names == ["base", "trained"]
    return [one.completion for one in generator.continue_all(PROMPTS, GREEDY)]


@pytest.mark.parametrize("kind", ["LoRA", "DoRA", "embedding and head whole", "copy"])
def test_a_run_of_a_given_model_trains_nothing_measures_it_and_exports_it_routed(
    kind: str,
    adapter: MakeAdapter,
    tuned: Path,
    stories: Path,
    texts: dict[str, Path],
    tmp_path: Path,
    scale: Scale,
) -> None:
    given = tuned if kind == "copy" else adapter(kind)
    config = config_of(tmp_path, stories, given, texts["tales"])
    for verb in ("plan", "upscale"):
        done = scale(verb, config)
        assert done.exit_code == 0 and done.stdout.startswith("given          nothing ")
        assert done.stdout.count("\n") == 1 and not (tmp_path / "run").exists()

    done = scale("run", config)
    assert done.exit_code == 0, done.stderr
    assert f"parameters of {given} are in {tmp_path / 'run' / 'final'}" in done.stdout
    report = Report.load(tmp_path / "run" / "evaluation")
    assert (report.served, report.step) == ("posterior", 0)
    page = (tmp_path / "run" / "evaluation" / "report.md").read_text("utf-8")
    assert f"the base {stories}, beside it {given}, which others trained. Served: both" in page
    heads = report.corpora[0].heads
    assert heads["trained"].bits_per_byte != heads["base"].bits_per_byte

    form = "plain" if kind == "copy" else "adapter"
    export = tmp_path / "run" / "export" / form
    keys = read_json(export / "config.json")["scale_router"]
    assert keys["kind"] == ("copy" if kind == "copy" else "adapter")
    assert "With its router and its base" in (export / "README.md").read_text("utf-8")
    expected = said(given, stories)
    shutil.copytree(export, tmp_path / "elsewhere")
    for folder in (tmp_path / "run", export, tmp_path / "elsewhere"):
        assert said(folder) == expected
    for name in ("final", "evaluation", f"export/{form}"):
        verify_folder(tmp_path / "run" / name)
    done = scale("verify", tmp_path / "run")
    assert done.exit_code == 0, done.stdout

    again = scale("run", config)
    assert again.stdout.count("done already") == 3, again.stdout
    given.rename(moved := given.with_name("moved"))
    try:
        assert said(tmp_path / "run") == expected, "the run holds a copy"
        assert scale("evaluate", tmp_path / "run").exit_code == 0
    finally:
        moved.rename(given)


def test_an_adapter_is_evaluated_without_a_run_of_its_own(
    adapter: MakeAdapter, stories: Path, texts: dict[str, Path], tmp_path: Path, scale: Scale
) -> None:
    given, out = adapter("LoRA"), tmp_path / "out"
    asked = ["--corpus", texts["petitions"], "--language", "ko", "--retention", texts["tales"]]
    done = scale("evaluate", given, "--base", stories, *asked, "--output", out)
    assert done.exit_code == 0, done.stderr
    assert f"report: {out / 'evaluation' / 'report.html'}" in done.stdout
    report = Report.load(out / "evaluation")
    assert [(of.name, of.language, of.role) for of in report.corpora] == [
        ("petitions", "ko", "acquisition"),
        ("tales", "en", "retention"),
    ]
    config = config_of(tmp_path, stories, given, texts["tales"])
    assert scale("run", config).exit_code == 0
    tales = Report.load(tmp_path / "run" / "evaluation").corpora[0]
    assert tales.heads == report.corpora[1].heads

    without_base = scale("evaluate", given, *asked, "--output", tmp_path / "named")
    assert without_base.exit_code == 0, "adapter_config.json names it"
    exported = scale("export", out)
    assert (
        exported.exit_code == 0
        and read_json(out / "export" / "adapter" / "config.json")["scale_router"]["script"]
    ), "the languages of the texts give the prior by script"
    few = scale(
        "evaluate", given, *asked, "--output", out, "evaluation.perplexity.0.max_documents=1"
    )
    assert few.exit_code == 0 and Report.load(out / "evaluation").corpora[0].num_documents == 1


def test_what_is_recorded_of_another_base_whose_shapes_fit_is_said(
    adapter: MakeAdapter, base: Path, texts: dict[str, Path], tmp_path: Path, scale: Scale
) -> None:
    given = adapter("LoRA")
    named = read_json(given / "adapter_config.json")["base_model_name_or_path"]
    told = f"adapter_config.json names {named} as its base; nothing proves that {base} is the same"
    out = tmp_path / "out"
    done = scale("evaluate", given, "--base", base, "--retention", texts["tales"], "--output", out)
    assert done.exit_code == 0 and f"note           {told}\n" in done.stdout
    assert f"which others trained ({told})" in (out / "evaluation" / "report.md").read_text("utf-8")
    done = scale("generate", given, "--base", base, "--prompt", "x", "--max-new-tokens", "2")
    assert done.exit_code == 0 and told in done.stderr and told not in done.stdout
    assert told in scale("verify", given, "--base", base).stdout


def test_a_run_holds_one_model(
    adapter: MakeAdapter, stories: Path, texts: dict[str, Path], tmp_path: Path, scale: Scale
) -> None:
    given = Path(shutil.copytree(adapter("LoRA"), tmp_path / "adapter"))
    config = config_of(tmp_path, stories, given, texts["tales"])
    assert scale("train", config).exit_code == 0
    shutil.rmtree(given)
    shutil.copytree(adapter("rsLoRA"), given)
    model = get_peft_model(
        plain(stories), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=TARGETS)
    )
    disturb(model, seed=9)
    model.save_pretrained(str(given))
    assert "holds another model than" in scale("evaluate", config).error()


def other_base(given: Path, _stories: Path, shared_data: Path, _folder: Path) -> tuple[Path, Path]:
    return given, shared_data / "ckpt-eltec" / "hf"


def two_adapters(given: Path, stories: Path, _: Path, folder: Path) -> tuple[Path, Path]:
    for name in ("one", "other"):
        shutil.copytree(given, folder / "two" / name)
    return folder / "two", stories


def prefix(_: Path, stories: Path, __: Path, folder: Path) -> tuple[Path, Path]:
    asked = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    get_peft_model(plain(stories), asked).save_pretrained(str(folder / "prefix"))
    return folder / "prefix", stories


def resized_adapter(_: Path, stories: Path, __: Path, folder: Path) -> tuple[Path, Path]:
    base = plain(stories)
    base.resize_token_embeddings(base.config.vocab_size + 8)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=TARGETS))
    model.save_pretrained(str(folder / "resized"), save_embedding_layers=True)
    return folder / "resized", stories


def resized_copy(_: Path, stories: Path, __: Path, folder: Path) -> tuple[Path, Path]:
    model = copy.copy(plain(stories))
    model.resize_token_embeddings(model.config.vocab_size + 8)
    model.save_pretrained(folder / "resized")
    return folder / "resized", stories


def other_tokenizer(_: Path, stories: Path, shared_data: Path, folder: Path) -> tuple[Path, Path]:
    given = Path(shutil.copytree(stories, folder / "retokenised"))
    written = read_json(given / "tokenizer.json")
    vocabulary = written["model"]["vocab"]
    one, other = sorted(vocabulary, key=vocabulary.get)[300:302]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    edit_json(given / "tokenizer.json", written)
    return given, stories


def without_weights(given: Path, stories: Path, _: Path, folder: Path) -> tuple[Path, Path]:
    ignored = shutil.ignore_patterns("*.safetensors")
    return Path(shutil.copytree(given, folder / "bare", ignore=ignored)), stories


def unknown_kind(_: Path, stories: Path, __: Path, folder: Path) -> tuple[Path, Path]:
    given = Path(shutil.copytree(stories, folder / "kind"))
    edit_json(given / "config.json", {"scale_router": {"kind": "mixture", "base": "x"}})
    return given, stories


def moved_base(given: Path, _: Path, __: Path, folder: Path) -> tuple[Path, Path]:
    return given, folder / "gone"


def repeated_layers(given: Path, stories: Path, _: Path, folder: Path) -> tuple[Path, Path]:
    file = "adapter_config.json"
    return changed_copy(given, folder / "deep", file, layer_replication=[[0, 3], [1, 5]]), stories


def quantised_base(given: Path, stories: Path, _: Path, folder: Path) -> tuple[Path, Path]:
    base = Path(shutil.copytree(stories, folder / "quantised"))
    edit_json(
        base / "config.json",
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    )
    return given, base


BAD = {
    other_base: "is not an adapter of this base: ",
    two_adapters: "contains adapters, but is none; give one of them: .*one, .*other",
    prefix: "peft_type is PREFIX_TUNING; only LORA is read",
    resized_adapter: "its vocabulary was resized: .* has 520 rows, but the base's has 512",
    resized_copy: "its vocab_size is 520, but that of .* is 512",
    other_tokenizer: "its tokenizer is not that of .*: in '.*' it has .* where the base has ",
    without_weights: "has no adapter_model.safetensors",
    unknown_kind: "scale_router.kind is 'mixture'; known are adapter and copy",
    moved_base: "^--base: .*gone",
    repeated_layers: "layer_replication is .* changes the base itself; merge it",
    quantised_base: "^--base: .*quantised",
}


@pytest.mark.parametrize("make", BAD, ids=lambda make: make.__name__)
def test_what_cannot_be_a_pair_is_one_line_and_nothing_is_written(
    make: Callable[..., tuple[Path, Path]],
    adapter: MakeAdapter,
    stories: Path,
    shared_data: Path,
    texts: dict[str, Path],
    tmp_path: Path,
    scale: Scale,
) -> None:
    (made := tmp_path / "made").mkdir()
    given, base = make(adapter("LoRA"), stories, shared_data, made)
    out = tmp_path / "out"
    done = scale("evaluate", given, "--base", base, "--retention", texts["tales"], "--output", out)
    with pytest.raises(AssertionError, match=BAD[make]):
        raise AssertionError(done.error())
    assert not out.exists()


def test_flags_that_say_too_little_are_refused(
    adapter: MakeAdapter, stories: Path, texts: dict[str, Path], tmp_path: Path, scale: Scale
) -> None:
    given, text = adapter("LoRA"), texts["tales"]
    for flags, told in (
        (["--base", stories], "--corpus, --retention: give at least one text to measure on"),
        (["--base", stories, "--corpus", text], "--language: not given"),
        (["--base", stories, "--corpus", text, "--language", "kr"], "--language: kr is a country"),
        (["--base", stories, "--retention", tmp_path / "no.txt"], "--retention: .*no.txt"),
    ):
        with pytest.raises(AssertionError, match=told):
            raise AssertionError(scale("evaluate", given, *flags).error())
    none = scale("evaluate", stories, "--retention", text, "--output", tmp_path / "out").error()
    assert "--base: " in none and "names no base" in none
