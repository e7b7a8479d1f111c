"""The prior by a prompt's script, and templates that are no evidence: vLLM beside `scale generate`."""

from __future__ import annotations

import lzma
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scale_cli.config.schema import ModelConfig
from scale_cli.config.vocabulary import Script
from scale_cli.data.conversations import Messages
from scale_cli.export.dense import plain_model
from scale_cli.export.plain_folder import copy_tokenizer, name_ends, router_keys, write_plain
from scale_cli.generation.generator import FramedPrompt, Generator, Sampling
from scale_cli.methods.widened import RouterConfig
from scale_cli.runs.method_folder import set_router
from scale_cli.storage.atomic import read_json
from scale_cli.upscale.base import load_base
from scale_cli.upscale.base_tokenizer import load_tokenizer, tokenizer_place
from tests.serving.engine.conftest import Ask, random_adapter
from tests.serving.engine.test_vllm import ENGINE
from tests.torture.attacker import edit_json
from tests.widening import as_if_trained, widen

NEW = 6
LONG = 40  # an answer, in which a sign comes
SAMPLING = {"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True, "logprobs": 0}
TEMPLATE = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Served:
    """What an engine said of the prompts of a round, and the same model in transformers."""

    generator: Generator
    prompts: Sequence[FramedPrompt]
    tokens: list[list[int]]
    log_probs: Tensor

    @torch.no_grad()
    def expected(self, priors: Sequence[float]) -> Tensor:
        """(prompts, NEW): log-probabilities of what was served, by the base head's first weights."""
        found = []
        for prompt, tokens, prior in zip(self.prompts, self.tokens, priors, strict=True):
            new_T = torch.tensor(tokens)
            judged_T = torch.cat([prompt.judged_T, torch.ones_like(new_T, dtype=torch.bool)])
            logits_TV = self.generator.model(
                torch.cat([prompt.ids_T, new_T])[None],
                evidence_mask=judged_T[None],
                router_prior=prior,
                use_cache=False,
            ).logits[0, -NEW - 1 : -1]
            found.append(logits_TV.log_softmax(dim=-1).gather(-1, new_T[:, None])[:, 0])
        return torch.stack(found)


def beginnings(text: Path) -> list[str]:
    with lzma.open(text, "rt", encoding="utf-8") as file:
        lines = [line.strip() for line in file.read(200_000).splitlines()]
    long = [line for line in lines if len(line) > 20][:200:5]
    return [line[:length] for line in long for length in (12, 20)]


KOREAN = Script.of_languages(["ko"])


def widened_to(folder: Path, base: ModelConfig) -> None:
    model = as_if_trained(widen(load_base(base), "route"), std=0.12)
    set_router(model, RouterConfig(), KOREAN)
    plain = plain_model(model, "float32", [torch.arange(64)[None]])
    write_plain(plain, load_tokenizer(base), base, folder, router_keys(model))


def adapted_to(folder: Path, base: ModelConfig) -> None:
    assert KOREAN is not None
    ranges = [list(span) for span in KOREAN.ranges]
    at = Path(base.base)
    model = load_base(base)
    random_adapter(model, folder, at, prior=0.5, script_prior=0.02, script=ranges)
    copy_tokenizer(load_tokenizer(base), tokenizer_place(base), folder)
    model.generation_config.save_pretrained(folder)
    name_ends(folder, load_tokenizer(base))


@pytest.fixture(scope="module", params=[widened_to, adapted_to], ids=["expansion", "adapter"])
def served(
    request: pytest.FixtureRequest,
    ask: Ask,
    shared_data: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Served]:
    """Korean and English prompts, as texts and in chats; the trained head knows as little as the base."""
    root = tmp_path_factory.mktemp("prompts")
    request.param(root / "by script", ModelConfig(base=str(shared_data / "ckpt-eltec" / "hf")))
    (root / "by script" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    shutil.copytree(root / "by script", root / "even")
    even = {"scale_router": {**read_json(root / "even" / "config.json")["scale_router"]}}
    del even["scale_router"]["script"]
    edit_json(root / "even" / "config.json", even)

    korean = beginnings(shared_data / "ko-petitions" / "valid.txt.xz")
    english = beginnings(shared_data / "en-eltec" / "valid.txt.xz")
    texts = [text for both in zip(korean, english, strict=False) for text in both]
    chats: list[Messages] = [[{"role": "user", "content": text}] for text in texts[:24]]
    system = {"role": "system", "content": "Answer as a poet would, in verse."}
    answer = {"role": "assistant", "content": "네, the train leaves at noon."}
    chats += [[system, *chats[0]], [*chats[1], answer, *chats[2]], [*chats[2], answer, *chats[1]]]
    asked: dict[str, Sequence[Any]] = {"texts": texts, "again": texts[::-1], "chats": chats}
    generators = {name: Generator(root / name) for name in ("by script", "even")}
    framed = {name: [generators["by script"].framed(of) for of in asked[name]] for name in asked}
    rounds = [
        {"prompts": [of.ids_T.tolist() for of in framed[name]], "sampling": SAMPLING}
        for name in asked
    ]
    few_places = {**ENGINE, "max_num_seqs": 6, "max_num_batched_tokens": 48}
    jobs = {
        "by script": {"folder": str(root / "by script"), "engine": few_places, "rounds": rounds},
        "even": {"folder": str(root / "even"), "engine": few_places, "rounds": rounds[:1]},
    }
    return {
        f"{job}, {name}": Served(
            generators[job],
            framed[name],
            [of[0] for of in told["tokens"]],
            torch.tensor([of[0] for of in told["log_probs"]]),
        )
        for job, told_of_job in ask(jobs, root).items()
        for name, told in zip(asked, told_of_job["rounds"], strict=False)
    }


@pytest.mark.parametrize("name", ["by script, texts", "by script, again", "by script, chats"])
def test_every_prompt_begins_with_the_prior_of_its_script_and_a_template_is_no_evidence(
    served: dict[str, Served], name: str
) -> None:
    of = served[name]
    priors = [prompt.base_prior or 0.0 for prompt in of.prompts]
    assert {0.02, 0.98} <= {*priors}
    assert all(prompt.judged_T.all() for prompt in of.prompts) == (name != "by script, chats")
    torch.testing.assert_close(of.log_probs, of.expected(priors), atol=1e-3, rtol=0)


def test_a_short_korean_prompt_reaches_the_trained_head_where_the_even_prior_sends_it_to_the_base(
    served: dict[str, Served],
) -> None:
    def trained_share(of: Served) -> Tensor:
        # With all weight on one head before the prompt, hardly any evidence moves it.
        base = of.expected([1.0 - 1e-9] * len(of.prompts))[:, 0].exp()
        trained = of.expected([1e-9] * len(of.prompts))[:, 0].exp()
        share = (of.log_probs[:, 0].exp() - base) / (trained - base)
        tells = (trained - base).abs() > 0.005  # else both heads say the same
        is_korean = torch.tensor([prompt.base_prior == 0.02 for prompt in of.prompts])
        return torch.where(tells, share, torch.nan)[is_korean]

    by_script = trained_share(served["by script, texts"])
    even = trained_share(served["even, texts"])
    moved = (even < 0.5) & (by_script > 0.5)
    assert moved.sum() >= 4
    assert not ((even > 0.5) & (by_script < 0.5)).any()


@pytest.mark.parametrize("write", [widened_to, adapted_to], ids=["expansion", "adapter"])
def test_an_answer_ends_in_the_engine_at_the_mark_that_ends_an_assistants_turn(
    write: Callable[[Path, ModelConfig], None], ask: Ask, shared_data: Path, tmp_path: Path
) -> None:
    base = ModelConfig(base=str(tmp_path / "base"))
    shutil.copytree(shared_data / "ckpt-eltec" / "hf", base.base)
    write(tmp_path / "endless", base)
    endless = Generator(tmp_path / "endless")
    prompt = endless.framed("The train leaves at noon.")
    (whole_T,) = endless.generate([prompt], Sampling(max_new_tokens=LONG, temperature=0.0))
    whole = whole_T.tolist()

    described = read_json(Path(base.base, "tokenizer.json"))
    signs = {index: token for token, index in described["model"]["vocab"].items() if token in ",.;"}
    index = next(token for token in whole if token in signs)  # marks have signs in them
    mark = signs[index]
    form = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = {"id": index, "content": mark, **form, "special": False}
    edit_json(
        Path(base.base, "tokenizer.json"), {"added_tokens": [*described["added_tokens"], added]}
    )
    turns = TEMPLATE.replace("<|im_end|>", mark)
    Path(base.base, "chat_template.jinja").write_text(turns, encoding="utf-8")
    write(tmp_path / "ends", base)

    sampling = {"temperature": 0.0, "max_tokens": LONG}
    rounds = [{"prompts": [prompt.ids_T.tolist()], "sampling": sampling}]
    jobs = {
        name: {"folder": str(tmp_path / name), "engine": ENGINE, "rounds": rounds}
        for name in ("endless", "ends")
    }
    said = {name: told["rounds"][0]["tokens"][0][0] for name, told in ask(jobs, tmp_path).items()}
    assert len(whole) == LONG and said["endless"] == whole
    assert said["ends"] == whole[: whole.index(index) + 1]
