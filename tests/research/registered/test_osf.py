import copy

import pytest
import torch

from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.export.dense import plain_model
from scripts.research.osf import OsfConfig
from tests.methods.test_methods import prepared
from tests.steps import Steps, batches_of
from tests.widening import tiny_llama


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_osf_leaves_what_each_matrix_does_in_its_kept_directions_as_the_base_has_it(
    optimiser: str,
) -> None:
    base = tiny_llama(vocab_size=64)
    before = {name: tensor.double() for name, tensor in base.state_dict().items()}
    model = prepared(copy.deepcopy(base), "osf", osf={"kept": 0.4})
    train = TrainConfig.model_validate(
        {"max_steps": 20, "lr": 3e-2, "weight_decay": 0.0, "optimiser": optimiser}
    )
    steps = Steps(model, train, batches_of(4), MethodConfig(variant="osf"))
    for step in range(3):
        steps.take(step).result()
    moved = set()
    for name, tensor in plain_model(model, "float32").state_dict().items():
        if change := float((difference := tensor.double() - before[name]).norm()):
            moved.add(name.split(".")[-2])
            left, _, right = torch.linalg.svd(before[name], full_matrices=False)
            kept = int(0.4 * min(tensor.shape))
            assert (left[:, :kept].T @ difference).norm() < 1e-5 * change, name
            assert (difference @ right[:kept].T).norm() < 1e-5 * change, name
    assert moved == set(OsfConfig().targets)
