"""What `scale serve` answers with transformers: what `scale generate` says, asked as its users ask."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from typing import Any

import openai
import pytest
import uvicorn
from transformers import AutoTokenizer

from scale_cli.commands.serve import serve
from scale_cli.data.decoding import Decoder
from scale_cli.export.plain_folder import routed_class
from scale_cli.generation.generator import Generator, Sampling
from scale_cli.generation.server import Answer, create_app
from tests.command_line import handlers_put_back
from tests.commands.test_serve import write_routed
from tests.vocabulary.tokenizers_at_hand import KOREAN, RUSSIAN

PROMPTS = [
    "Once upon a time",
    "Lily saw a big",
    "안녕하세요.",
    "В начале",
    "3.14159 is",
    "“Where,” she asked,",
    " A",
    "",
    "Once upon a time\n",
    "The dog </s> said",
    KOREAN[:30],
    RUSSIAN[:30],
]
NUM_NEW = 8
NAME = "korean"
Served = Callable[[Path], openai.OpenAI]
KINDS = {"with BOS": "ckpt-stories260K", "without BOS": "ckpt-novels-en"}


@pytest.fixture(scope="module")
def folders(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Plain exports with their routers."""
    made = {kind: tmp_path_factory.mktemp("export") for kind in KINDS}
    for kind, folder in made.items():
        write_routed(shared_data / KINDS[kind] / "hf", folder)
    return made


@pytest.fixture(scope="module")
def served(folders: dict[str, Path]) -> Iterator[Served]:
    """Serve folders, each once, and return a client of each."""
    servers: list[tuple[uvicorn.Server, threading.Thread]] = []
    clients: dict[Path, openai.OpenAI] = {}

    def client_of(folder: Path) -> openai.OpenAI:
        if folder not in clients:
            app = create_app(Generator(folder), NAME)
            server = uvicorn.Server(
                uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1)
            )
            thread = threading.Thread(target=server.run)
            servers.append((server, thread))
            thread.start()
            while not server.started:
                time.sleep(0.01)
            url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
            clients[folder] = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        return clients[folder]

    yield client_of
    for server, thread in servers:
        server.should_exit = True
        thread.join()


@pytest.fixture
def client(folders: dict[str, Path], served: Served) -> openai.OpenAI:
    """A client of the base that has no BOS."""
    return served(folders["without BOS"])


@pytest.fixture
def steps(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """The priors that every step of that base's is given."""
    given: list[list[float]] = []
    routed = routed_class(folders["without BOS"])
    forward = routed.forward

    @wraps(forward)
    def noting(self: Any, *args: Any, **options: Any) -> Any:
        given.append(options["router_prior"].tolist())
        return forward(self, *args, **options)

    monkeypatch.setattr(routed, "forward", noting)
    return given


def answer_of(client: openai.OpenAI, prompt: str | list[str], **options: Any) -> Any:
    asked = {"model": NAME, "max_tokens": NUM_NEW, "temperature": 0.0, **options}
    return client.completions.create(prompt=prompt, **asked)


def text_of(client: openai.OpenAI, prompt: str, **options: Any) -> str:
    answer = answer_of(client, prompt, **options)
    if not options.get("stream"):
        return str(answer.choices[0].text)
    pieces = [part.choices[0].text for part in answer]
    assert not any("\ufffd" in piece for piece in pieces)
    return "".join(pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_continued_as_by_scale_generate_and_framed_as_by_its_tokenizer(
    folders: dict[str, Path], served: Served, kind: str
) -> None:
    folder = folders[kind]
    client = served(folder)
    generator, tokenizer = Generator(folder), AutoTokenizer.from_pretrained(folder)
    for prompt, wanted in zip(
        PROMPTS, generator.continue_all(PROMPTS, Sampling(max_new_tokens=NUM_NEW)), strict=True
    ):
        assert text_of(client, prompt) == wanted.completion
        assert tokenizer(prompt).input_ids == generator.prompt_ids(prompt).tolist()
    for prompt in PROMPTS[:4]:
        assert text_of(client, prompt, stream=True) == text_of(client, prompt)


def test_every_prompt_of_a_request_begins_with_the_prior_of_its_script(
    client: openai.OpenAI, steps: list[list[float]]
) -> None:
    answer_of(client, ["안녕하세요.", "Once", "1"], n=2)
    assert steps and all(priors == [0.02, 0.02, 0.98, 0.98, 0.5, 0.5] for priors in steps)


def test_it_samples_where_a_temperature_is_asked_for_and_the_seed_alone_decides(
    client: openai.OpenAI,
) -> None:
    greedy = text_of(client, PROMPTS[0])
    drawn = [
        text_of(client, PROMPTS[0], temperature=1.0, seed=seed) for seed in (3, 3, 4, 5, -1, 2**40)
    ]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) >= 4 and greedy not in drawn
    assert len({text_of(client, PROMPTS[0], temperature=openai.omit) for _ in range(3)}) == 3
    assert {text_of(client, PROMPTS[0], seed=seed, top_p=0.5) for seed in range(3)} == {greedy}
    assert text_of(client, PROMPTS[0], temperature=1.0, top_p=1e-6, seed=7) == greedy


def test_ten_at_once_are_each_answered_as_alone(client: openai.OpenAI) -> None:
    def ask(number: int) -> str:
        return text_of(
            client, PROMPTS[number], temperature=1.0, seed=number % 3, stream=number % 2 == 1
        )

    alone = [ask(number) for number in range(10)]
    with ThreadPoolExecutor(10) as users:
        assert list(users.map(ask, range(10))) == alone


def test_n_answers_are_drawn_and_told_apart(client: openai.OpenAI) -> None:
    asked = {"n": 3, "seed": 1, "temperature": 1.0}
    whole = answer_of(client, PROMPTS[0], **asked)
    texts = [choice.text for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2] and len(set(texts)) == 3
    assert whole.usage.completion_tokens <= 3 * NUM_NEW
    pieces = [""] * 3
    for part in answer_of(client, PROMPTS[0], **asked, stream=True):
        pieces[part.choices[0].index] += part.choices[0].text
    assert pieces == texts


def test_several_prompts_of_one_request_are_each_answered_as_alone_in_their_order(
    client: openai.OpenAI,
) -> None:
    prompts = PROMPTS[:4]
    alone = [answer_of(client, prompt) for prompt in prompts]
    whole = answer_of(client, prompts, n=2)
    assert [(choice.index, choice.text) for choice in whole.choices] == [
        (index, alone[index // 2].choices[0].text) for index in range(8)
    ]
    assert whole.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone)


def test_stops_and_counts_are_of_all_that_follows_a_wrong_byte(folders: dict[str, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folders["with BOS"])
    content = b"\xec\x88" + "안녕하세요".encode()
    ids: Any = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in content])
    for stops, told, finish in (([], "��안녕하세요", "length"), (["하세"], "��안녕", "stop")):
        decoder = Decoder(tokenizer, tokenizer("Lily").input_ids)
        answer = Answer(decoder, ends=[], stops=stops, most=len(ids))
        pieces = []
        for token in ids:
            if not answer.finish:
                pieces.append(answer.take(token))
        assert ("".join(pieces), answer.finish) == (told, finish)
        assert answer.num_tokens == len((told + "".join(stops)).replace("�", "").encode()) + 2


def test_an_answer_ends_before_a_stop_however_it_is_cut_into_tokens(client: openai.OpenAI) -> None:
    whole = text_of(client, PROMPTS[0])
    for stop in (whole[5:7], whole[3:9], [whole[8:10], whole[2:4], "never said"], "never said"):
        stops = [stop] if isinstance(stop, str) else stop
        expected = min((whole.split(one)[0] for one in stops), key=len)
        for stream in (False, True):
            assert text_of(client, PROMPTS[0], stop=stop, stream=stream) == expected
    assert answer_of(client, PROMPTS[0], stop=whole[3]).choices[0].finish_reason == "stop"
    answer = answer_of(client, PROMPTS[0], max_tokens=3)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 3)


def test_what_is_not_answered_is_refused_in_one_line(client: openai.OpenAI) -> None:
    asked: Any = {"model": NAME, "prompt": "Once", "max_tokens": 2}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"logprobs": 0}, "^logprobs: this server does not support it; remove it$"),
        ({"extra_body": {"max_token": 2}}, "^max_token: .*; did you mean max_tokens\\?$"),
        ({"extra_body": {"max_completion_tokens": 2}}, "^max_completion_tokens: .*; remove it$"),
        ({"extra_body": {"top_k": 2}}, "^top_k: .*; remove it$"),
        ({"echo": True}, "^echo: "),
        ({"best_of": 2}, "^best_of: "),
        ({"top_p": 0.0}, "^top_p: "),
        ({"max_tokens": 0}, "^max_tokens: "),
        ({"prompt": []}, "^prompt: "),
        ({"prompt": [1, 2]}, r"^prompt\.0: "),
        ({"prompt": ["one"] * 33, "n": 2}, "prompt, n: 66 answers, but at most 64"),
        (
            {"prompt": "word " * 3000},
            r"^prompt: [\d,]+ tokens, but .* the model's context of 1,024",
        ),
    ]
    for change, told in refused:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as error:
                client.completions.create(**asked | change, stream=stream)
            body: Any = error.value.body
            assert re.search(told, body["message"]) and "\n" not in body["message"]
            if len(change) == 1 and "prompt" not in change:
                assert body["param"] == body["message"].partition(":")[0]
    with pytest.raises(openai.NotFoundError, match=f"this server serves only {NAME}"):
        client.completions.create(**asked | {"model": "gpt"})
    as_json = {"Content-Type": "application/json"}
    bad = (
        b"{",
        b"[]",
        b'{"prompt": "x", "temprature": 1}',
        rb'{"prompt": "\ud800"}',
        b'{"prompt": "\xff"}',
    )
    for path, sent, headers, code in (
        *(("completions", body, as_json, 400) for body in bad),
        ("completions", b'{"prompt": "Once"}', {}, 400),
        ("completions", None, {}, 405),
        ("nowhere", None, {}, 404),
        ("completions", rb'{"prompt": "x", "model": "\ud800"}', as_json, 404),
    ):
        request = urllib.request.Request(f"{client.base_url}{path}", sent, headers)
        with pytest.raises(urllib.error.HTTPError) as answer:
            urllib.request.urlopen(request)
        told = json.loads(answer.value.read())["error"]["message"]
        assert answer.value.code == code and told and "\n" not in told
    # What many clients send with every request asks for nothing.
    nothing: Any = {"logprobs": None, "echo": False, "presence_penalty": 0.0, "logit_bias": {}}
    more = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "repetition_penalty": 1.0,
    }
    assert client.completions.create(**asked, **nothing, user="me", extra_body=more).choices[0].text


def test_the_model_is_listed_and_a_base_without_a_chat_template_is_no_model_to_talk_to(
    client: openai.OpenAI,
) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match=f"this server serves only {NAME}"):
        client.models.retrieve("gpt")
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "Hello"}])


@pytest.mark.parametrize("kind", KINDS)
def test_a_chat_is_framed_by_its_template_alone(
    folders: dict[str, Path], served: Served, tmp_path: Path, kind: str
) -> None:
    folder = shutil.copytree(folders[kind], tmp_path / "chat")
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
    )
    client = served(folder)
    generator = Generator(folder)
    said = {"user": "Once upon", "assistant": "a time"}
    turns: Any = [{"role": role, "content": content} for role, content in said.items()]
    (wanted,) = generator.continue_all([turns], Sampling(max_new_tokens=NUM_NEW))
    asked: Any = {"model": NAME, "temperature": 0.0, "max_completion_tokens": NUM_NEW}
    answer = client.chat.completions.create(**asked, messages=turns)
    assert answer.choices[0].message.content == wanted.completion
    rendered = ("<s>" if kind == "with BOS" else "") + "[user]Once upon[assistant]a time"
    num_tokens = len(generator.tokenizer(rendered, add_special_tokens=False).input_ids)
    assert answer.usage is not None and answer.usage.prompt_tokens == num_tokens
    parts = [
        {"role": role, "content": [{"type": "text", "text": text}]} for role, text in said.items()
    ]
    streamed: Any = {"messages": parts, "stream": True, "stream_options": {"include_usage": True}}
    told = list(client.chat.completions.create(**asked, **streamed))
    assert "".join(part.choices[0].delta.content or "" for part in told[:-1]) == wanted.completion
    assert told[-1].usage == answer.usage
    # Clients join what comes, the role too.
    assert [part.choices[0].delta.role for part in told[:2]] == ["assistant", None]


def test_what_fails_within_an_answer_is_told_as_clients_read_it(
    client: openai.OpenAI, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    routed = routed_class(folders["without BOS"])

    @wraps(routed.forward)
    def fail(*_: Any, **_options: Any) -> None:
        raise RuntimeError("out of memory\nof the device")

    monkeypatch.setattr(routed, "forward", fail)
    with pytest.raises(openai.InternalServerError, match="out of memory of the device"):
        text_of(client, "Once")
    with pytest.raises(openai.APIError, match="out of memory of the device"):
        text_of(client, "Once", stream=True)


def test_a_client_that_goes_ends_its_answer(
    client: openai.OpenAI, steps: list[list[float]]
) -> None:
    asked: Any = {"model": NAME, "prompt": "Once", "max_tokens": 100, "temperature": 1.0, "seed": 0}
    assert list(client.completions.create(**asked, stream=True))
    whole = len(steps)
    with client.completions.create(**asked, stream=True) as stream:
        next(iter(stream))
    text_of(client, "Once", max_tokens=1)  # waits its turn
    assert len(steps) - whole < whole // 2
    steps.clear()
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(**asked, timeout=0.05)
    text_of(client, "Once", max_tokens=1)
    assert len(steps) < whole // 2


def test_the_verb_serves_until_a_signal_comes_and_runs_no_code_of_the_folder(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(folders["without BOS"], tmp_path / "it's 한글")
    ran = tmp_path / "ran"
    for file in folder.glob("*.py"):
        file.write_text(f"open({str(ran)!r}, 'w')\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lines: list[str] = []
    monkeypatch.setattr("scale_cli.commands.serve.log", lines.append)

    def ask() -> tuple[Any, Any]:
        try:
            deadline = time.monotonic() + 240
            while time.monotonic() < deadline:
                with socket.socket() as asked:
                    if asked.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            curl = lines[-1].removeprefix("ask            ")
            done = subprocess.run(
                ["bash", "-c", f"{curl} --silent"], capture_output=True, check=True
            )
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models") as models:
                return json.loads(done.stdout), json.loads(models.read())
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    place = ["--port", str(port), "--host", "127.0.0.1"]
    with handlers_put_back(), ThreadPoolExecutor(1) as users, pytest.raises(SystemExit) as ended:
        asked = users.submit(ask)
        serve(folder, "transformers", place)
    answer, listed = asked.result()
    assert answer["choices"][0]["text"] and 0 < answer["usage"]["completion_tokens"] <= 16
    assert lines[1] == f"model          {folder}"
    assert [model["id"] for model in listed["data"]] == [str(folder)]
    assert ended.value.code == 130 and not ran.exists()
