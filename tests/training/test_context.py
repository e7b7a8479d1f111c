from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface

from scale_cli.config.training import TrainConfig
from scale_cli.data.batches import MicroBatch
from scale_cli.errors import ConfigError
from scale_cli.training.context import _visible, attend_over_parts, parallelism
from scale_cli.upscale.objective import SHARING_WINDOWS
from tests.model.test_families import tiny
from tests.widening import as_if_trained, widen


@pytest.mark.parametrize("family", ["gemma3_text", "exaone4, tied"])
@pytest.mark.parametrize("isolated", [False, True])
def test_layers_with_and_without_a_window_see_what_they_see_in_a_whole_window(
    group: dist.ProcessGroup, family: str, isolated: bool
) -> None:
    """One process has both parts of a window; more of them in test_sharding.py."""
    model = as_if_trained(widen(tiny(family), "route", "top:1")).train()
    ids = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(0))
    positions = (
        torch.cat([torch.arange(length) for length in (7, 1, 16)]).expand(2, -1)
        if isolated
        else None
    )
    whole = MicroBatch(ids, ids, torch.zeros(2, dtype=torch.long), positions)

    def loss(batch: MicroBatch) -> float:
        asked = {"labels": batch.targets, "shift_labels": batch.targets, "num_items_in_batch": 48}
        return model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, **asked
        ).loss.item()

    expected = loss(whole)
    AttentionInterface.register(SHARING_WINDOWS, partial(attend_over_parts, group, isolated))
    model.root.set_attn_implementation(SHARING_WINDOWS)
    assert loss(whole.part(0, 1)) == pytest.approx(expected, rel=1e-6)


def test_the_bias_by_which_a_gpu_needs_no_mask_is_that_mask() -> None:
    mask = _visible(torch.arange(6, 9).unsqueeze(0), 6, None)
    assert torch.equal(mask[0, 0], causal_lower_right(3, 9)._materialize())


def test_what_accelerate_does_not_lay_out_or_nobody_counts_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    within = {"max_steps": 1, "sharding": "all", "sharded_within": "node"}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match=r"^train\.context_parallel 2, train\.sharded_within node: [^\n]+$"
    ):
        parallelism(TrainConfig.model_validate({**within, "context_parallel": 2}), 4)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert parallelism(TrainConfig.model_validate(within), 1).total_size == 1
    with pytest.raises(ConfigError, match=r"^train\.sharded_within node: .*LOCAL_WORLD_SIZE"):
        parallelism(TrainConfig.model_validate(within), 2)
