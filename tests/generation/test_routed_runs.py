"""What a run answers with: its trained model and its base, routed, or one of them."""

import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from scale_cli.commands.serve import serve
from scale_cli.config.schema import Head, RunConfig
from scale_cli.errors import BaseModelError, ChangedBaseError, RunFolderError, UsageError
from scale_cli.generation.generator import Generator, HeadShares, Sampling
from scale_cli.storage.atomic import load_tensors, read_json, save_tensors
from tests.command_line import Scale, refused
from tests.small_runs import changed, export, petitions_run, train_run
from tests.torture.attacker import edit_json

PROMPTS = ["Once upon a time", "학교에서", "Lily saw a big"]
GREEDY = Sampling(max_new_tokens=8)


def plain(folder: Path | str) -> Any:
    """A model as anybody loads it, by transformers alone."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


def said(generator: Generator) -> list[str]:
    return [one.completion for one in generator.continue_all(PROMPTS, GREEDY)]


def greedy(model: Any, ids_T: Tensor, sampling: Sampling = GREEDY) -> list[int]:
    options = {"max_new_tokens": sampling.max_new_tokens, "do_sample": False}
    new_T = model.generate(input_ids=ids_T[None], **options)[0, len(ids_T) :]
    return new_T.tolist()


def trained(shared_data: Path, folder: Path, variant: str) -> RunConfig:
    return train_run(petitions_run(shared_data, folder / "run", variant=variant))


@pytest.fixture(scope="module")
def lora(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return trained(shared_data, tmp_path_factory.mktemp("routed"), "lora")


@pytest.fixture(scope="module", params=["lora", "full"])
def run(
    request: pytest.FixtureRequest,
    lora: RunConfig,
    shared_data: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> RunConfig:
    """A run that widens nothing."""
    if request.param == "lora":
        return lora
    return trained(shared_data, tmp_path_factory.mktemp("routed"), request.param)


def test_a_widened_run_answers_with_the_head_that_is_asked_for(
    shared_data: Path, tmp_path: Path
) -> None:
    config = trained(shared_data, tmp_path, "route")
    base = plain(config.model.base)
    said = {}
    for head in get_args(Head):
        generator = Generator(config.output_dir, head)
        framed = [generator.framed(prompt) for prompt in PROMPTS]
        said[head] = [new_T.tolist() for new_T in generator.generate(framed, GREEDY)]
        assert generator.head_names == (["base", "trained"] if head == "routed" else [])
    for prompt, new in zip(framed, said["base"], strict=True):
        assert greedy(base, prompt.ids_T) == new
    assert said["trained"] != said["base"]
    assert said["routed"] == [
        new_T.tolist() for new_T in Generator(config.output_dir / "final").generate(framed, GREEDY)
    ]


@torch.no_grad()
def mixed(models: list[Any], prior: float, ids_T: Tensor, num_new: int) -> tuple[Tensor, Tensor]:
    """Return greedy tokens of the posterior mixture of plain models, and the base's last weight."""
    log_weights_K = torch.tensor([prior, 1.0 - prior], dtype=torch.float64).log()
    read = 0
    while True:
        log_probs_KTV = torch.stack(
            [model(ids_T[None]).logits[0].double().log_softmax(-1) for model in models]
        )
        for at in range(read, len(ids_T) - 1):
            log_weights_K = log_weights_K + log_probs_KTV[:, at, ids_T[at + 1]]
        read = len(ids_T) - 1
        weights_K = log_weights_K.softmax(0)
        if num_new == 0:
            return ids_T, weights_K[0]
        best = (weights_K[:, None] * log_probs_KTV[:, -1].exp()).sum(0).argmax()
        ids_T, num_new = torch.cat([ids_T, best[None]]), num_new - 1


def test_a_run_that_widens_nothing_is_mixed_with_its_base_by_the_posterior(run: RunConfig) -> None:
    generator = Generator(run.output_dir)
    folder = export(run).folder
    models = [plain(path) for path in (run.model.base, folder)]
    framed = [generator.framed(prompt) for prompt in PROMPTS]
    assert [prompt.base_prior for prompt in framed] == [0.98, 0.02, 0.98]
    seen = HeadShares(generator.model)
    generated = generator.generate(framed, GREEDY, seen=seen)
    for row, (prompt, new_T) in enumerate(zip(framed, generated, strict=True)):
        assert prompt.base_prior is not None
        expected, _ = mixed(models, prompt.base_prior, prompt.ids_T, len(new_T))
        assert torch.cat([prompt.ids_T, new_T]).tolist() == expected.tolist()
        _, weight = mixed(models, prompt.base_prior, prompt.ids_T, len(new_T) - 1)
        assert seen.of_row(row)[len(new_T) - 1][0] == pytest.approx(float(weight))


def test_a_head_alone_says_what_its_own_model_says(run: RunConfig) -> None:
    alone: dict[Head, str | Path] = {"base": run.model.base, "trained": export(run).folder}
    for head, folder in alone.items():
        generator = Generator(run.output_dir, head)
        assert generator.head_names == []
        model = plain(folder)
        for prompt in map(generator.framed, PROMPTS):
            (new_T,) = generator.generate([prompt], GREEDY)
            assert new_T.tolist() == greedy(model, prompt.ids_T)


def test_a_config_without_a_router_serves_the_trained_head(lora: RunConfig, scale: Scale) -> None:
    unrouted = changed(lora, "method.router=null")
    assert (lora.method.head, unrouted.method.head) == ("routed", "trained")
    for variant, head in (("full", "routed"), ("route", "routed"), ("preserve", "trained")):
        assert changed(lora, f"method.variant={variant}").method.head == head
    route = changed(lora, "method.variant=route", "method.router=null")
    assert route.method.served == "trained"
    with_router = changed(lora, "method.variant=route")
    assert with_router.method.served == "posterior"


def test_a_checkpoint_and_an_adapter_are_routed_too(lora: RunConfig) -> None:
    expected = said(Generator(lora.output_dir))
    of_adapter = export(changed(lora, "export.format=adapter")).folder
    for folder in (lora.output_dir / "final", of_adapter):
        generator = Generator(folder)
        assert generator.head_names == ["base", "trained"]
        assert said(generator) == expected


def test_an_export_is_routed_without_its_run(run: RunConfig, tmp_path: Path, scale: Scale) -> None:
    expected = said(Generator(run.output_dir))
    form = {"lora": "adapter", "full": "plain"}[run.method.variant]
    written = export(changed(run, f"export.format={form}")).folder
    folder = tmp_path / "elsewhere"
    ignored = shutil.ignore_patterns("scale.yaml", "base.json", "method.json", "manifest.json")
    shutil.copytree(written, folder, ignore=ignored)
    keys = read_json(folder / "config.json")["scale_router"]
    kind = {"lora": "adapter", "full": "copy"}[run.method.variant]
    assert (keys["kind"], keys["base"], keys["prior"]) == (kind, run.model.base, 0.5)
    assert keys["script_prior"] == 0.02 and [0xAC00, 0xD7A3] in keys["script"]
    assert "route" in (folder / "README.md").read_text()
    generator = Generator(folder)
    assert said(generator) == expected
    assert Generator(folder, "trained").head_names == []
    assert scale("verify", folder, "--base", run.model.base).exit_code == 0

    other = shutil.copytree(run.model.base, tmp_path / "other")
    weights = load_tensors(other / "model.safetensors")
    save_tensors(other / "model.safetensors", {k: 1.5 * w for k, w in weights.items()})
    with refused(ChangedBaseError, "is not the base that it was trained from"):
        Generator(folder, base=str(other))
    for changes, told in (
        ({"kind": "mixture"}, "scale_router.kind is 'mixture'; known are adapter and copy"),
        ({"base": str(tmp_path / "gone")}, "^--base: .*gone"),
    ):
        edit_json(folder / "config.json", {"scale_router": keys | changes})
        with refused(BaseModelError, told):
            Generator(folder)


def test_transformers_routes_an_adapters_folder_whose_code_it_trusts(lora: RunConfig) -> None:
    folder = export(changed(lora, "export.format=adapter")).folder
    base = plain(lora.model.base)
    trained = PeftModel.from_pretrained(plain(lora.model.base), str(folder)).eval()
    routed = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    for prompt in PROMPTS:
        ids_T = Generator(folder).framed(prompt).ids_T
        expected_T, _ = mixed([base, trained], 0.5, ids_T, 8)
        said_BT = routed.generate(ids_T[None], max_new_tokens=8, do_sample=False)
        assert said_BT[0].tolist() == expected_T.tolist()
        options = {"max_new_tokens": 8, "do_sample": False, "use_cache": False}
        assert torch.equal(routed.generate(ids_T[None], **options), said_BT)
    with torch.no_grad():
        output = routed(ids_T[None], labels=ids_T[None])
    of_next = output.logits[0, :-1].log_softmax(dim=-1).gather(1, ids_T[1:, None])
    assert torch.isclose(output.loss, -of_next.mean())
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):  # config.json is there
        AutoModelForCausalLM.from_pretrained(folder)


def test_transformers_loads_an_adapters_folder_as_it_is_asked_to(
    lora: RunConfig, tmp_path: Path
) -> None:
    folder = export(changed(lora, "export.format=adapter")).folder
    folder = shutil.copytree(folder, tmp_path / "adapter")
    edit_json(folder / "generation_config.json", {"eos_token_id": [2, 5]})
    asked = {"torch_dtype": torch.bfloat16, "attn_implementation": "eager"}
    routed: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **asked)
    assert routed.dtype == torch.bfloat16
    assert routed.streams.config._attn_implementation == "eager"
    assert routed.generation_config.eos_token_id == [2, 5]


def test_a_fully_trained_export_is_verified_with_the_base_that_it_names(
    run: RunConfig, scale: Scale
) -> None:
    if run.method.variant == "full":
        folder = export(run).folder
        done = scale("verify", folder)
        assert done.exit_code == 0 and "hashes, base, parity" in done.stdout


def test_the_weights_that_lora_leaves_frozen_lie_in_memory_once(lora: RunConfig) -> None:
    routed = Generator(lora.output_dir).model
    held = {weight.data_ptr(): weight.numel() for weight in routed.parameters()}
    trained = load_tensors(lora.output_dir / "final" / "trained.safetensors")
    of_base = AutoModelForCausalLM.from_pretrained(lora.model.base).num_parameters()
    assert sum(held.values()) == of_base + sum(tensor.numel() for tensor in trained.values())


def test_a_folder_of_one_model_answers_with_that_alone(lora: RunConfig) -> None:
    heads: tuple[Head, ...] = ("base", "routed")
    for head in heads:
        with refused(RunFolderError, f"--head {head}: this folder holds only a trained model"):
            Generator(Path(lora.model.base), head)
    assert Generator(Path(lora.model.base), "trained").head_names == []


def test_the_server_says_its_bound(
    lora: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[Any] = []
    monkeypatch.setattr(
        "scale_cli.generation.server.run_server", lambda *server: served.extend(server)
    )
    monkeypatch.setattr("signal.signal", lambda *_: None)
    serve(lora.output_dir, None, ["--port", "0"])
    promise = capsys.readouterr().out.splitlines()[0]
    assert "routed with its base" in promise
    assert "0.693 nats over its best head, or 3.912 where" in promise
    assert served[0].head_names == ["base", "trained"]

    served[0].model.head = "cosine"
    monkeypatch.setattr("scale_cli.generation.generator.Generator", lambda *_: served[0])
    serve(lora.output_dir, None, ["--port", "0"])
    assert "the cosine rule promises no bound\n" in capsys.readouterr().out
    with refused(UsageError, "^--engine vllm: serves plain exports"):
        serve(lora.output_dir, "vllm", [], "base")
