"""What every verb computes, on a device that refuses to mix with the CPU: the same as on the CPU."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from lm_eval.api.instance import Instance
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from scale_cli.commands.run import run_pipeline
from scale_cli.commands.upscale import upscale
from scale_cli.commands.verify import verify
from scale_cli.config.load import load_config
from scale_cli.config.schema import MethodConfig, RunConfig
from scale_cli.config.training import TrainConfig
from scale_cli.data.batches import Batches, PackedWindows
from scale_cli.data.corpora import open_sources
from scale_cli.evaluation.lm_eval_heads import heads_of
from scale_cli.evaluation.scoring import Passes, score_corpus
from scale_cli.generation.generator import Generator, Sampling
from scale_cli.methods.widened import RouterConfig
from scale_cli.model.heads import ModelPair, Streams
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.processes import ALONE
from scale_cli.runs.folder import RunFolder
from scale_cli.training.objective import for_training
from scale_cli.training.optimiser import build_optimiser, load_optimiser_tensors, optimiser_tensors
from scale_cli.training.step import StepResult, train_step
from scale_cli.upscale.base_tokenizer import load_tokenizer
from scale_cli.upscale.building import start_model
from tests.pretended_device import accelerate_on, pretended_device
from tests.small_runs import changed
from tests.torture.tiny_run import Runs, write_base_and_texts
from tests.vocabulary.tokenizers_at_hand import KOREAN
from tests.widening import as_if_trained, tiny_llama, widen

CPU = torch.device("cpu")
VARIANTS = ("preserve", "adapt", "route", "full", "lora", "freeze", "llama-pro")
SMALL = {"vocab_size": 280, "num_hidden_layers": 2}
PROMPTS = ["12 7", "30 31 32 33"]
TWO_STEPS = (
    "train.max_steps=2",
    "train.warmup_steps=1",
    "train.save_every_steps=2",
    "train.eval_every_steps=1",
)


@pytest.fixture
def device() -> Iterator[torch.device]:
    with pretended_device() as device, accelerate_on(device):
        yield device


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Of a run of a second that has been upscaled; two texts are read, for every operator costs here."""
    root = tmp_path_factory.mktemp("pretended")
    write_base_and_texts(root, num_hidden_layers=2)
    fewer = [f"evaluation.perplexity.{index}.max_documents=2" for index in range(2)]
    config = load_config(Runs(root).config("run"), fewer)
    upscale(config)
    return config


def embedded_on(compute: Callable[[], Any]) -> set[str]:
    """Return the devices on which any model read token ids while something was computed."""
    devices = set()

    def note(module: nn.Module, _: Any) -> None:
        if isinstance(module, nn.Embedding) and not is_fake(module.weight):
            devices.add(module.weight.device.type)

    hook = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        compute()
    finally:
        hook.remove()
    return devices


def test_the_device_refuses_what_cuda_refuses_and_takes_what_cuda_takes(
    device: torch.device,
) -> None:
    x, y = torch.arange(3.0, device=device), torch.ones(3)
    index, number = torch.tensor([2, 0]), torch.tensor(2.0)
    refused: list[Callable[[], Any]] = [
        lambda: x + y,
        lambda: y.add_(x[0]),
        lambda: y[index.to(device)],
        lambda: torch.where(x > 1, x, y),
        lambda: nn.functional.embedding(index, x[:, None]),
        lambda: torch.rand(3, device=device, generator=torch.Generator()),
        lambda: np.asarray(x),
    ]
    for mixture in refused:
        with pytest.raises((RuntimeError, TypeError), match=r"same device|for generator|to numpy"):
            mixture()
    there = [x + number, number * x, x[index], torch.where(x > 1, x, number), x.double().sum()]
    assert {tensor.device.type for tensor in there} == {device.type}
    assert {tensor.device.type for tensor in (y.copy_(x), x.to("cpu"))} == {"cpu"}
    assert torch.equal(x.cpu(), torch.arange(3.0))


def small_batches() -> Batches:
    ids = np.random.default_rng(0).integers(0, 61, 200)
    windows = PackedWindows(ids, 16, offsets=np.arange(0, 201, 10))
    return Batches([windows], [1.0], num_steps=2, seed=0, global_batch_size=4, micro_batch_size=2)


@pytest.mark.parametrize(
    ("variant", "precision"), [(variant, "no") for variant in VARIANTS] + [("route", "bf16")]
)
def test_two_training_steps_of_every_method(
    device: torch.device, variant: Any, precision: Any
) -> None:
    settings: dict[str, Any] = {"lr": 1e-4, "schedule": "constant", "embedding_norm": "bounded"}
    train = TrainConfig(max_steps=2, mixed_precision=precision, **settings)

    def steps(where: torch.device) -> list[StepResult]:
        torch.manual_seed(0)
        method = MethodConfig.model_validate({"variant": variant, "freeze": {"num_layers": 1}})
        model = start_model(tiny_llama(num_hidden_layers=2), method, seed=0)
        with accelerate_on(where):
            accelerator = Accelerator()
            wrapped = accelerator.prepare(for_training(nn.Module.to(model, where), train)).train()
            optimiser, batches, results = build_optimiser(wrapped, train), small_batches(), []
            for index in range(2):
                batch = batches.of_step(index)
                results.append(train_step(accelerator, wrapped, optimiser, batch, train).result())
                moments = optimiser_tensors(optimiser, wrapped)
                saved = {name: moment.cpu() for name, moment in moments.items()}
                load_optimiser_tensors(optimiser, wrapped, saved)
        return results

    for there, here in zip(steps(device), steps(CPU), strict=True):
        assert there.loss == pytest.approx(here.loss, rel=1e-2 if precision == "bf16" else 1e-5)


def route(**router: Any) -> ScaleForCausalLM:
    return as_if_trained(widen(tiny_llama(**SMALL), "route", "top:1", **router))


def beside_base() -> ModelPair:
    beside: ModelPair = ModelPair(tiny_llama(**SMALL), tiny_llama(1, **SMALL)).eval()
    return beside


@pytest.mark.parametrize("make", [route, beside_base])
def test_the_scores_of_documents_and_benchmarks(
    device: torch.device, config: RunConfig, make: Callable[[], Any]
) -> None:
    tokenizer = load_tokenizer(config.model)
    corpus = open_sources(config, config.evaluation.perplexity, tokenizer)[0]
    router = RouterConfig(prior=0.3, threshold=0.97)

    def scores(model: Streams) -> list[Tensor]:
        passes = Passes(16, 16, 4, "no")
        losses = score_corpus(model, corpus, router, passes)
        answering = heads_of(
            model, tokenizer, router=router, passes=passes, max_length=64, share=ALONE
        )
        stop = {"until": ["\n"], "max_gen_toks": 2}
        until = [Instance("generate_until", {}, (text, stop), 0) for text in PROMPTS]
        texts = ("1 2", " 3"), ("30 31 32", " 4 5")
        asked = [Instance("loglikelihood", {}, text, 0) for text in texts]
        told: list[float] = []
        for head, lm in answering.items():
            lm.head = head
            told.extend(score for score, _ in lm.loglikelihood(asked))
            told.extend(ord(letter) for text in lm.generate_until(until) for letter in text)
        of_documents = [losses.num_tokens, *losses.nats.values(), *losses.served.values()]
        return [torch.tensor(told), *map(torch.from_numpy, of_documents)]

    here, moved = scores(make()), make().to(device)
    assert embedded_on(
        lambda: torch.testing.assert_close(scores(moved), here, rtol=1e-5, atol=1e-4)
    ) == {device.type}


def generated(folder: Path) -> Any:
    return Generator(folder).continue_all(PROMPTS, Sampling(2))


def shortened(config: RunConfig, output_dir: Path, *overrides: str) -> RunConfig:
    """Return a run of two steps, with evaluations and a checkpoint."""
    return changed(config, f"output_dir={output_dir}", *TWO_STEPS, *overrides)


def korean(folder: Path) -> str:
    """Return the keys of a text of letters, which no other here is."""
    (folder / "ko.txt").write_text("\n\n".join([KOREAN] * 3))
    return f"name: ko, path: {folder / 'ko.txt'}, language: ko"


def with_replay(config: RunConfig, folder: Path) -> RunConfig:
    """Return a run that also reads text that the base knows."""
    return changed(
        config,
        f"corpus.sources.1={{{korean(folder)}}}",
        "corpus.sources.0.role=replay",
        f"evaluation.perplexity.0={{{korean(folder)}, role: acquisition, max_documents: 2}}",
    )


@pytest.mark.parametrize(
    ("variant", "formats", "lr"),
    [
        ("route", "[plain, transformers, adapter]", 0.003),
        ("full", "plain", "auto"),
        ("preserve, vocabulary: {new_tokens: 8, min_count: 2}", "plain", 0.003),
    ],
)
def test_every_verb_of_a_run_computes_on_the_device(
    device: torch.device,
    config: RunConfig,
    tmp_path: Path,
    variant: str,
    formats: str,
    lr: float | str,
) -> None:
    if variant != "route":
        config = with_replay(config, tmp_path)
    keys = (f"method={{variant: {variant}}}", f"export.format={formats}", f"train.lr={lr}")
    config = shortened(config, tmp_path / "run", *keys)
    verbs: list[Callable[[], Any]] = [
        lambda: run_pipeline(config),
        lambda: generated(config.output_dir),
        lambda: generated(RunFolder(config.output_dir).export("plain")),
        lambda: verify(config.output_dir),
    ]
    for verb in verbs:
        assert embedded_on(verb) == {device.type}


def test_a_precision_that_a_device_has_decided_is_kept_where_there_is_none(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = shortened(config, tmp_path / "run", "export.format=[plain, adapter]")
    assert (config.model.dtype, config.train.mixed_precision) == ("auto", "auto")
    with pretended_device() as device, accelerate_on(device):
        upscale(config)
    with accelerate_on(CPU):
        report = run_pipeline(config)
    assert "1 x cpu, bf16 autocast, base in bfloat16" in capsys.readouterr().out
    assert report and (report.dtype, report.mixed_precision) == ("bfloat16", "bf16")
    run = RunFolder(config.output_dir)
    for folder in (run.upscaled, run.final, run.evaluation, run.export("adapter")):
        of = load_config(folder / "scale.yaml")
        kept = (of.model.dtype, of.train.mixed_precision, of.evaluation.mixed_precision)
        assert kept == ("bfloat16", "bf16", "bf16")
