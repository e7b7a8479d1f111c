import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from scale_cli.config.schema import MethodConfig, ModelConfig
from scale_cli.data.encoding import DocumentMarkers
from scale_cli.data.tokens import TokenCache
from scale_cli.errors import BaseModelError, ExportParityError
from scale_cli.export.dense import dense_model, plain_model
from scale_cli.export.formats import write_self_contained
from scale_cli.export.plain_folder import (
    copy_tokenizer,
    frame_prompts,
    router_keys,
    write_plain,
)
from scale_cli.methods.stream_kinds import ROUTER
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.storage.atomic import read_json, write_json
from scale_cli.upscale.base import load_base, load_written
from scale_cli.upscale.base_tokenizer import load_tokenizer, tokenizer_place
from scale_cli.upscale.building import start_model
from tests.data.corpus_files import source_of, write_jsonl
from tests.model.test_families import BASES, IDS, answered, write_tiny
from tests.torture.attacker import edit_json
from tests.widening import as_if_trained, tiny_llama, widen

SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
WIDENED = {
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "scale_widened",
}
SPELLINGS = {
    "rope_theta",
    "rope_local_base_freq",
    "rope_scaling",
    "rope_parameters",
    "torch_dtype",
    "dtype",
}
# What a base's folder may hold; the last ones stay where they are.
COPIED = ["tokenizer.model", "special_tokens_map.json", "additional_chat_templates/tools.jinja"]
LEFT = ["README.md", ".env", "modeling_own.py", "additional_chat_templates/x.py"]
TOKENIZER = ["tokenizer.json", "tokenizer_config.json"]


@pytest.fixture
def base(shared_data: Path, tmp_path: Path) -> Path:
    """A random Llama with a real tokenizer that frames its prompts, as transformers 4 wrote them."""
    folder = tmp_path / "base"
    tiny_llama(vocab_size=512, eos_token_id=2).save_pretrained(folder)
    with_tokenizer(shared_data, folder)
    frame_prompts(folder, load_tokenizer(ModelConfig(base=str(folder))))
    spell(folder, None)
    return folder


@pytest.fixture
def model(base: Path) -> ModelConfig:
    return ModelConfig(base=str(base))


def with_tokenizer(shared_data: Path, folder: Path) -> Path:
    """Give a base the files of a real tokenizer."""
    folder.mkdir(exist_ok=True)
    for name in TOKENIZER:
        shutil.copyfile(shared_data / "ckpt-stories260K" / "hf" / name, folder / name)
    return folder


def spell(folder: Path, scaling: dict[str, Any] | None) -> None:
    """Write a base's config.json in the spelling of transformers 4."""
    config = read_json(folder / "config.json")
    for name in ("rope_parameters", "dtype"):
        config.pop(name, None)
    config |= {
        "rope_theta": 500000.0,
        "rope_scaling": scaling,
        "torch_dtype": "float32",
        "a_key_of_its_own": [1, 2],
    }
    config["transformers_version"] = "4.45.0"
    write_json(folder / "config.json", config)


def written(
    plain: PreTrainedModel, base: Path | str, folder: Path, router: dict[str, Any] | None = None
) -> Path:
    model = ModelConfig(base=str(base))
    folder.mkdir(exist_ok=True)
    write_plain(plain, load_tokenizer(model), model, folder, router)
    return folder


def widened(base: Path | str, dtype: str = "float32") -> PreTrainedModel:
    return dense_model(
        as_if_trained(widen(load_base(ModelConfig(base=str(base))), "preserve")), dtype
    )


@pytest.mark.parametrize("kind", SCALINGS)
def test_config_json_is_the_bases_own_but_for_the_sizes_and_spelled_for_both_transformers(
    base: Path, tmp_path: Path, kind: str
) -> None:
    spell(base, SCALINGS[kind])
    folder = written(widened(base, "bfloat16"), base, tmp_path / "export")
    config, before = (read_json(place / "config.json") for place in (folder, base))
    changed = {name for name in {**config, **before} if config.get(name) != before.get(name)}
    assert changed == WIDENED | {"torch_dtype", "dtype", "rope_parameters"}
    assert (config["rope_theta"], config["rope_scaling"]) == (500000.0, SCALINGS[kind])
    rope = {"rope_type": "default", "rope_theta": 500000.0, **(SCALINGS[kind] or {})}
    assert config["rope_parameters"] == AutoConfig.from_pretrained(folder).rope_parameters == rope
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("family", BASES)
@pytest.mark.parametrize("variant", ["adapt", "llama-pro"])
def test_of_every_family_it_computes_what_was_trained_and_adds_no_key(
    shared_data: Path, tmp_path: Path, family: str, variant: Any
) -> None:
    write_tiny(family, with_tokenizer(shared_data, tmp_path / "base"))
    base = load_base(ModelConfig(base=str(tmp_path / "base")))
    of_base = answered(base)
    model = start_model(base, MethodConfig(variant=variant), seed=0).eval()
    if isinstance(model, ScaleForCausalLM):
        as_if_trained(model)
        assert (answered(model) - of_base).abs().max() > 0.1, "the expansion is in it"
    folder = written(plain_model(model, "float32", [IDS]), tmp_path / "base", tmp_path / "export")
    assert (
        answered(load_written(AutoModelForCausalLM, folder).eval()) - answered(model)
    ).abs().max() <= 1e-4
    config, before = read_json(folder / "config.json"), read_json(tmp_path / "base" / "config.json")
    assert config.keys() - before.keys() <= SPELLINGS | {"head_dim", "scale_widened"}
    assert config["architectures"] == before["architectures"]
    unchanged = {
        "adapt": {"num_hidden_layers", "layer_types"},
        "llama-pro": WIDENED | {"tie_word_embeddings"},
    }
    assert all(config.get(name) == before.get(name) for name in unchanged[variant])


def test_the_tokenizers_files_alone_come_along_byte_for_byte(base: Path, tmp_path: Path) -> None:
    for name in (*COPIED, *LEFT):
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text("{}" if name.endswith("json") else name, encoding="utf-8")
    edit_json(base / "config.json", {"auto_map": {"AutoConfig": "modeling_own.Config"}})
    folder = written(widened(base), base, tmp_path / "export")
    for name in (*TOKENIZER, *COPIED):
        assert (folder / name).read_bytes() == (base / name).read_bytes()
    files = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    made = {"config.json", "generation_config.json", "model.safetensors"}
    assert files == {*COPIED, *TOKENIZER} | made
    assert "auto_map" not in read_json(folder / "config.json")


def test_what_ends_an_answer_is_among_the_ends_that_other_servers_read(
    base: Path, model: ModelConfig, tmp_path: Path
) -> None:
    assert read_json(base / "generation_config.json")["eos_token_id"] == 2
    ends = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<unk>{% endfor %}"
    (base / "chat_template.jinja").write_text(ends, encoding="utf-8")
    plain = written(widened(base), base, tmp_path / "plain")
    of_run = widen(load_base(model), "preserve")
    write_self_contained(of_run, load_tokenizer(model), tmp_path / "own")
    for folder in (plain, tmp_path / "own"):
        settings = read_json(folder / "generation_config.json")
        assert settings["eos_token_id"] == [2, 0]
        assert AutoTokenizer.from_pretrained(folder).decode([0, 2]) == "<unk></s>"
    loaded = AutoModelForCausalLM.from_pretrained(plain)
    assert loaded.generation_config.eos_token_id == [2, 0]


def test_of_a_base_from_the_hub_the_files_come_from_its_cache(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, cache = "0" * 40, tmp_path / "hub" / "models--someone--tiny"
    (base / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    shutil.copytree(base, cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit, encoding="utf-8")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for revision in (None, commit):
        folder = tmp_path / f"export-{revision}"
        model = ModelConfig(base="someone/tiny", revision=revision)
        write_plain(widened(base), load_tokenizer(model), model, folder)
        for name in (*TOKENIZER, "chat_template.jinja", "generation_config.json"):
            assert (folder / name).read_bytes() == (base / name).read_bytes()
        assert read_json(folder / "config.json")["a_key_of_its_own"] == [1, 2]
    tokenizer, elsewhere = AutoTokenizer.from_pretrained(base), ModelConfig(base="someone/else")
    with pytest.raises(BaseModelError, match=r"^model\.base: .*someone/else"):
        write_plain(widened(base), tokenizer, elsewhere, folder)


def test_files_that_tokenise_otherwise_than_the_base_did_are_refused(
    base: Path, model: ModelConfig, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(model)
    edit_json(base / "tokenizer.json", {"normalizer": {"type": "Lowercase"}})
    with pytest.raises(ExportParityError, match="nothing was written"):
        write_plain(widened(base), tokenizer, model, tmp_path / "export")


def test_a_tokenizer_that_the_config_names_is_copied_from_its_own_place(
    base: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for file in base.glob("tokenizer*"):
        file.rename(elsewhere / file.name)
    (elsewhere / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    (base / "added_tokens.json").write_text("{}", encoding="utf-8")
    model = ModelConfig(base=str(base), tokenizer=str(elsewhere))
    write_plain(widened(base), load_tokenizer(model), model, tmp_path / "export")
    for file in elsewhere.iterdir():
        assert (tmp_path / "export" / file.name).read_bytes() == file.read_bytes()
    assert not (tmp_path / "export" / "added_tokens.json").exists()


QWEN = {"add_bos_token": False, "tokenizer_class": "Qwen2Tokenizer"}
# A class with steps of its own, and marks that its settings do not name.
NEOX = {
    "tokenizer_class": "GPTNeoXTokenizer",
    "bos_token": "<|end_of_text|>",
    "unk_token": "<|end_of_text|>",
}
TEXTS = ["Once upon a time", "학교에서 Lily saw 3 big dogs."]


@pytest.mark.parametrize(
    ("checkpoint", "settings"),
    [
        ("ckpt-stories260K", {}),  # has a BOS, and files that do not write it
        ("ckpt-stories260K", {"add_bos_token": False, "add_eos_token": True}),
        ("ckpt-stories260K", {"add_bos_token": True}),
        ("ckpt-novels-en", {}),  # has none: the end of the document before stands there
        ("ckpt-novels-en", QWEN),
        ("ckpt-novels-en", NEOX),
        ("ckpt-eltec", {}),
    ],
)
def test_whoever_tokenises_a_prompt_with_an_export_gets_what_stood_in_training(
    shared_data: Path, tmp_path: Path, checkpoint: str, settings: dict[str, Any]
) -> None:
    base, folder = tmp_path / "base", tmp_path / "export"
    shutil.copytree(shared_data / checkpoint / "hf", base)
    template = {"chat_template": "<|user|>{{ messages[0].content }}"}
    edit_json(base / "tokenizer_config.json", settings | template)
    model = ModelConfig(base=str(base))
    trained = load_tokenizer(model)
    folder.mkdir()
    copy_tokenizer(trained, tokenizer_place(model), folder)
    source = source_of(write_jsonl(tmp_path / "corpus.jsonl", ["The end.", *TEXTS]))
    corpus = TokenCache(tmp_path / "cache", trained).open(source)
    before = 0 if DocumentMarkers.of(trained).bos is not None else 1
    exported = AutoTokenizer.from_pretrained(folder)
    for index, text in enumerate(TEXTS, start=1):
        stood = corpus.ids[corpus.offsets[index] - before : corpus.offsets[index + 1] - 1].tolist()
        assert exported(text).input_ids == stood
        # A template writes its own beginning, and training's tokenisation is what it was.
        asked = exported.apply_chat_template([{"role": "user", "content": text}], return_dict=False)
        assert asked == trained(f"<|user|>{text}", add_special_tokens=False).input_ids
        plain = trained(text, add_special_tokens=False).input_ids
        assert exported(text, add_special_tokens=False).input_ids == plain
    again = TokenCache(tmp_path / "cache of the export", exported).open(source)
    assert again.ids.tolist() == corpus.ids.tolist()


@pytest.mark.parametrize(
    "method",
    [
        {"variant": "preserve"},
        {"variant": "route", "layers": "top:1"},
        {"variant": "route", "rule": "cosine"},
    ],
    ids=["one head", "collaborating above", "the cosine rule"],
)
def test_where_one_row_does_not_hold_both_heads_or_no_posterior_mixes_them_there_are_no_keys(
    method: dict[str, Any],
) -> None:
    assert router_keys(as_if_trained(widen(tiny_llama(), **method))) is None


def test_an_export_that_serves_as_a_base_does_not_hand_its_router_on(
    base: Path, model: ModelConfig, tmp_path: Path
) -> None:
    of_run = as_if_trained(widen(load_base(model), "route"))
    first = written(dense_model(of_run, "float32"), base, tmp_path / "first", router_keys(of_run))
    assert ROUTER in read_json(first / "config.json")
    again = written(widened(first), first, tmp_path / "again")
    assert ROUTER not in read_json(again / "config.json")
