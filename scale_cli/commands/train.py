"""The verb `scale train`: open everything, decide where to start, run the loop, write `final/`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate import Accelerator

from scale_cli.config.load import load_config
from scale_cli.config.same_run import LOCATION_KEYS, TRAIN_SECTIONS, check_same_run, scored_otherwise
from scale_cli.config.schema import RunConfig
from scale_cli.data.corpora import (
    check_same_text,
    open_sources,
    training_sources,
)
from scale_cli.errors import RunFolderError, StorageError
from scale_cli.evaluation.benchmark_opening import open_benchmarks_of
from scale_cli.model.heads import BaseAndTrained, HeadedModel
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.planning.counting import peak_tokens_per_s
from scale_cli.planning.device import device_name
from scale_cli.processes import on_main, process_state
from scale_cli.storage.atomic import (
    new_folder,
    remove_leftovers,
    save_tensors,
    verify_folder,
)
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.lock import claimed
from scale_cli.storage.metrics import MetricsLog
from scale_cli.storage.records import TRAINED, BranchPoint, TrainState
from scale_cli.training.anchors import start_to_decay_to
from scale_cli.training.averaging import averaged
from scale_cli.training.beginning import adopt_rates, is_longer, starting_point
from scale_cli.training.checkpoint import (
    RunMetadata,
    branch_point_at,
    check_base,
    describe_run,
    load_checkpoint,
)
from scale_cli.training.loop import TrainingRun, run_loop
from scale_cli.training.observing import Observer
from scale_cli.training.optimiser import build_optimiser
from scale_cli.training.sharding import gather_trained, hash_parts, is_sharded, shard_for_evaluation, shard_model
from scale_cli.training.tensor_rates import TensorRates, set_tensor_rates
from scale_cli.training.text import hold_to_beginning, open_text
from scale_cli.training.tracking import check_trackers, tracked
from scale_cli.upscale.base import load_base
from scale_cli.upscale.folder import MethodModel, load_trained, read_method
from scale_cli.upscale.method import two_headed
from scale_cli.upscale.objective import for_training
from scale_cli.upscale.session import check_before_writing, open_folder, open_start
from scale_cli.upscale.vocabulary import beside_new_tokens

if TYPE_CHECKING:
    from torch import nn

    from scale_cli.evaluation.benchmarks import OpenedBenchmarks


@dataclass(frozen=True)
class TrainSummary:
    """What was trained, for the terminal."""

    folder: Path
    state: TrainState

    def lines(self) -> list[str]:
        """Return aligned lines."""
        state, best = self.state, self.state.best
        rate = f" ({state.tokens_per_s:,.0f} tokens/s)" if state.tokens_per_s else ""
        kept = f", of step {best.step:,}: {best.forgetting:+.4f} bits/byte on what is to be kept" if best else ""
        return [
            f"trained        {state.step:,} steps, {state.num_tokens:,} tokens "
            f"in {state.stepping_s:,.0f} s{rate}; "
            f"besides {state.evaluating_s:,.0f} s evaluating, {state.saving_s:,.0f} s saving",
            f"written        {self.folder}{kept}",
        ]


def train(
    config: RunConfig, resume: str | None, log: Callable[[str], None], accepted: Collection[str] = ()
) -> TrainSummary:
    """Train what the method trains, from `upscaled/` or from a checkpoint, and write `final/`."""
    process_state()  # joins the process group, with our own time-out
    # Autocast is the step's, by the config alone, whatever the launcher was told.
    accelerator = Accelerator(mixed_precision="no")
    log = log if accelerator.is_main_process else lambda _: None  # the main process alone speaks
    run_folder = RunFolder(config.output_dir)
    if resume == "auto" and run_folder.final.is_dir() and not is_longer(run_folder.final, config, accepted):
        return _finished(run_folder.final, config, accepted)
    if not run_folder.upscaled.is_dir():
        raise RunFolderError(f"{run_folder.upscaled}: not there; run `scale upscale` first")
    check_before_writing(config, training_sources(config), accelerator.num_processes)
    check_trackers(config.train.trackers)
    benchmarks = open_benchmarks_of(config.evaluation) if config.train.eval_benchmarks_every_steps else None
    for skipped in benchmarks.skipped if benchmarks is not None else ():
        log(f"warning: {skipped.name} is not measured: {skipped.reason}")
    with ExitStack() as held:
        on_main(lambda: _claim(run_folder, held))
        start = starting_point(config, resume, log, accepted)
        run = _open_run(config, accelerator, start, benchmarks, log)
        on_main(lambda: held.enter_context(tracked(run.metrics, config, run.state.step)))
        run_loop(run)
        _write_final(run, _put_back_best(run, log))
    return TrainSummary(run_folder.final, run.state)


def _claim(run_folder: RunFolder, held: ExitStack) -> None:
    """Keep every other launch out of the run, and remove what a killed one has left."""
    held.enter_context(claimed(run_folder.root))
    remove_leftovers(run_folder.checkpoints)


def _finished(final: Path, config: RunConfig, accepted: Collection[str]) -> TrainSummary:
    try:
        session = open_folder(final, config.model)
    except StorageError as error:
        raise StorageError(f"{error}; remove {final}, and --resume auto makes it again") from None
    if check_same_run(final, config, TRAIN_SECTIONS, LOCATION_KEYS, accepted):
        session.load_to_train(config.seed)  # a base that lies elsewhere than it did is held to what it was
        check_same_text(final, open_sources(config, config.corpus.sources, session.tokenizer), config)
    return TrainSummary(final, TrainState.load(final))


def _put_back_best(run: TrainingRun, log: Callable[[str], None]) -> TrainState:
    """Return what `final/` is of: the last step, or where the best is kept, that, the model being put back to it."""
    best, bound = run.state.best, run.config.train.max_forgetting
    if best is None or bound is None:
        return run.state
    if best.forgetting > bound:
        lost = f"{best.forgetting:+.4f} bits/byte at step {best.step:,}"
        log(f"warning: train.max_forgetting {bound:g}: no evaluation kept within it; the least was lost, {lost}")
    if best.step == run.state.step:
        return run.state
    checkpoint = run.folder.checkpoint(best.step)
    on_main(lambda: verify_folder(checkpoint))
    of_best = load_config(checkpoint / "scale.yaml").train
    return load_checkpoint(checkpoint, run.model, run.optimiser, of_best)


def _write_final(run: TrainingRun, state: TrainState) -> None:
    """Write `final/`: a method folder of whole tensors, whatever was sharded; of their average, where there is one."""
    check_base(run.metadata, run.model, state.step)
    with averaged(run.optimiser):
        trained = gather_trained(run.model, run.accelerator)
        if run.accelerator.is_main_process:
            with new_folder(run.folder.final) as partial:
                describe_run(partial, run.metadata, run.model, state)
                save_tensors(partial / TRAINED, trained)
                run.cost().save(partial)
    run.accelerator.wait_for_everyone()


def _open_run(
    config: RunConfig,
    accelerator: Accelerator,
    start: Path | None,
    benchmarks: OpenedBenchmarks | None,
    log: Callable[[str], None],
) -> TrainingRun:
    run_folder, settings = RunFolder(config.output_dir), config.train
    session = open_start(config)
    main = accelerator.is_main_process
    log(f"processes      {accelerator.num_processes} x {accelerator.device.type}, {settings.mixed_precision} autocast")
    text = open_text(config, session, accelerator, log)
    init_from = None if start is not None or settings.init_from is None else Path(settings.init_from)
    hold_to_beginning(text, config, start, init_from, log)
    model = session.load_to_train(config.seed)
    base_weights = start_to_decay_to(model, settings)
    if init_from is not None:
        load_trained(model, init_from)
    if (begun := start or init_from) is not None:
        adopt_rates(model, begun)
    wrapped = _wrapped(model, config, accelerator)
    optimiser = build_optimiser(model, settings, base_weights, by_tensor=config.method.variant == "adept")
    state, branch_point = TrainState(), None
    if start is not None:
        state = load_checkpoint(start, model, optimiser, settings)
        state = _with_best_to_compare(state, start, config, log)
        set_tensor_rates(optimiser, state.tensor_rates)
        branch_point = BranchPoint.load_if_there(start)
    elif init_from is not None:
        if settings.init_moments == "kept":
            load_checkpoint(init_from, model, optimiser, None)
        branch_point = branch_point_at(init_from, settings.init_moments)
    base_parts = hash_parts(model.base) if is_sharded(model) and isinstance(model, ScaleForCausalLM) else {}
    # What was measured to upscale is there alone.
    method = config.method.model_copy(update={"adept": read_method(session.folder).adept})
    saved, observer = run_folder.checkpoint(state.step), None
    if settings.observes:
        observed = _observed(model, config, accelerator)
        observer = Observer(config, model, wrapped, observed, session.tokenizer, text.held_out, benchmarks)
    peak = peak_tokens_per_s(config, device_name(accelerator.device), accelerator.num_processes) if main else None
    return TrainingRun(
        config=config,
        accelerator=accelerator,
        model=model,
        wrapped=wrapped,
        metadata=RunMetadata(
            config, method, session.record, text.contents, base_parts, text.ledgers, text.batches, branch_point
        ),
        optimiser=optimiser,
        batches=text.batches,
        observer=observer,
        state=state,
        tensor_rates=TensorRates.of(config, accelerator.unwrap_model(wrapped), text.batches),
        metrics=MetricsLog(run_folder.metrics, state.step, evaluation_due=state.evaluation_due) if main else None,
        peak_tokens_per_s=peak,
        # `--resume PATH` may name a checkpoint outside this run, which then has none of that step yet.
        saved_step=None if start is None or start.resolve() != saved.resolve() else state.step,
    )


def _wrapped(model: MethodModel, config: RunConfig, accelerator: Accelerator) -> nn.Module:
    """Return the model as it is run: sharded, which Accelerate would wrap once more, or by Accelerate."""
    if config.train.sharding != "none" and accelerator.num_processes > 1:
        return shard_model(model, accelerator, config.train)
    return accelerator.prepare(for_training(model.to(accelerator.device), config.train))


def _with_best_to_compare(state: TrainState, start: Path, config: RunConfig, log: Callable[[str], None]) -> TrainState:
    """Return the state, its best so far dropped where its checkpoint is gone or was scored by other settings."""
    if state.best is None:
        return state
    best = RunFolder(config.output_dir).checkpoint(state.best.step)
    if not best.is_dir():
        reason = "is not there"
    elif changed := scored_otherwise(load_config(start / "scale.yaml"), config):
        reason = f"was scored otherwise ({', '.join(changed)})"
    else:
        return state
    log(f"warning: {best}: the best so far {reason}; chosen from the steps to come")
    return replace(state, best=None)


def _observed(model: MethodModel, config: RunConfig, accelerator: Accelerator) -> HeadedModel:
    """Return what this process scores in a periodic evaluation."""
    if not is_sharded(model) or isinstance(model, ScaleForCausalLM) or config.train.sharding == "expansion":
        return two_headed(model, config.model)
    base = load_base(config.model)
    beside = beside_new_tokens(base, model)
    shard_for_evaluation(base, accelerator)
    return BaseAndTrained(beside, model)
