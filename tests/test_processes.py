"""Any verb under several processes, which are forks; `tests/integration/test_launcher.py` has them of a launcher."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import accelerate
import pytest
import torch

from scale_cli import processes
from scale_cli.commands import train as train_verb
from scale_cli.commands.run import run_pipeline
from scale_cli.commands.verify import verify
from scale_cli.config.load import load_config
from scale_cli.config.schema import leaves
from scale_cli.errors import CheckFailed, EndedElsewhere, UsageError
from scale_cli.evaluation.results import Report
from scale_cli.processes import (
    check_launch,
    cpu_precision,
    fast_precision,
    on_main,
    process_state,
    refuse_several,
    slow_in_bfloat16,
)
from scale_cli.runs.folder import TRAINED, RunFolder
from scale_cli.storage.atomic import load_tensors
from scale_cli.training import loop, optimiser
from scale_cli.training.interruption import StopRequest
from scale_cli.training.metrics_log import read_records
from scale_cli.training.records import TrainState
from tests.command_line import Scale
from tests.torture.tiny_run import Runs, write_base_and_texts
from tests.torture.verbs import ended_group, run_verb, start_group
from tests.vocabulary.tokenizers_at_hand import KOREAN

pytestmark = pytest.mark.long


def files(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*")}


def losses(run: RunFolder) -> list[float]:
    """Return what was logged of losses and of evaluations."""
    return [
        value
        for record in read_records(run.metrics)
        for key, value in leaves(record)
        if key.startswith(("loss", "evaluation_", "best")) and isinstance(value, int | float)
    ]


# All processes have to agree on which weights are kept.
ROUTE = (
    "train.max_steps=4",
    "train.eval_every_steps=2",
    "train.max_forgetting=0",
    "export.format=plain",
)
# The base's predictions are learned from. AdamW divides gradients by their size, so of those near 0
# it would magnify the rounding; this epsilon is above that.
ASKING_THE_BASE = (
    "method={variant: preserve, distillation: {weight: 1}}",
    "train.adam_epsilon=1e-4",
    "corpus.sources.1.role=replay",
    "train.max_steps=4",
    "train.eval_every_steps=null",
)


# Muon's products in bfloat16 would magnify the rounding of the gradients' sums.
EXACT = torch.float64


def multiply_exactly() -> None:
    vars(optimiser)["dtype_of_products"] = lambda _: EXACT


@pytest.mark.parametrize("overrides", [ROUTE, ASKING_THE_BASE], ids=["route", "asking the base"])
def test_two_processes_run_all_verbs_as_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    write_base_and_texts(tmp_path, num_hidden_layers=2)
    (tmp_path / "one.txt").write_text("\n\n".join([KOREAN[:90], KOREAN[90:]] * 3))
    runs = Runs(tmp_path)
    monkeypatch.setattr(optimiser, "dtype_of_products", lambda _: EXACT)
    run_pipeline(load_config(runs.config("one"), list(overrides)))
    group = start_group(
        "run", str(runs.config("two")), *overrides, num_processes=2, hook=multiply_exactly
    )
    ends = ended_group(group)
    assert [ended.exit_code for ended in ends] == [0, 0], ends
    for said in ("== upscale", "processes      2 x cpu", "== evaluate", "== export"):
        assert sum(ended.printed.count(said) for ended in ends) == 1, "two work, one speaks"
    one, two = (runs.folder(name) for name in ("one", "two"))
    assert files(one.root) == files(two.root)
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    chosen = [TrainState.load(run.final) for run in (one, two)]
    assert chosen[0].step == chosen[1].step
    assert (chosen[0].best is not None) == (overrides is ROUTE)
    if overrides is ASKING_THE_BASE:
        trained = load_tensors(one.final / TRAINED)
        for name, tensor in load_tensors(two.final / TRAINED).items():
            torch.testing.assert_close(tensor, trained[name], rtol=1e-5, atol=1e-6, msg=name)
    of_runs = (Report.load(run.evaluation).corpora for run in (one, two))
    for alone, told in zip(*of_runs, strict=True):
        for head, figures in alone.heads.items():
            assert told.heads[head].bits_per_byte == pytest.approx(figures.bits_per_byte, rel=1e-4)
    verify(two.root)


def test_where_the_main_one_of_two_processes_is_refused_both_end_as_it_does_and_one_says_why(
    tmp_path: Path,
) -> None:
    write_base_and_texts(tmp_path)
    (tmp_path / "one.txt").unlink()
    verbs = start_group("prepare", str(Runs(tmp_path).config("two")), num_processes=2)
    ends = [verb.ended() for verb in verbs]
    assert [ended.exit_code for ended in ends] == [2, 2], ends
    assert sum("error: " in ended.printed for ended in ends) == 1, ends


def count_waits() -> None:
    """Have a run print what it asked of tensors in its steps, and what is exchanged."""
    waits: Counter[str] = Counter()

    def within(place: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
                    patch.setattr(torch.Tensor, name, counted(name, getattr(torch.Tensor, name)))
                return work(*args)

        def counted(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
            def noting(*args: Any) -> Any:
                waits[f"{name} in {place}"] += 1
                return read(*args)

            return noting

        return counting

    loop._Loop._take_step = within("a step", loop._Loop._take_step)  # type: ignore[method-assign]
    StopRequest.agreed = within("agreeing", StopRequest.agreed)  # type: ignore[method-assign]
    run_loop = loop.run_loop

    def run_and_tell(run: Any) -> None:
        run_loop(run)
        wrapped = run.wrapped
        print(dict(waits), wrapped.broadcast_buffers, wrapped.gradient_as_bucket_view)

    vars(train_verb)["run_loop"] = run_and_tell


def test_between_logs_no_process_of_several_waits_for_its_device(tmp_path: Path) -> None:
    """What all were asked by is read off the host, where it came to in the step before."""
    write_base_and_texts(tmp_path)
    runs = Runs(tmp_path)
    config = str(runs.config("two"))
    assert run_verb("upscale", config).exit_code == 0
    keys = "max_steps=5 log_every_steps=5 save_every_steps=5 eval_every_steps=null"
    few = [f"train.{key}" for key in keys.split()]
    for ended in ended_group(start_group("train", config, *few, num_processes=2, hook=count_waits)):
        assert ended.exit_code == 0, ended.printed
        assert "{'item in agreeing': 3} False True" in ended.printed


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("raised", "code"), [(None, 0), (CheckFailed("x"), 3), (SystemExit(143), 1), (MemoryError(), 1)]
)
def test_only_the_main_process_works_and_the_others_end_as_it_does_however_it_fails(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException | None, code: int
) -> None:
    told: list[int] = []

    def highest(number: int, _group: object) -> int:
        told.append(number)
        return max(told)

    def work() -> str:
        if raised is not None:
            raise raised
        return "done"

    monkeypatch.setattr(processes, "are_several", lambda: True)
    monkeypatch.setattr(processes, "_highest", highest)
    monkeypatch.setattr(processes, "is_main", lambda: True)
    with nullcontext() if raised is None else pytest.raises(type(raised)):
        assert on_main(work) == "done"
    monkeypatch.setattr(processes, "is_main", lambda: False)
    with nullcontext() if raised is None else pytest.raises(EndedElsewhere) as ended:
        assert on_main(work) is None
    assert told == [code, 0]
    assert ended is None or ended.value.exit_code == code


@pytest.mark.parametrize(
    ("rank", "told"), [("0", "srun has started 4 independent processes"), ("1", "")]
)
def test_processes_of_srun_alone_are_refused_in_one_line_and_those_of_a_launcher_taken(
    scale: Scale, monkeypatch: pytest.MonkeyPatch, rank: str, told: str
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", rank)
    ended = scale("train", "absent.yaml")
    assert ended.exit_code == 2 and told in ended.stderr
    assert len(ended.stderr.splitlines()) == bool(told)
    monkeypatch.setenv("WORLD_SIZE", "16")
    check_launch()
    with pytest.raises(UsageError, match="one process"):
        refuse_several("init")


def test_without_one_dnn_bfloat16_is_slow_and_every_setting_that_uses_it_is_told_how_to_avoid_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert cpu_precision() == "no"
    settings = {"model.dtype=float32": False, "train.mixed_precision=no": True}
    (warning,) = slow_in_bfloat16("cpu", settings)
    assert "train.mixed_precision=no is many times faster" in warning
    assert slow_in_bfloat16("cuda", settings) == []


def test_the_fast_precision_is_that_of_the_device_and_not_of_the_cpu_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "cpu_precision", lambda: "bf16")
    assert fast_precision() == "bf16"
    monkeypatch.setattr(processes, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(processes, "computes_in_bfloat16", lambda: False)
    assert fast_precision() == "no"


@pytest.mark.parametrize(("accelerator", "on_cpu"), [("cuda", False), (None, True)])
def test_the_processor_is_taken_where_there_is_no_accelerator(
    monkeypatch: pytest.MonkeyPatch, accelerator: str | None, on_cpu: bool
) -> None:
    found = None if accelerator is None else torch.device(accelerator)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: found)
    monkeypatch.setattr(accelerate, "PartialState", lambda **given: given)
    assert cast(dict[str, object], process_state())["cpu"] == on_cpu
