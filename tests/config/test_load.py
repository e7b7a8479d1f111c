from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scale_cli.config.load import dump_config, load_config
from scale_cli.config.schema import RunConfig
from tests.config.small_config import EVALUATED, KEYS, SMALLEST, error_of, load_text

REPOSITORY = Path(__file__).resolve().parents[2]
SHIPPED = sorted((REPOSITORY / "configs").glob("*.yaml"))


# The happy path


def test_what_the_smallest_config_leaves_out_has_the_documented_default() -> None:
    source: dict[str, object] = {"path": None, "dataset": None, "subset": None, "revision": None, "text_field": "text"}
    source |= {"messages_field": None, "documents": "paragraph", "skip_documents": 0}
    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert load_text(EVALUATED).model_dump(mode="json") == {
        "output_dir": "runs/x",
        "seed": 0,
        "model": {"base": "some/model", "revision": None, "tokenizer": None, "dtype": "float32"},
        "method": {
            "variant": "route",
            "expansion": {
                "ratio": 0.25,
                "hidden_ratio": None,
                "mlp_ratio": None,
                "init": "svd",
                "embedding_scale": 1.4,
                "codes": "random",
            },
            "collaboration": {"layers": None, "modules": ["attention", "mlp"]},
            "router": {"rule": "posterior", "prior": 0.5, "switch_rate": 0.0, "threshold": 0.5},
            "distillation": {"weight": 0.0},
            "lora": {
                "rank": 16,
                "alpha": 32,
                "rank_stabilised": False,
                "targets": projections,
                "embeddings": False,
            },
            "osf": {"kept": 0.5, "targets": projections},
            "freeze": {"num_layers": 3},
            "llama_pro": {"num_blocks": None},
            "adept": {"num_blocks": None, "layers": None, "probe_windows": 16, "every_steps": 500},
            "vocabulary": None,
        },
        "corpus": {
            "sequence_length": 2048,
            "isolate_documents": False,
            "cache_dir": None,
            "max_document_bytes": 10_000_000,
            "max_bad_fraction": 0.001,
            "max_unknown_fraction": 0.01,
            "num_workers": None,
            "stages": [],
            "sources": [
                source
                | {"name": "news", "path": "news.txt", "language": "ko", "split": "train"}
                | {"max_documents": None, "weight": 1.0, "role": "new", "order": "shuffled", "select": None}
            ],
        },
        "train": {
            "max_steps": 10,
            "global_batch_size": 32,
            "micro_batch_size": None,
            "init_from": None,
            "init_moments": "fresh",
            "optimiser": "adamw",
            "lr": 1e-3,
            "lr_multipliers": {"embedding": None, "head": None, "gains": None},
            "average": None,
            "lookahead": None,
            "min_lr_ratio": 0.1,
            "schedule": "cosine",
            "warmup_steps": 0,
            "decay_steps": None,
            "decay_shape": None,
            "cooldown_steps": None,
            "constant_lr_ratio": 0.5,
            "weight_decay": 0.1,
            "embedding_norm": "free",
            "decay_to_base": False,
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "adam_epsilon": 1e-8,
            "max_grad_norm": 1.0,
            "sharding": "none",
            "sharded_within": "launch",
            "mixed_precision": "no",
            "attention": None,
            "compile": False,
            "activation_checkpointing": False,
            "on_nonfinite": "stop",
            "max_skipped_steps": 10,
            "max_hours": None,
            "log_every_steps": 10,
            "save_every_steps": 500,
            "keep_checkpoints": 2,
            "eval_every_steps": None,
            "trackers": [],
            "project": "scale",
            "run_name": None,
            "eval_max_documents": 32,
            "max_forgetting": None,
            "eval_benchmarks_every_steps": None,
            "eval_max_items": 32,
        },
        "evaluation": {
            "perplexity": [
                source
                | {"name": "tales", "path": "tales.txt", "language": "en", "split": "validation"}
                | {"max_documents": None, "role": "retention"}
            ],
            "benchmarks": [],
            "continuations": None,
            "sequence_length": None,
            "batch_size": 8,
            "mixed_precision": "no",
            "bootstrap_resamples": 2000,
        },
        "export": {"format": "llama", "dtype": "float32"},
    }


@pytest.mark.parametrize("section", ["train", "evaluation"])
@pytest.mark.parametrize("written", ["no", "'no'", '"no"', "No", "off"])
def test_mixed_precision_no_needs_no_quotes(section: str, written: str) -> None:
    config = load_text(EVALUATED, f"{section}.mixed_precision={written}")
    assert getattr(config, section).mixed_precision == "no"


@pytest.mark.parametrize("written", ["1e-4", "1E-4", "1.e-4", ".1e-3", "1.0e-4", "0.0001", "+1e-4"])
def test_every_spelling_of_a_float_is_a_number(written: str) -> None:
    assert load_text(SMALLEST.replace("max_steps: 10", f"max_steps: 10, lr: {written}")).train.lr == 0.0001
    assert load_text(SMALLEST, f"train.lr={written}").train.lr == 0.0001


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_config_loads(path: Path) -> None:
    assert load_config(path).corpus.sources


def test_configs_are_shipped() -> None:
    assert SHIPPED


# Overrides


def test_an_override_reaches_a_nested_key_and_leaves_its_neighbours() -> None:
    before, after = load_text(SMALLEST), load_text(SMALLEST, "method.expansion.ratio=0.5")
    assert after.method.expansion.ratio == 0.5
    assert after.method.expansion.init == before.method.expansion.init
    assert after.model_copy(update={"method": before.method}) == before


def test_an_override_reaches_an_element_of_a_list() -> None:
    config = load_text(SMALLEST, "corpus.sources.0.weight=2", "corpus.sources.0.language=en")
    assert [(source.name, source.weight, source.language) for source in config.corpus.sources] == [("news", 2.0, "en")]


def test_an_override_replaces_an_element_of_a_list_whole() -> None:
    config = load_text(SMALLEST, "corpus.sources.0={name: other, dataset: some/set, language: en}")
    assert [(source.name, source.path, source.dataset) for source in config.corpus.sources] == [
        ("other", None, "some/set")
    ]


def test_the_value_of_an_override_is_yaml() -> None:
    config = load_text(
        SMALLEST,
        "method.variant=adapt",
        "method.collaboration={layers: [0, 2], modules: [mlp]}",
        "train.eval_every_steps=5",
        "corpus.cache_dir=~",
        "model.revision='1e5'",
    )
    assert config.method.collaboration.layers == [0, 2]
    assert config.method.collaboration.modules == ["mlp"]
    assert config.train.eval_every_steps == 5
    assert config.corpus.cache_dir is None
    assert config.model.revision == "1e5"


def test_an_override_may_hold_an_equals_sign() -> None:
    assert load_text(SMALLEST, "corpus.sources.0.path=lang=ko/part.txt").corpus.sources[0].path == "lang=ko/part.txt"


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5))
def test_the_later_override_wins(seeds: list[int]) -> None:
    assert load_text(SMALLEST, *(f"seed={seed}" for seed in seeds)).seed == seeds[-1]


@pytest.mark.parametrize(
    ("overrides", "formats"),
    [
        ([], ["llama"]),
        (["method.variant=route", "export.dtype=bfloat16"], ["llama"]),
        (["method.collaboration.layers=top:1"], ["llama", "transformers"]),
        (["method.variant=route", "method.router.rule=cosine"], ["llama", "transformers"]),
        (["method.variant=adapt"], ["llama"]),
        (["method.variant=lora"], ["llama"]),
        (["export.format=llama"], ["llama"]),
        (["export.format=[adapter, llama]"], ["adapter", "llama"]),
    ],
)
def test_a_routed_model_is_exported_in_two_folders_where_the_plain_one_cannot_be_routed_unless_the_config_says_so(
    overrides: list[str], formats: list[str]
) -> None:
    assert load_text(SMALLEST, *overrides).export.formats == formats


@pytest.mark.parametrize("section", ["export:", "export: ~", "export: {}"])
def test_an_override_fills_an_empty_section(section: str) -> None:
    assert load_text(f"{SMALLEST}{section}\n", "export.format=adapter").export.format == "adapter"


def test_an_override_fills_an_empty_element_of_a_list() -> None:
    text = SMALLEST.replace("- {name: news, path: news.txt, language: ko}", "-")
    overrides = [f"corpus.sources.0.{field}" for field in ("name=a", "path=a.txt", "language=en")]
    assert load_text(text, *overrides).corpus.sources[0].name == "a"


def test_an_override_leaves_what_a_yaml_alias_shares_with_its_target() -> None:
    alias = "[&one {name: a, path: a.txt, language: en}, *one]"
    config = load_text(
        f"output_dir: x\nmodel: {{base: m}}\ntrain: {{max_steps: 1}}\ncorpus: {{sources: {alias}}}\n",
        "corpus.sources.1.name=b",
    )
    assert [source.name for source in config.corpus.sources] == ["a", "b"]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("train.max_steps", "key.sub=value"),
        ("=1", "key.sub=value"),
        ("train..lr=1", "key.sub=value"),
        ("corpus.sources.1.name=x", "'1'"),
        ("corpus.sources.-1.name=x", "'-1'"),
        ("corpus.sources.first=x", "'first'"),
        (f"corpus.sources.{'9' * 5000}=x", "not an index"),
        ("model.base.sub=x", "model.base is a string"),
        ("train.lr=[", "not valid YAML"),
        ("train.lr=!!bool x", "not valid YAML"),
    ],
)
def test_an_override_that_cannot_be_applied_is_quoted(override: str, named: str) -> None:
    message = error_of(SMALLEST, override)
    assert repr(override[:200])[:-1] in message
    assert len(message) < 1000
    assert named in message
    assert "\n" not in message


@pytest.mark.parametrize("override", ["train.lr=fast", "train.lrr=1", "corpus.sources.0.weight=-1", "train={lr: -1}"])
def test_a_mistake_in_an_override_is_told_of_the_override_and_one_beside_it_of_the_file(override: str) -> None:
    told = error_of(SMALLEST.replace("max_steps: 10", "max_steps: none"), override).splitlines()
    of_override = [line for line in told if line.startswith(f"override {override!r}: ")]
    assert len(of_override) == len(told) if override.startswith("train={") else len(of_override) == 1
    assert all("max_steps" in line for line in told if line not in of_override)


# dump_config

# PyYAML folds the line breaks that are not ASCII (U+0085, U+2028, U+2029) when it writes Unicode as it is.
UNICODE = st.text(
    alphabet=st.characters(exclude_categories=["Cs", "Zl", "Zp"], exclude_characters="\x85\0"), max_size=12
)
NUMBER_LIKE = st.from_regex(r"\A[-+]?[0-9._]{1,3}([eE][-+]?[0-9]{1,2})?\Z")


@settings(deadline=None, max_examples=80)
@given(
    base=(UNICODE | NUMBER_LIKE).filter(lambda base: base and base[0] != "~" and "://" not in base),
    revision=st.none() | UNICODE | NUMBER_LIKE,
    lr=st.floats(min_value=0.0, exclude_min=True, max_value=100.0),
    seed=st.integers(0, 2**32 - 1),
    layers=st.none() | st.sampled_from(["none", "all", "top:3"]) | st.lists(st.integers(0, 99), max_size=3),
)
@example(base="1e5", revision="12345e67", lr=5e-324, seed=0, layers=[])
@example(base="no", revision="~", lr=1e-22, seed=0, layers=None)
@example(base="a\r\n\ufeff\x07b", revision="", lr=1.0, seed=0, layers=None)
def test_a_dumped_config_loads_as_itself(
    base: str, revision: str | None, lr: float, seed: int, layers: str | list[int] | None
) -> None:
    before = load_text(EVALUATED)
    tree = before.model_dump() | {"seed": seed}
    tree["model"] |= {"base": base, "revision": revision}
    tree["train"]["lr"] = lr
    tree["method"]["collaboration"]["layers"] = layers
    config = RunConfig.model_validate(tree)
    assert load_text(dump_config(config)) == config


def test_a_dumped_config_holds_every_key() -> None:
    dumped = yaml.safe_load(dump_config(load_text(EVALUATED, "evaluation.benchmarks=[arc_easy]")))
    for key in KEYS:
        node = dumped
        for part in key.split("."):
            node = node[int(part)] if isinstance(node, list) else node[part]
            if node is None or node == []:
                break  # a section, or a list, that is left out
    assert set(dumped) == set(RunConfig.model_fields)


@pytest.mark.parametrize("global_batch_size", [1, 2, 6, 7, 12, 32, 44])
@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_a_micro_batch_that_is_left_open_divides_every_processs_share(
    global_batch_size: int, num_processes: int
) -> None:
    train = load_text(SMALLEST, f"train.global_batch_size={global_batch_size}").train
    share, rest = divmod(global_batch_size, num_processes)
    if not rest:
        at_once = train.sequences_at_once(num_processes)
        assert share % at_once == 0
        assert at_once == min(share, 8) or share % min(share, 8)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_an_evaluation_is_in_the_precision_of_training_unless_it_says_another(precision: str) -> None:
    trained = f"train.mixed_precision={precision}"
    assert load_text(SMALLEST, trained).evaluation.mixed_precision == precision
    for stated in ("no", "bf16"):
        config = load_text(SMALLEST, trained, f"evaluation.mixed_precision={stated}")
        assert config.evaluation.mixed_precision == stated
