"""What tests widen, and how: the real checkpoints, tiny random Llamas, expansions as if they had been trained."""

import atexit
import copy
import lzma
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from scale_cli.config.load import load_config
from scale_cli.config.schema import MethodConfig, ModelConfig
from scale_cli.config.training import TrainConfig
from scale_cli.methods.recipes import trainable_parameters
from scale_cli.methods.starts.start import TextToLearn
from scale_cli.methods.widened import CollaborationConfig, ExpansionConfig, RouterConfig
from scale_cli.model.expansion_scale import ExpansionNorm
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.runs.opened import MethodFolder, Run
from scale_cli.storage.atomic import read_json, verify_folder, write_json
from scale_cli.training.optimiser import build_optimiser
from scale_cli.upscale.base import load_base
from scale_cli.upscale.building import MethodModel, NewPieces, start_model

CORPORA = (
    "en-tinystories/tinystories_val.txt",
    "en-eltec/valid.txt.xz",
    "ko-petitions/valid.txt.xz",
)


def real_base(shared_data: Path, checkpoint: str, dtype: Any = "float32") -> PreTrainedModel:
    return load_base(ModelConfig(base=str(shared_data / checkpoint / "hf"), dtype=dtype))


def lower_stories(shared_data: Path) -> Path:
    """Write stories260K without its two upper layers, for runs that need a real base, and not all of one."""
    return lower_layers(shared_data, "ckpt-stories260K", 3)


@cache
def lower_layers(shared_data: Path, checkpoint: str, num_layers: int) -> Path:
    root = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    folder = root / checkpoint / "hf"
    shutil.copytree(shared_data / checkpoint / "hf", folder)
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", config | {"num_hidden_layers": num_layers})
    weights = load_file(folder / "model.safetensors")
    above = [f"layers.{layer}." for layer in range(num_layers, config["num_hidden_layers"])]
    kept = {
        name: weight
        for name, weight in weights.items()
        if not any(layer in name for layer in above)
    }
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


@cache
def real_ids(shared_data: Path, checkpoint: str) -> Tensor:
    """Token ids of the beginnings of all three corpora, a third each, in a checkpoint's own vocabulary."""
    tokenizer = AutoTokenizer.from_pretrained(shared_data / checkpoint / "hf")
    streams = []
    for name in CORPORA:
        path = shared_data / name
        with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as file:
            text = file.read(30_000)
        streams.append(
            torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        )
    shortest = min(len(stream) for stream in streams)
    return torch.cat([stream[:shortest] for stream in streams])


# A base never predicts this text of TINY's vocabulary as well as its token shares do: they are certain.
UNKNOWN = TextToLearn(torch.eye(61, dtype=torch.float64)[0], torch.arange(40)[None])

# Sizes of a random model that is quick and yet has several of everything.
TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}


def random_ids(*shape: int, below: int = 61, lowest: int = 0, seed: int = 0) -> Tensor:
    """Token ids of TINY's vocabulary, or of another."""
    return torch.randint(lowest, below, shape, generator=torch.Generator().manual_seed(seed))


def tiny_llama(seed: int = 0, **sizes: Any) -> LlamaForCausalLM:
    """A random Llama whose predictions are far from flat and whose gains and biases are not at their defaults."""
    generator = torch.Generator().manual_seed(seed)
    base = LlamaForCausalLM(LlamaConfig(**{**TINY, **sizes})).eval().requires_grad_(False)
    for name, parameter in base.named_parameters():
        centre = 1.0 if "norm" in name else 0.0
        parameter.copy_(centre + 0.2 * torch.randn(parameter.shape, generator=generator))
    return base


def widen(
    base: PreTrainedModel,
    variant: Any,
    layers: str | list[int] | None = None,
    *,
    ratio: float = 0.25,
    seed: int = 0,
    new: NewPieces | None = None,
    text: TextToLearn | None = None,
    **router: Any,
) -> ScaleForCausalLM:
    """A freshly initialised widened model, in evaluation mode."""
    method = MethodConfig(
        variant=variant,
        expansion=ExpansionConfig(ratio=ratio),
        collaboration=CollaborationConfig(layers=layers),
        router=RouterConfig(**router),
    )
    model = start_model(base, method, seed, new, text)
    assert isinstance(model, ScaleForCausalLM)
    return model.eval()


def load_model(folder: Path, base: ModelConfig) -> MethodModel:
    """Load a base and what a folder makes of it, both held to their hashes."""
    verify_folder(folder)
    config = load_config(folder / "scale.yaml").model_copy(update={"model": base})
    return MethodFolder(folder, Run(config)).load_to_train()


def load_widened(folder: Path, base: ModelConfig) -> ScaleForCausalLM:
    model = load_model(folder, base)
    assert isinstance(model, ScaleForCausalLM)
    return model


@torch.no_grad()
def as_if_trained(model: ScaleForCausalLM, std: float = 0.05, seed: int = 1) -> ScaleForCausalLM:
    """Fill every block of the expansion, W12 and H' included, with random numbers."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.expansion.modules():
        centre = 1.0 if isinstance(module, ExpansionNorm) else 0.0
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:  # rows of new tokens are composed, and stay
                parameter.copy_(centre + std * torch.randn(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def move(model: torch.nn.Module, std: float) -> None:
    """Move everything that trains of any method's model, as training would."""
    generator = torch.Generator().manual_seed(1)
    for parameter in trainable_parameters(model).values():
        parameter.add_(std * torch.randn(parameter.shape, generator=generator))


def trained_on(
    base: PreTrainedModel, variant: Any, layers: str | None = None, *, ratio: float = 0.5, seed: int
) -> ScaleForCausalLM:
    """A widened copy of a base, as if it had been trained by itself."""
    return as_if_trained(widen(copy.deepcopy(base), variant, layers, ratio=ratio), seed=seed)


@torch.no_grad()
def trained_head(model: ScaleForCausalLM, input_ids: Tensor) -> Tensor:
    return model.trained_logits(model.final_states(input_ids, with_base_head=False))


def assert_starts_as_base(
    model: ScaleForCausalLM, input_ids: Tensor, expected: Tensor, *, num_eps: float = 6.0
) -> None:
    """Assert that the trained head begins as the base, whose logits are `expected`.

    Codes are not read before training: the bits are the same. Of a difference stream what copies
    and originals compute cancels to rounding: `num_eps` of the base's dtype, relative to the largest
    logit. Over all families 2.6 was the most where nothing is copied twice; the more copies, the
    more rounding. Where the originals are not subtracted, a third of the largest logit is the least.
    """
    logits = trained_head(model, input_ids).float()
    if model.config.start["name"] == "codes":
        assert torch.equal(logits, expected)
    allowed = num_eps * torch.finfo(model.base.dtype).eps * expected.abs().max()
    assert (logits - expected).abs().max() <= allowed


@torch.no_grad()
def routed_heads(model: ScaleForCausalLM, input_ids: Tensor) -> list[Tensor]:
    """The logits of every head that is routed among, the base's first."""
    return model.routed_logits(model.final_states(input_ids, with_base_head=True))


def train_steps(model: ScaleForCausalLM, ids: Tensor, *, num_steps: int, lr: float) -> list[float]:
    """Train on random windows of a token stream, 2 x 64 tokens a step, and return the losses."""
    optimiser = build_optimiser(model, TrainConfig(max_steps=num_steps, lr=lr, weight_decay=0.1))
    generator = torch.Generator().manual_seed(0)
    losses = []
    model.train()
    for _ in range(num_steps):
        starts = torch.randint(0, len(ids) - 65, (2,), generator=generator).tolist()
        windows = torch.stack([ids[start : start + 65] for start in starts])
        loss = model(
            input_ids=windows[:, :-1], labels=windows[:, :-1], shift_labels=windows[:, 1:]
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.expansion.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses
