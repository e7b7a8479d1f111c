"""The verb `scale upscale`: load, widen, initialise, prove, write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scale_cli.config.compare import UPSCALE_SECTIONS, differences
from scale_cli.config.load import dump_config, load_config
from scale_cli.config.schema import RunConfig
from scale_cli.errors import RunFolderError
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.storage.atomic import new_folder, write_text
from scale_cli.storage.layout import RunFolder
from scale_cli.upscale.base import BaseRecord, load_base, load_tokenizer, record_base
from scale_cli.upscale.folder import write_expansion
from scale_cli.upscale.initialise import initialise_expansion
from scale_cli.upscale.preservation import check_preservation
from scale_cli.upscale.sizes import plan_expansion


@dataclass(frozen=True)
class UpscaleSummary:
    """What was made, for the terminal."""

    folder: Path
    model: ScaleForCausalLM
    record: BaseRecord
    num_prompts: int

    def lines(self) -> list[str]:
        """Return aligned lines: sizes, parameters, bytes, and what was proved."""
        base, config = self.model.base.config, self.model.config
        frozen = list(self.model.base.parameters())
        added = list(self.model.expansion.parameters())
        num_bytes = sum(file.stat().st_size for file in self.folder.iterdir())
        layers = sorted({*config.attention_collaboration_layers, *config.mlp_collaboration_layers})
        sizes = (
            ("hidden", base.hidden_size, config.expansion_hidden_size),
            ("MLP", base.intermediate_size, config.expansion_intermediate_size),
            ("heads", base.num_attention_heads, config.expansion_num_attention_heads),
            ("KV heads", base.num_key_value_heads, config.expansion_num_key_value_heads),
        )
        return [
            f"base           {self.record.name} ({base.architectures[0]}, {self.record.dtype})",
            f"base hash      sha256 {self.record.content_sha256}",
            f"sizes          {', '.join(f'{name} {size:,} + {more:,}' for name, size, more in sizes)}",
            f"collaboration  {'layers ' + ', '.join(map(str, layers)) if layers else 'none: W12 does not exist'}",
            f"frozen         {sum(p.numel() for p in frozen):>15,} parameters",
            f"trainable      {sum(p.numel() for p in added):>15,} parameters",
            f"preserved      base logits bitwise equal on {self.num_prompts} prompts",
            f"written        {self.folder} ({num_bytes / 1e6:,.1f} MB)",
        ]


def upscale(config: RunConfig) -> UpscaleSummary:
    """Widen the base model and write `upscaled/`; nothing the base computes changes.

    Raises:
        BaseModelError: the base is missing or not supported.
        RunFolderError: training has already begun in this folder.
        PreservationError: the widened model's base logits are not the base's; nothing is written then.
    """
    run = RunFolder(config.output_dir)
    if run.final.is_dir() or run.checkpoints.is_dir():
        raise RunFolderError(f"{run.root}: training has begun from what is there; choose another output_dir")
    model, record = widen(config)
    tokenizer = load_tokenizer(config.model)
    num_prompts = check_preservation(model, tokenizer)
    with new_folder(run.upscaled) as partial:
        write_expansion(partial, model, record)
        tokenizer.save_pretrained(partial)
        write_text(partial / "scale.yaml", dump_config(config))
    return UpscaleSummary(run.upscaled, model, record, num_prompts)


def upscale_is_finished(config: RunConfig) -> bool:
    """Return whether `upscaled/` is there, made with the same base and method."""
    folder = RunFolder(config.output_dir).upscaled
    if not folder.is_dir():
        return False
    return not differences(load_config(folder / "scale.yaml"), config, UPSCALE_SECTIONS)


def widen(config: RunConfig) -> tuple[ScaleForCausalLM, BaseRecord]:
    """Return a freshly widened and initialised model, and the record of its base."""
    base = load_base(config.model)
    record = record_base(base, config.model)
    model = ScaleForCausalLM(plan_expansion(base.config, config.method), base)
    initialise_expansion(model, config.method.expansion.init, config.seed)
    return model, record
