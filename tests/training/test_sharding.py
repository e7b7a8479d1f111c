"""Sharded training, on real processes, which are forks; `tests/integration/test_launcher.py` has some of a launcher."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale
from scale_cli.config.load import dump_config, load_config
from scale_cli.config.schema import MethodConfig, RunConfig
from scale_cli.config.training import TrainConfig
from scale_cli.errors import PreservationError, StorageError
from scale_cli.methods.recipes import local_part, trainable_parameters
from scale_cli.processes import ALONE
from scale_cli.runs.folder import TRAINED, RunFolder
from scale_cli.storage.atomic import load_tensors, save_tensors, verify_folder
from scale_cli.storage.shards import load_shards, shard_of
from scale_cli.training import loop, observing, optimiser
from scale_cli.training.metrics_log import EVALUATION, read_records
from scale_cli.training.objective import for_training
from scale_cli.training.optimiser import kinds_of_parameters
from scale_cli.training.records import TrainState
from scale_cli.training.sharding import parts_here, shard_model, whole_tensor
from scale_cli.training.training_run import TrainingRun
from scale_cli.upscale.base_hashes import tensor_sha256, versions
from scale_cli.upscale.building import MethodModel, start_model
from tests.small_runs import held_out
from tests.torture.verbs import ended_group, start_group
from tests.training.conftest import MakeConfig, configs_in
from tests.widening import load_model, random_ids, tiny_llama

pytestmark = pytest.mark.long

VARIANTS = ["preserve", "adapt", "full", "freeze", "lora", "llama-pro"]
_SAVED_STEP, _LAST_STEP = 2, 3
_LENGTH = (f"train.max_steps={_LAST_STEP}", f"train.save_every_steps={_SAVED_STEP}")
EVALUATED = (f"train.eval_every_steps={_LAST_STEP}",)
NEW_TOKENS = (
    "method.vocabulary={new_tokens: 64, min_count: 2, sources: [petitions]}",
    "method.collaboration.layers=null",
    "train.micro_batch_size=2",
    *EVALUATED,
)
# LoRA of rank 1 has matrices of one row: only one of several processes holds any of it.
_LORA = ("method.variant=lora", "method.lora.rank=1")
# What is trained in one process, and how it is sharded among two; more of them, and four processes, in
# tests/integration.
PAIRS: dict[str, tuple[str, ...]] = {
    "lora": ("all", *_LORA, *EVALUATED),
    # The search reads what is outside the layers after every change of the weights.
    "searched": ("all", "method.variant=full", "train.lr=auto", *EVALUATED),
    "grown": (
        "all",
        "train.embedding_norm=bounded",
        *NEW_TOKENS,
    ),
}
# Muon's products in bfloat16 would magnify the rounding of the gradients' sums.
EXACT = torch.float64
GOES_ON = ("all-two-then-one", "lora-two-then-one")


@dataclass
class Runs:
    """Runs, by name: `-one`, `-two` or `-four` processes."""

    make: MakeConfig
    root: Path
    configs: dict[str, RunConfig] = field(default_factory=dict)

    def folder(self, name: str) -> RunFolder:
        return RunFolder(self.configs[name].output_dir)

    def trained(self, name: str) -> dict[str, torch.Tensor]:
        return load_tensors(self.folder(name).final / TRAINED)

    def logged(self, name: str, key: str) -> list[Any]:
        records: list[Any] = read_records(self.folder(name).metrics)
        return [record[key] for record in records if key in record]

    def add(self, name: str, *overrides: str, like: str | None = None) -> RunConfig:
        """Make a run's config and its start, that of the run that it is `like`, where there is one."""
        self.configs[name] = self.make(name, *_LENGTH, *overrides)
        if like is None:
            upscale(self.configs[name])
        else:
            shutil.copytree(self.folder(like).upscaled, self.root / name / "upscaled")
        return self.configs[name]

    def check_as(self, name: str, as_in: str, *, weights: bool = True) -> None:
        """Check that two runs have the same losses, files and, but for rounding, weights."""
        losses = self.logged(name, "loss")
        assert len(losses) == _LAST_STEP
        assert losses == pytest.approx(self.logged(as_in, "loss"), rel=1e-5)
        found, expected = (
            {file.name for file in self.folder(one).final.iterdir()} for one in (name, as_in)
        )
        assert found == expected
        trained = self.trained(name)
        assert trained.keys() == self.trained(as_in).keys()
        for key, tensor in self.trained(as_in).items() if weights else ():
            torch.testing.assert_close(trained[key], tensor, atol=1e-4, rtol=1e-3)

    def add_pair(self, name: str, sharding: str, *overrides: str) -> None:
        self.add(f"{name}-one", *overrides)
        sharded = ("train.micro_batch_size=2", f"train.sharding={sharding}")
        self.add(f"{name}-two", *overrides, *sharded, like=f"{name}-one")

    def add_cut(self, name: str, **settings: Any) -> None:
        """Add a copy of a finished run as it was when it had just saved its first checkpoint, `whole-then-number`."""
        whole, root = self.configs[name.partition("-then-")[0]], self.root / name
        shutil.copytree(whole.output_dir, root)
        shutil.rmtree(RunFolder(root).final)
        shutil.rmtree(RunFolder(root).checkpoint(_LAST_STEP))
        train_section = whole.train.model_copy(update=settings)
        self.configs[name] = whole.model_copy(update={"output_dir": root, "train": train_section})

    @contextmanager
    def training_in_processes(self, num_processes: int) -> Iterator[None]:
        """Train those of a number, one after another, in one group of processes, while the body goes on."""
        paths = []
        for name, config in self.configs.items():
            if name.endswith({2: "two", 4: "four"}[num_processes]):
                path = self.root / f"{name}-in-processes.yaml"
                path.write_text(dump_config(config))
                paths.append(path)
        group = start_group("-h", num_processes=num_processes, hook=partial(train_each, paths))
        yield
        for ended in ended_group(group):
            assert ended.exit_code == 0, ended.printed


def train_each(configs: Iterable[Path]) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # four processes are two machines of two
    observing._PROMPT_TOKENS, observing._NEW_TOKENS = 4, 1
    vars(optimiser)["dtype_of_products"] = lambda _: EXACT
    for config in configs:
        train(load_config(config), "auto", print)


def no_runs(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("sharding")
    return Runs(configs_in(root, shared_data, tmp_path_factory.getbasetemp() / "tokens"), root)


@contextmanager
def exact_products() -> Iterator[None]:
    """Have this process's Muon multiply exactly, as `train_each` has the others' do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimiser, "dtype_of_products", lambda _: EXACT)
        yield


@pytest.fixture(scope="module")
@exact_products()
def runs(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = no_runs(shared_data, tmp_path_factory)
    train(made.add("one", *EVALUATED), None, print)
    for sharding in ("none", "expansion", "all"):
        sharded = ("train.micro_batch_size=2", f"train.sharding={sharding}", *EVALUATED)
        made.add(f"{sharding}-two", *sharded, like="one")
    for name, pair in PAIRS.items():
        made.add_pair(name, *pair)
    trunk = made.folder("all-two").checkpoint(_SAVED_STEP)
    tales = shared_data / "en-tinystories/tinystories_val.txt"
    roles = ("acquisition", "retention")
    corpora = json.dumps([held_out(role, tales, role, max_documents=2) for role in roles])
    # At this rate a step before the last has lost least, and is kept.
    chooses = (
        "train.lr=1e-2",
        "train.eval_every_steps=1",
        "train.max_forgetting=0",
        f"evaluation.perplexity={corpora}",
    )
    made.add_pair("branch", "all", f"train.init_from={trunk}", "seed=3", *chooses)
    made.add_cut("one-then-two", sharding="all", micro_batch_size=2)
    with made.training_in_processes(2):
        for name in PAIRS:
            train(made.configs[f"{name}-one"], None, print)
    for name in GOES_ON:
        made.add_cut(name, micro_batch_size=4)
    for name in ("branch-one", *GOES_ON):
        train(made.configs[name], "auto", print)
    return made


@pytest.mark.parametrize(
    ("name", "as_in"),
    [
        *((name, "one") for name in ("none-two", "expansion-two", "all-two")),
        *((f"{name}-two", f"{name}-one") for name in (*PAIRS, "branch")),
        *((name, name.partition("-then-")[0]) for name in GOES_ON),
        ("one-then-two", "one"),
    ],
)
def test_any_number_of_processes_sharded_or_gone_on_gives_the_losses_and_an_ordinary_final_of_one(
    runs: Runs, name: str, as_in: str
) -> None:
    """A periodic evaluation too; of the base bit for bit, where it is the base's own tokens."""
    runs.check_as(name, as_in)
    of_both = (runs.logged(one, EVALUATION) for one in (name, as_in))
    for found, expected in zip(*of_both, strict=True):
        assert found.keys() == expected.keys()
        for corpus, heads in expected.items():
            assert found[corpus] == pytest.approx(heads, rel=1e-5)
            assert name == "grown-two" or found[corpus]["base"] == heads["base"]
    assert name != "grown-two" or any("new_tokens" in key for key in runs.trained(name))


def test_sharded_processes_keep_the_best_weights_that_one_process_keeps(runs: Runs) -> None:
    one, two = (runs.logged(f"branch-{number}", "best_step") for number in ("one", "two"))
    assert one == two and len(one) == _LAST_STEP
    finals = [runs.folder(f"branch-{number}") for number in ("one", "two")]
    assert {TrainState.load(run.final).step for run in finals} == {one[-1]}
    assert one[-1] < _LAST_STEP
    final = runs.trained("branch-two")
    last = load_model(finals[1].checkpoint(_LAST_STEP), runs.configs["branch-two"].model)
    tensors = trainable_parameters(last).items()
    assert not all(torch.allclose(tensor, final[name]) for name, tensor in tensors)


def check_checkpoint(runs: Runs, name: str, num_shards: int) -> None:
    """Check that a sharded checkpoint is whole, holds no pickle, and that each process wrote its part."""
    folder = runs.folder(name).checkpoint(_LAST_STEP)
    verify_folder(folder)
    files = {file for file in folder.rglob("*") if file.is_file()}
    shards = {file for file in files if file.suffix == ".safetensors"}
    assert {file.suffix for file in files - shards} == {".json", ".yaml"}
    assert len(shards) == num_shards
    sizes = [sum(tensor.numel() for tensor in load_tensors(shard).values()) for shard in shards]
    if name != "lora-two":  # of node-four, two machines hold the same, and one of them writes it
        trained = runs.trained(name)
        kinds = kinds_of_parameters(load_model(folder, runs.configs[name].model))
        assert kinds.keys() == trained.keys()
        assert sum(sizes) == sum(
            2 * tensor.numel() if kinds[key] == "matrix" else 3 * tensor.numel() + 1
            for key, tensor in trained.items()
        ), "a matrix has Muon's momentum, other parameters two moments and a step count"
        assert max(sizes) < 0.55 * sum(sizes)


@pytest.mark.parametrize("name", ["all-two", "lora-two"])
def test_a_sharded_checkpoint_is_whole_holds_no_pickle_and_each_process_writes_its_part(
    runs: Runs, name: str
) -> None:
    check_checkpoint(runs, name, num_shards=2)


def count_exchanges() -> None:
    """Have a run print the bytes of each step: gathered forward and backward, by what trains, and reduced."""
    counted: Counter[str] = Counter()
    collectives, step = vars(_fsdp_param_group), vars(loop)["train_step"]
    gather, reduce = collectives["foreach_all_gather"], collectives["foreach_reduce"]

    def gathering(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        place = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
        for parameter in parameters:
            kind = "trains" if parameter.sharded_param.requires_grad else "frozen"
            dtype = parameter.param_dtype or parameter.orig_dtype
            counted[f"{kind}, {place}"] += parameter._orig_size.numel() * dtype.itemsize
        return gather(parameters, *args, **kwargs)

    def reducing(parameters: Any, gradients: list[torch.Tensor], *args: Any) -> Any:
        counted["reduced"] += sum(gradient.numel() for gradient in gradients)
        return reduce(parameters, gradients, *args)

    def stepping(*args: Any, **kwargs: Any) -> Any:
        counted.clear()
        taken = step(*args, **kwargs)
        counted["micro-batches"] = len(args[3].micro_batches)
        counted["parameters"] = sum(p.numel() for p in trainable_parameters(args[1]).values())
        print(f"exchanged {json.dumps(counted)}")
        return taken

    collectives |= {"foreach_all_gather": gathering, "foreach_reduce": reducing}
    vars(loop)["train_step"] = stepping


def test_what_is_frozen_is_gathered_forward_alone_and_gradients_are_reduced_once_a_step(
    shared_data: Path, tmp_path: Path
) -> None:
    """What trains costs the bytes of two bfloat16 gathers a micro-batch at most."""
    config = configs_in(tmp_path, shared_data, tmp_path / "tokens")(
        "run",
        "method.collaboration.layers=null",
        "model.dtype=bfloat16",
        "train.max_steps=2",
        "train.micro_batch_size=2",
        "train.sharding=all",
        "train.mixed_precision=bf16",
    )
    upscale(config)
    path = tmp_path / "resolved.yaml"
    path.write_text(dump_config(config))
    for ended in ended_group(
        start_group("train", str(path), num_processes=2, hook=count_exchanges)
    ):
        assert ended.exit_code == 0, ended.printed
        _, line = (line for line in ended.printed.splitlines() if line.startswith("exchanged "))
        counted = Counter(json.loads(line.removeprefix("exchanged ")))
        assert counted["frozen, backward"] == 0 < counted["frozen, forward"]
        assert counted["micro-batches"] == 2
        # Two micro-batches, two gathers each, two bytes a parameter.
        assert counted["trains, backward"] > 0
        assert counted["trains, backward"] + counted["trains, forward"] <= 8 * counted["parameters"]
        assert counted["reduced"] == counted["parameters"]


@pytest.fixture
def accelerator(group: Any) -> Accelerator:
    return Accelerator(cpu=True)


def start(variant: str) -> MethodModel:
    method = MethodConfig.model_validate({"variant": variant, "freeze": {"num_layers": 1}})
    return start_model(tiny_llama(), method, seed=0).train()


def go_back(trained: Any) -> None:
    ids = random_ids(2, 9)
    trained(
        input_ids=ids, labels=ids, shift_labels=ids, num_items_in_batch=18, use_cache=False
    ).loss.backward()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("keep_frozen_whole", [True, False])
def test_what_is_sharded_is_what_was_asked_for_and_nothing_stays_gathered(
    accelerator: Accelerator, variant: str, keep_frozen_whole: bool
) -> None:
    model = start(variant)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trains = set(trainable_parameters(model))
    train = TrainConfig(max_steps=1, sharding="expansion" if keep_frozen_whole else "all")
    go_back(shard_model(model, train, accelerator))
    parameters = dict(model.named_parameters())
    sharded = {name for name, parameter in parameters.items() if isinstance(parameter, DTensor)}
    assert sharded == (trains if keep_frozen_whole else set(parameters))
    assert {name for name, parameter in parameters.items() if parameter.grad is not None} == trains
    assert parameters.keys() == before.keys()
    assert all(
        torch.equal(whole_tensor(parameter), before[name]) for name, parameter in parameters.items()
    )


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("variant", VARIANTS)
def test_without_sharding_processes_exchange_the_gradient_of_what_trains_and_nothing_else(
    variant: str,
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
    go_back(wrapped)
    assert sum(exchanged) == sum(
        parameter.numel() for parameter in trainable_parameters(model).values()
    )


def test_a_changed_bit_of_a_sharded_base_is_named(accelerator: Accelerator) -> None:
    model: Any = start("adapt")
    wrapped = shard_model(model, TrainConfig(max_steps=1, sharding="all"), accelerator)
    hashes = {name: tensor_sha256(part) for name, part in parts_here(model.base).items()}
    run: Any = SimpleNamespace(model=model, base_parts=hashes)
    TrainingRun.check_frozen_base(run, 2)
    before = versions(parts_here(model.base))
    go_back(wrapped)
    assert versions(parts_here(model.base)) == before, "gathering its parts is no write"
    with torch.no_grad():
        local_part(model.expansion.norm.weight).add_(1)
        local_part(model.base.model.layers[1].mlp.up_proj.weight)[3, 5].mul_(-1)
    with pytest.raises(
        PreservationError, match=r"^step 3: .*: model\.layers\.1\.mlp\.up_proj\.weight$"
    ):
        TrainingRun.check_frozen_base(run, 3)
    after = versions(parts_here(model.base))
    written = [name for name in before if before[name] != after[name]]
    assert written == ["model.layers.1.mlp.up_proj.weight"]


@pytest.mark.usefixtures("group")
def test_shards_of_another_model_are_refused(tmp_path: Path) -> None:
    small, large = (
        start_model(tiny_llama(hidden_size=size), MethodConfig(), seed=0) for size in (32, 64)
    )
    shard = shard_of(trainable_parameters(small), ALONE)
    save_tensors(tmp_path / shard.file, shard.tensors, shard.header)
    with pytest.raises(StorageError, match="does not fit this model"):
        load_shards(tmp_path, trainable_parameters(large))
