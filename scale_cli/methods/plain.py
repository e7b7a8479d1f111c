"""Methods that train a plain model: layers of the base, or copies of them."""

from __future__ import annotations

from typing import Any

from scale_cli.methods.method import Method, PlainTraining, Settings


class Plain(Method[Settings]):
    """A model of the base's layers and copies of some; `plain_training` says which train."""

    def plain_training(self, settings: Settings, num_layers: int) -> PlainTraining:
        """Return what trains; ConfigError as from `build`."""
        raise NotImplementedError

    def build(self, base: Any, settings: Settings, seed: int, new: Any = None) -> Any:
        num_layers = base.config.num_hidden_layers
        training = self.plain_training(settings, num_layers)
        model = base if len(training.layers) == num_layers else deepen(base, training)
        model.model.norm.requires_grad_(training.trains_top)
        model.lm_head.requires_grad_(training.trains_top)
        # If the embeddings are tied, this decides for the head too: they are one tensor.
        model.model.embed_tokens.requires_grad_(training.trains_embedding)
        for layer, (_, trains) in zip(model.model.layers, training.layers, strict=True):
            layer.requires_grad_(trains)
        return model


def deepen(base: Any, training: PlainTraining) -> Any:
    """Return a model with a base's layers and copies of some, each above its original.

    A copy adds nothing at first: its o_proj and down_proj, or the gains of the norms after them,
    are 0.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from scale_cli.model.family_scale import PER_LAYER_KEYS, SUBLAYERS, family_of

    family = family_of(base.config)
    sources = [source for source, _ in training.layers]
    sizes: dict[str, Any] = {"num_hidden_layers": len(sources)}
    for key in PER_LAYER_KEYS:
        if of_layers := getattr(base.config, key, None):
            sizes[key] = [of_layers[source] for source in sources]
    config = type(base.config).from_dict({**base.config.to_dict(), **sizes})
    deeper: Any = AutoModelForCausalLM.from_config(config, dtype=base.dtype)
    weights = base.state_dict()
    tensors = {
        name: tensor for name, tensor in weights.items() if not name.startswith("model.layers.")
    }
    for place, source in enumerate(sources):
        prefix = f"model.layers.{source}."
        for name, tensor in weights.items():
            if name.startswith(prefix):
                tensors[f"model.layers.{place}.{name.removeprefix(prefix)}"] = tensor
    deeper.load_state_dict(tensors, strict=True)
    deeper.generation_config = base.generation_config

    silent = []  # parts of parameters' names, and the number that they are filled with
    for sublayer in SUBLAYERS:
        _, norm = family.norms_around(sublayer)
        silent.append(
            (sublayer.writing, 0.0) if norm is None else (norm, 0.0 - family.norm_form.offset)
        )
    for place, layer in enumerate(deeper.model.layers):
        if place > 0 and sources[place] == sources[place - 1]:
            for name, parameter in layer.named_parameters():
                for part, number in silent:
                    if part in name.split("."):
                        torch.nn.init.constant_(parameter, number)
    return deeper
