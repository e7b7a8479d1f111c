"""Opens what a run trains with: its text, its model, and where it stands."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator, DistributedDataParallelKwargs
from transformers import PreTrainedModel

from scale_cli.config.schema import LOCATION_KEYS, TRAIN_SECTIONS, RunConfig, scored_otherwise
from scale_cli.config.sources import CORPORA
from scale_cli.config.training import TrainConfig
from scale_cli.data.batches import Batches
from scale_cli.data.corpora import (
    WINDOWS,
    build_batches,
    cache_of,
    check_same_text,
    corpus_warnings,
    held_out_in_cache,
    open_held_out,
    open_sources,
    training_sources,
)
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.errors import (
    ConfigError,
    CorpusError,
    OutOfMemory,
    RunFolderError,
    is_out_of_memory,
    one_line,
)
from scale_cli.heap import hand_back_large_tensors
from scale_cli.methods.recipes import Training, make_hooks
from scale_cli.model.heads import ModelPair, Streams, beside_new_tokens
from scale_cli.processes import gathered, main_decides, main_first, on_main, share
from scale_cli.runs.method_folder import load_trained
from scale_cli.runs.opened import MethodFolder, Run
from scale_cli.runs.precision import slow_while_training, slower_than_here
from scale_cli.storage.atomic import is_whole, read_json, verify_folder
from scale_cli.terminal import Log
from scale_cli.training.checkpoint import branch_point_at, init_from, load_checkpoint
from scale_cli.training.metrics_log import MetricsLog
from scale_cli.training.objective import for_training, settings_on
from scale_cli.training.observing import Observer
from scale_cli.training.optimiser import build_optimiser, kinds_of_parameters
from scale_cli.training.rate_search import find_rate
from scale_cli.training.records import BranchPoint, TrainState
from scale_cli.training.sharding import (
    check_machines,
    is_sharded,
    shard_for_evaluation,
    shard_model,
)
from scale_cli.training.tracking import check_trackers
from scale_cli.training.training_run import TrainingRun
from scale_cli.upscale.building import MethodModel
from scale_cli.values import counted


def open_accelerator(run: Run) -> Accelerator:
    hand_back_large_tensors()
    # `no`, whatever the launcher was told: each step uses autocast itself, as the config says.
    return Accelerator(
        mixed_precision="no",
        log_with=list(run.config.train.trackers) or None,
        project_dir=run.folder.tensorboard,
        # Buffers do not change, so they are not sent. Gradients lie in the exchange buckets, and
        # are not kept twice.
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
        ],
    )


def check_to_train(run: Run, accelerator: Accelerator) -> None:
    """Check all that can be known before the first write."""
    config = run.config
    run.folder.check_upscaled()
    run.check(training_sources(config), accelerator.num_processes)
    check_machines(config.train, accelerator.num_processes)
    check_trackers(config.train.trackers)


@contextmanager
def explaining_out_of_memory(config: RunConfig, accelerator: Accelerator) -> Iterator[None]:
    """If memory runs out, raise OutOfMemory, which says what to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        at_once = config.train.sequences_at_once(accelerator.num_processes)
        raise OutOfMemory(
            f"out of memory on {accelerator.device.type} while training ({one_line(error)}): lower "
            f"train.micro_batch_size (now {at_once}) or corpus.sequence_length (now "
            f"{config.corpus.sequence_length:,}), or set train.activation_checkpointing=true or, with several "
            "processes, train.sharding=all; `scale plan CONFIG` says what a step needs"
        ) from None


def finished_state(run: Run, accepted: Collection[str], log: Log) -> TrainState | None:
    """Return the state of a finished run, checked; None if it has to be trained, or trained on.

    It must still have its files, its tokenizer and its config. If the base or the text lies
    elsewhere now, or an accepted key has changed, their content is compared too.
    """
    config = run.config
    final = MethodFolder(run.folder.final, run)
    if not final.path.is_dir():
        return None
    if "train.max_steps" in accepted and config.train.max_steps > final.config.train.max_steps:
        return None
    verify_folder(final.path)
    final.check_base()
    if final.check_same_run(TRAIN_SECTIONS, LOCATION_KEYS, accepted):
        final.load_to_train()  # compares a base that has moved with the recorded hashes
        corpora = open_sources(config, config.corpus.sources, final.tokenizer)
        check_same_text(final.path, [corpus.name for corpus in corpora])
    elif other := _other_text(final):
        log(
            f"warning: {final.path}: the training text of {other} has changed since; to train on it, choose another "
            "output_dir"
        )
    log(f"done already   {final.path}")
    return TrainState.load(final.path)


def _other_text(final: MethodFolder) -> str:
    """Return the sources whose text is another now than a finished run read; text that is gone is none."""
    config = final.run.config
    cache = cache_of(config, final.tokenizer)
    changed = []
    for source, before in zip(config.corpus.sources, read_json(final.path / CORPORA), strict=True):
        with suppress(CorpusError):
            if source.is_local and cache.name_of(source) != before:
                changed.append(source.name)
    return ", ".join(changed)


@dataclass(frozen=True)
class Texts:
    """The text of a run, tokenised."""

    corpora: list[TokenisedCorpus]  # to train on
    batches: Batches
    held_out: list[TokenisedCorpus]  # to evaluate on during training
    by_base_tokens: list[TokenisedCorpus]  # the same, if the run has tokens of its own


@dataclass(frozen=True)
class Position:
    """Where a run goes on."""

    state: TrainState
    branch_point: BranchPoint | None = None  # what the weights began as, if another run made it
    saved_step: int | None = None  # of the checkpoint that it has already


def open_training(
    run: Run,
    accelerator: Accelerator,
    resumed_from: MethodFolder | None,
    log: Log,
) -> TrainingRun:
    """Load the model and its text, and restore a checkpoint of the run, if it resumes from one.

    A run that does not resume may begin with the weights of another one (`train.init_from`).
    """
    config = run.config
    start = run.open_start()
    _log_processes(run, accelerator, log)
    texts = _open_text(start, accelerator, log)
    if resumed_from is not None:
        _check_goes_on(resumed_from, texts)
    else:
        _check_made_for(start.path, texts.corpora)
    initialised_from = init_from(run) if resumed_from is None else None

    model, untouched = _open_model(start, resumed_from, initialised_from)
    wrapped = _prepare(model, config, accelerator)
    optimiser = build_optimiser(model, config.train)  # it keeps nothing before the first step
    for kind in _without_tensors(model, config.train):
        log(
            f"warning: train.lr_multipliers.{kind}: has no effect, since nothing of that kind trains"
        )
    training = Training(
        config=config, model=model, wrapped=wrapped, accelerator=accelerator, batches=texts.batches
    )
    hooks = make_hooks(training)

    if resumed_from is not None:
        load_checkpoint(resumed_from, model, optimiser, hooks)
        position = _position_in(resumed_from, texts, log)
    else:
        branch_point = None if initialised_from is None else branch_point_at(initialised_from)
        position = Position(TrainState(windows=WINDOWS), branch_point)
    state = position.state
    if config.train.lr != "auto":
        state = replace(
            state, lr=None
        )  # that one may have been accepted in place of what was found
    elif state.lr is None:
        log("finding        the learning rate (train.lr: auto)")
        found = find_rate(training, texts.corpora)
        log(f"rate           {found}")
        state = replace(state, lr=found.lr)

    observer = None
    if config.train.eval_every_steps:
        observer = Observer(
            config=config,
            model=model,
            wrapped=wrapped,
            observed=_beside_base(model, untouched, config.train, accelerator),
            base=start.record,
            tokenizer=start.tokenizer,
            held_out=texts.held_out,
            by_base_tokens=texts.by_base_tokens,
        )
    metrics = None
    if accelerator.is_main_process:
        metrics = MetricsLog(run.folder.metrics, state.step, evaluation_due=state.evaluation_due)
    return TrainingRun(
        start=start,
        corpora=texts.corpora,
        batches=texts.batches,
        accelerator=accelerator,
        model=model,
        wrapped=wrapped,
        optimiser=optimiser,
        hooks=hooks,
        observer=observer,
        state=state,
        metrics=metrics,
        branch_point=position.branch_point,
        saved_step=position.saved_step,
    )


def _without_tensors(model: MethodModel, train: TrainConfig) -> list[str]:
    """Return the kinds of tensors whose rate the config sets and of which the model trains none."""
    given = train.lr_multipliers.model_dump(exclude_none=True)
    return sorted(given.keys() - set(kinds_of_parameters(model).values()))


def _prepare(model: MethodModel, config: RunConfig, accelerator: Accelerator) -> Any:
    """Move a model to the device of this process, and return the module to train."""
    settings = settings_on(accelerator.device.type, config)
    if settings.sharding != "none" and accelerator.num_processes > 1:
        # Not by Accelerate, which would wrap the model again.
        return shard_model(model, settings, accelerator)
    return accelerator.prepare(for_training(model.to(accelerator.device), settings))


def _check_made_for(upscaled: Path, corpora: Sequence[TokenisedCorpus]) -> None:
    """Refuse a start that other text has decided."""
    names = [corpus.name for corpus in corpora]
    if (upscaled / CORPORA).is_file() and read_json(upscaled / CORPORA) != names:
        raise RunFolderError(
            f"{upscaled}: was made for another training text; run `scale upscale` again"
        )


def _check_goes_on(resumed_from: MethodFolder, texts: Texts) -> None:
    """Refuse a checkpoint of other text, of the same text in other windows, or whose rate is not to be found now."""
    check_same_text(resumed_from.path, [corpus.name for corpus in texts.corpora])
    state = TrainState.load(resumed_from.path)
    if resumed_from.run.config.train.lr == "auto" and state.lr is None:
        raise ConfigError(
            f"train.lr: auto finds a rate before the first step, and {resumed_from.path} has trained by one that the "
            "config named; set train.lr to a number"
        )
    if state.windows != WINDOWS:
        raise RunFolderError(
            f"{resumed_from.path}: was trained by another version, which cut text into other windows; go on with "
            "that version, or start anew in another output_dir"
        )


def _position_in(resumed_from: MethodFolder, texts: Texts, log: Log) -> Position:
    """Return where a checkpoint's run goes on."""
    state = _without_stale_best(resumed_from, texts.held_out, log)
    # `--resume PATH` may name a checkpoint outside this run, which then has none of that step.
    of_run = resumed_from.run.folder.checkpoint(state.step)
    is_of_run = resumed_from.path.resolve() == of_run.resolve()
    return Position(
        state,
        branch_point=BranchPoint.load_if_there(resumed_from.path),
        saved_step=state.step if is_of_run else None,
    )


def _beside_base(
    model: Any, untouched: PreTrainedModel | None, train: TrainConfig, accelerator: Accelerator
) -> Streams:
    """Return a model with two heads: with its untouched base beside it, if it does not hold it."""
    if untouched is None:
        widened: Streams = model
        return widened
    observed = ModelPair(beside_new_tokens(untouched, model), model)
    if is_sharded(model) and train.sharding == "all":
        shard_for_evaluation(untouched, accelerator)
    else:
        untouched.to(accelerator.device)
    return observed


def _log_processes(run: Run, accelerator: Accelerator, log: Log) -> None:
    """Log the devices and the precision, and warn if a precision is slow."""
    config = run.config
    device_type = accelerator.device.type
    log(
        f"processes      {accelerator.num_processes} x {device_type}, {config.train.mixed_precision} autocast, "
        f"base in {config.model.dtype}"
    )
    for warning in (
        *slow_while_training(config, device_type),
        *slower_than_here(run.given, config),
    ):
        log(f"warning: {warning}")


def _open_model(
    start: MethodFolder, resumed_from: MethodFolder | None, initialised_from: MethodFolder | None
) -> tuple[Any, PreTrainedModel | None]:
    """Return the model to train, and an untouched base if evaluations need one beside it."""
    config = start.run.config
    untouched = None
    if config.train.eval_every_steps and not config.method.definition.widens:
        model, untouched = start.load_beside_base()
    else:
        model = start.load_to_train()
    if initialised_from is not None:
        load_trained(model, initialised_from.path)
    before = resumed_from or initialised_from
    if before is not None and hasattr(model.config, "start"):
        # Rates follow what the blocks began as, not what this run's text would make of them.
        model.config.start = read_json(before.path / "config.json").get("start", {})
    return model, untouched


def _open_text(start: MethodFolder, accelerator: Accelerator, log: Log) -> Texts:
    """Open a run's text; log what there is.

    The main process tokenises what is not in the cache; on another machine with a cache of its own,
    one process does.
    """
    config = start.run.config
    tokenizer = start.tokenizer
    corpora = main_first(lambda: open_sources(config, config.corpus.sources, tokenizer))
    held_out: list[TokenisedCorpus] = []
    by_base_tokens: list[TokenisedCorpus] = []
    if config.train.eval_every_steps:
        held_out, by_base_tokens = open_held_out(config, tokenizer, start.run.base_tokenizer)
    names = [corpus.name for corpus in (*corpora, *held_out, *by_base_tokens)]
    of_all = gathered(names, share())
    on_main(lambda: _check_same_names(of_all))
    batches = build_batches(config, corpora, accelerator.num_processes)
    texts = Texts(corpora, batches, held_out, by_base_tokens)
    if not accelerator.is_main_process:
        return texts
    for source, corpus in zip(config.corpus.sources, corpora, strict=True):
        losses = corpus.ledger.described_losses()
        dropped = f"; dropped {losses}" if losses else ""
        read = f"{counted(len(corpus), 'document')}, {corpus.ledger.num_tokens:,} tokens{dropped}"
        log(f"corpus         {source.name}{' (replay)' if source.role == 'replay' else ''}: {read}")
    for warning in corpus_warnings(
        config, corpora, held_out or held_out_in_cache(config, tokenizer)
    ):
        log(f"warning: {warning}")
    return texts


def _check_same_names(of_all: list[list[str]]) -> None:
    """Raise CorpusError if processes read different text, as machines without a common disk may."""
    for of_source in zip(*of_all, strict=True):
        if len(different := sorted(set(of_source))) > 1:
            names = ", ".join(different)
            raise CorpusError(
                f"corpus: machines read different text ({names}); copy the same files to each machine"
            )


def _without_stale_best(
    resumed_from: MethodFolder, held_out: Sequence[TokenisedCorpus], log: Log
) -> TrainState:
    """Return the training state, without its best if that checkpoint is gone or was scored
    otherwise.
    """
    state = TrainState.load(resumed_from.path)
    run = resumed_from.run
    if state.best is None or run.config.train.max_forgetting is None:
        return replace(state, best=None)
    best = run.folder.checkpoint(state.best.step)
    if not best.is_dir():
        reason = "is missing"
    elif changed := scored_otherwise(resumed_from.config, run.config):
        reason = f"was scored with other settings ({', '.join(changed)})"
    elif state.best.texts != [corpus.name for corpus in held_out]:
        reason = "was scored on other held-out text"
    elif not main_decides(lambda: is_whole(best)):
        reason = "is damaged"
    else:
        return state
    log(
        f"warning: {best}: the best checkpoint so far {reason}; the best is chosen from later steps"
    )
    return replace(state, best=None)
