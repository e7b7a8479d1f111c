"""Sharded training, on real processes, which are forks; `tests/integration/test_launcher.py` has some of a launcher."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale
from scale_cli.config.load import dump_config, load_config
from scale_cli.config.schema import MethodConfig, RunConfig
from scale_cli.config.training import TrainConfig
from scale_cli.errors import StorageError
from scale_cli.methods.hooks import local_part
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.storage.atomic import load_tensors, verify_folder
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.metrics import EVALUATION_OF_AVERAGE
from scale_cli.storage.records import TrainState
from scale_cli.storage.shards import load_shards, save_shards
from scale_cli.training import loop
from scale_cli.training.optimiser import trainable_parameters
from scale_cli.training.sharding import changed_parts, hash_parts, shard_model, whole_tensor
from scale_cli.upscale.method import MethodModel, start_model
from scale_cli.upscale.objective import for_training
from scale_cli.vocabulary import proofs
from tests.torture.verbs import ended_group, start_group
from tests.training.conftest import configs_in
from tests.widening import load_model, tiny_llama

pytestmark = pytest.mark.long

SHARDINGS = ("none", "expansion", "all")
SHARDED_BASELINES = {"full": "all", "freeze": "expansion", "lora": "all", "llama-pro": "expansion"}
# LoRA of rank 1 has matrices of one row: only one of several processes holds any of it.
_OF_LORA = ("method.lora.rank=1", "train.lookahead={every_steps: 3}")
_OF = {"lora": _OF_LORA, "freeze": ("method.freeze.num_layers=1",)}
OF_BASELINES = {v: (f"method.variant={v}", *_OF.get(v, ())) for v in SHARDED_BASELINES}
EVALUATED_BASELINES = ("freeze", "lora")
GROWN = {"route": ("train.embedding_norm=bounded",), "full": ()}
_OF_GROWN = "method.vocabulary={new_tokens: 64, min_count: 2, sources: [petitions]}"
# Without sharding four processes do what two do, and so does a checkpoint of theirs.
IN_FOUR = ("expansion", "all")
GOES_ON = (("none", "one"), ("expansion", "one"), ("all", "one"), ("lora", "one"), ("all", "four"), ("lora", "four"))
_SAVED_STEP, _LAST_STEP = 2, 4
_LENGTH = (f"train.max_steps={_LAST_STEP}", f"train.save_every_steps={_SAVED_STEP}")


@dataclass
class Runs:
    """Finished runs, by name."""

    configs: dict[str, RunConfig]

    def folder(self, name: str) -> RunFolder:
        return RunFolder(self.configs[name].output_dir)

    def records(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.folder(name).metrics.read_text(encoding="utf-8").splitlines()]

    def losses(self, name: str) -> list[float]:
        return [record["loss"] for record in self.records(name) if "loss" in record]

    def evaluations(self, name: str) -> list[Any]:
        key = "evaluation_nats_per_token"
        return [record[key] for record in self.records(name) if key in record]


def train_each(configs: Iterable[Path]) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # four processes are two machines of two
    for config in configs:
        train(load_config(config), "auto", print)


def train_in_processes(configs: Iterable[RunConfig], num_processes: int, folder: Path) -> None:
    """Train some runs, one after another, in one group of processes."""
    paths = []
    for config in configs:
        paths.append(folder / f"{config.output_dir.name}-{num_processes}.yaml")
        paths[-1].write_text(dump_config(config), encoding="utf-8")
    *before, last = paths
    command = ("train", str(last), "--resume", "auto")
    for ended in ended_group(start_group(*command, num_processes=num_processes, hook=partial(train_each, before))):
        assert ended.exit_code == 0, ended.printed


def cut_after_saved_step(whole: RunConfig, name: str, *, sharding: str, micro_batch_size: int) -> RunConfig:
    """Return a copy of a finished run as it was when it had just saved its first checkpoint."""
    root = whole.output_dir.with_name(name)
    shutil.copytree(whole.output_dir, root)
    shutil.rmtree(RunFolder(root).final)
    shutil.rmtree(RunFolder(root).checkpoint(_LAST_STEP))
    settings = whole.train.model_copy(update={"sharding": sharding, "micro_batch_size": micro_batch_size})
    return whole.model_copy(update={"output_dir": root, "train": settings})


@pytest.fixture(scope="module")
def runs(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("sharding")
    make = configs_in(folder, shared_data, tmp_path_factory.getbasetemp() / "tokens")
    configs: dict[str, RunConfig] = {}
    whole = shared_data / "ckpt-stories260K" / "hf"

    def add(name: str, *overrides: str) -> RunConfig:
        in_full = () if name.startswith((*SHARDED_BASELINES, "grown")) else (f"model.base={whole}",)
        configs[name] = make(name, *in_full, *_LENGTH, *overrides)
        upscale(configs[name])
        return configs[name]

    evaluated = f"train.eval_every_steps={_LAST_STEP}"
    train(add("one", evaluated), None, print)
    for variant in SHARDED_BASELINES:
        evaluated_too = [evaluated] if variant in EVALUATED_BASELINES else []
        train(add(f"{variant}-one", *OF_BASELINES[variant], *evaluated_too), None, print)
    for sharding in SHARDINGS:
        add(f"{sharding}-two", "train.micro_batch_size=2", f"train.sharding={sharding}", evaluated)
    for sharding in IN_FOUR:
        add(f"{sharding}-four", "train.micro_batch_size=1", f"train.sharding={sharding}")
    add("node-four", "train.micro_batch_size=1", "train.sharding=all", "train.sharded_within=node")
    # Of batches cut alike: bfloat16 products, and Muon's, show how they are cut.
    lowered = ("train.mixed_precision=bf16", "model.dtype=bfloat16", "train.micro_batch_size=2")
    train(add("lowered-one", *lowered), None, print)
    add("lowered-two", *lowered, "train.sharding=all")
    for variant, sharding in SHARDED_BASELINES.items():
        settings = [*OF_BASELINES[variant], "train.micro_batch_size=2", f"train.sharding={sharding}"]
        add(f"{variant}-two", *settings, *([evaluated] if variant in EVALUATED_BASELINES else []))
    trunk = RunFolder(configs["all-two"].output_dir).checkpoint(_SAVED_STEP)
    tales = f"path: {shared_data}/en-tinystories/tinystories_val.txt, language: en, max_documents: 2"
    held_out = ", ".join(f"{{name: {role}, role: {role}, {tales}}}" for role in ("acquisition", "retention"))
    # What has lost least is kept, since all lose something: a step before the last.
    chooses = ("train.eval_every_steps=1", "train.max_forgetting=0", f"evaluation.perplexity=[{held_out}]")
    branch = (f"train.init_from={trunk}", "train.init_moments=kept", "seed=3", *chooses)
    add("branch-two", *branch, "train.micro_batch_size=2", "train.sharding=all")
    average = ("train.average={kind: ema, steps: 3}", evaluated)
    train(add("average-one", *average), None, print)
    add("average-two", *average, "train.micro_batch_size=2", "train.sharding=all")
    muon = ("train.optimiser=muon", "train.micro_batch_size=2")
    train(add("muon-one", *muon), None, print)
    add("muon-two", *muon)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proofs, "_CODE_POINTS", range(0x500))
        patch.setattr(proofs, "_NUM_RANDOM", 200)
        for variant, more in GROWN.items():
            grown = (f"method.variant={variant}", "method.collaboration.layers=null", _OF_GROWN, evaluated, *more)
            grown = (*grown, "train.micro_batch_size=2")
            train(add(f"grown-{variant}-one", *grown), None, print)
            add(f"grown-{variant}-two", *grown, "train.sharding=all")
    configs["one-then-two"] = cut_after_saved_step(configs["one"], "one-then-two", sharding="all", micro_batch_size=2)
    train_in_processes([config for name, config in configs.items() if name.endswith("two")], 2, folder)
    train(add("branch-one", *branch), None, print)
    for first, number in GOES_ON:
        name, micro_batch_size = f"{first}-two-then-{number}", {"one": 4, "four": 1}[number]
        configs[name] = cut_after_saved_step(
            configs[f"{first}-two"],
            name,
            sharding=SHARDED_BASELINES.get(first, first),
            micro_batch_size=micro_batch_size,
        )
        if number == "one":
            train(configs[name], "auto", print)
    train_in_processes([config for name, config in configs.items() if name.endswith("four")], 4, folder)
    return Runs(configs)


@pytest.mark.parametrize("name", [*(f"{sharding}-two" for sharding in SHARDINGS), *(f"{one}-four" for one in IN_FOUR)])
def test_several_processes_give_the_losses_of_one(runs: Runs, name: str) -> None:
    assert runs.losses(name) == pytest.approx(runs.losses("one"), rel=1e-5)


def test_machines_that_each_hold_all_parts_give_the_losses_of_one_process(runs: Runs) -> None:
    assert runs.losses("node-four") == pytest.approx(runs.losses("one"), rel=1e-5)
    parts = sorted((runs.folder("node-four").checkpoint(_LAST_STEP) / "shards").iterdir())
    held = [name for part in parts for name in load_tensors(part)]
    trained = load_tensors(runs.folder("node-four").final / "trained.safetensors")
    assert max(Counter(held).values()) <= 2, "two machines hold the same, one of them writes it"
    assert trained.keys() <= set(held)


def test_matrices_gathered_in_the_precision_of_their_products_give_the_losses_of_one_process(runs: Runs) -> None:
    assert runs.losses("lowered-two") == pytest.approx(runs.losses("lowered-one"), rel=1e-5)


@pytest.mark.parametrize("name", ["branch", "muon"])
def test_branches_and_muon_have_the_losses_of_one_process_on_two(runs: Runs, name: str) -> None:
    """The branches are off a sharded checkpoint."""
    assert runs.losses(f"{name}-two") == pytest.approx(runs.losses(f"{name}-one"), rel=1e-5)


def test_sharded_processes_keep_the_best_weights_that_one_process_keeps(runs: Runs) -> None:
    one, two = (runs.folder(f"branch-{number}") for number in ("one", "two"))
    chosen = [
        [record["best_step"] for record in runs.records(run.root.name) if "best_step" in record] for run in (one, two)
    ]
    assert chosen[0] == chosen[1] and len(chosen[0]) == _LAST_STEP
    (kept,) = {TrainState.load(run.final).step for run in (one, two)}
    assert kept == chosen[0][-1] < _LAST_STEP
    whole, sharded = (load_tensors(run.final / "trained.safetensors") for run in (one, two))
    for key, tensor in whole.items():
        torch.testing.assert_close(sharded[key], tensor, atol=1e-4, rtol=1e-3)
    last = load_model(two.checkpoint(_LAST_STEP), runs.configs["branch-two"].model)
    assert any(
        not torch.allclose(p, sharded[name]) for name, p in trainable_parameters(last).items() if name in sharded
    )


def test_an_average_is_the_same_sharded_and_is_of_no_effect_on_what_is_trained(runs: Runs) -> None:
    assert runs.losses("average-two") == runs.losses("all-two")
    one, two = (load_tensors(runs.folder(f"average-{n}").final / "trained.safetensors") for n in ("one", "two"))
    last = load_tensors(runs.folder("one").final / "trained.safetensors")
    for key, tensor in one.items():
        torch.testing.assert_close(two[key], tensor, atol=1e-4, rtol=1e-3)
    assert any(not torch.allclose(last[key], tensor, atol=1e-4, rtol=1e-3) for key, tensor in one.items())
    (of_one,), (of_two,) = (
        [r[EVALUATION_OF_AVERAGE] for r in runs.records(f"average-{n}") if EVALUATION_OF_AVERAGE in r]
        for n in ("one", "two")
    )
    assert of_two["tiny"] == pytest.approx(of_one["tiny"], rel=1e-5)


@pytest.mark.parametrize("variant", SHARDED_BASELINES)
def test_a_sharded_baseline_gives_the_losses_of_one_process(runs: Runs, variant: str) -> None:
    assert runs.losses(f"{variant}-two") == pytest.approx(runs.losses(f"{variant}-one"), rel=1e-5)


@pytest.mark.parametrize("variant", GROWN)
def test_new_tokens_train_sharded_and_are_heard_beside_the_base_as_in_one_process(runs: Runs, variant: str) -> None:
    one, two = (f"grown-{variant}-{number}" for number in ("one", "two"))
    assert runs.losses(two) == pytest.approx(runs.losses(one), rel=1e-5)
    (expected,), (found,) = runs.evaluations(one), runs.evaluations(two)
    assert found["tiny"] == pytest.approx(expected["tiny"], rel=1e-5)
    whole, sharded = (load_tensors(runs.folder(name).final / "trained.safetensors") for name in (one, two))
    assert whole.keys() == sharded.keys() and any("new_tokens" in name for name in whole) == (variant == "route")
    for key, tensor in whole.items():
        torch.testing.assert_close(sharded[key], tensor, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(("first", "processes"), GOES_ON)
def test_a_checkpoint_of_two_processes_goes_on_in_another_number(runs: Runs, first: str, processes: str) -> None:
    resumed = f"{first}-two-then-{processes}"
    assert [record["step"] for record in runs.records(resumed) if "loss" in record] == list(range(1, _LAST_STEP + 1))
    assert runs.losses(resumed) == pytest.approx(runs.losses(f"{first}-two"), rel=1e-5)


@pytest.mark.parametrize("name", ["all-two", "lora-two", "expansion-four"])
def test_one_process_loads_a_sharded_checkpoint_as_a_model(runs: Runs, name: str) -> None:
    expected = load_tensors(runs.folder(name).final / "trained.safetensors")
    model = load_model(runs.folder(name).checkpoint(_LAST_STEP), runs.configs[name].model)
    trained = trainable_parameters(model)
    assert trained.keys() == expected.keys()
    assert all(torch.equal(trained[key], tensor) for key, tensor in expected.items())


def test_a_checkpoint_of_one_process_goes_on_sharded(runs: Runs) -> None:
    assert runs.losses("one-then-two") == pytest.approx(runs.losses("one"), rel=1e-5)
    assert (runs.folder("one-then-two").checkpoint(_LAST_STEP) / "shards").is_dir()


@pytest.mark.parametrize("name", ["expansion-two", "all-two", "lora-two", "one-then-two", "all-four"])
def test_a_sharded_checkpoint_is_whole_and_holds_no_pickle(runs: Runs, name: str) -> None:
    folder = runs.folder(name).checkpoint(_LAST_STEP)
    verify_folder(folder)
    files = [file for file in folder.rglob("*") if file.is_file()]
    shards = [file for file in files if file.suffix == ".safetensors"]
    assert len(shards) == {"two": 2, "four": 4}[name.rpartition("-")[2]]
    for file in files:
        if file.suffix == ".json":
            json.loads(file.read_text(encoding="utf-8"))
        elif file.suffix == ".safetensors":
            load_tensors(file)
        else:
            assert file.name == "scale.yaml"


@pytest.mark.parametrize("name", ["expansion-two", "all-two", "full-two"])
def test_a_process_writes_its_part_only(runs: Runs, name: str) -> None:
    shards = sorted((runs.folder(name).checkpoint(_LAST_STEP) / "shards").iterdir())
    sizes = [sum(tensor.numel() for tensor in load_tensors(shard).values()) for shard in shards]
    trained = load_tensors(runs.folder(name).final / "trained.safetensors")
    parameters = sum(tensor.numel() for tensor in trained.values())
    assert sum(sizes) == 3 * parameters + len(trained), "parameters, two moments each, and a step count each"
    assert max(sizes) < 0.55 * sum(sizes)


@pytest.mark.parametrize("name", ["expansion-two", "all-two", "all-four", "all-two-then-four"])
def test_final_is_an_ordinary_method_folder(runs: Runs, name: str) -> None:
    whole, sharded = (runs.folder(n).final for n in ("one", name))
    assert {file.name for file in sharded.iterdir()} == {file.name for file in whole.iterdir()}
    expected, trained = (load_tensors(folder / "trained.safetensors") for folder in (whole, sharded))
    assert trained.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(trained[key], tensor, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["none-two", "expansion-two", "all-two"])
def test_periodic_evaluation_finds_the_base_bit_for_bit_whatever_is_sharded(runs: Runs, name: str) -> None:
    (expected,), (found,) = runs.evaluations("one"), runs.evaluations(name)
    assert found.keys() == expected.keys() and expected
    for corpus, losses in expected.items():
        assert found[corpus]["base"] == losses["base"]
        assert found[corpus] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("variant", EVALUATED_BASELINES)
def test_a_sharded_baseline_is_evaluated_beside_its_base(runs: Runs, variant: str) -> None:
    (expected,), (found,) = runs.evaluations(f"{variant}-one"), runs.evaluations(f"{variant}-two")
    assert found["tiny"]["base"] == expected["tiny"]["base"]
    assert found["tiny"] == pytest.approx(expected["tiny"], rel=1e-5)


def count_exchanges() -> None:
    """Have a run print the bytes of its second step: gathered forward and backward, by what trains, and reduced."""
    counted: Counter[str] = Counter()
    at: dict[str, Any] = {"step": -1, "place": "forward"}
    collectives = vars(_fsdp_param_group)
    gather, reduce, backward, step = (
        collectives["foreach_all_gather"],
        collectives["foreach_reduce"],
        Accelerator.backward,
        vars(loop)["train_step"],
    )

    def gathering(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        for parameter in parameters if at["step"] == 1 else ():
            kind = "trains" if parameter.sharded_param.requires_grad else "frozen"
            dtype = parameter.param_dtype or parameter.orig_dtype
            counted[f"{kind}, {at['place']}"] += parameter._orig_size.numel() * dtype.itemsize
        return gather(parameters, *args, **kwargs)

    def reducing(parameters: Any, gradients: list[torch.Tensor], *args: Any) -> Any:
        if at["step"] == 1:
            counted["reduced"] += sum(gradient.numel() for gradient in gradients)
        return reduce(parameters, gradients, *args)

    def going_back(*args: Any, **kwargs: Any) -> None:
        at["place"] = "backward"
        backward(*args, **kwargs)
        at["place"] = "forward"

    def stepping(*args: Any, **kwargs: Any) -> Any:
        at["step"] = args[3].step
        counted["micro-batches"] = len(args[3].micro_batches)
        counted["parameters"] = sum(p.numel() for p in trainable_parameters(args[1]).values())
        taken = step(*args, **kwargs)
        if at["step"] == 1:
            print(f"exchanged {json.dumps(counted)}")
        return taken

    collectives |= {"foreach_all_gather": gathering, "foreach_reduce": reducing}
    vars(loop)["train_step"] = stepping
    setattr(Accelerator, "backward", going_back)  # noqa: B010


def test_what_is_frozen_is_gathered_forward_alone_and_gradients_are_reduced_once_a_step(
    shared_data: Path, tmp_path: Path
) -> None:
    """What trains costs the bytes of two bfloat16 gathers a micro-batch at most."""
    few = ("train.max_steps=2", "train.micro_batch_size=2", "train.sharding=all", "train.mixed_precision=bf16")
    config = configs_in(tmp_path, shared_data, tmp_path / "tokens")(
        "run", "method.collaboration.layers=null", "model.dtype=bfloat16", *few
    )
    upscale(config)
    path = tmp_path / "resolved.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    for ended in ended_group(start_group("train", str(path), num_processes=2, hook=count_exchanges)):
        assert ended.exit_code == 0, ended.printed
        (line,) = (line for line in ended.printed.splitlines() if line.startswith("exchanged "))
        counted = Counter(json.loads(line.removeprefix("exchanged ")))
        assert counted["frozen, backward"] == 0 < counted["frozen, forward"]
        assert counted["micro-batches"] == 2
        in_two_gathers = counted["micro-batches"] * counted["parameters"] * 2 * torch.bfloat16.itemsize
        assert 0 < counted["trains, forward"] + counted["trains, backward"] <= in_two_gathers
        assert counted["reduced"] == counted["parameters"]


@pytest.fixture
def accelerator(tmp_path: Path) -> Iterator[Accelerator]:
    """A group of one process: enough for a model to be sharded in all but number."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield Accelerator(cpu=True)
    dist.destroy_process_group()


def start(variant: str) -> MethodModel:
    method = MethodConfig.model_validate({"variant": variant, "freeze": {"num_layers": 1}})
    return start_model(tiny_llama(), method, seed=0).train()


@pytest.mark.parametrize("variant", ["preserve", "adapt", *SHARDED_BASELINES])
@pytest.mark.parametrize("keep_frozen_whole", [True, False])
def test_what_is_sharded_is_what_was_asked_for_and_nothing_stays_gathered(
    accelerator: Accelerator, variant: str, keep_frozen_whole: bool
) -> None:
    model = start(variant)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trains = set(trainable_parameters(model))
    trained = shard_model(
        model, accelerator, TrainConfig(max_steps=1, sharding="expansion" if keep_frozen_whole else "all")
    )
    ids = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    trained(input_ids=ids, labels=ids, shift_labels=ids, num_items_in_batch=18, use_cache=False).loss.backward()
    parameters = dict(model.named_parameters())
    sharded = {name for name, parameter in parameters.items() if isinstance(parameter, DTensor)}
    assert sharded == (trains if keep_frozen_whole else set(parameters))
    assert {name for name, parameter in parameters.items() if parameter.grad is not None} == trains
    assert parameters.keys() == before.keys()
    assert all(torch.equal(whole_tensor(parameter), before[name]) for name, parameter in parameters.items())


@pytest.mark.parametrize("variant", ["preserve", "adapt", *SHARDED_BASELINES])
def test_without_sharding_processes_exchange_the_gradient_of_what_trains_and_nothing_else(
    accelerator: Accelerator, variant: str
) -> None:
    model = start(variant)
    exchanged: list[int] = []

    def count(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        exchanged.append(bucket.buffer().numel())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped = DistributedDataParallel(for_training(model, TrainConfig(max_steps=1)))
    wrapped.register_comm_hook(None, lambda _, bucket: count(bucket))
    ids = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    wrapped(input_ids=ids, labels=ids, shift_labels=ids, num_items_in_batch=18, use_cache=False).loss.backward()
    assert sum(exchanged) == sum(parameter.numel() for parameter in trainable_parameters(model).values())


def test_a_changed_bit_of_a_sharded_base_is_named(accelerator: Accelerator) -> None:
    model = start("adapt")
    assert isinstance(model, ScaleForCausalLM)
    shard_model(model, accelerator, TrainConfig(max_steps=1, sharding="all"))
    before = hash_parts(model.base)
    with torch.no_grad():
        local_part(model.expansion.norm.weight).add_(1)
        assert changed_parts(model.base, before) == []
        local_part(model.base.model.layers[1].mlp.up_proj.weight)[3, 5].mul_(-1)
    assert changed_parts(model.base, before) == ["model.layers.1.mlp.up_proj.weight"]


def test_shards_of_another_model_are_refused(accelerator: Accelerator, tmp_path: Path) -> None:
    small, large = (start_model(tiny_llama(hidden_size=size), MethodConfig(), seed=0) for size in (32, 64))
    save_shards(tmp_path, trainable_parameters(small))
    with pytest.raises(StorageError, match="does not fit this model"):
        load_shards(tmp_path, trainable_parameters(large))
