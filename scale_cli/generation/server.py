"""An OpenAI endpoint on a `Generator`; it frames prompts as `scale generate` does.

It computes one request at a time, in the order of arrival; the others wait.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import sys
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from starlette.exceptions import HTTPException
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from scale_cli.data.conversations import Messages
from scale_cli.data.decoding import Decoder
from scale_cli.errors import ScaleError, one_line
from scale_cli.generation.generator import Generator, Sampling

_MOST_ANSWERS = 64  # per request, computed as one batch
_SIMILAR = 0.81  # so like are max_token and max_tokens, but not top_k and top_p
_CLIENT_GONE = 499  # as nginx writes it in its log; nobody reads the answer
OneOrMore = Annotated[
    list[str], BeforeValidator(lambda given: [given] if isinstance(given, str) else given)
]
# Values with which clients that fill in every field say that they do not want it; so do null,
# false, and empty texts, lists and objects, in fields that this server does not know.
_ASKS_NOTHING = {
    "best_of": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "response_format": {"type": "text"},
    "tool_choice": "none",
}


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: bool = False  # the number of tokens, in a last event


class GenerationRequest(BaseModel):
    """Fields of both endpoints; an unknown field is an error."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    temperature: float = Field(1.0, ge=0.0, le=2.0)  # 0 takes the likeliest token
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    seed: int | None = None  # the same seed gives the same text
    n: int = Field(1, ge=1, le=_MOST_ANSWERS)
    stop: OneOrMore = []  # texts that end an answer; they are not part of it
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str | None = None  # names the client; ignored

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_nothing(cls, body: Any) -> Any:
        """Drop fields that ask for nothing, since many clients send every field."""
        if not isinstance(body, dict):
            return body

        asked = {}
        for name, value in body.items():
            if value is None or value is False or _ASKS_NOTHING.get(name, ...) == value:
                continue
            if name in cls.model_fields or value not in ("", [], {}):
                asked[name] = value
        return asked

    def sampling(self, most: int) -> Sampling:
        seed = secrets.randbits(32) if self.seed is None else self.seed % 2**32
        return Sampling(most, self.temperature, self.top_p if self.temperature else 1.0, seed)


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions; several prompts are computed as one batch."""

    prompt: OneOrMore = Field(min_length=1)
    max_tokens: int = Field(16, ge=1)


class TextPart(BaseModel):
    """A part of a message, as many clients send them."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A turn of a conversation."""

    role: str
    content: str | list[TextPart]

    @field_validator("content")
    @classmethod
    def _join_parts(cls, content: str | list[TextPart]) -> str:
        return content if isinstance(content, str) else "".join(part.text for part in content)


class ChatRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int = Field(sys.maxsize, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)


@dataclass(frozen=True)
class Piece:
    """New text of one answer, which can no longer change."""

    index: int
    text: str
    finish: str | None  # stop | length, of the last piece


class Answer:
    """One answer as it grows, token by token."""

    def __init__(
        self, decoder: Decoder, ends: Sequence[int], stops: Sequence[str], most: int
    ) -> None:
        self.num_tokens = 0
        self.finish: str | None = None
        self._decoder = decoder
        self._ends = ends
        self._stops = stops
        self._most = most
        self._held = ""  # text that may contain the beginning of a stop

    def take(self, token: int) -> str:
        """Add a token, and return the text that can no longer change."""
        self.num_tokens += 1
        if token in self._ends:
            self.finish = "stop"
        else:
            self._held += self._decoder.add(token)
            if self.num_tokens == self._most:
                self.finish = "length"

        if places := [place for stop in self._stops if (place := self._held.find(stop)) >= 0]:
            self.finish = "stop"
            return self._held[: min(places)]
        kept = 0 if self.finish else max(map(len, self._stops), default=1) - 1
        certain = self._held[: len(self._held) - kept]
        self._held = self._held[len(certain) :]
        return certain


class _Stopped(Exception):
    """Ends a generation that nobody needs any more."""


class Answers(BaseStreamer):
    """All answers to one request: takes tokens from transformers, and passes on certain text."""

    def __init__(
        self,
        generator: Generator,
        asked: GenerationRequest,
        prompts: Sequence[str | Messages],
        most: int,
    ) -> None:
        """Prepare `asked.n` answers to each prompt."""
        framed = [generator.framed(prompt) for prompt in prompts]
        stops = [stop for stop in asked.stop if stop]
        self._num_read = sum(len(prompt.ids_T) for prompt in framed)
        self._asked = [prompt for prompt in framed for _ in range(asked.n)]
        self._answers = []
        for prompt in self._asked:
            decoder = Decoder(generator.tokenizer, prompt.ids_T.tolist())
            room = min(most, generator.num_positions - len(prompt.ids_T))
            self._answers.append(Answer(decoder, generator.ends, stops, room))
        self._generator = generator
        self._sampling = asked.sampling(most)
        self._loop = asyncio.get_running_loop()
        self._queue = asyncio.Queue[Piece | Exception]()
        self._is_wanted = True

    @property
    def usage(self) -> dict[str, int]:
        written = sum(answer.num_tokens for answer in self._answers)
        return {
            "prompt_tokens": self._num_read,
            "completion_tokens": written,
            "total_tokens": self._num_read + written,
        }

    async def pieces(self, worker: ThreadPoolExecutor) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of all answers as they come."""
        worker.submit(self._compute)
        try:
            while isinstance(item := await self._queue.get(), Piece):
                yield item
            if not isinstance(item, _Stopped):
                raise item
        finally:
            self._is_wanted = False  # the client may have gone

    def _compute(self) -> None:
        try:
            self._generator.generate(self._asked, self._sampling, self)
        except Exception as error:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, error)

    def put(self, value: Tensor) -> None:
        """Take the prompts' ids (B, T) first, then one token of each prompt (B,) per call."""
        if not self._is_wanted:
            raise _Stopped
        if value.dim() > 1:
            return
        for index, (answer, token) in enumerate(zip(self._answers, value.tolist(), strict=True)):
            if answer.finish is None:
                text = answer.take(token)
                if text or answer.finish:
                    piece = Piece(index, text, answer.finish)
                    self._loop.call_soon_threadsafe(self._queue.put_nowait, piece)
        if all(answer.finish for answer in self._answers):
            raise _Stopped

    def end(self) -> None:
        """Do nothing: each answer has already sent its end."""


class Endpoint:
    """A generator that answers requests in turn."""

    def __init__(self, generator: Generator, name: str) -> None:
        self._generator = generator
        self._name = name
        # All requests share torch's random numbers, so one at a time draws.
        self._worker = ThreadPoolExecutor(1)

    async def respond(
        self,
        request: Request,
        asked: GenerationRequest,
        prompts: Sequence[str | Messages],
        most: int,
    ) -> Response:
        """Return the answers to a request, whole or as a stream of events.

        A client that goes ends its answers.
        """
        if asked.model not in (None, self._name):
            raise HTTPException(
                404, f"model: {asked.model!r}: this server serves only {self._name}"
            )
        number = len(prompts) * asked.n
        if number > _MOST_ANSWERS:
            raise HTTPException(400, f"prompt, n: {number:,} answers, but at most {_MOST_ANSWERS}")
        answers = Answers(self._generator, asked, prompts, most)
        kind = "text_completion"
        if isinstance(asked, ChatRequest):
            kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self._name,
        }
        if asked.stream:
            events = self._events(asked, answers, head)
            return StreamingResponse(events, media_type="text/event-stream")

        wholes = [Piece(index, "", None) for index in range(number)]
        try:
            async with aclosing(answers.pieces(self._worker)) as pieces:
                async for piece in pieces:
                    if await request.is_disconnected():
                        raise HTTPException(_CLIENT_GONE, "the client has gone")
                    text = wholes[piece.index].text + piece.text
                    wholes[piece.index] = replace(piece, text=text)
        except asyncio.CancelledError:
            raise HTTPException(503, "the server stops") from None
        except (ScaleError, HTTPException):
            raise
        except Exception as error:  # raised further, it would end the connection
            return JSONResponse({"error": _failure(error)}, status_code=500)
        choices = [_choice(asked, whole) for whole in wholes]
        return JSONResponse(head | {"choices": choices, "usage": answers.usage})

    async def _events(
        self, asked: GenerationRequest, answers: Answers, head: dict[str, Any]
    ) -> AsyncIterator[str]:
        def event(**fields: Any) -> str:
            return f"data: {json.dumps(head | fields, ensure_ascii=False)}\n\n"

        begun = set[int]()
        try:
            async with aclosing(answers.pieces(self._worker)) as pieces:
                async for piece in pieces:
                    yield event(choices=[_part(asked, piece, begins=piece.index not in begun)])
                    begun.add(piece.index)
        except Exception as error:  # the status is sent already
            yield f"data: {json.dumps({'error': _failure(error)}, ensure_ascii=False)}\n\n"
            return
        if asked.stream_options.include_usage:
            yield event(choices=[], usage=answers.usage)
        yield "data: [DONE]\n\n"


def _choice(asked: GenerationRequest, whole: Piece) -> dict[str, Any]:
    """Return a whole answer as a choice."""
    said: dict[str, Any] = {"text": whole.text}
    if isinstance(asked, ChatRequest):
        said = {"message": {"role": "assistant", "content": whole.text}}
    return {"index": whole.index, **said, "logprobs": None, "finish_reason": whole.finish}


def _part(asked: GenerationRequest, piece: Piece, *, begins: bool) -> dict[str, Any]:
    """Return a piece of an answer as a choice of a stream; clients join what comes, the role too."""
    choice = _choice(asked, piece)
    if (message := choice.pop("message", None)) is not None:
        choice["delta"] = message if begins else {"content": piece.text}
    return choice


def _failure(error: Exception) -> dict[str, Any]:
    """Return what OpenAI's clients read of an error that is not the request's, and log it."""
    logging.getLogger("uvicorn.error").error("an answer failed", exc_info=error)
    return {"message": one_line(error), "type": "server_error", "param": None, "code": None}


def create_app(generator: Generator, name: str) -> FastAPI:
    app = FastAPI(openapi_url=None)
    endpoint = Endpoint(generator, name)

    async def refuse(request: Request, error: Exception) -> JSONResponse:
        status = 400
        told = str(error)
        headers = None
        param = None
        if isinstance(error, HTTPException):
            status = error.status_code
            told = f"{request.method} {request.url.path}: {error.detail}"
            headers = error.headers
        if isinstance(error, RequestValidationError):
            problems = error.errors()
            asked = ChatRequest if "chat" in request.url.path else CompletionRequest
            told = "; ".join(_problem(problem, {*asked.model_fields}) for problem in problems)
            param = _field(problems[0]) or None
        fields = {"message": told, "type": "invalid_request_error", "param": param, "code": None}
        return JSONResponse({"error": fields}, status_code=status, headers=headers)

    for kind in (RequestValidationError, HTTPException, ScaleError):
        app.add_exception_handler(kind, refuse)

    @app.post("/v1/completions")
    async def complete(request: Request, asked: CompletionRequest) -> Response:
        return await endpoint.respond(request, asked, asked.prompt, asked.max_tokens)

    @app.post("/v1/chat/completions")
    async def chat(request: Request, asked: ChatRequest) -> Response:
        turns = [message.model_dump() for message in asked.messages]
        most = asked.max_completion_tokens or asked.max_tokens
        return await endpoint.respond(request, asked, [turns], most)

    served = {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "scale",
        "max_model_len": generator.num_positions,
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [served]}

    @app.get("/v1/models/{asked:path}")
    async def model(asked: str) -> dict[str, Any]:
        if asked != name:
            raise HTTPException(404, f"this server serves only {name}")
        return served

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


def _field(problem: dict[str, Any]) -> str:
    """Return the field of a body that pydantic has a problem with; "" for the body itself."""
    if problem["type"] == "json_invalid":
        return ""
    return ".".join(str(part) for part in problem["loc"] if part != "body")


def _problem(problem: dict[str, Any], fields: set[str]) -> str:
    """Return one line of what pydantic says of a body that may have these fields."""
    if problem["type"] == "json_invalid":
        return f"body: is not JSON ({problem['ctx']['error']})"
    field = _field(problem)
    if problem["type"] == "extra_forbidden":
        meant = get_close_matches(field, fields, n=1, cutoff=_SIMILAR)
        told = f"did you mean {meant[0]}?" if meant else "remove it"
        return f"{field}: this server does not support it; {told}"
    return f"{field or 'body'}: {' '.join(str(problem['msg']).split())}"


def run_server(generator: Generator, name: str, host: str, port: int) -> None:
    """Serve until a signal comes; answers in progress then have a second."""
    app = create_app(generator, name)
    uvicorn.run(app, host=host, port=port, timeout_graceful_shutdown=1)
