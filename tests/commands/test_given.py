"""Models that others trained, from a config and from the command line: measured, exported, refused."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, PrefixTuningConfig, get_peft_model

from scale_cli.errors import BaseModelError
from scale_cli.evaluation.results import Report
from scale_cli.generation.generator import Generator
from scale_cli.model.adapter_pair import AdapterPair
from scale_cli.storage.atomic import read_json, verify_folder
from scale_cli.upscale import given_model
from tests.command_line import Scale, refused
from tests.generation.test_given_models import (
    GREEDY,
    TARGETS,
    adapter,
    disturb,
    tuned,
)
from tests.generation.test_routed_runs import PROMPTS, plain
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
    assert scale("export", out).exit_code == 0
    card = (out / "export" / "adapter" / "README.md").read_text(encoding="utf-8")
    assert "Not measured" not in card and "language:\n- en\n- ko\n" in card

    other = tmp_path / "other" / texts["petitions"].name
    other.parent.mkdir()
    other.write_bytes(texts["tales"].read_bytes())
    asked[-1] = other  # a file of the same name
    again = scale("evaluate", out / "export" / "adapter", *asked, "--output", tmp_path / "again")
    assert again.exit_code == 0, "an export names its base"
    corpora = Report.load(tmp_path / "again" / "evaluation").corpora
    assert [of.name for of in corpora] == ["acquisition", "retention"]


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
    edit_json(given / "adapter_config.json", {"lora_alpha": 64})
    assert "holds another model than" in scale("evaluate", config).error()
    shutil.rmtree(given)
    shutil.copytree(adapter("rsLoRA"), given)
    model = get_peft_model(
        plain(stories), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=TARGETS)
    )
    disturb(model, seed=9)
    model.save_pretrained(str(given))
    assert "holds another model than" in scale("evaluate", config).error()


@dataclass(frozen=True)
class Makings:
    """What pairs are made of that are none: they are written into `folder`."""

    lora: Path
    tuned: Path
    stories: Path
    eltec: Path
    folder: Path

    def copied(self, folder: Path, file: str, **keys: Any) -> Path:
        """Return a copy with other values of some keys of a file."""
        shutil.copytree(folder, copied := self.folder / "copied")
        edit_json(copied / file, keys)
        return copied

    def adapter(self, **keys: Any) -> Path:
        return self.copied(self.lora, "adapter_config.json", **keys)

    def routed(self, **keys: Any) -> Path:
        """Return an adapter whose config.json says how it is routed; None leaves a key out."""
        shutil.copytree(self.lora, copied := self.folder / "routed")
        shutil.copyfile(self.stories / "config.json", copied / "config.json")
        router = {"kind": "adapter", "base": str(self.stories), "prior": 0.5} | keys
        written = {key: value for key, value in router.items() if value is not None}
        edit_json(copied / "config.json", {"scale_router": written})
        return copied


Make = Callable[[Makings], Path]


def two_adapters(of: Makings) -> Path:
    for name in ("one", "other"):
        shutil.copytree(of.lora, of.folder / "two" / name)
    return of.folder / "two"


def prefix(of: Makings) -> Path:
    asked = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    get_peft_model(plain(of.stories), asked).save_pretrained(str(of.folder / "prefix"))
    return of.folder / "prefix"


def resized_adapter(of: Makings) -> Path:
    base = plain(of.stories)
    base.resize_token_embeddings(base.config.vocab_size + 8)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=TARGETS))
    model.save_pretrained(str(of.folder / "resized"), save_embedding_layers=True)
    return of.folder / "resized"


def resized_copy(of: Makings) -> Path:
    model = plain(of.stories)
    model.resize_token_embeddings(model.config.vocab_size + 8)
    model.save_pretrained(of.folder / "resized")
    return of.folder / "resized"


def other_tokenizer(of: Makings) -> Path:
    model = read_json(of.stories / "tokenizer.json")["model"]
    vocabulary = model["vocab"]
    one, other = sorted(vocabulary, key=vocabulary.get)[300:302]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    return of.copied(of.stories, "tokenizer.json", model=model)


def start_of(start: str, of: Makings) -> Path:
    return of.adapter(init_lora_weights=start, loftq_config={"loftq_bits": 4})


def resized_whole(of: Makings) -> Path:
    base = plain(of.stories)
    base.resize_token_embeddings(base.config.vocab_size + 8)
    settings = LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        target_modules=TARGETS,
        modules_to_save=["embed_tokens", "lm_head"],
    )
    get_peft_model(base, settings).save_pretrained(str(of.folder / "resized"))
    return of.folder / "resized"


def other_head(of: Makings) -> Path:
    """An adapter of the head, which PEFT saves with the base's own head, of another base."""
    base = plain(of.stories)
    base.lm_head.weight.data += 0.01
    targets = [*TARGETS, "lm_head"]
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets))
    model.save_pretrained(str(of.folder / "head"), save_embedding_layers=True)
    return of.folder / "head"


def without_weights(of: Makings) -> Path:
    ignored = shutil.ignore_patterns("*.safetensors")
    return shutil.copytree(of.lora, of.folder / "bare", ignore=ignored)


def unknown_kind(of: Makings) -> Path:
    router = {"kind": "mixture", "base": "x"}
    return of.copied(of.stories, "config.json", scale_router=router)


def gone(of: Makings) -> Path:
    return of.folder / "gone"


def quantised(of: Makings) -> Path:
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    return of.copied(of.stories, "config.json", quantization_config=settings)


LORA: Make = attrgetter("lora")
TUNED: Make = attrgetter("tuned")
STORIES: Make = attrgetter("stories")
ELTEC: Make = attrgetter("eltec")
BAD: dict[str, tuple[Make, Make, str]] = {
    "another base": (LORA, ELTEC, "is not an adapter of this base: .* is in only one of them"),
    "another rank": (lambda of: of.adapter(r=8), STORIES, "of this base: .*has another shape"),
    "fewer targets": (
        lambda of: of.adapter(target_modules=["q_proj"]),
        STORIES,
        "is in only one of them",
    ),
    "no such target": (
        lambda of: of.adapter(target_modules=["w1"]),
        STORIES,
        "does not fit the base: .*w1",
    ),
    **{
        start: (
            partial(start_of, start),
            STORIES,
            f"init_lora_weights is {start}, which changes the base itself",
        )
        for start in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga")
    },
    "KaSA": (
        lambda of: of.adapter(kasa_config={}),
        STORIES,
        "adapter_config.json: kasa_config: not read; if it can be merged",
    ),
    "a setting of a newer PEFT": (
        lambda of: of.adapter(base_is_rotated=True),
        STORIES,
        "adapter_config.json: base_is_rotated: not read; if it can be merged",
    ),
    "an adapter that is switched on": (
        lambda of: of.adapter(alora_invocation_tokens=[5]),
        STORIES,
        "alora_invocation_tokens: not read",
    ),
    "no PEFT that we know": (
        lambda of: of.adapter(peft_type="FOO"),
        STORIES,
        "adapter_config.json: PEFT cannot read it: KeyError: 'FOO'",
    ),
    "no pattern": (lambda of: of.adapter(target_modules="((("), STORIES, "does not fit the base"),
    "words for a number": (
        lambda of: of.adapter(lora_alpha="x"),
        STORIES,
        "does not fit the base|PEFT cannot read it",
    ),
    "a saved head of another base": (other_head, STORIES, "lm_head.* is in only one of them"),
    "a resized head and embedding": (
        resized_whole,
        STORIES,
        "its vocabulary was resized: .* has 520 rows, but the base's has 512",
    ),
    "another kind of model": (
        lambda of: of.copied(
            of.tuned, "config.json", model_type="mistral", architectures=["MistralForCausalLM"]
        ),
        STORIES,
        "its model_type is mistral, but that of .* is llama",
    ),
    "a router without a prior": (
        lambda of: of.routed(prior=None),
        STORIES,
        "config.json: scale_router: prior: ",
    ),
    "a prior that is none": (lambda of: of.routed(prior=2.0), STORIES, "scale_router: prior: "),
    "a router without a base": (lambda of: of.routed(base=None), STORIES, "scale_router: base: "),
    "a base by another hash": (
        lambda of: of.routed(sha256="0" * 64),
        STORIES,
        "is not the base that it was trained from, which has SHA-256 000000000000",
    ),
    "a bias": (lambda of: of.adapter(bias="all"), STORIES, "bias is all, which changes"),
    "repeated layers": (
        lambda of: of.adapter(layer_replication=[[0, 3], [1, 5]]),
        STORIES,
        "layer_replication is .* changes the base itself; merge it",
    ),
    "two adapters": (
        two_adapters,
        STORIES,
        "contains adapters, but is none; give one of them: .*one, .*other",
    ),
    "a prefix": (prefix, STORIES, "peft_type is PREFIX_TUNING; only LORA is read"),
    "a resized adapter": (
        resized_adapter,
        STORIES,
        "its vocabulary was resized: .* has 520 rows, but the base's has 512",
    ),
    "a resized copy": (resized_copy, STORIES, "its vocab_size is 520, but that of .* is 512"),
    "another tokenizer": (
        other_tokenizer,
        STORIES,
        "its tokenizer is not that of .*: in '.*' it has .* where the base has ",
    ),
    "a copy of another base": (
        TUNED,
        ELTEC,
        "its tokenizer is not that of .*: in 'It was|its (hidden|vocab)_size is",
    ),
    "no weights": (without_weights, STORIES, "has no adapter_model.safetensors"),
    "an unknown kind": (
        unknown_kind,
        STORIES,
        "scale_router.kind is 'mixture'; known are adapter and copy",
    ),
    "a base that is gone": (LORA, gone, "^--base: .*gone"),
    "a copy's base that is gone": (TUNED, gone, "^--base: |cannot be loaded"),
    "a model that is gone": (gone, STORIES, "gone"),
    "a quantised base": (LORA, quantised, "^--base: .*quantised"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_a_pair_is_one_line_and_nothing_is_written(
    name: str,
    adapter: MakeAdapter,
    tuned: Path,
    stories: Path,
    shared_data: Path,
    texts: dict[str, Path],
    tmp_path: Path,
    scale: Scale,
) -> None:
    (made := tmp_path / "made").mkdir()
    of = Makings(adapter("LoRA"), tuned, stories, shared_data / "ckpt-eltec" / "hf", made)
    make_given, make_base, told = BAD[name]
    given, base = make_given(of), make_base(of)
    out = tmp_path / "out"
    done = scale("evaluate", given, "--base", base, "--retention", texts["tales"], "--output", out)
    assert re.search(told, done.error())
    assert not out.exists()
    if make_given is not other_tokenizer:  # it shows in the texts that are measured alone
        with refused(BaseModelError, told):
            Generator(given, base=str(base))


def test_a_folder_of_adapters_is_none_whatever_is_asked_of_it(
    adapter: MakeAdapter, texts: dict[str, Path], tmp_path: Path, scale: Scale
) -> None:
    for name in ("one", "other"):
        shutil.copytree(adapter("LoRA"), tmp_path / "two" / name)
    told = f"{tmp_path / 'two'}: contains adapters, but is none; give one of them: "
    for verb in (
        ("generate", tmp_path / "two", "--prompt", "Once"),
        ("verify", tmp_path / "two"),
        ("evaluate", tmp_path / "two", "--retention", texts["tales"], "--output", tmp_path / "o"),
    ):
        assert scale(*verb).error().startswith(told)


def test_verify_finds_an_adapter_that_changes_its_base(
    adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch, scale: Scale
) -> None:
    class ChangingPair(AdapterPair):
        def __init__(self, base: Any, trained: Any) -> None:
            super().__init__(base, trained)
            base.model.norm.weight.data *= 1.5

    assert "base logits" in scale("verify", adapter("LoRA")).stdout
    monkeypatch.setattr(given_model, "AdapterPair", ChangingPair)
    told = scale("verify", adapter("LoRA")).stderr
    assert "the base's logits are not those of its own" in told


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
        assert re.search(told, scale("evaluate", given, *flags).error())
    asked = ("--base", tmp_path / "no", "--prompt", "x")
    assert re.search("^--base: .*no ", scale("generate", given, *asked).error())
    none = scale("evaluate", stories, "--retention", text, "--output", tmp_path / "out").error()
    assert "--base: " in none and "names no base" in none
    run = tmp_path / "run"
    (run / "final").mkdir(parents=True)
    assert "is a run, whose config" in scale("evaluate", run, "--retention", text).error()


def test_every_verb_takes_the_base_that_an_adapter_names_and_asks_for_one_where_it_names_none(
    adapter: MakeAdapter, stories: Path, tmp_path: Path, scale: Scale
) -> None:
    given = tmp_path / "given"
    shutil.copytree(adapter("LoRA"), given)
    edit_json(given / "adapter_config.json", {"base_model_name_or_path": str(stories)})
    assert "base logits" in scale("verify", given).stdout
    assert scale("generate", given, "--prompt", "Once", "--max-new-tokens", 2).stdout

    edit_json(given / "adapter_config.json", {"base_model_name_or_path": None})
    asked = [("generate", given, "--prompt", "Once"), ("verify", given)]
    asked.append(("serve", given, "--engine", "transformers"))
    for verb in asked:
        assert scale(*verb).error() == (
            f"--base: {given} names no base; give the one that it was trained from"
        )

    edit_json(given / "adapter_config.json", {"base_model_name_or_path": str(tmp_path / "gone")})
    for verb in asked:
        assert re.search("^--base: .*gone is not a folder", scale(*verb).error())
