"""`train.lr: auto`: a rate that is found on the run's own model and text, before the first step."""

import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scale_cli.config.schedule import learning_rate
from scale_cli.config.schema import RunConfig
from scale_cli.config.search import MOST_BRANCHES
from scale_cli.data.batches import IGNORED, Batches, MicroBatch, PackedWindows
from scale_cli.errors import ConfigError
from scale_cli.methods.lora import Lora, LoraConfig
from scale_cli.methods.recipes import Hook, Update
from scale_cli.storage.atomic import read_json
from scale_cli.training import objective, rate_search, step
from scale_cli.training.rate_search import (
    FoundRate,
    RateSearch,
    lowest_power,
    read_and_judged,
    useful_power,
)
from scale_cli.training.step import train_step
from tests.command_line import refused
from tests.training.conftest import MakeConfig, are_equal, finished, go_on, trained


def parabola(lowest: float, before: float) -> Callable[[int], float]:
    """Return the loss after an update at 2 ** power, which is lowest at the rate `lowest`."""
    return lambda power: before * (1 - 0.1 * (1 - (2.0**power / lowest - 1) ** 2))


@given(st.floats(-8.0, 8.0), st.floats(0.5, 20.0))
def test_a_parabola_is_followed_to_its_lowest_point_within_a_quarter(
    power: float, before: float
) -> None:
    found = useful_power(parabola(2.0**power, before), before)
    assert found == pytest.approx(power, abs=0.35)


def test_where_the_loss_stays_low_far_beyond_the_rate_is_where_that_begins() -> None:
    # What ckpt-eltec, which never saw Hangul, costs after one update of LoRA (docs/results/rates.md).
    losses = {-1: 12.1, 0: 10.235, 1: 9.481, 2: 9.441, 3: 9.320, 4: 9.156, 5: 9.246}
    assert 0.5 < useful_power(losses.__getitem__, 14.517) < 1.5


def test_where_noise_hides_the_beginning_of_a_gain_its_end_tells() -> None:
    # Gemma 3 by full fine-tuning, in bfloat16; at 3.3e-5, which the beginning tells, 30 steps learned nothing.
    losses = {0: 3.676, 1: 3.672, 2: 3.664, 3: 3.691, 4: 3.996}
    found = 1.25e-5 * 2 ** (useful_power(losses.__getitem__, 3.676) - 1)
    assert found == pytest.approx(2.0e-5, rel=0.05)


@given(st.integers(-6, 0))
def test_rates_that_overflow_are_left_downwards(last_finite: int) -> None:
    def loss(power: int) -> float:
        return math.inf if power > last_finite else parabola(2.0**last_finite, 5.0)(power)

    assert useful_power(loss, 5.0) == pytest.approx(last_finite, abs=0.35)


def test_where_no_rate_helps_it_is_half_of_the_highest_that_does_no_harm() -> None:
    # Gemma 3's LoRA by the gradient of one window.
    losses = {-2: 2.808, -1: 2.812, 0: 2.823, 1: 2.853}
    before = 2.807
    assert useful_power(lambda power: losses.get(power, before), before) == -3
    assert useful_power(lambda power: 5.0 + 2.0**power, 5.0) == -9
    assert useful_power(lambda _: math.inf, math.inf) == 0
    assert useful_power(lambda _: 0.0, 0.0) == 0


def test_where_the_gain_is_noise_the_harm_of_higher_rates_tells_how_far_to_go() -> None:
    # Gemma 3's expansion in bfloat16: at the rate of power -4 its sixth step was NaN.
    losses = {-8: 3.675, -7: 3.674, -6: 3.674, -5: 3.674, -4: 3.692, -3: 3.777, -2: 4.119}
    power = useful_power(lambda power: losses.get(power, math.inf), 3.676)
    assert -6 < power < -5.5


def test_noise_where_a_gain_has_hardly_begun_does_not_end_the_way_up() -> None:
    # ckpt-eltec by LoRA, beginnings of novels that it knows; the loss at power 1 is higher by noise.
    losses = {
        -1: 4.0312,
        0: 4.0309,
        1: 4.031,
        2: 4.028,
        3: 4.024,
        4: 4.019,
        5: 4.01,
        6: 4.001,
        7: 4.013,
    }
    assert 5 < useful_power(losses.__getitem__, 4.0314) < 6.5


def test_a_gain_of_less_than_a_thousandth_is_noise() -> None:
    lowest = {0: 0.9995, 1: 0.999, 2: 0.9985}
    for share, taken in ((1.0, 2), (0.5, 0)):
        losses = {power: 5.0 * (1 - share * (1 - loss)) for power, loss in lowest.items()}
        reached = useful_power(defaultdict(lambda: 5.0, losses).__getitem__, 5.0)
        assert reached == pytest.approx(taken, abs=0.6)


@given(st.floats(-1.6, 1.6), st.floats(0.5, 20.0), st.floats(0.01, 1.0))
def test_branches_go_downhill_to_where_a_parabola_is_lowest_but_for_noise_and_are_few(
    lowest: float, level: float, bend: float
) -> None:
    tried: list[int] = []

    def loss(power: int) -> float:
        tried.append(power)
        return level + bend * (power - lowest) ** 2

    found = lowest_power(loss)
    rises_by_noise = math.sqrt(0.001 * level / bend)
    if abs(lowest) < 1.4:
        expected = max(min(tried), lowest - rises_by_noise)
        assert found == pytest.approx(expected, abs=0.01)
    else:  # four branches may end on one side of it
        assert lowest - rises_by_noise - 0.6 < found < lowest + 0.6
    assert len(tried) == len(set(tried)) <= MOST_BRANCHES


def test_of_branches_that_noise_alone_tells_apart_a_low_rate_is_taken() -> None:
    # ckpt-eltec by full fine-tuning, whole novels: 1e-4 is the best of a sweep, 4.4e-4 is worse than the base.
    losses = {-2: 3.364, -1: 3.361, 0: 3.362}
    assert 0.9e-4 < 4.4e-4 * 2.0 ** lowest_power(losses.__getitem__) < 1.4e-4
    # and the same, beginnings of novels: 8.5e-4 is the best
    losses = {-1: 3.956, 0: 3.942, 1: 3.999}
    assert 6e-4 < 1.1e-3 * 2.0 ** lowest_power(losses.__getitem__) < 9e-4


def test_branches_that_are_not_finite_are_left_downwards_and_the_lower_of_equal_rates_is_taken() -> (
    None
):
    losses = {0: math.inf, -1: math.inf, -2: 5.0, -3: 5.1}
    assert lowest_power(losses.__getitem__) == -2
    assert lowest_power(lambda _: 5.0) == 1 - MOST_BRANCHES
    assert lowest_power(lambda _: math.inf) == 1 - MOST_BRANCHES


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[RateSearch]:
    """Return the searches that runs make from now on."""
    made: list[RateSearch] = []
    found = RateSearch.from_rate

    def remembered(search: RateSearch, first: float, highest: float = math.inf) -> FoundRate:
        made.append(search)
        return found(search, first, highest)

    monkeypatch.setattr(RateSearch, "from_rate", remembered)
    return made


def test_the_text_that_judges_an_update_was_not_read_for_it_and_the_update_is_not_warmed_up(
    make_config: MakeConfig, searches: list[RateSearch], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = set()
    for steps in (0, 2):
        method = "method={variant: full}"
        config = make_config(f"{steps}", method, "train.lr=auto", f"train.warmup_steps={steps}")
        rates.add(read_json(finished(config).final / "position.json")["lr"])
    assert len(rates) == 1

    search = searches[0]
    *read, judged = (
        {row.numpy().tobytes() for batch in of.micro_batches for row in batch.input_ids}
        for of in (*search.read, search.judged)
    )
    assert [len(windows) for windows in (*read, judged)] == [8] * 5
    assert len(set.union(*read, judged)) == 40

    monkeypatch.setattr(rate_search, "loss_share", lambda *_: torch.tensor(math.nan))
    assert search.judged_loss() == math.inf


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_a_branchs_rate_falls_whatever_the_runs_own_does_and_the_first_updates_is_whole(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    taken: list[float] = []

    def counted(*args: Any, **how: Any) -> Any:
        (batch, train) = args[3:5]
        taken.append(learning_rate(batch.step, train) / train.lr)
        return train_step(*args, **how)

    monkeypatch.setattr(rate_search, "train_step", counted)
    settings = (f"train.schedule={schedule}", "train.min_lr_ratio=0", "train.warmup_steps=2")
    finished(make_config("run", "method={variant: full}", "train.lr=auto", *settings))
    whole, *branches = taken
    assert whole == 1.0
    assert len(branches) % 4 == 0
    for first in range(0, len(branches), 4):
        assert branches[first : first + 4] == pytest.approx([1.0, 1.0, 0.75, 0.25])


def found_by_both(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, highest: float = math.inf
) -> tuple[FoundRate, FoundRate]:
    """Return what a run's search finds by its first update, and by branches."""
    both: list[FoundRate] = []
    found = RateSearch.from_rate

    def kept(search: RateSearch, first: float, **_of_method: float) -> FoundRate:
        for read in (search.read[:1], search.read):
            both.append(found(replace(search, read=read), first, highest))
        return both[-1]

    monkeypatch.setattr(RateSearch, "from_rate", kept)
    finished(config)
    by_one_update, by_branches = both
    return by_one_update, by_branches


def test_branches_see_what_an_adapters_first_update_does_not(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In LoRA's first update only B moves.
    config = make_config("lora", "method={variant: lora}", "train.lr=auto", "train.max_steps=2")
    by_one_update, by_branches = found_by_both(config, monkeypatch)
    assert by_branches.lr < 0.5 * by_one_update.lr


def test_in_float16_the_first_update_is_taken_under_a_loss_scale_that_it_bears(
    make_config: MakeConfig,
) -> None:
    rates = {}
    for precision in ("no", "fp16"):
        settings = (f"train.mixed_precision={precision}", "train.lr=auto", "train.max_steps=2")
        config = make_config(precision, "method={variant: full}", *settings)
        rates[precision] = read_json(finished(config).final / "position.json")["lr"]
    assert rates["fp16"] == pytest.approx(rates["no"], rel=0.1)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_run_is_bitwise_the_one_that_is_told_the_rate_and_so_is_a_resumed_one(
    make_config: MakeConfig, method: str
) -> None:
    keys = (f"method={{variant: {method}}}", "train.max_steps=15", "train.save_every_steps=6")
    auto = make_config("auto", *keys, "train.lr=auto")
    said: list[str] = []
    run = finished(auto, said)
    state = read_json(run.final / "position.json")
    assert any(line.startswith(f"rate           {state['lr']:g}, ") for line in said)
    told = finished(make_config("told", *keys, f"train.lr={state['lr']}"))
    assert are_equal(trained(run.final), trained(told.final))

    ended = trained(run.final)
    for folder in (run.final, sorted(run.checkpoints.iterdir())[-1]):
        shutil.rmtree(folder)
    assert not any(line.startswith("rate") for line in go_on(auto))
    assert are_equal(ended, trained(run.final))


def test_no_higher_rate_is_taken_than_many_updates_bear_whatever_the_first_ones_do(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("run", "method={variant: full}", "train.lr=auto", "train.max_steps=2")
    for found in found_by_both(config, monkeypatch, highest=1e-4):
        assert found.lr == 1e-4
        assert "0.0001, the highest that the method takes, by " in str(found)


@pytest.mark.parametrize(
    ("settings", "highest"),
    [
        ({"rank": 16, "alpha": 32}, 1e-2),
        ({"rank": 16, "alpha": 64}, 5e-3),
        ({"rank": 16, "alpha": 8, "rank_stabilised": True}, 1e-2),
    ],
)
def test_an_adapters_highest_rate_is_by_how_far_its_product_is_scaled(
    settings: dict[str, float], highest: float
) -> None:
    assert Lora().highest_lr(LoraConfig.model_validate(settings)) == pytest.approx(highest)


def test_text_of_one_window_cannot_judge_what_was_read_of_it(make_config: MakeConfig) -> None:
    said: list[str] = []
    asked = ("corpus.sources.0.max_documents=1", "corpus.sequence_length=512", "train.lr=auto")
    config = make_config("one", "method={variant: full}", "train.max_steps=2", *asked)
    corpus = config.corpus.model_copy(update={"sources": config.corpus.sources[:1]})
    finished(config.model_copy(update={"corpus": corpus}), said)
    own = "rate           0.0001, the method's own: there is too little text to judge others by"
    assert own in said


def test_codes_take_the_rate_that_their_multiples_were_made_for(
    make_config: MakeConfig,
) -> None:
    said: list[str] = []
    run = finished(make_config("wide", "train.max_steps=15", "train.lr=auto"), said)
    assert read_json(run.final / "position.json")["lr"] == 1e-3
    assert "rate           0.001, the method's own: its start has rates that go with it" in said


def windows_of(number: int, unlearned: Collection[int] = ()) -> PackedWindows:
    """Return as many windows, all of whose tokens are targets but in those that are not learned."""
    length = 12
    ids = np.random.default_rng(number).integers(1, 1_000, number * length + 1).astype(np.uint32)
    learned = ~np.isin((np.arange(len(ids)) - 1) // length, list(unlearned))
    return PackedWindows(ids, length, learned)


def batches_of(*sources: PackedWindows) -> Batches:
    """Return five steps' batches of sources that are drawn from alike."""
    weights = [1.0] * len(sources)
    return Batches(sources, weights, num_steps=5, seed=0, global_batch_size=8, micro_batch_size=2)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_windows_that_were_read_do_not_judge_and_every_process_still_computes_them(
    num_processes: int,
) -> None:
    batches = batches_of(windows_of(100), windows_of(1))
    parts = [read_and_judged(batches, rank, num_processes) for rank in range(num_processes)]
    num_judged = 0
    for part in parts:
        assert part is not None
        read, judged = part
        assert [step.step for step in read] == [0, 1, 2, 3]
        assert sum(len(batch.input_ids) for batch in judged.micro_batches) == 8 // num_processes
        for batch in judged.micro_batches:
            assert (batch.targets[batch.sources == 1] == IGNORED).all()
            assert (batch.targets[batch.sources == 0] != IGNORED).all()
            num_judged += int((batch.targets != IGNORED).sum())
    assert num_judged
    assert {part[1].num_targets for part in parts if part} == {(num_judged, 0)}


def test_of_text_that_branches_would_read_whole_only_the_first_update_reads() -> None:
    parts = read_and_judged(batches_of(windows_of(16)), 0, 1)
    assert parts is not None
    assert len(parts[0]) == 1
    assert read_and_judged(batches_of(windows_of(2)), 0, 1) is None


def test_batches_without_targets_neither_give_updates_nor_judge() -> None:
    at_first = [batches_of(windows_of(60)).windows_of(step) for step in range(2)]
    unlearned = [window for step in at_first for _, window in step]
    parts = read_and_judged(batches_of(windows_of(60, unlearned)), 0, 1)
    assert parts is not None
    read, judged = parts
    assert len(read) == 2
    assert all(any(step.num_targets) for step in (*read, judged))
    assert read_and_judged(batches_of(windows_of(60, range(60))), 0, 1) is None


def test_a_step_that_a_run_would_skip_does_not_end_its_branches(
    make_config: MakeConfig, searches: list[RateSearch], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("run", "method={variant: full}", "train.lr=auto", "train.max_steps=2")
    finished(config)
    search = searches[0]
    expected = search.from_rate(1e-4).lr
    broken = search.read[2].micro_batches[0].input_ids
    share = step.loss_share

    def loss_share(model: Any, batch: MicroBatch, *of_step: Any) -> torch.Tensor:
        loss = share(model, batch, *of_step)
        return loss * math.nan if torch.equal(batch.input_ids, broken) else loss

    monkeypatch.setattr(step, "loss_share", loss_share)
    skipping = search.train.model_copy(update={"on_nonfinite": "skip"})
    assert all(math.isinf(loss) for rate, loss in search.from_rate(1e-4).losses.items() if rate)
    found = replace(search, train=skipping).from_rate(1e-4)
    assert all(map(math.isfinite, found.losses.values()))
    assert found.lr == pytest.approx(expected, rel=0.5)


def test_the_update_that_is_judged_is_the_one_that_a_runs_hooks_make(
    make_config: MakeConfig, searches: list[RateSearch]
) -> None:
    class NoGradient(Hook):
        def before(self, update: Update) -> None:
            for parameter in update.parameters:
                parameter.grad = None

    finished(make_config("run", "method={variant: full}", "train.lr=auto", "train.max_steps=1"))
    still = replace(searches[0], make_hooks=lambda: [NoGradient()]).from_rate(1e-4)
    assert len(set(still.losses.values())) == 1


@pytest.mark.parametrize("variant", ["full", "route"])
def test_a_run_that_compiles_finds_the_rate_of_one_that_does_not(
    make_config: MakeConfig, shared_data: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    searching = []
    found = RateSearch.from_rate

    def from_rate(search: RateSearch, *args: Any, **options: Any) -> FoundRate:
        searching.append(True)
        try:
            return found(search, *args, **options)
        finally:
            searching.clear()

    def compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            assert not searching, "batches of another shape would be compiled too"
            return forward(*args, **options)

        return run

    monkeypatch.setattr(RateSearch, "from_rate", from_rate)
    monkeypatch.setattr(objective, "compiled", compiled)
    known = shared_data / "en-tinystories" / "tinystories_val.txt"
    source = f"{{name: known, path: {known}, language: en, max_documents: 60}}"
    lines = []
    for compiles in ("false", "true"):
        said: list[str] = []
        asked = (f"method={{variant: {variant}}}", "train.lr=auto", f"train.compile={compiles}")
        text = (f"corpus.sources=[{source}]", "train.max_steps=1")
        finished(make_config(compiles, *asked, *text), said)
        lines.append(next(line for line in said if line.startswith("rate")))
    assert lines[0] == lines[1]


def test_a_rate_that_is_accepted_on_the_way_is_the_one_that_is_recorded(
    make_config: MakeConfig,
) -> None:
    keys = ("method={variant: full}", "train.max_steps=9")
    run = finished(make_config("run", *keys, "train.lr=auto"))
    shutil.rmtree(run.final)
    shutil.rmtree(sorted(run.checkpoints.iterdir())[-1])
    numbered = make_config("run", *keys, "train.lr=1e-5")
    go_on(numbered, "train.lr")
    assert read_json(run.final / "position.json")["lr"] is None

    shutil.rmtree(run.final)
    with refused(ConfigError, "train.lr: auto finds a rate before the first step"):
        go_on(make_config("run", *keys, "train.lr=auto"), "train.lr")


def test_words_other_than_auto_are_refused_by_key(make_config: MakeConfig) -> None:
    with refused(ConfigError, "train.lr: .*number"):
        make_config("word", "train.lr=automatic")
