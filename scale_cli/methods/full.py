"""Full fine-tuning: every weight trains."""

from __future__ import annotations

from scale_cli.methods.method import MethodSection, PlainTraining
from scale_cli.methods.plain import Plain


class Full(Plain[MethodSection]):
    """Everything trains."""

    name = "full"
    label = "full fine-tuning"
    colour = "#d55e00"
    mark = ("o", "●")
    takes_new_tokens = True
    usual_lr = 1.0e-4  # what small Llamas want; Gemma 3 wants a sixth (docs/results/rates.md)

    def plain_training(self, settings: MethodSection, num_layers: int) -> PlainTraining:
        layers = [(layer, True) for layer in range(num_layers)]
        return PlainTraining(layers, trains_embedding=True, trains_top=True)
