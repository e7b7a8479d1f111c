from __future__ import annotations

import json
import math
import re
import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from scale_cli.cli import main
from scale_cli.commands.export import export
from scale_cli.commands.generate import output_lines
from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale
from scale_cli.config.schema import RunConfig
from scale_cli.config.sources import CorpusSource
from scale_cli.data.tokens import tokenised
from scale_cli.errors import ConfigError, RunFolderError
from scale_cli.generation.generator import Continuation, Generator, Sampling
from scale_cli.generation.streaming import Decoder, HeadStreamer
from scale_cli.model.cache_scale import ScaleCache
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.model.routing import RouterMemory
from scale_cli.printable import printable
from tests.export.conftest import configured

PROMPTS = ["Once upon a time", "Lily saw a big", "학교에서"]
GREEDY = Sampling(max_new_tokens=12)
TEMPLATE = """{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""


@pytest.fixture(scope="module")
def run(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("generating") / "run"
    config = configured(shared_data, folder, {"variant": "route", "collaboration": {"layers": "top:1"}})
    base = folder.parent / "base"
    shutil.copytree(config.model.base, base)
    (base / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    config = config.model_copy(update={"model": config.model.model_copy(update={"base": str(base)})})
    upscale(config)
    train(config, None, print)
    for name in ("llama", "transformers", "adapter"):
        export(config.model_copy(update={"export": config.export.model_copy(update={"format": name})}))
    return config


def completions(path: Path, prompts: list[str] = PROMPTS) -> list[str]:
    return [c.completion for c in Generator(path).continue_all(prompts, GREEDY)]


def test_a_run_its_final_folder_a_checkpoint_and_its_exports_say_the_same(run: RunConfig) -> None:
    expected = completions(run.output_dir)
    (checkpoint,) = (run.output_dir / "checkpoints").iterdir()
    assert all(expected[:2])  # what it makes of Hangul is no whole character
    for folder in (
        run.output_dir / "final",
        checkpoint,
        *(run.output_dir / "export" / n for n in ("transformers", "adapter")),
    ):
        assert completions(folder) == expected
    assert all(completions(run.output_dir / "export" / "llama")[:2])


def test_the_bases_chat_template_is_in_a_run_and_in_every_export(run: RunConfig) -> None:
    for folder in (run.output_dir, *(run.output_dir / "export" / n for n in ("llama", "transformers", "adapter"))):
        assert Generator(folder).tokenizer.chat_template == TEMPLATE
    for name in ("llama", "transformers"):  # by transformers alone
        assert AutoTokenizer.from_pretrained(run.output_dir / "export" / name).chat_template == TEMPLATE


def test_a_users_turn_is_answered_after_what_the_chat_template_makes_of_the_conversation(run: RunConfig) -> None:
    generator = Generator(run.output_dir)
    turns = [{"role": "user", "content": PROMPTS[0]}]
    # The template writes the mark that stands before a document itself, where a text gets it.
    (text,) = generator.continue_all([f"[user]{PROMPTS[0]}\n[assistant]"], GREEDY)
    (answer,) = generator.continue_all([turns], GREEDY)
    assert generator.prompt_ids(turns).tolist() == generator.prompt_ids(f"[user]{PROMPTS[0]}\n[assistant]").tolist()
    assert (answer.prompt, answer.completion) == (PROMPTS[0], text.completion)
    generator.tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(ConfigError, match=r"^refused by the chat template: no$"):
        generator.continue_all([turns], GREEDY)
    generator.tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"^the tokenizer has no chat template"):
        generator.continue_all([turns], GREEDY)


def test_at_a_terminal_a_conversation_goes_on(
    run: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    monkeypatch.setattr("sys.argv", ["scale", "generate", str(run.output_dir), "--chat", "--max-new-tokens", "6"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    answers = capsys.readouterr().out.splitlines()
    assert [len(turns) for turns in seen] == [1, 3] and len(answers) >= 2
    assert seen[1][0] == {"role": "user", "content": "Once upon a time"} and seen[1][1]["role"] == "assistant"


def test_a_batch_of_prompts_is_continued_as_each_alone(run: RunConfig) -> None:
    assert completions(run.output_dir) == [completions(run.output_dir, [prompt])[0] for prompt in PROMPTS]


def test_the_base_heads_share_is_what_bayes_rule_says_token_by_token(run: RunConfig) -> None:
    generator = Generator(run.output_dir)
    assert isinstance(generator.model, ScaleForCausalLM)
    (continued,) = generator.continue_all(PROMPTS[:1], GREEDY)
    prompt = generator.prompt_ids(PROMPTS[0]).tolist()
    ids = prompt + generator.tokenizer(continued.completion, add_special_tokens=False).input_ids
    with torch.no_grad():
        states = generator.model.final_states(torch.tensor([ids]), preserved=True)
        heads = [logits[0].double().log_softmax(-1) for logits in generator.model.routed_logits(states)]
    weight = 0.5
    for position, token in enumerate(ids[1 : len(prompt)]):
        said = [math.exp(head[position, token]) for head in heads]
        weight = weight * said[0] / (weight * said[0] + (1 - weight) * said[1])
    assert continued.tokens[0].base_weight == pytest.approx(weight, rel=1e-3)
    assert all(token.base_weight is not None and 0 <= token.base_weight <= 1 for token in continued.tokens)


def test_the_tokens_add_up_to_the_completion(run: RunConfig) -> None:
    for continued in Generator(run.output_dir).continue_all(PROMPTS, GREEDY):
        assert "".join(token.text for token in continued.tokens) == continued.completion


def test_sampling_hangs_on_the_seed_and_on_nothing_else(run: RunConfig) -> None:
    def sampled(seed: int) -> list[Continuation]:
        return Generator(run.output_dir).continue_all(PROMPTS, Sampling(12, temperature=1.0, seed=seed))

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_the_verb_prints_json_with_every_tokens_head(
    run: RunConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["scale", "generate", str(run.output_dir), "--prompt", PROMPTS[0], "--max-new-tokens", "4", "--json"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    told = json.loads(capsys.readouterr().out)
    assert told["prompt"] == PROMPTS[0]
    assert len(told["tokens"]) == 4


def test_every_end_that_the_bases_settings_name_ends_a_text(run: RunConfig) -> None:
    generator = Generator(run.output_dir)
    whole = generator.continue_all(PROMPTS, GREEDY)
    ids = [
        generator.model.generate(generator.prompt_ids(p)[None], max_new_tokens=8, do_sample=False)[0] for p in PROMPTS
    ]
    new = [row[len(generator.prompt_ids(p)) :].tolist() for row, p in zip(ids, PROMPTS, strict=True)]
    ends = [generator.tokenizer.eos_token_id, new[0][4], new[1][5]]
    folder = run.output_dir / "export" / "transformers"
    settings = json.loads((folder / "generation_config.json").read_text())
    changed = shutil.copytree(folder, run.output_dir.parent / "many-ends")
    (changed / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": ends}))
    for cut, text, row in zip(Generator(changed).continue_all(PROMPTS, GREEDY), whole, new, strict=True):
        expected = min((row.index(end) for end in ends if end in row), default=GREEDY.max_new_tokens)
        assert len(cut.tokens) == expected and text.completion.startswith(cut.completion)


def said(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["scale", "generate", *arguments, "--max-new-tokens", "12"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    return capsys.readouterr()


def test_the_text_is_on_standard_output_the_summary_on_standard_error_and_a_rule_between_prompts(
    run: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    continued = Generator(run.output_dir).continue_all(PROMPTS[:2], GREEDY)
    prompts = ["--prompt", PROMPTS[0], "--prompt", PROMPTS[1]]
    out, err = said([str(run.output_dir), *prompts], monkeypatch, capsys)
    assert out == "\n--------\n".join(printable(c.prompt + c.completion) for c in continued) + "\n"
    assert err.startswith("base head spoke") and err.count("\n") == 1


def test_heads_are_shown_token_by_token_as_they_are_afterwards(
    run: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    continued = Generator(run.output_dir).continue_all(PROMPTS[:1], GREEDY)
    plain, told = said([str(run.output_dir), "--prompt", PROMPTS[0], "--show-heads"], monkeypatch, capsys)
    assert [plain] == [f"{line}\n" for line in output_lines(continued, as_json=False, show_heads=True)]
    assert "\x1b" not in plain, "no colours where nobody looks, but the names of the heads"
    assert told.startswith("heads: [base], [trained], each where it takes over\n")
    spoken = re.split(r"\[(base|trained)\]", plain.removesuffix("\n"))
    assert "".join(spoken[::2]) == f"{PROMPTS[0]}{continued[0].completion}"
    assert all(before != after for before, after in pairwise(spoken[1::2]))
    monkeypatch.setattr("scale_cli.generation.streaming.has_colours", lambda: True)
    monkeypatch.setattr(f"{typer.echo.__module__}.should_strip_ansi", lambda *_: False)  # as on a terminal
    streamed, told = said([str(run.output_dir), "--prompt", PROMPTS[0], "--show-heads"], monkeypatch, capsys)
    assert told.startswith("heads: \x1b[34mbase\x1b[0m, \x1b[33mtrained\x1b[0m\n")
    assert [streamed] == [f"{line}\n" for line in output_lines(continued, as_json=False, show_heads=True)]
    streamer = Generator(run.output_dir).streamer("", show_heads=True)
    assert isinstance(streamer, HeadStreamer)
    streamer.put(torch.tensor([[5]]))
    assert capsys.readouterr().out == ""
    assert isinstance(streamer.cache, ScaleCache)
    streamer.cache.router = RouterMemory(torch.tensor([[-9.0], [0.0]]), torch.zeros(2, 1, 1), torch.zeros(2, 1))
    for token in continued[0].tokens[:1]:
        streamer.put(torch.tensor([Generator(run.output_dir).prompt_ids(token.text)[-1]]))
        assert "\x1b[33m" in capsys.readouterr().out, "before the next token is there"


def test_half_a_character_is_held_back_until_it_is_whole(run: RunConfig) -> None:
    tokenizer = Generator(run.output_dir).tokenizer
    first, *ids = tokenizer("x 학교 a", add_special_tokens=False).input_ids
    decoder = Decoder(tokenizer, first)
    added = [decoder.added(token) for token in ids] + [decoder.rest()]
    assert "\ufffd" not in "".join(added)
    assert "".join(added) == str(tokenizer.decode([first, *ids]))[len(str(tokenizer.decode([first]))) :]


@pytest.mark.parametrize("checkpoint", ["ckpt-stories260K", "ckpt-novels-en"])
@pytest.mark.parametrize(
    "written",
    [
        "x 학교 ends whole",
        "x 학교에서",
        b"half: \xed\x95",
        b"\xed\x95 half in the middle",
        b"x \xed\x95\x9c\xea\xb5 half after a whole one",
    ],
)
def test_text_that_is_told_token_by_token_has_its_whole_characters_and_no_others(
    shared_data: Path, checkpoint: str, written: str | bytes
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared_data / checkpoint / "hf")
    if isinstance(written, bytes):
        spelled = bytes_to_unicode()
        if checkpoint == "ckpt-stories260K":
            spelled = {byte: chr(byte) if byte < 128 else f"<0x{byte:02X}>" for byte in range(256)} | {32: "▁"}
        ids: Any = tokenizer.convert_tokens_to_ids([spelled[byte] for byte in written])
        expected = written.decode(errors="ignore")
    else:
        ids, expected = tokenizer(written, add_special_tokens=False).input_ids, written
    decoder = Decoder(tokenizer, tokenizer.eos_token_id)
    told = "".join([decoder.added(token) for token in ids] + [decoder.rest()])
    assert told == expected


def test_a_prompt_that_leaves_no_room_in_the_context_is_one_line_and_an_answer_ends_where_the_context_does(
    run: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = Generator(run.output_dir)
    most = generator.model.config.max_position_embeddings
    word = generator.tokenizer(" Lily", add_special_tokens=False).input_ids
    (fits,) = generator.tokenizer.batch_decode([(word * most)[: most - 4]])
    room = most - len(generator.prompt_ids(fits))
    assert 0 < room < 8
    short, long = generator.continue_all(["Lily", fits], Sampling(max_new_tokens=12, options={"min_new_tokens": 12}))
    assert (len(short.tokens), len(long.tokens)) == (12, room)
    monkeypatch.setattr("sys.argv", ["scale", "generate", str(run.output_dir), "--prompt", fits * 2])
    with pytest.raises(SystemExit) as stopped:
        main()
    told = capsys.readouterr().err
    assert stopped.value.code == 2 and told.count("\n") == 1
    assert f"the model's context is {most:,}" in told


def test_top_p_without_a_temperature_is_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"--top-p 0\.9: does nothing at temperature 0; add --temperature 1"):
        Sampling(top_p=0.9)


def test_a_folder_without_a_model_is_refused(run: RunConfig, tmp_path: Path) -> None:
    shutil.copy(run.output_dir / "final" / "trained.safetensors", tmp_path)
    with pytest.raises(RunFolderError, match="holds no model"):
        Generator(tmp_path)


def test_options_of_generation_config_reach_transformers(run: RunConfig) -> None:
    generator = Generator(run.output_dir / "export" / "llama")
    options = {"num_beams": 3, "repetition_penalty": 3.0}
    plain, continued = (
        generator.continue_all(PROMPTS[:1], Sampling(max_new_tokens=40, options=given))[0] for given in ({}, options)
    )
    prompt = generator.prompt_ids(PROMPTS[0])[None]
    expected = generator.model.generate(prompt, do_sample=False, max_new_tokens=40, **options)[0, prompt.shape[1] :]
    assert continued.completion == generator.tokenizer.decode(expected)
    assert continued.completion != plain.completion


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("temprature=1", "KEY is one of"),
        ("top_k=many", "not a number of the kind"),
        ("num_beams", "not a number of the kind"),
        ("repetition_penalty=-1", "--set"),
        ("top_k=5", "top_k"),  # greedy: it would say nothing
        ("num_beams=0", "at least 1"),
        ("no_repeat_ngram_size=-1", "at least 0"),
        ("max_time=nan", "at least 0.001"),
        ("repetition_penalty=inf", "at most 1000"),
        ("min_p=1.5", "at most 1"),
        ("min_new_tokens=999", "more than --max-new-tokens"),
    ],
)
def test_an_option_that_cannot_be_had_is_one_line(
    run: RunConfig, option: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["scale", "generate", str(run.output_dir), "--prompt", "x", "--set", option])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["", "export/llama"])
def test_prompt_and_completion_are_the_text_that_was_generated(run: RunConfig, folder: str) -> None:
    generator = Generator(run.output_dir / folder)
    (continued,) = generator.continue_all(["Once upon"], GREEDY)
    row = generator.prompt_ids("Once upon")
    generated = generator.model.generate(row[None], do_sample=False, max_new_tokens=GREEDY.max_new_tokens)[0]
    assert str(generator.tokenizer.decode(generated)).endswith(f"Once upon{continued.completion}")
    assert continued.completion[0] == " "


def test_lines_of_standard_input_may_end_as_windows_ends_them(
    run: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", ["Once\r\n", "\r\n", "Lily"])
    monkeypatch.setattr("sys.argv", ["scale", "generate", str(run.output_dir), "--max-new-tokens", "2", "--json"])
    with pytest.raises(SystemExit):
        main()
    told = [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()]
    assert told == ["Once", "Lily"]


@pytest.mark.parametrize(
    ("stdin", "told"), [(None, "none given"), ([], "none given"), (["good\n", "\udcff\udcfe\n"], "not UTF-8")]
)
def test_standard_input_that_holds_no_text_is_one_line(
    run: RunConfig,
    stdin: list[str] | None,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", stdin)
    monkeypatch.setattr("sys.argv", ["scale", "generate", str(run.output_dir)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err


def test_texts_of_the_base_are_drawn_anew_by_every_seed_and_are_a_source_to_replay(
    run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("scale_cli.commands.generate._AT_ONCE", 2)
    config = run.output_dir / "final" / "scale.yaml"

    def drawn(name: str, *options: str) -> list[str]:
        arguments = ["generate", str(config), "--samples", "5", "--output", str(tmp_path / name), *options]
        monkeypatch.setattr("sys.argv", ["scale", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0, capsys.readouterr().err
        return [json.loads(line)["text"] for line in (tmp_path / name).read_text(encoding="utf-8").splitlines()]

    texts = drawn("one.jsonl")
    assert len(set(texts)) == 5 == len(texts)
    assert drawn("again.jsonl") == texts
    assert not set(drawn("other.jsonl", "--seed", "1")) & set(texts)
    assert {text[:4] for text in drawn("begun.jsonl", "--prompt", "Once", "--prompt", "Lily")} == {"Once", "Lily"}
    greedy, base = drawn("greedy.jsonl", "--temperature", "0", "--max-new-tokens", "8"), Generator(run.model)
    assert set(greedy) == {base.continue_all([""], Sampling(max_new_tokens=8))[0].completion}
    source = CorpusSource(name="drawn", language="en", role="replay", path=str(tmp_path / "one.jsonl"))
    corpus = tokenised(source, base.tokenizer, tmp_path / "tokens", show_progress=False)
    assert len(corpus) == 5


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--samples", "2"], "--samples, --output: each needs the other"),
        (["--samples", "2", "--output", "x.txt"], "named .jsonl"),
        (["--samples", "2", "--output", "there.jsonl"], "is there already"),
    ],
)
def test_samples_that_could_not_be_used_are_refused_before_the_base_is_loaded(
    run: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.jsonl").touch()
    monkeypatch.setattr("sys.argv", ["scale", "generate", str(run.output_dir / "final" / "scale.yaml"), *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
