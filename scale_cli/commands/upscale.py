"""The verb `scale upscale`: load, make what the method trains, prove that nothing changed, write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scale_cli.config.load import dump_config, load_config
from scale_cli.config.same_run import BASE_KEYS, UPSCALE_SECTIONS, differences
from scale_cli.config.schema import RunConfig
from scale_cli.data.batches import known_windows
from scale_cli.data.corpora import ids_to_count, open_sources, training_sources, windows_of
from scale_cli.errors import RunFolderError
from scale_cli.export.dense import plain_model
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.processes import placed
from scale_cli.storage.atomic import new_folder, write_json, write_text
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.lock import claimed
from scale_cli.storage.records import CORPORA, BaseRecord
from scale_cli.upscale.base import check_finite, check_same_base, record_base
from scale_cli.upscale.bypass import with_found_layers
from scale_cli.upscale.folder import MethodModel, describe_method, load_any_base, write_trained
from scale_cli.upscale.method import start_model
from scale_cli.upscale.preservation import check_preservation, own_logits, sample_ids
from scale_cli.upscale.session import check_before_writing, text_to_find_in
from scale_cli.upscale.tokenizer import (
    check_tokenizer,
    load_run_tokenizer,
    load_tokenizer,
    make_run_tokenizer,
    prove_vocabulary,
    write_run_tokenizer,
)
from scale_cli.upscale.vocabulary import new_pieces


@dataclass(frozen=True)
class UpscaleSummary:
    """What was made, for the terminal."""

    folder: Path
    variant: str
    model: MethodModel
    record: BaseRecord
    num_prompts: int
    num_new_tokens: int
    num_proved_texts: int  # whose ids the new tokens leave alone

    def lines(self) -> list[str]:
        """Return aligned lines: sizes, parameters, bytes, and what was proved."""
        parameters = list(self.model.parameters())
        num_trainable = sum(p.numel() for p in parameters if p.requires_grad)
        num_bytes = sum(file.stat().st_size for file in self.folder.iterdir())
        made = [f"method         {self.variant}: widens nothing; the folder is prepared for `scale train`"]
        proved = "logits at the start"
        if isinstance(self.model, ScaleForCausalLM):
            made, proved = _expansion_lines(self.model), "base logits"
        return [
            f"base           {self.record.name} ({self.record.dtype})",
            f"base hash      sha256 {self.record.content_sha256}",
            *made,
            *self._vocabulary_lines(),
            f"frozen         {sum(p.numel() for p in parameters) - num_trainable:>15,} parameters",
            f"trainable      {num_trainable:>15,} parameters",
            f"preserved      {proved} bitwise equal on {self.num_prompts} prompts",
            f"written        {self.folder} ({num_bytes / 1e6:,.1f} MB)",
        ]

    def _vocabulary_lines(self) -> list[str]:
        if not self.num_new_tokens:
            return []
        return [
            f"new tokens     {self.num_new_tokens:,}; the ids of {self.num_proved_texts:,} texts held to the base's"
        ]


def _expansion_lines(model: ScaleForCausalLM) -> list[str]:
    base, config = model.root.config, model.config
    layers = sorted({*config.attention_collaboration_layers, *config.mlp_collaboration_layers})
    names = {
        "hidden": "hidden_size",
        "MLP": "intermediate_size",
        "heads": "num_attention_heads",
        "KV heads": "num_key_value_heads",
    }
    sizes = []
    for name, key in names.items():
        parts = [getattr(base, key), *(getattr(stage, f"expansion_{key}") for stage in config.stages())]
        sizes.append(f"{name} {' + '.join(f'{part:,}' for part in parts)}")
    return [
        f"sizes          {', '.join(sizes)}",
        f"collaboration  {'layers ' + ', '.join(map(str, layers)) if layers else 'none: W12 does not exist'}",
    ]


def upscale(config: RunConfig) -> UpscaleSummary:
    """Make what the method trains of the base model and write `upscaled/`; nothing the base computes changes."""
    run = RunFolder(config.output_dir)
    with claimed(run.root):
        return _upscale(run, config)


def _upscale(run: RunFolder, config: RunConfig) -> UpscaleSummary:
    method = config.method
    if run.final.is_dir() or run.checkpoints.is_dir():
        raise RunFolderError(_already_begun(run, config))
    check_before_writing(config, training_sources(config))
    tokenizer, of_base = make_run_tokenizer(config), load_tokenizer(config.model)
    num_texts = prove_vocabulary(config, of_base, tokenizer) if method.vocabulary else 0
    base = load_any_base(config.model)
    check_finite(base, config.model.base)
    record = record_base(base, config.model, tokenizer)
    if method.trains_base_weights:
        base.float()  # the master copy it will be trained in: compared in the same precision
    if method.variant == "adept" and method.adept.layers is None:
        known = [windows_of(config.corpus, corpus) for corpus in open_sources(config, config.corpus.replay, tokenizer)]
        probe = known_windows(known, config.seed, method.adept.probe_windows)
        method = with_found_layers(method, placed(base), probe)
    prompts = sample_ids(of_base)
    base_logits = own_logits(placed(base), prompts)
    counted = ids_to_count(config, tokenizer) if method.counts_text else None
    new = new_pieces(config, of_base, tokenizer)
    model = placed(start_model(base, method, config.seed, new, tokenizer, counted))
    # A matrix in two parts is itself to rounding; merged, as it is exported, bit for bit.
    merged = plain_model(model, "float32") if method.variant == "osf" else model
    check_preservation(merged, prompts, base_logits)
    found_in = text_to_find_in(config)
    with new_folder(run.upscaled) as partial:
        if method.widens or method.vocabulary is not None:
            write_trained(partial, model, method, record)
        else:
            describe_method(partial, model, method, record)
        write_run_tokenizer(partial, config, tokenizer)
        if found_in:
            write_json(partial / CORPORA, found_in)
        write_text(partial / "scale.yaml", dump_config(config))
    copied = ""
    if method.variant == "adept" and method.adept.layers:
        copied = f" (layers copied: {', '.join(map(str, method.adept.layers))})"
    return UpscaleSummary(
        run.upscaled,
        f"{method.variant}{copied}",
        model,
        record,
        len(base_logits),
        len(tokenizer) - len(of_base),
        num_texts,
    )


def _already_begun(run: RunFolder, config: RunConfig) -> str:
    message = f"{run.root}: training has begun from what is there; choose another output_dir"
    if not (run.upscaled / "scale.yaml").is_file():
        return message
    changed = differences(load_config(run.upscaled / "scale.yaml"), config, UPSCALE_SECTIONS)
    return f"{message} ({'; '.join(changed)})" if changed else message


def upscale_is_finished(config: RunConfig) -> bool:
    """Return whether `upscaled/` is there, made with the same base and method."""
    folder = RunFolder(config.output_dir).upscaled
    if not folder.is_dir():
        return False
    before = load_config(folder / "scale.yaml")
    if differences(before, config, UPSCALE_SECTIONS, BASE_KEYS):
        return False
    if differences(before, config, UPSCALE_SECTIONS):  # the base has moved
        record = BaseRecord.load(folder)
        check_same_base(load_any_base(config.model), record, where=f"model.base {config.model.base}")
        check_tokenizer(load_run_tokenizer(config), record)
    return True
