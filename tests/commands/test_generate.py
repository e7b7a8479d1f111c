import json
import math
import re
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from scale_cli.commands.export import export
from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale
from scale_cli.config.schema import RunConfig
from scale_cli.config.sources import CorpusSource
from scale_cli.data.tokens import TokenCache
from scale_cli.errors import ConfigError
from scale_cli.generation import Continuation, Generator, Sampling
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.runs.opened import MethodFolder, Run
from scale_cli.terminal import printable
from tests.command_line import Scale
from tests.config.small_config import changed
from tests.export.conftest import configured
from tests.torture.attacker import edit_json
from tests.widening import lower_stories

PROMPTS = ["Once upon a time", "Lily saw a big", "학교에서"]
GREEDY = Sampling(max_new_tokens=12)
TEMPLATE = """{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""


@pytest.fixture(scope="module")
def run(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("generating") / "run"
    base = shutil.copytree(lower_stories(shared_data), folder.parent / "base")
    (base / "chat_template.jinja").write_text(TEMPLATE)
    config = configured(
        shared_data, folder, {"variant": "route", "collaboration": {"layers": "top:1"}}
    )
    config = changed(config, f"model.base={base}", "export.format=[llama, transformers, adapter]")
    upscale(config)
    train(config, None, print)
    for name in ("llama", "transformers", "adapter"):
        export(changed(config, f"export.format={name}"))
    return config


@pytest.fixture(scope="module")
def generator(run: RunConfig) -> Generator:
    return Generator(run.output_dir)


@pytest.fixture(scope="module")
def continued(generator: Generator) -> list[Continuation]:
    return generator.continue_all(PROMPTS, GREEDY)


def completions(path: Path, sampling: Sampling = GREEDY) -> list[str]:
    return [c.completion for c in Generator(path).continue_all(PROMPTS, sampling)]


def test_a_run_its_folders_and_its_exports_say_the_same_and_have_its_chat_template(
    run: RunConfig, continued: list[Continuation]
) -> None:
    expected = [c.completion for c in continued]
    assert all(expected[:2])  # what it makes of Hangul is no whole character
    (checkpoint,) = (run.output_dir / "checkpoints").iterdir()
    exports = {
        name: run.output_dir / "export" / name for name in ("llama", "transformers", "adapter")
    }
    for folder in (
        run.output_dir / "final",
        checkpoint,
        exports["transformers"],
        exports["adapter"],
    ):
        assert completions(folder) == expected
    assert all(completions(exports["llama"])[:2])
    for folder in (run.output_dir, *exports.values()):
        assert Generator(folder).tokenizer.chat_template == TEMPLATE
    for name in ("llama", "transformers"):  # by transformers alone
        assert AutoTokenizer.from_pretrained(exports[name]).chat_template == TEMPLATE


def test_a_users_turn_is_answered_after_what_the_chat_template_makes_of_the_conversation(
    run: RunConfig,
) -> None:
    generator = Generator(run.output_dir)
    turns = [{"role": "user", "content": PROMPTS[0]}]
    # The template writes the mark that stands before a document itself, where a text gets it.
    (text,) = generator.continue_all([f"[user]{PROMPTS[0]}\n[assistant]"], GREEDY)
    (answer,) = generator.continue_all([turns], GREEDY)
    assert (
        generator.prompt_ids(turns).tolist()
        == generator.prompt_ids(f"[user]{PROMPTS[0]}\n[assistant]").tolist()
    )
    assert answer.prompt == text.prompt.removeprefix("[user]").removesuffix("\n[assistant]")
    # The router judges by the user's words alone, in generation as in the shares that it reports.
    prompt = generator.framed(turns)
    judged = prompt.judged_T
    said = str(generator.tokenizer.decode(prompt.ids_T[judged]))
    assert said.strip(" []\n") == PROMPTS[0]
    assert not judged[-1] and not judged[0]
    unjudged = replace(prompt, judged_T=torch.zeros_like(judged), base_prior=0.75)
    with torch.no_grad():
        shares = generator.head_shares(unjudged, prompt.ids_T[:0])
    assert all(share["base"] == pytest.approx(0.75) for share in shares if share)
    # A mark that a user writes is text: it ends no turn.
    mark = generator.tokenizer.eos_token
    asked = generator.prompt_ids([{"role": "user", "content": f"a{mark}b"}])
    assert generator.tokenizer.eos_token_id not in asked.tolist()
    assert mark in str(generator.tokenizer.decode(asked))
    for template, told in (
        ("{{ raise_exception('no') }}", "the chat template refuses .*: no$"),
        (None, "has no chat template"),
    ):
        generator.tokenizer.chat_template = template
        with pytest.raises(ConfigError, match=told):
            generator.continue_all([turns], GREEDY)


def test_a_prompt_in_the_new_script_begins_with_the_trained_head(
    run: RunConfig, generator: Generator
) -> None:
    for of in (generator, Generator(run.output_dir / "export/transformers")):
        framed = [of.framed(prompt) for prompt in PROMPTS]
        assert [prompt.base_prior for prompt in framed] == [0.98, 0.98, 0.02]
        assert of.framed([{"role": "user", "content": PROMPTS[2]}]).base_prior == 0.02
        with torch.no_grad():
            first = [of.head_shares(prompt, prompt.ids_T[:1])[0] for prompt in framed]
        assert [share["base"] for share in first if share] == pytest.approx([0.98, 0.98, 0.02])
    model = MethodFolder(
        run.output_dir / "final", Run(changed(run, "method.router.script_prior=null"))
    ).load()
    assert model.config.router_script_prior is None


def test_at_a_terminal_a_conversation_goes_on(
    run: RunConfig, scale: Scale, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = iter(["Once upon a time", "   ", "And then?"])

    def one_line(_: str) -> str:
        try:
            return next(said)
        except StopIteration:
            raise EOFError from None

    seen: list[list[dict[str, str]]] = []
    continue_all = Generator.continue_all

    def noted(self: Generator, prompts: Any, *rest: Any) -> list[Continuation]:
        seen.extend([dict(turn) for turn in prompt] for prompt in prompts)
        return continue_all(self, prompts, *rest)

    monkeypatch.setattr(Generator, "continue_all", noted)
    monkeypatch.setattr("builtins.input", one_line)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    done = scale("generate", run.output_dir, "--chat", "--max-new-tokens", "6")
    assert done.exit_code == 0 and len(done.stdout.splitlines()) >= 2
    assert [len(turns) for turns in seen] == [1, 3]
    assert (
        seen[1][0] == {"role": "user", "content": "Once upon a time"}
        and seen[1][1]["role"] == "assistant"
    )


def test_the_base_heads_share_is_what_bayes_rule_says_token_by_token(
    generator: Generator, continued: list[Continuation]
) -> None:
    assert isinstance(generator.model, ScaleForCausalLM)
    prompt = generator.prompt_ids(PROMPTS[0]).tolist()
    ids = prompt + generator.tokenizer(continued[0].completion, add_special_tokens=False).input_ids
    with torch.no_grad():
        states = generator.model.final_states(torch.tensor([ids]), preserved=True)
        heads = [
            logits[0].double().log_softmax(-1) for logits in generator.model.routed_logits(states)
        ]
    weight = 0.98  # the prompt has no letter of the new script
    for position, token in enumerate(ids[1 : len(prompt)]):
        said = [math.exp(head[position, token]) for head in heads]
        weight = weight * said[0] / (weight * said[0] + (1 - weight) * said[1])
    shares = [token.shares or {} for token in continued[0].tokens]
    assert shares[0]["base"] == pytest.approx(weight, rel=1e-3)
    assert all(sum(share.values()) == pytest.approx(1.0) for share in shares)


def test_the_tokens_add_up_to_the_completion_and_prompt_and_completion_to_the_text_that_was_generated(
    run: RunConfig, generator: Generator, continued: list[Continuation]
) -> None:
    for c in continued:
        assert "".join(token.text for token in c.tokens) == c.completion
    for of in (generator, Generator(run.output_dir / "export/llama")):
        (begun,) = of.continue_all(["Once upon"], GREEDY)
        asked: dict[str, Any] = {"do_sample": False, "max_new_tokens": GREEDY.max_new_tokens}
        if of.head_names():
            asked["router_prior"] = 0.98
        generated = of.model.generate(of.prompt_ids("Once upon")[None], **asked)[0]
        assert str(of.tokenizer.decode(generated)).endswith(f"Once upon{begun.completion}")
        assert begun.completion[0] == " "


def test_only_what_is_asked_for_decides_the_text_whatever_the_base_would_generate_with(
    run: RunConfig, continued: list[Continuation]
) -> None:
    penalised = shutil.copytree(
        run.output_dir / "export" / "transformers", run.output_dir.parent / "penalised"
    )
    penalty = {
        "repetition_penalty": 5.0,
        "no_repeat_ngram_size": 1,
        "num_beams": 3,
        "do_sample": True,
    }
    edit_json(penalised / "generation_config.json", penalty)
    for settings in (GREEDY, replace(GREEDY, temperature=1e-39)):  # the second is the coldest
        assert completions(penalised, settings) == [text.completion for text in continued]


def test_every_end_that_the_bases_settings_name_ends_a_text(
    run: RunConfig, generator: Generator, continued: list[Continuation]
) -> None:
    framed = [generator.framed(prompt) for prompt in PROMPTS]
    new = [
        generator.model.generate(
            prompt.ids_T[None], max_new_tokens=8, do_sample=False, router_prior=prompt.base_prior
        )[0, len(prompt.ids_T) :].tolist()
        for prompt in framed
    ]
    ends = [generator.tokenizer.eos_token_id, new[0][4], new[1][5]]
    many = shutil.copytree(
        run.output_dir / "export" / "transformers", run.output_dir.parent / "many-ends"
    )
    edit_json(many / "generation_config.json", {"eos_token_id": ends})
    for cut, text, row in zip(
        Generator(many).continue_all(PROMPTS, GREEDY), continued, new, strict=True
    ):
        expected = min(
            (row.index(end) for end in ends if end in row), default=GREEDY.max_new_tokens
        )
        assert len(cut.tokens) == expected and text.completion.startswith(cut.completion)


def test_text_is_on_standard_output_with_its_heads_where_asked_and_as_json_of_lines(
    run: RunConfig,
    scale: Scale,
    continued: list[Continuation],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = [printable(c.prompt + c.completion) for c in continued[:2]]
    command = ("generate", run.output_dir, "--max-new-tokens", "12", "--prompt", PROMPTS[0])
    for number in (1, 2):  # one prompt is printed as it comes
        done = scale(*command, *("--prompt", PROMPTS[1])[: 2 * number - 2])
        assert done.stdout == "\n--------\n".join(texts[:number]) + "\n"
        assert done.stderr.startswith("shares of the heads in ") and done.stderr.count("\n") == 1
    spoken = re.split(
        r"\[(base|trained)\]", scale(*command, "--show-heads").stdout.removesuffix("\n")
    )
    assert "".join(spoken[::2]) == f"{PROMPTS[0]}{continued[0].completion}" and len(spoken) > 1
    assert all(before != after for before, after in pairwise(spoken[1::2]))
    monkeypatch.setattr("sys.stdin", ["Once\r\n", "\r\n", "Lily"])
    told = [json.loads(line) for line in scale(*command[:4], "--json").stdout.splitlines()]
    assert [one["prompt"] for one in told] == ["Once", "Lily"]
    for one in told:
        assert len(one["tokens"]) == 12
        assert set(one["tokens"][0]["shares"]) == {"base", "trained"}


def test_a_prompt_that_leaves_no_room_in_the_context_is_one_line_and_an_answer_ends_where_the_context_does(
    run: RunConfig, generator: Generator, scale: Scale
) -> None:
    most = generator.model.config.max_position_embeddings
    word = generator.tokenizer(" Lily", add_special_tokens=False).input_ids
    (fits,) = generator.tokenizer.batch_decode([(word * most)[: most - 4]])
    room = most - len(generator.prompt_ids(fits))
    assert 0 < room < 8
    _, long = generator.continue_all(["Lily", fits], Sampling(max_new_tokens=12))
    assert len(long.tokens) <= room
    assert (
        f"the model's context of {most:,}"
        in scale("generate", run.output_dir, "--prompt", fits * 2).error()
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--top-p", "0.9"], "--top-p 0.9: does nothing at temperature 0"),
        (["--samples", "2"], "--samples, --output: give both or neither"),
        (
            ["--samples", "2", "--output", "x.jsonl", "--chat"],
            "and without --chat, --show-heads and --json",
        ),
        (
            ["--samples", "2", "--output", "x.jsonl", "--json"],
            "and without --chat, --show-heads and --json",
        ),
        (["--samples", "2", "--output", "x.txt"], "must end in .jsonl"),
        (["--samples", "2", "--output", "there.jsonl"], "already exists"),
    ],
)
def test_what_cannot_be_had_is_one_line(
    run: RunConfig,
    scale: Scale,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.jsonl").touch()
    path = run.output_dir / "final" / "scale.yaml" if "--samples" in options else run.output_dir
    done = scale("generate", path, "--prompt", "x", *options)
    assert told in done.error()


def test_standard_input_that_holds_no_text_is_one_line(
    run: RunConfig, scale: Scale, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stdin, told in (
        (None, "no prompt given"),
        ([], "no prompt given"),
        (["good\n", "\udcff\udcfe\n"], "not UTF-8"),
    ):
        monkeypatch.setattr("sys.stdin", stdin)
        assert told in scale("generate", run.output_dir).error()


def test_texts_of_the_base_are_drawn_anew_by_every_seed_and_are_a_source_to_replay(
    run: RunConfig, tmp_path: Path, scale: Scale, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scale_cli.commands.generate._AT_ONCE", 2)

    def drawn(name: str, *options: str) -> list[str]:
        command = (
            "generate",
            run.output_dir / "final/scale.yaml",
            "--samples",
            "5",
            "--output",
            tmp_path / name,
        )
        options = ("--max-new-tokens", "16", *options)
        assert scale(*command, *options).exit_code == 0
        return [json.loads(line)["text"] for line in (tmp_path / name).read_text().splitlines()]

    texts = drawn("one.jsonl")
    assert len(set(texts)) == 5 == len(texts)
    assert drawn("again.jsonl") == texts
    assert not set(drawn("other.jsonl", "--seed", "1")) & set(texts)
    assert {text[:4] for text in drawn("begun.jsonl", "--prompt", "Once", "--prompt", "Lily")} == {
        "Once",
        "Lily",
    }
    greedy, base = (
        drawn("greedy.jsonl", "--temperature", "0", "--max-new-tokens", "8"),
        Generator(run.model),
    )
    assert set(greedy) == {base.continue_all([""], Sampling(max_new_tokens=8))[0].completion}
    source = CorpusSource(
        name="drawn", language="en", role="replay", path=str(tmp_path / "one.jsonl")
    )
    assert len(TokenCache(tmp_path / "tokens", base.tokenizer).open(source)) == 5
