"""Run by two processes of torchrun: Muon on sharded matrices has the bits that it has on whole ones."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from scale_cli.training.optimiser import BatchedMuon

SHAPES = [(7, 12), (7, 12), (12, 7), (1, 9), (16, 16)]
NOT_FINITE = 1  # the step that is withheld


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in SHAPES]
    gradients = [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(3)]

    def sharded(whole: torch.Tensor) -> DTensor:
        return distribute_tensor(whole, mesh, [Shard(0)])

    whole = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    parts = [torch.nn.Parameter(sharded(tensor)) for tensor in start]
    optimisers = [
        BatchedMuon(matrices, adjust_lr_fn="match_rms_adamw") for matrices in (whole, parts)
    ]
    for step, of_step in enumerate(gradients):
        for one, part, gradient in zip(whole, parts, of_step, strict=True):
            one.grad, part.grad = gradient.clone(), sharded(gradient)
        for optimiser in optimisers:
            found_inf = torch.tensor(float(step == NOT_FINITE))
            optimiser.found_inf = found_inf  # type: ignore[attr-defined]  # as a gradient scaler would
            optimiser.step()
    for one, part in zip(whole, parts, strict=True):
        assert isinstance(part, DTensor) and torch.equal(part.full_tensor(), one)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
