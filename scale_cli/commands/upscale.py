"""The verb `scale upscale`: load the base, set up the method, prove that nothing changed, write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scale_cli.config.load import dump_config
from scale_cli.config.schema import (
    BASE_KEYS,
    UPSCALE_SECTIONS,
    RunConfig,
    differences,
)
from scale_cli.config.sources import CORPORA
from scale_cli.data.corpora import open_sources, text_to_learn, training_sources
from scale_cli.errors import RunFolderError
from scale_cli.export.dense import WIDENED, WIDENED_KEY
from scale_cli.export.sizes import served_size
from scale_cli.processes import device, move_to_device
from scale_cli.runs.folder import folder_bytes
from scale_cli.runs.method_folder import describe_method, write_trained
from scale_cli.runs.new_tokens import prove_vocabulary
from scale_cli.runs.opened import MethodFolder, Run
from scale_cli.runs.precision import slow_while_training
from scale_cli.storage.atomic import claimed, new_folder, read_json, write_json, write_text
from scale_cli.terminal import log
from scale_cli.upscale.base import check_finite, dtype_of_files, load_hashed_base
from scale_cli.upscale.base_hashes import record_base
from scale_cli.upscale.base_tokenizer import check_tokenizer
from scale_cli.upscale.building import new_pieces, start_model
from scale_cli.upscale.preservation import SAMPLE_TEXTS, check_preservation, own_logits, sample_ids
from scale_cli.values import counted
from scale_cli.vocabulary.tokenizer import write_grown


def nothing_to_prepare(config: RunConfig) -> str:
    """Return what `scale upscale` says of a model that is trained already."""
    return f"given          nothing to prepare: {config.method.model} is trained already"


def upscale(config: RunConfig) -> MethodFolder:
    """Set up the method on the base model and write `upscaled/`.

    What the base computes does not change.
    """
    run = Run(config)
    with claimed(run.folder.root):
        _check_not_begun(run)
        return _upscale(run)


def _check_not_begun(run: Run) -> None:
    """Raise RunFolderError if training has begun; name what has changed in the config since."""
    if not run.folder.final.is_dir() and not run.folder.saved:
        return
    changed = []
    upscaled = MethodFolder(run.folder.upscaled, run)
    if (upscaled.path / "scale.yaml").is_file():
        changed = differences(upscaled.config, run.config, UPSCALE_SECTIONS)
    because = f" ({'; '.join(changed)})" if changed else ""
    raise RunFolderError(
        f"{run.folder.root}: training from this folder has already begun; "
        f"choose another output_dir{because}"
    )


def _upscale(run: Run) -> MethodFolder:
    config = run.config
    method = config.method
    upscaled = run.folder.upscaled
    run.check(training_sources(config))
    for warning in slow_while_training(config, device().type):
        log(f"warning: {warning}")
    if getattr(run.base_config, WIDENED_KEY, False):
        log(
            f"warning: model.base: {config.model.base} is the plain export of a widened model: some of its rows are "
            "stored small, so training changes it badly or hardly; start from the base of that run, with a corpus "
            "of both texts (docs/after-training.md)"
        )
    of_base = run.base_tokenizer
    tokenizer = run.make_tokenizer()
    if run.grown_vocabulary is not None and (note := run.grown_vocabulary.note):
        log(f"note           {note}")
    # Errors in a text are found before weights load.
    corpora = open_sources(config, training_sources(config), tokenizer)
    num_texts = prove_vocabulary(config, of_base, tokenizer) if method.vocabulary else 0

    base, known = load_hashed_base(config.model)
    check_finite(base.named_parameters(), f"model.base: {config.model.base}")
    record = record_base(base, config.model, tokenizer, known)
    log(f"base           {record.name} ({record.dtype})")
    log(f"base hash      sha256 {record.content_sha256}")
    if method.trains_base_weights:
        base.float()  # training uses a float32 master copy: compare in that precision

    definition = method.definition
    prompts = sample_ids(of_base)
    base_logits = own_logits(move_to_device(base), prompts)
    new = new_pieces(config, of_base, tokenizer)
    vocab_size = run.base_config.vocab_size + (0 if new is None else len(new.new_tokens))
    sources = config.corpus.sources
    text = text_to_learn(sources, corpora[: len(sources)], vocab_size)
    log("starting       what is to be trained, by what the base holds")
    model = move_to_device(start_model(base, method, config.seed, new, text))
    check_preservation(definition.as_base(model), prompts, base_logits)

    with new_folder(upscaled) as partial:
        if definition.widens or method.vocabulary is not None:
            write_trained(partial, model, method, record)
        else:
            describe_method(partial, model, method, record)
        if method.vocabulary is None:
            tokenizer.save_pretrained(partial)
        else:
            write_grown(partial, tokenizer)
        if definition.widens or method.vocabulary is not None:  # the text has decided what they are
            write_json(partial / CORPORA, [corpus.name for corpus in corpora[: len(sources)]])
        write_text(partial / "scale.yaml", dump_config(config))

    for line in _described(run, model, len(tokenizer) - len(of_base), num_texts):
        log(line)
    log(f"written        {upscaled} ({folder_bytes(upscaled) / 1e6:,.1f} MB)")
    return MethodFolder(upscaled, run)


def _described(run: Run, model: Any, num_new: int, num_texts: int) -> Iterator[str]:
    """Yield lines on what was made.

    The new tokens left the base's ids of `num_texts` texts unchanged.
    """
    config = run.config
    method = config.method
    definition = method.definition
    parameters = list(model.parameters())
    num_trainable = sum(p.numel() for p in parameters if p.requires_grad)
    if definition.widens:
        base = model.base.config
        widened = model.config
        sizes = [
            f"{getattr(base, name):,} + {getattr(widened, f'expansion_{name}'):,}"
            for name in WIDENED
        ]
        yield "sizes          hidden {}, MLP {}, heads {}, KV heads {}".format(*sizes)
        layers = sorted(
            {*widened.attention_collaboration_layers, *widened.mlp_collaboration_layers}
        )
        collaborating = (
            f"layers {', '.join(map(str, layers))}" if layers else "none: W12 does not exist"
        )
        yield f"collaboration  {collaborating}"
    else:
        yield f"method         {method.variant}: widens nothing; the folder is prepared for `scale train`"
    if num_new:
        yield f"new tokens     {num_new:,}; the ids of {counted(num_texts, 'text')} checked against the base's"
    yield f"frozen         {sum(p.numel() for p in parameters) - num_trainable:>15,} parameters"
    yield f"trainable      {num_trainable:>15,} parameters"
    held = "base logits" if definition.widens else "logits at the start"
    yield f"preserved      {held} bitwise equal on {len(SAMPLE_TEXTS)} prompts"
    size = served_size(model, run.base_config, config.export.dtype or dtype_of_files(config.model))
    asked = method.expansion.hidden_ratio or method.expansion.ratio
    if size.ratio is not None and abs(size.ratio - asked) > 5e-4:
        yield f"ratio          {size.ratio:.3f}: {asked:g}, rounded to whole heads"
    yield f"served         {size}"


def upscale_is_finished(run: Run) -> bool:
    upscaled = MethodFolder(run.folder.upscaled, run)
    config = run.config
    if not upscaled.path.is_dir() or differences(
        upscaled.config, config, UPSCALE_SECTIONS, BASE_KEYS
    ):
        return False
    if differences(upscaled.config, config, UPSCALE_SECTIONS):  # the base has moved
        upscaled.load_base()
        check_tokenizer(run.tokenizer, upscaled.record)
    has_begun = run.folder.final.is_dir() or run.folder.saved  # training compares the text itself
    if has_begun or not (upscaled.path / CORPORA).is_file():
        return True
    corpora = open_sources(config, config.corpus.sources, run.tokenizer)
    return read_json(upscaled.path / CORPORA) == [corpus.name for corpus in corpora]
