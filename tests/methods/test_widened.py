from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from scale_cli.config.schema import MethodConfig
from scale_cli.errors import ConfigError
from scale_cli.methods.widened import (
    CollaborationConfig,
    ExpansionConfig,
    added_sizes,
    collaborating_layers,
    far_from_asked,
    plan_expansion,
)
from scale_cli.planning.step import step_cost

unhurried = settings(max_examples=60)


@st.composite
def llama_configs(draw: st.DrawFn) -> LlamaConfig:
    num_key_value_heads = draw(st.integers(1, 9))
    num_heads = num_key_value_heads * draw(st.integers(1, 8))
    return LlamaConfig(
        hidden_size=num_heads * 2 * draw(st.integers(1, 8)),
        intermediate_size=draw(st.integers(8, 500)),
        num_attention_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        num_hidden_layers=draw(st.integers(1, 6)),
        head_dim=draw(st.none() | st.sampled_from([8, 16])),
    )


@unhurried
@given(llama_configs(), st.floats(0.01, 1.0))
def test_whole_heads_are_added_at_the_bases_own_ratio(base: LlamaConfig, ratio: float) -> None:
    planned = plan_expansion(base, MethodConfig(expansion=ExpansionConfig(ratio=ratio)))
    num_added = planned.expansion_num_key_value_heads
    num_base = base.num_key_value_heads
    assert num_base is not None and num_added >= 1
    assert planned.expansion_num_attention_heads * num_base == base.num_attention_heads * num_added
    assert abs(num_added - ratio * num_base) <= 0.5 or num_added == 1, "the nearest number of heads"


ratios = st.floats(0.01, 1.0)
own_sizes = st.builds(
    ExpansionConfig, ratio=ratios, hidden_ratio=st.none() | ratios, mlp_ratio=st.none() | ratios
)


@unhurried
@given(llama_configs(), own_sizes)
def test_the_widened_sizes_are_those_of_a_valid_llama_as_near_to_what_was_asked_for_as_can_be(
    base: LlamaConfig, expansion: ExpansionConfig
) -> None:
    planned = plan_expansion(base, MethodConfig(expansion=expansion))
    num_heads = base.num_attention_heads + planned.expansion_num_attention_heads
    if expansion.hidden_ratio is not None:
        missed = abs(planned.expansion_hidden_size - expansion.hidden_ratio * base.hidden_size)
        is_nearest = 2 * missed <= num_heads
        # Of more channels than the base's some would never train.
        is_below = planned.expansion_hidden_size > base.hidden_size - num_heads
        assert is_nearest or is_below or 0 < planned.expansion_hidden_size <= num_heads
    assert planned.expansion_hidden_size <= max(base.hidden_size, num_heads)
    if expansion.mlp_ratio is not None:
        wanted = expansion.mlp_ratio * base.intermediate_size
        missed = abs(planned.expansion_intermediate_size - wanted)
        assert missed <= 0.5 or planned.expansion_intermediate_size == 1
    added = {
        size: getattr(base, size) + getattr(planned, f"expansion_{size}")
        for size in (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
        )
    }
    widened = LlamaConfig(**added, head_dim=base.head_dim)
    widened.validate()
    assert widened.hidden_size % widened.num_attention_heads == 0
    assert widened.num_attention_heads % (widened.num_key_value_heads or 1) == 0


def one_key_value_head() -> LlamaConfig:
    """The shape of Gemma 3 1B."""
    return LlamaConfig(
        vocab_size=262_144,
        hidden_size=1152,
        intermediate_size=6912,
        num_hidden_layers=26,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        tie_word_embeddings=True,
    )


def test_stream_and_mlp_keep_the_ratio_where_the_heads_cannot() -> None:
    base = one_key_value_head()
    added = added_sizes(base, ExpansionConfig(ratio=0.25))
    assert (added.hidden_size, added.intermediate_size) == (288, 1728)
    assert (added.num_attention_heads, added.num_key_value_heads) == (4, 1)

    step = step_cost(base, MethodConfig())
    assert step.num_served < 2 * step.num_frozen, (
        "though the base's head is tied, and the served one is not"
    )


def test_a_size_that_rounding_made_far_larger_than_asked_is_named_and_no_other() -> None:
    (line,) = far_from_asked(one_key_value_head(), ExpansionConfig(ratio=0.25))
    assert (
        "method.expansion.ratio: 0.25 asks for 0.25 more key/value heads, but it is 1, 4 times"
        in (line)
    )
    assert far_from_asked(one_key_value_head(), ExpansionConfig(ratio=0.7)) == []
    (line,) = far_from_asked(one_key_value_head(), ExpansionConfig(ratio=1, hidden_ratio=0.001))
    assert "method.expansion.hidden_ratio: 0.001 asks for 1.15 more channels" in line


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("none", []),
        ("all", [0, 1, 2, 3]),
        ("top:1", [3]),
        ("top:4", [0, 1, 2, 3]),
        ([], []),
        ([2, 0, 2], [0, 2]),
    ],
)
def test_layers_named_are_the_layers_that_collaborate_and_left_out_what_the_variant_stands_for(
    layers: Any, expected: list[int]
) -> None:
    for variant, of_variant in (("preserve", []), ("adapt", [0, 1, 2, 3]), ("route", [])):
        assert collaborating_layers(CollaborationConfig(layers=layers), variant, 4) == expected
        assert collaborating_layers(CollaborationConfig(), variant, 4) == of_variant


@pytest.mark.parametrize("layers", ["top:5", [4], [0, 99]])
def test_a_layer_that_the_base_does_not_have_is_refused_by_name(layers: Any) -> None:
    with pytest.raises(ConfigError, match=r"method\.collaboration\.layers.*the base has 4 layers"):
        collaborating_layers(CollaborationConfig(layers=layers), "adapt", 4)


@pytest.mark.parametrize(
    ("modules", "attention", "mlp"),
    [(["attention", "mlp"], [3], [3]), (["attention"], [3], []), (["mlp"], [], [3])],
)
def test_only_the_named_modules_collaborate(
    modules: Any, attention: list[int], mlp: list[int]
) -> None:
    collaboration = CollaborationConfig(layers="top:1", modules=modules)
    planned = plan_expansion(
        LlamaConfig(num_hidden_layers=4), MethodConfig(collaboration=collaboration)
    )
    assert planned.attention_collaboration_layers == attention
    assert planned.mlp_collaboration_layers == mlp
    assert planned.first_collaborating_layer == (3 if modules else 4)
