"""The verb `scale train`: open everything, decide where to start, run the loop, write `final/`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from transformers import PreTrainedModel

from scale_cli.config.schema import LOCATION_KEYS, TRAIN_SECTIONS, RunConfig, scored_otherwise
from scale_cli.config.training import TrainConfig
from scale_cli.data.batches import Batches
from scale_cli.data.corpora import (
    build_batches,
    check_same_text,
    corpus_warnings,
    held_out_in_cache,
    open_sources,
    training_sources,
)
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.errors import CorpusError, OutOfMemory, RunFolderError, is_out_of_memory, one_line
from scale_cli.evaluation.benchmarks import open_benchmarks_of
from scale_cli.methods.recipes import Training, make_hooks
from scale_cli.model.heads import BaseAndTrained, HeadedModel
from scale_cli.planning import peak_tokens_per_s
from scale_cli.processes import (
    all_succeed,
    device_name,
    gathered,
    group_beside,
    main_first,
    on_main,
    process_state,
    share,
    slow_in_bfloat16,
)
from scale_cli.runs.folder import TRAINED
from scale_cli.runs.method_folder import beside_base, beside_new_tokens, load_trained
from scale_cli.runs.opened import MethodFolder, Run
from scale_cli.storage.atomic import (
    claimed,
    new_folder,
    read_json,
    remove_leftovers,
    save_tensors,
    verify_folder,
)
from scale_cli.terminal import Log
from scale_cli.training.checkpoint import (
    branch_point_at,
    init_from,
    load_checkpoint,
    starting_point,
)
from scale_cli.training.loop import run_loop
from scale_cli.training.metrics_log import MetricsLog
from scale_cli.training.objective import for_training, settings_on
from scale_cli.training.observing import Observer
from scale_cli.training.optimiser import build_optimiser
from scale_cli.training.records import BranchPoint, TrainState
from scale_cli.training.run import TrainingRun
from scale_cli.training.sharding import (
    check_machines,
    gather_trained,
    is_sharded,
    parts_here,
    shard_for_evaluation,
    shard_model,
)
from scale_cli.training.tracking import check_trackers, tracked
from scale_cli.upscale.base_record import tensor_sha256
from scale_cli.upscale.building import MethodModel

if TYPE_CHECKING:
    from torch import nn

    from scale_cli.evaluation.benchmark_tasks import OpenedBenchmarks


def train(
    config: RunConfig, resume: str | None, log: Log, accepted: Collection[str] = ()
) -> TrainState:
    """Train from `upscaled/` or from a checkpoint, and write `final/`; return its state: the last step's or the best.

    `resume` is None, `auto` or a checkpoint's path; `accepted` are the keys that may have changed since the run began.
    A finished run is only checked under `auto`, unless `accepted` allows the config to ask for more steps now.
    """
    process_state()  # joins the process group, with our own time-out
    run = Run(config)
    # `no`, whatever the launcher was told: each step uses autocast itself, as the config says.
    accelerator = Accelerator(
        mixed_precision="no",
        log_with=list(config.train.trackers) or None,
        project_dir=run.folder.tensorboard,
        # Buffers do not change, so they are not sent. Gradients lie in the exchange buckets, and are not kept twice.
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
        ],
    )
    log = log if accelerator.is_main_process else lambda _: None  # only the main process logs
    final = MethodFolder(run.folder.final, run)
    goes_on = (  # a finished run that is to be longer now: it resumes from its last checkpoint
        "train.max_steps" in accepted
        and final.path.is_dir()
        and config.train.max_steps > final.config.train.max_steps
    )
    if resume == "auto" and final.path.is_dir() and not goes_on:
        _check_finished(final, accepted)
        log(f"done already   {final.path}")
        return TrainState.load(final.path)
    if not run.folder.upscaled.is_dir():
        raise RunFolderError(f"{run.folder.upscaled}: does not exist; run `scale upscale` first")
    run.check(training_sources(config), accelerator.num_processes)
    check_machines(config.train, accelerator.num_processes)
    check_trackers(config.train.trackers)
    benchmarks = (
        open_benchmarks_of(config.evaluation) if config.train.eval_benchmarks_every_steps else None
    )
    for skipped in benchmarks.skipped if benchmarks is not None else ():
        log(f"warning: {skipped.name} is not measured: {skipped.reason}")
    accelerator.wait_for_everyone()  # the main process removes leftovers; the others have looked through them by now
    with ExitStack() as held:
        on_main(lambda: held.enter_context(claimed(run.folder.root)))
        on_main(lambda: remove_leftovers(run.folder.checkpoints))  # what a killed launch has left
        begun = starting_point(run, resume, log, accepted)
        held.enter_context(_explaining_out_of_memory(config, accelerator))
        _log_processes(config, accelerator, log)
        training = _open_training(run, accelerator, begun, benchmarks, log)
        on_main(lambda: held.enter_context(tracked(training.metrics, config, accelerator)))
        run_loop(training)
        kept = _put_back_best(training, log)
        _write_final(training, kept)
    _log_trained(final.path, training.state, log)
    return kept


def _log_trained(folder: Path, state: TrainState, log: Log) -> None:
    best = state.best
    rate = f" ({state.tokens_per_s:,.0f} tokens/s)" if state.tokens_per_s else ""
    kept = (
        f", the best step {best.step:,}: {best.forgetting:+.4f} bits/byte on retention text"
        if best
        else ""
    )
    log(
        f"trained        {state.step:,} steps, {state.num_tokens:,} tokens in {state.stepping_s:,.0f} s{rate}; "
        f"also {state.evaluating_s:,.0f} s evaluating, {state.saving_s:,.0f} s saving"
    )
    log(f"written        {folder}{kept}")
    if not state.num_tokens:
        log(
            "warning: no step had a token to learn; raise corpus.sequence_length, or look at the conversations' turns"
        )


@contextmanager
def _explaining_out_of_memory(config: RunConfig, accelerator: Accelerator) -> Iterator[None]:
    """If memory runs out, raise OutOfMemory, which says what to lower and what the plan expects."""
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


def _check_finished(final: MethodFolder, accepted: Collection[str]) -> None:
    """Check that a finished run still has its files, its tokenizer and its config.

    If the base or the text lies elsewhere now, or an accepted key has changed, compare their content too.
    """
    config = final.run.config
    verify_folder(final.path)
    final.check_base()
    if final.check_same_run(TRAIN_SECTIONS, LOCATION_KEYS, accepted):
        final.load_to_train()  # compares a base that has moved with the recorded hashes
        check_same_text(final.path, open_sources(config, config.corpus.sources, final.tokenizer))


def _open_training(
    run: Run,
    accelerator: Accelerator,
    begun: MethodFolder | None,
    benchmarks: OpenedBenchmarks | None,
    log: Log,
) -> TrainingRun:
    """Load the model and its text, and restore what `begun`, a checkpoint, or `train.init_from` has trained."""
    config, settings, start, main = (
        run.config,
        run.config.train,
        run.open_start(),
        accelerator.is_main_process,
    )
    corpora, held_out, batches = _open_text(start, accelerator, log)
    if begun is not None:
        check_same_text(begun.path, corpora)
    trunk = init_from(run) if begun is None else None
    model: Any
    untouched = None
    if settings.observes and not config.method.definition.widens:
        model, untouched = start.load_beside_base()
    else:
        model = start.load_to_train()
    if trunk is not None:
        load_trained(model, trunk.path)
    before = begun or trunk
    if before is not None and hasattr(
        model.config, "expansion_embedding_rms"
    ):  # rates follow the size E' first had
        model.config.expansion_embedding_rms = read_json(before.path / "config.json").get(
            "expansion_embedding_rms"
        )
    wrapped = _wrapped(model, config, accelerator)
    optimiser = build_optimiser(model, settings)
    hooks = make_hooks(
        Training(
            config=config, model=model, wrapped=wrapped, accelerator=accelerator, batches=batches
        )
    )
    state, branch_point = TrainState(), None
    if begun is not None:
        load_checkpoint(begun, model, optimiser, hooks)
        state, branch_point = (
            _without_stale_best(begun, held_out, log),
            BranchPoint.load_if_there(begun.path),
        )
    elif trunk is not None:
        branch_point = branch_point_at(trunk)
    peak = (
        peak_tokens_per_s(config, device_name(accelerator.device), accelerator.num_processes)
        if main
        else None
    )
    saved, observer = run.folder.checkpoint(state.step), None
    if settings.observes:
        observed = _observed(model, untouched, settings, accelerator)
        observer = Observer(config, model, wrapped, observed, start.tokenizer, held_out, benchmarks)
    return TrainingRun(
        start=start,
        corpora=corpora,
        batches=batches,
        accelerator=accelerator,
        model=model,
        wrapped=wrapped,
        optimiser=optimiser,
        scaler=_scaler(settings, accelerator, state),
        hooks=hooks,
        observer=observer,
        state=state,
        metrics=MetricsLog(run.folder.metrics, state.step, evaluation_due=state.evaluation_due)
        if main
        else None,
        peak_tokens_per_s=peak,
        branch_point=branch_point,
        # `--resume PATH` may name a checkpoint outside this run, which then has no checkpoint of that step yet.
        saved_step=None if begun is None or begun.path.resolve() != saved.resolve() else state.step,
        base_parts=_hashes_of_base(model, config),
        beside=group_beside() if is_sharded(model) else None,
    )


def _log_processes(config: RunConfig, accelerator: Accelerator, log: Log) -> None:
    """Log the devices and the precision, and warn if a precision is slow."""
    device_type = accelerator.device.type
    avoided_by = {
        "train.mixed_precision=no": config.train.mixed_precision == "bf16",
        "evaluation.mixed_precision=no": config.train.observes
        and config.evaluation.mixed_precision == "bf16",
        "train.optimiser=adamw": config.train.optimiser == "muon",  # its products are in bfloat16
    }
    log(
        f"processes      {accelerator.num_processes} x {device_type}, {config.train.mixed_precision} autocast"
    )
    for warning in slow_in_bfloat16(device_type, avoided_by):
        log(f"warning: {warning}")


def _hashes_of_base(model: Any, config: RunConfig) -> dict[str, str]:
    """Return hashes of this process's part of a sharded base; {} for any other base, as `base.json` has its hashes."""
    if not is_sharded(model) or not config.method.definition.widens:
        return {}
    return {name: tensor_sha256(part) for name, part in parts_here(model.base).items()}


def _scaler(
    train: TrainConfig, accelerator: Accelerator, state: TrainState
) -> torch.amp.GradScaler:
    """Return the scaler of the loss, in the state of a checkpoint."""
    scaler = torch.amp.GradScaler(accelerator.device.type, enabled=train.mixed_precision == "fp16")
    if state.loss_scale is not None:
        reached = {"scale": state.loss_scale, "_growth_tracker": state.loss_scale_steps}
        scaler.load_state_dict(scaler.state_dict() | reached)
    return scaler


def _open_text(
    start: MethodFolder, accelerator: Accelerator, log: Log
) -> tuple[list[TokenisedCorpus], list[TokenisedCorpus], Batches]:
    """Return the training corpora, the corpora to evaluate on during training, and the batches; log what there is.

    The main process tokenises what is not in the cache; on another machine with a cache of its own, one process does.
    """
    config, tokenizer = start.run.config, start.tokenizer
    corpora = main_first(lambda: open_sources(config, config.corpus.sources, tokenizer))
    held_out = []
    if config.train.eval_every_steps:
        held_out = main_first(lambda: open_sources(config, config.evaluation.perplexity, tokenizer))
    names = [corpus.name for corpus in (*corpora, *held_out)]
    of_all = gathered(names, share())
    on_main(lambda: _check_same_names(of_all))
    batches = build_batches(config, corpora, accelerator.num_processes)
    if not accelerator.is_main_process:
        return corpora, held_out, batches
    for source, corpus in zip(config.corpus.sources, corpora, strict=True):
        losses = corpus.ledger.described_losses()
        dropped = f"; dropped {losses}" if losses else ""
        read = f"{len(corpus):,} documents, {corpus.ledger.num_tokens:,} tokens{dropped}"
        log(f"corpus         {source.name}{' (replay)' if source.role == 'replay' else ''}: {read}")
    for warning in corpus_warnings(
        config, corpora, held_out or held_out_in_cache(config, tokenizer)
    ):
        log(f"warning: {warning}")
    return corpora, held_out, batches


def _check_same_names(of_all: list[list[str]]) -> None:
    """Raise CorpusError if processes read different text, as machines without a common disk may."""
    for of_source in zip(*of_all, strict=True):
        if len(different := sorted(set(of_source))) > 1:
            names = ", ".join(different)
            raise CorpusError(
                f"corpus: machines read different text ({names}); copy the same files to each machine"
            )


def _wrapped(model: MethodModel, config: RunConfig, accelerator: Accelerator) -> nn.Module:
    """Return the model as it is run: prepared by Accelerate, or sharded here, since Accelerate would wrap it again."""
    settings = settings_on(accelerator.device.type, config)
    if settings.sharding != "none" and accelerator.num_processes > 1:
        return shard_model(model, settings, accelerator)
    return accelerator.prepare(for_training(model.to(accelerator.device), settings))


def _without_stale_best(
    begun: MethodFolder, held_out: Sequence[TokenisedCorpus], log: Log
) -> TrainState:
    """Return the training state, without its best if that checkpoint is gone or was scored otherwise."""
    state, run = TrainState.load(begun.path), begun.run
    if state.best is None:
        return state
    best = run.folder.checkpoint(state.best.step)
    if not best.is_dir():
        reason = "is missing"
    elif changed := scored_otherwise(begun.config, run.config):
        reason = f"was scored with other settings ({', '.join(changed)})"
    elif state.best.texts != [corpus.name for corpus in held_out]:
        reason = "was scored on other held-out text"
    else:
        return state
    log(
        f"warning: {best}: the best checkpoint so far {reason}; the best is chosen from later steps"
    )
    return replace(state, best=None)


def _observed(
    model: Any, untouched: PreTrainedModel | None, train: TrainConfig, accelerator: Accelerator
) -> HeadedModel:
    """Return the model with two heads that periodic evaluations score; `untouched` is the base of one that has none."""
    if untouched is None:
        return model
    if not is_sharded(model) or train.sharding == "expansion":
        return beside_base(model, untouched)
    beside = beside_new_tokens(untouched, model)
    shard_for_evaluation(untouched, accelerator)
    return BaseAndTrained(beside, model)


def _put_back_best(run: TrainingRun, log: Log) -> TrainState:
    """Return the state that `final/` holds, the last step or the best that is kept, and restore the model to it."""
    best, bound = run.state.best, run.config.train.max_forgetting
    if best is None or bound is None:
        return run.state
    if best.forgetting > bound:
        lost = f"{best.forgetting:+.4f} bits/byte at step {best.step:,}"
        log(
            f"warning: train.max_forgetting {bound:g}: every evaluation forgot more; the least was {lost}"
        )
    if best.step == run.state.step:
        return run.state
    kept = MethodFolder(run.folder.checkpoint(best.step), run.start.run)
    on_main(lambda: verify_folder(kept.path))
    state = load_checkpoint(kept, run.model, run.optimiser, run.hooks)
    return replace(
        state, best=best, evaluation_due=False
    )  # a signal may have saved it before it was evaluated


def _write_final(run: TrainingRun, state: TrainState) -> None:
    """Write `final/`: a method folder of unsharded tensors."""
    with all_succeed(run.beside):
        run.check_base(state.step, run.base_here())
    trained = gather_trained(run.model, run.accelerator)
    if run.accelerator.is_main_process:
        with new_folder(run.folder.final) as partial:
            run.describe(partial, state)
            save_tensors(partial / TRAINED, trained)
            run.cost().save(partial)
    run.accelerator.wait_for_everyone()
