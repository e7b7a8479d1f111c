import io
import json
import re
import shutil
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoTokenizer

from scale_cli.config.schema import RunConfig
from scale_cli.data.tokens import TokenCache
from scale_cli.errors import ConfigError
from scale_cli.generation.generator import Continuation, Generator, HeadShares, Sampling
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.runs.folder import RunFolder
from scale_cli.runs.opened import MethodFolder, Run
from scale_cli.terminal import printable
from tests.command_line import Scale
from tests.data.corpus_files import source_of
from tests.small_runs import changed, export, petitions_run, train_run
from tests.torture.attacker import edit_json
from tests.widening import lower_stories, routed_heads

PROMPTS = ["Once upon a time", "Lily saw a big", "학교에서"]
GREEDY = Sampling(max_new_tokens=12)
TEMPLATE = """{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""


@pytest.fixture(scope="module")
def config(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("generating") / "run"
    base = shutil.copytree(lower_stories(shared_data), folder.parent / "base")
    (base / "chat_template.jinja").write_text(TEMPLATE)
    config = petitions_run(shared_data, folder, collaboration={"layers": "top:1"})
    config = train_run(
        changed(config, f"model.base={base}", "export.format=[plain, transformers, adapter]")
    )
    for name in ("plain", "transformers", "adapter"):
        export(changed(config, f"export.format={name}"))
    return config


@pytest.fixture(scope="module")
def run(config: RunConfig) -> RunFolder:
    return RunFolder(config.output_dir)


@pytest.fixture
def generate(run: RunFolder, scale: Scale) -> Scale:
    return partial(scale, "generate", run.root)


@pytest.fixture
def copied(run: RunFolder, tmp_path: Path) -> Path:
    """A copy of the export with code."""
    return shutil.copytree(run.export("transformers"), tmp_path / "copied")


@pytest.fixture(scope="module")
def generator(run: RunFolder) -> Generator:
    return Generator(run.root)


@pytest.fixture(scope="module")
def continued(generator: Generator) -> list[Continuation]:
    return generator.continue_all(PROMPTS, GREEDY)


def completions(path: Path, sampling: Sampling = GREEDY) -> list[str]:
    return [c.completion for c in Generator(path).continue_all(PROMPTS, sampling)]


def test_a_run_its_folders_and_its_exports_say_the_same(
    run: RunFolder, continued: list[Continuation]
) -> None:
    expected = [c.completion for c in continued]
    assert all(expected[:2])  # what it makes of Hangul is no whole character
    (checkpoint,) = run.checkpoints.iterdir()
    plain, with_code, adapter = map(run.export, ("plain", "transformers", "adapter"))
    for folder in (run.final, checkpoint, with_code, adapter):
        assert completions(folder) == expected
    assert all(completions(plain)[:2])
    for folder in (run.root, plain, with_code, adapter):
        assert Generator(folder).tokenizer.chat_template == TEMPLATE
    for folder in (plain, with_code):  # by transformers alone
        assert AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATE


def test_a_users_turn_is_answered_after_what_the_chat_template_makes_of_it(
    run: RunFolder,
) -> None:
    generator = Generator(run.root)
    turns = [{"role": "user", "content": PROMPTS[0]}]
    # The template writes the mark that stands before a document itself, where a text gets it.
    framed = generator.prompt_ids(f"[user]{PROMPTS[0]}\n[assistant]")
    assert torch.equal(generator.prompt_ids(turns), framed)
    (answer,) = generator.continue_all([turns], GREEDY)
    assert answer.prompt == PROMPTS[0]
    # The router judges by the user's words alone, in generation as in the shares that it reports.
    prompt = generator.framed(turns)
    judged = prompt.judged_T
    said = str(generator.tokenizer.decode(prompt.ids_T[judged]))
    assert said.strip(" []\n") == PROMPTS[0]
    assert not judged[-1] and not judged[0]
    unjudged = replace(prompt, judged_T=torch.zeros_like(judged), base_prior=0.75)
    seen = HeadShares(generator.model)
    generator.generate([unjudged], Sampling(max_new_tokens=1), seen=seen)
    assert seen.of_row(0)[0] == pytest.approx([0.75, 0.25])
    # A mark that a user writes is text: it ends no turn.
    mark = generator.tokenizer.eos_token
    asked = generator.prompt_ids([{"role": "user", "content": f"a{mark}b"}])
    assert generator.tokenizer.eos_token_id not in asked.tolist()
    assert mark in str(generator.tokenizer.decode(asked))
    for template, told in (("{{ raise_exception('no') }}", "refuses .*: no$"), (None, "has no")):
        generator.tokenizer.chat_template = template
        with pytest.raises(ConfigError, match=told):
            generator.continue_all([turns], GREEDY)


def test_a_prompt_in_the_new_script_begins_with_the_trained_head(
    config: RunConfig, run: RunFolder, generator: Generator
) -> None:
    for of in (generator, Generator(run.export("transformers"))):
        framed = [of.framed(prompt) for prompt in PROMPTS]
        assert [prompt.base_prior for prompt in framed] == [0.98, 0.98, 0.02]
        assert of.framed([{"role": "user", "content": PROMPTS[2]}]).base_prior == 0.02
        for prompt, prior in zip(framed, (0.98, 0.98, 0.02), strict=True):
            begun = replace(prompt, ids_T=prompt.ids_T[:1], judged_T=prompt.judged_T[:1])
            seen = HeadShares(of.model)
            of.generate([begun], Sampling(max_new_tokens=1), seen=seen)
            assert seen.of_row(0)[0][0] == pytest.approx(prior)
    even = Run(changed(config, "method.router.script_prior=null"))
    model = MethodFolder(run.final, even).load()
    assert model.config.router_script_prior is None


def test_at_a_terminal_a_conversation_goes_on(
    generate: Scale, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = Mock(side_effect=["Once upon a time", "   ", "And then?", EOFError])
    seen: list[list[dict[str, str]]] = []
    continue_all = Generator.continue_all

    def noted(self: Generator, prompts: Any, *rest: Any) -> list[Continuation]:
        seen.extend([*prompt] for prompt in prompts)
        return continue_all(self, prompts, *rest)

    monkeypatch.setattr(Generator, "continue_all", noted)
    monkeypatch.setattr("builtins.input", lines)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    done = generate("--chat", "--max-new-tokens", "6")
    assert done.exit_code == 0 and len(done.stdout.splitlines()) >= 2
    (first,), (again, answer, then) = seen
    assert first == again == {"role": "user", "content": "Once upon a time"}
    assert (answer["role"], then["role"], then["content"]) == ("assistant", "user", "And then?")


def test_a_question_and_its_answer_stand_on_lines_of_their_own(generate: Scale) -> None:
    asked = ("--prompt", "Who?", "--prompt", "Where?", "--max-new-tokens", "4")
    texts = generate("--chat", *asked).stdout.split("\n--------\n")
    assert [text.splitlines()[0] for text in texts] == ["Who?", "Where?"]


def test_the_base_heads_share_is_what_bayes_rule_says_token_by_token(
    generator: Generator, continued: list[Continuation]
) -> None:
    widened = generator.model.streams
    assert isinstance(widened, ScaleForCausalLM)
    prompt = generator.prompt_ids(PROMPTS[0]).tolist()
    logits = routed_heads(widened, torch.tensor([prompt]))
    heads = [of_head[0].double().softmax(-1) for of_head in logits]
    weight = 0.98  # the prompt has no letter of the new script
    for position, token in enumerate(prompt[1:]):
        base, trained = (float(head[position, token]) for head in heads)
        weight = weight * base / (weight * base + (1 - weight) * trained)
    shares = [token.shares or {} for token in continued[0].tokens]
    assert shares[0]["base"] == pytest.approx(weight, rel=1e-3)
    assert all(sum(share.values()) == pytest.approx(1.0) for share in shares)


def test_tokens_add_up_to_the_completion_and_with_the_prompt_to_what_was_generated(
    run: RunFolder, generator: Generator, continued: list[Continuation]
) -> None:
    for c in continued:
        assert "".join(token.text for token in c.tokens) == c.completion
    for of in (generator, Generator(run.export("plain"))):
        (begun,) = of.continue_all(["Once upon"], GREEDY)
        asked: dict[str, Any] = {"do_sample": False, "max_new_tokens": GREEDY.max_new_tokens}
        if of.head_names:
            asked["router_prior"] = 0.98
        generated = of.model.generate(of.prompt_ids("Once upon")[None], **asked)[0]
        assert str(of.tokenizer.decode(generated)).endswith(f"Once upon{begun.completion}")
        assert begun.completion[0] == " "


def test_what_is_asked_for_alone_decides_the_text(
    copied: Path, continued: list[Continuation]
) -> None:
    penalty = {"repetition_penalty": 5.0, "num_beams": 3, "do_sample": True}
    edit_json(copied / "generation_config.json", penalty)
    for settings in (GREEDY, replace(GREEDY, temperature=1e-39)):  # the second is the coldest
        assert completions(copied, settings) == [text.completion for text in continued]


def test_every_end_that_the_bases_settings_name_ends_a_text(
    copied: Path, generator: Generator, continued: list[Continuation]
) -> None:
    new = []
    for prompt in map(generator.framed, PROMPTS):
        asked = {"max_new_tokens": 8, "router_prior": prompt.base_prior}
        whole = generator.model.generate(prompt.ids_T[None], do_sample=False, **asked)[0]
        new.append(whole[len(prompt.ids_T) :].tolist())
    ends = [generator.tokenizer.eos_token_id, new[0][4], new[1][5]]
    edit_json(copied / "generation_config.json", {"eos_token_id": ends})
    cut = Generator(copied).continue_all(PROMPTS, GREEDY)
    for short, text, row in zip(cut, continued, new, strict=True):
        places = (row.index(end) for end in ends if end in row)
        assert len(short.tokens) == min(places, default=GREEDY.max_new_tokens)
        assert text.completion.startswith(short.completion)


@pytest.mark.parametrize("special", [True, False])
def test_what_the_chat_template_writes_after_an_answer_ends_a_text(
    copied: Path, *, special: bool
) -> None:
    turns = [{"role": "user", "content": PROMPTS[0]}]
    framed = Generator(copied).framed(turns)
    (whole,) = Generator(copied).generate([framed], GREEDY)
    index = int(whole[5])
    described = json.loads((copied / "tokenizer.json").read_text())
    (mark,) = (token for token, at in described["model"]["vocab"].items() if at == index)
    form = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = {"id": index, "content": mark, **form, "special": special}
    edit_json(copied / "tokenizer.json", {"added_tokens": [*described["added_tokens"], added]})
    written = TEMPLATE.replace("{{ m.content }}", f"{{{{ m.content }}}}\n{mark}")
    for template, ends in ((TEMPLATE, False), (written, True)):
        (copied / "chat_template.jinja").write_text(template)
        generator = Generator(copied)
        assert (index in generator.ends) == ends
        (new,) = generator.generate([framed], GREEDY)
        assert len(new) == (whole.tolist().index(index) + 1 if ends else GREEDY.max_new_tokens)


def test_text_is_on_standard_output_with_its_heads_where_asked_and_as_json_of_lines(
    generate: Scale, continued: list[Continuation], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [printable(c.prompt + c.completion) for c in continued[:2]]
    length = ("--max-new-tokens", "12")
    asked = (*length, "--prompt", PROMPTS[0])
    more: list[str]
    for more, shown in ([], texts[:1]), (["--prompt", PROMPTS[1]], texts):
        done = generate(*asked, *more)
        assert done.stdout == "\n--------\n".join(shown) + "\n"
        assert done.stderr.count("shares of the heads in 12 tokens: ") == len(shown)
    spoken = re.split(r"\[(base|trained)\]", generate(*asked, "--show-heads").stdout)
    assert "".join(spoken[::2]) == texts[0] + "\n" and len(spoken) > 1
    assert all(before != after for before, after in pairwise(spoken[1::2]))
    monkeypatch.setattr("sys.stdin", ["Once\r\n", "\r\n", "Lily"])
    told = [json.loads(line) for line in generate(*length, "--json").stdout.splitlines()]
    assert [one["prompt"] for one in told] == ["Once", "Lily"]
    assert told[0]["tokens"][11]["shares"].keys() == {"base", "trained"}


def test_an_answer_that_ends_at_once_is_told_and_its_model_has_its_heads(
    generate: Scale, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(_: Generator, prompts: list[str], *__: Any) -> list[Continuation]:
        return [Continuation(prompt, "", []) for prompt in prompts]

    monkeypatch.setattr(Generator, "continue_all", nothing)
    told = generate("--show-heads", "--prompt", "Once").stderr
    assert "ended the text at once" in told and "one head" not in told


def test_an_answer_ends_where_the_context_does_and_a_prompt_without_room_is_one_line(
    generator: Generator, generate: Scale
) -> None:
    most = generator.model.config.max_position_embeddings
    word = generator.tokenizer(" Lily", add_special_tokens=False).input_ids
    (fits,) = generator.tokenizer.batch_decode([(word * most)[: most - 4]])
    room = most - len(generator.prompt_ids(fits))
    assert 0 < room < 8
    _, long = generator.continue_all(["Lily", fits], Sampling(max_new_tokens=12))
    assert len(long.tokens) <= room
    told = generate("--prompt", fits * 2).error()
    assert f"the model's context of {most:,}" in told


ASKED = ["--prompt", "x"]
DRAWN = [*ASKED, "--samples", "2", "--output"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([*ASKED, "--top-p", "0.9"], "--top-p 0.9: does nothing at temperature 0"),
        ([*ASKED, "--samples", "2"], "--samples, --output: give both or neither"),
        ([*DRAWN, "x.jsonl", "--chat"], "without --chat, --show-heads, --json, --head and --base"),
        ([*DRAWN, "x.jsonl", "--json"], "without --chat, --show-heads, --json, --head and --base"),
        ([*DRAWN, "x.txt"], "must end in .jsonl"),
        ([*DRAWN, "there.jsonl"], "already exists"),
        ([], "no prompt given"),
    ],
)
def test_what_cannot_be_had_is_one_line(
    run: RunFolder,
    scale: Scale,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.jsonl").touch()
    path = run.final / "scale.yaml" if "--samples" in options else run.root
    monkeypatch.setattr("sys.stdin", [])
    assert told in scale("generate", path, *options).error()


def test_standard_input_that_is_closed_or_no_text_is_one_line(
    generate: Scale, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = io.TextIOWrapper(io.BytesIO("good\n한국의 수도는\n".encode("cp949")), "utf-8")
    for stdin, told in ((None, "no prompt given"), (foreign, "not UTF-8")):
        monkeypatch.setattr("sys.stdin", stdin)
        assert told in generate().error()


def test_texts_of_the_base_are_drawn_anew_by_every_seed_and_are_a_source_to_replay(
    config: RunConfig, run: RunFolder, tmp_path: Path, scale: Scale, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scale_cli.commands.generate._AT_ONCE", 2)

    def drawn(name: str, *options: str) -> list[str]:
        command = ("generate", run.final / "scale.yaml", "--max-new-tokens", "16")
        file = tmp_path / name
        assert scale(*command, "--samples", "5", "--output", file, *options).exit_code == 0
        return [json.loads(line)["text"] for line in file.read_text().splitlines()]

    texts = drawn("one.jsonl")
    assert len({*texts}) == 5
    assert drawn("again.jsonl") == texts
    assert not set(drawn("other.jsonl", "--seed", "1")) & set(texts)
    begun = drawn("begun.jsonl", "--prompt", "Once", "--prompt", "Lily")
    assert {text[:4] for text in begun} == {"Once", "Lily"}
    greedy = drawn("greedy.jsonl", "--temperature", "0", "--max-new-tokens", "8")
    base = Generator(config.model)
    assert set(greedy) == {base.continue_all([""], Sampling(max_new_tokens=8))[0].completion}
    source = source_of(tmp_path / "one.jsonl")
    assert len(TokenCache(tmp_path / "tokens", base.tokenizer).open(source)) == 5


def test_so_many_prompts_at_once_are_continued_as_all_together_and_no_more(
    generate: Scale, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    continue_all = Generator.continue_all

    def noted(self: Generator, prompts: Any, *rest: Any) -> list[Continuation]:
        sizes.append(len(prompts))
        return continue_all(self, prompts, *rest)

    def said() -> list[str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{prompt}\n" for prompt in PROMPTS)))
        lines = generate("--json", "--max-new-tokens", "6").stdout.splitlines()
        return [json.loads(line)["completion"] for line in lines]

    monkeypatch.setattr(Generator, "continue_all", noted)
    together = said()
    monkeypatch.setattr("scale_cli.commands.generate._AT_ONCE", 2)
    assert said() == together
    assert sizes == [3, 2, 1]
