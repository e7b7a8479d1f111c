"""An OpenAI endpoint that answers with a `Generator`: prompts are framed and text is cut as in `scale generate`.

One request is computed at a time, in the order in which they come; the others wait.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from scale_cli.data.conversations import Messages
from scale_cli.errors import ScaleError, UsageError
from scale_cli.generation.generator import Generator, Sampling
from scale_cli.generation.streaming import Decoder

_MOST_ANSWERS = 64  # of one request: they are computed as one batch
_SHUTDOWN_S = 1  # after a signal, for answers that are on their way
# By what value a client that fills in every field says that it does not want this.
_ASKS_NOTHING = {"presence_penalty": 0, "frequency_penalty": 0, "best_of": 1}

Stop = Literal["stop", "length"]


class StreamOptions(BaseModel):
    """What else a stream tells."""

    include_usage: bool = False  # how many tokens it was, in a last event


class Asked(BaseModel):
    """What both endpoints take; a field that is not here is refused."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    temperature: float = Field(1.0, ge=0.0, le=2.0)  # 0 takes the likeliest token
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    seed: int | None = None  # the same text for the same seed
    n: int = Field(1, ge=1, le=_MOST_ANSWERS)
    stop: str | list[str] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str | None = None  # says who asks, and changes nothing

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_nothing(cls, body: Any) -> Any:
        """Leave out fields without a value: many clients send every field."""
        if not isinstance(body, dict):
            return body
        return {k: v for k, v in body.items() if v is not None and v is not False and _ASKS_NOTHING.get(k, ...) != v}

    def stops(self) -> list[str]:
        """Return the texts that end an answer, and are no part of it."""
        return [text for text in ([self.stop] if isinstance(self.stop, str) else self.stop) if text]

    def sampling(self, most: int) -> Sampling:
        """Return how the next token is chosen."""
        seed = secrets.randbits(32) if self.seed is None else self.seed % 2**32
        return Sampling(most, self.temperature, self.top_p if self.temperature else 1.0, seed)


class AskedCompletion(Asked):
    """The body of /v1/completions."""

    prompt: str
    max_tokens: int = Field(16, ge=1)


class TextPart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn."""

    role: str
    content: str | list[TextPart]

    def text(self) -> str:
        """Return what was said."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class AskedChat(Asked):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)


class UnknownModelError(UsageError):
    """A request names a model that is not served."""


@dataclass(frozen=True)
class Piece:
    """What has become certain of one answer."""

    index: int
    text: str
    finish: Stop | None


@dataclass
class Answer:
    """One answer as it grows, token by token."""

    decoder: Decoder
    ends: Sequence[int]  # tokens
    stops: Sequence[str]
    most: int  # tokens
    num_tokens: int = 0
    finish: Stop | None = None
    _held: str = field(default="", init=False)  # text in which a stop may have begun

    def take(self, token: int) -> str:
        """Return what one more token makes certain."""
        self.num_tokens += 1
        if token in self.ends:
            self.finish = "stop"
        else:
            self._held += self.decoder.added(token)
            if self.num_tokens == self.most:
                self.finish = "length"
        if self.finish:
            self._held += self.decoder.rest()
        if places := [place for stop in self.stops if (place := self._held.find(stop)) >= 0]:
            self.finish = "stop"
            return self._held[: min(places)]
        kept = 0 if self.finish else max(map(len, self.stops), default=1) - 1
        certain = self._held[: len(self._held) - kept]
        self._held = self._held[len(certain) :]
        return certain


class _Enough(Exception):
    """Ends a generation of which nobody wants more."""


class _Answers(BaseStreamer):
    """Takes tokens from transformers, and tells the text of every answer as it becomes certain."""

    def __init__(self, new_answer: Callable[[int], Answer], tell: Callable[[Piece], None]) -> None:
        self._new_answer, self._tell = new_answer, tell
        self.answers: list[Answer] | None = None
        self.is_cancelled = False

    def put(self, value: Tensor) -> None:
        """Take the prompts' ids (B, T) first, then a token of each (B,) at a time."""
        if self.is_cancelled:
            raise _Enough
        if self.answers is None:
            self.answers = [self._new_answer(int(last)) for last in value[:, -1]]
            return
        for index, (answer, token) in enumerate(zip(self.answers, value.tolist(), strict=True)):
            if answer.finish is None:
                text = answer.take(token)
                if text or answer.finish:
                    self._tell(Piece(index, text, answer.finish))
        if all(answer.finish for answer in self.answers):
            raise _Enough

    def end(self) -> None:
        """Say nothing: every answer has told its end."""


class Endpoint:
    """A generator that answers requests in turn."""

    def __init__(self, generator: Generator, name: str) -> None:
        self.name = name
        self._generator = generator
        self._worker = ThreadPoolExecutor(1)  # torch's random numbers are one stream: one request at a time draws

    def prompt_ids(self, asked: Asked, prompt: str | Messages) -> Tensor:
        """Return a prompt's ids, or refuse it."""
        if asked.model not in (None, self.name):
            raise UnknownModelError(f"model: {asked.model}: this server has {self.name}")
        return self._generator.prompt_ids(prompt)

    async def answer(self, asked: Asked, row: Tensor, most: int) -> AsyncGenerator[Piece | int, None]:
        """Yield the pieces of all answers as they come, and last how many tokens they have together."""
        most = min(most, self._generator.num_positions - len(row))
        loop, told = asyncio.get_running_loop(), asyncio.Queue[Piece | int | Exception]()

        def tell(item: Piece | int | Exception) -> None:
            loop.call_soon_threadsafe(told.put_nowait, item)

        def new_answer(last: int) -> Answer:
            return Answer(Decoder(self._generator.tokenizer, last), self._generator.ends, asked.stops(), most)

        streamer = _Answers(new_answer, tell)

        def compute() -> None:
            try:
                self._generator.generate([row] * asked.n, asked.sampling(most), streamer)
            except _Enough:
                tell(sum(answer.num_tokens for answer in streamer.answers or []))
            except Exception as error:
                tell(error)

        self._worker.submit(compute)
        try:
            while True:
                item = await told.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if isinstance(item, int):
                    return
        finally:
            streamer.is_cancelled = True  # where the client has gone


@dataclass(frozen=True)
class Form:
    """How an endpoint writes its answers."""

    prefix: str  # of the ids
    whole: str  # `object`
    part: str
    choice: Callable[[str], dict[str, Any]]  # what a text is in a whole answer
    change: Callable[[str], dict[str, Any]]  # and in a stream's event

    def body(self, kind: str, identity: str, model: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what every answer and every event has."""
        return {"id": identity, "object": kind, "created": int(time.time()), "model": model, "choices": choices}


TEXT = Form("cmpl-", "text_completion", "text_completion", lambda text: {"text": text}, lambda text: {"text": text})
CHAT = Form(
    "chatcmpl-",
    "chat.completion",
    "chat.completion.chunk",
    lambda text: {"message": {"role": "assistant", "content": text}},
    lambda text: {"delta": {"role": "assistant", "content": text}},
)


async def respond(endpoint: Endpoint, form: Form, asked: Asked, row: Tensor, most: int) -> Response:
    """Return the answer to a request, whole or as a stream of events."""
    identity = f"{form.prefix}{uuid.uuid4().hex}"
    if asked.stream:
        return StreamingResponse(_events(endpoint, form, asked, row, most, identity), media_type="text/event-stream")
    texts, finishes, num_tokens = [""] * asked.n, [""] * asked.n, 0
    async for piece in endpoint.answer(asked, row, most):
        if isinstance(piece, int):
            num_tokens = piece
        else:
            texts[piece.index] += piece.text
            finishes[piece.index] = piece.finish or ""
    choices = [
        {"index": index, **form.choice(text), "logprobs": None, "finish_reason": finish}
        for index, (text, finish) in enumerate(zip(texts, finishes, strict=True))
    ]
    body = form.body(form.whole, identity, endpoint.name, choices)
    return JSONResponse(body | {"usage": _usage(len(row), num_tokens)})


async def _events(
    endpoint: Endpoint, form: Form, asked: Asked, row: Tensor, most: int, identity: str
) -> AsyncIterator[str]:
    async with aclosing(endpoint.answer(asked, row, most)) as pieces:
        async for piece in pieces:
            if not isinstance(piece, int):
                change = {"index": piece.index, **form.change(piece.text), "finish_reason": piece.finish}
                yield _event(form.body(form.part, identity, endpoint.name, [change]))
            elif asked.stream_options.include_usage:
                body = form.body(form.part, identity, endpoint.name, [])
                yield _event(body | {"usage": _usage(len(row), piece)})
    yield "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def _usage(num_prompt: int, num_new: int) -> dict[str, int]:
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}


def create_app(generator: Generator, name: str) -> FastAPI:
    """Return the endpoint of a model that is served under a name."""
    app, endpoint, began = FastAPI(openapi_url=None), Endpoint(generator, name), int(time.time())

    @app.exception_handler(RequestValidationError)
    async def refuse_body(_request: Request, error: RequestValidationError) -> JSONResponse:
        if isinstance(error.body, bytes):  # fastapi parses what the header says is JSON
            return _refusal(400, "body: the header Content-Type: application/json is missing")
        return _refusal(400, "; ".join(map(_problem, error.errors())))

    @app.exception_handler(HTTPException)
    async def refuse_request(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 400:  # all that fastapi says of a body that is not UTF-8 is that it could not parse it
            return _refusal(400, "body: is not JSON in UTF-8")
        return _refusal(error.status_code, f"{request.method} {request.url.path}: {error.detail}", error.headers)

    @app.exception_handler(ScaleError)
    async def refuse(_request: Request, error: ScaleError) -> JSONResponse:
        return _refusal(404 if isinstance(error, UnknownModelError) else 400, str(error))

    @app.post("/v1/completions")
    async def complete(asked: AskedCompletion) -> Response:
        return await respond(endpoint, TEXT, asked, endpoint.prompt_ids(asked, asked.prompt), asked.max_tokens)

    @app.post("/v1/chat/completions")
    async def chat(asked: AskedChat) -> Response:
        turns = [{"role": message.role, "content": message.text()} for message in asked.messages]
        row = endpoint.prompt_ids(asked, turns)
        most = asked.max_completion_tokens or asked.max_tokens or generator.num_positions
        return await respond(endpoint, CHAT, asked, row, most)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        served = {"id": name, "object": "model", "created": began, "owned_by": "scale"}
        return {"object": "list", "data": [served | {"max_model_len": generator.num_positions}]}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


def _problem(error: dict[str, Any]) -> str:
    """Return what is wrong with a field, on one line."""
    if error["type"] == "json_invalid":
        return f"body: is not JSON ({error['ctx']['error']})"
    place = ".".join(str(part) for part in error["loc"] if part != "body")
    if error["type"] == "extra_forbidden":
        return f"{place}: this server does not answer to it: leave it out, or serve with vLLM"
    return f"{place or 'body'}: {' '.join(str(error['msg']).split())}"


def _refusal(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status_code=status, headers=headers)


def run_server(generator: Generator, name: str, host: str, port: int) -> None:
    """Answer until a signal comes."""
    uvicorn.run(create_app(generator, name), host=host, port=port, timeout_graceful_shutdown=_SHUTDOWN_S)
