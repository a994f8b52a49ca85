"""Chat Completions (surface A): stateless, JSON or server-sent events.

Owns the request's messages, the answer object and the chunk order. A client that leaves aborts its
generation at once. Knows nothing of stored state.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mmserve import __version__
from mmserve.errors import EngineUnavailableError, InternalError, RequestError
from mmserve.prompt import ROLES, ImagePart, Message, Part, Prompt, TextPart
from mmserve.request import FinishReason, SamplingParams, TokenEvent
from mmserve.server.answer import (
    Answer,
    Call,
    cache_json,
    input_details,
    logprob_json,
    timings_json,
)
from mmserve.server.bodies import read_json
from mmserve.server.calling import Calling, call_text, parse_calling
from mmserve.server.content import Content, check_count, image_bytes, parse_content
from mmserve.server.deadline import Deadline
from mmserve.server.engine_face import Generation
from mmserve.server.errors import (
    GenerationFailedError,
    UnsupportedParameterError,
    error_object,
    internal_error,
)
from mmserve.server.fields import Fields, as_list, as_object
from mmserve.server.formats import constrain, parse_format
from mmserve.server.sampling import (
    check_model,
    parse_beams,
    parse_sampling,
    text_only,
    unsupported,
    whole,
)
from mmserve.server.services import Services, access_of, owner_of, services_of
from mmserve.server.wire import (
    DONE,
    EventStream,
    JSONBody,
    dumps,
    new_id,
    sse,
    while_connected,
)

CHAT_ROLES = {**ROLES, "function": "tool"}  # the old name of a tool's answer


@dataclass(frozen=True)
class ChatRequest:
    """A checked body; images are still references."""

    messages: tuple[tuple[str, tuple[Content, ...]], ...]
    params: SamplingParams
    calling: Calling
    stream: bool
    include_usage: bool
    continue_final: bool


def _tool_calls(message: Fields, services: Services) -> tuple[Content, ...]:
    texts = []
    for index, call in enumerate(message.list("tool_calls")):
        param = f"{message.param('tool_calls')}[{index}]"
        function = Fields(as_object(call, param), param).object("function")
        name, arguments = function.text("name") or "", function.text("arguments") or ""
        texts.append(TextPart(call_text(services.info, name, arguments)))
    return tuple(texts)


def _message(value: Any, param: str, services: Services) -> tuple[str, tuple[Content, ...]]:
    message = Fields(as_object(value, param), param)
    message.required("role")
    role = CHAT_ROLES[message.choice("role", tuple(CHAT_ROLES), "user")]
    content = parse_content(message.get("content"), message.param("content"))
    calls = _tool_calls(message, services)
    if role == "assistant":
        content += calls
    if role == "user" and not content:
        raise RequestError("A user message must hold text or an image.", param=param)
    return role, content


def _messages(fields: Fields, services: Services) -> tuple[tuple[str, tuple[Content, ...]], ...]:
    values = as_list(fields.required("messages"), "messages")
    if not values:
        raise RequestError("'messages' must not be empty.", param="messages")
    return tuple(_message(value, f"messages[{i}]", services) for i, value in enumerate(values))


def _continue_final(fields: Fields, last_role: str) -> bool:
    wanted = fields.flag("continue_final_message")
    generation_prompt = fields.flag("add_generation_prompt", not wanted)
    if wanted and generation_prompt:
        raise RequestError(
            "'continue_final_message' excludes 'add_generation_prompt'.",
            param="add_generation_prompt",
        )
    if not wanted and not generation_prompt:
        raise UnsupportedParameterError(
            "'add_generation_prompt' may be false only with 'continue_final_message'.",
            param="add_generation_prompt",
        )
    if wanted and last_role != "assistant":
        raise RequestError(
            "'continue_final_message' needs an assistant message at the end.",
            param="continue_final_message",
        )
    return wanted


def _logprobs(fields: Fields) -> int | None:
    wanted = fields.flag("logprobs")
    top = whole(fields, "top_logprobs")
    if not wanted and top:
        raise RequestError("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    return (top or 0) if wanted else None


def parse_chat(body: dict[str, Any], services: Services) -> ChatRequest:
    """Check a body. Raises `RequestError`s that name the field."""
    fields = Fields(body)
    check_model(fields, services.info)
    beams = parse_beams(fields)
    text_only(fields)
    unsupported(fields, "web_search_options", "prediction")
    format = parse_format(fields, fields, "response_format")
    calling = parse_calling(fields, services.info, formatted=format.constraint is not None)
    messages = _messages(fields, services)
    params = parse_sampling(
        fields,
        services.info,
        limits=("max_completion_tokens", "max_tokens"),
        logprobs=_logprobs(fields),
        constraint=constrain(format, calling),
        beams=beams,
    )
    return ChatRequest(
        messages=messages,
        params=params,
        calling=calling,
        stream=fields.flag("stream"),
        include_usage=fields.object("stream_options").flag("include_usage"),
        continue_final=_continue_final(fields, messages[-1][0]),
    )


async def _render(request: ChatRequest, services: Services, owner: str) -> list[Message]:
    check_count([part for _, content in request.messages for part in content], services)
    messages = []
    for role, content in request.messages:
        parts: list[Part] = []
        for part in content:
            if isinstance(part, TextPart):
                parts.append(part)
            else:
                data = await image_bytes(part, services, owner)
                parts.append(ImagePart(data, part.param, detail=part.detail))
        messages.append(Message(role, tuple(parts)))
    return messages


def usage_json(answer: Answer) -> dict[str, Any]:
    usage = answer.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": input_details(usage),
        "completion_tokens_details": {"reasoning_tokens": 0},
        "cache": cache_json(usage),
    }


def check_finished(answer: Answer) -> str:
    """The finish reason as the client knows it; raises what ended the generation otherwise."""
    if answer.finish_reason is FinishReason.STOP:
        return "tool_calls" if answer.calls else "stop"
    if answer.finish_reason is FinishReason.LENGTH:
        return "length"
    if answer.finish_reason is FinishReason.ABORT:
        raise EngineUnavailableError("The generation was stopped by the server.")
    if answer.code is not None:
        raise GenerationFailedError(answer.error or "The generation has failed.", answer.code)
    raise InternalError(answer.error or "The generation ended with an internal error.")


def call_json(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


class Completion:
    """One running completion and the JSON made of it."""

    def __init__(
        self,
        request: ChatRequest,
        generation: Generation,
        model: str,
        on_close: Callable[[Completion], None],
    ) -> None:
        self._request, self._on_close = request, on_close
        self._generation = generation
        self._answers = [Answer(request.calling.parser())]
        self._logprobs = request.params.logprobs is not None
        self._head = {
            "id": generation.id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"mm_{__version__}",
        }

    @property
    def _answer(self) -> Answer:
        """The only one, or the first, which has the counts of all."""
        return self._answers[0]

    def _parts(self, event: TokenEvent) -> list[TokenEvent]:
        """What an event says of each answer, by number: beams all end with the same one."""
        if not event.choices:
            return [event]
        parser = self._request.calling.parser
        self._answers += [Answer(parser()) for _ in event.choices[1:]]
        names = ("text", "token_ids", "logprobs", "finish_reason")
        said = [{name: getattr(choice, name) for name in names} for choice in event.choices]
        return [replace(event, choices=(), **each) for each in said]

    async def whole(self) -> dict[str, Any]:
        """The answer object. Aborts the generation when cancelled."""
        try:
            async for event in self._generation:
                for number, part in enumerate(self._parts(event)):
                    self._answers[number].add(part)
        finally:
            self.close()
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(*each) for each in enumerate(self._answers)],
            "usage": usage_json(self._answer),
            "timings": timings_json(self._answer.timings, self._answer.usage),
        }

    def _choice(self, number: int, answer: Answer) -> dict[str, Any]:
        return {
            "index": number,
            "message": self._message(answer),
            "logprobs": self._logprobs_json(answer) if self._logprobs else None,
            "finish_reason": check_finished(answer),
        }

    def close(self) -> None:
        """Stop, unless it has ended."""
        self._on_close(self)
        self._generation.abort()

    @staticmethod
    def _message(answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.calls:
            message["content"] = answer.text or None
            message["tool_calls"] = [call_json(call) for call in answer.calls]
        return message

    @staticmethod
    def _logprobs_json(answer: Answer) -> dict[str, Any]:
        return {"content": [logprob_json(entry) for entry in answer.logprobs], "refusal": None}

    def _chunk(
        self, delta: dict[str, Any], reason: str | None, logprobs: Any = None, number: int = 0
    ) -> bytes:
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        if self._request.include_usage:
            chunk["usage"] = None
        elif reason is not None:
            chunk["timings"] = timings_json(self._answer.timings, self._answer.usage)
            chunk["cache"] = cache_json(self._answer.usage)
        return sse(dumps(chunk))

    def _deltas(self, answer: Answer, event: TokenEvent) -> Iterator[tuple[dict[str, Any], Any]]:
        """What an event adds to an answer, and the log-probabilities of it."""
        before = len(answer.calls)
        pieces, entries = answer.add(event)
        logprobs = None
        if self._logprobs:
            logprobs = {"content": [logprob_json(entry) for entry in entries], "refusal": None}
        if entries and not pieces:
            yield {"content": ""}, logprobs
        index = before - 1
        for piece in pieces:
            if piece.kind == "text":
                yield {"content": piece.text}, logprobs
                logprobs = logprobs and {"content": [], "refusal": None}
            elif piece.kind == "call":
                index += 1
                head = call_json(answer.calls[index])
                head["function"]["arguments"] = ""
                yield {"tool_calls": [{"index": index, **head}]}, None
            elif piece.kind == "arguments":
                delta = {"index": index, "function": {"arguments": piece.text}}
                yield {"tool_calls": [delta]}, None

    def _usage_chunk(self) -> bytes:
        chunk = {
            **self._head,
            "object": "chat.completion.chunk",
            "choices": [],
            "usage": usage_json(self._answer),
            "timings": timings_json(self._answer.timings, self._answer.usage),
        }
        return sse(dumps(chunk))

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """The chunks in order; a fault after the first becomes an error frame without [DONE]."""
        try:
            yield self._chunk({"role": "assistant", "content": ""}, None)
            async for event in self._generation:
                for number, part in enumerate(self._parts(event)):
                    if number:
                        yield self._chunk({"role": "assistant", "content": ""}, None, None, number)
                    for delta, logprobs in self._deltas(self._answers[number], part):
                        yield self._chunk(delta, None, logprobs, number)
            for number, answer in enumerate(self._answers):
                yield self._chunk({}, check_finished(answer), None, number)
        except RequestError as error:
            yield sse(dumps({"error": error_object(error)}))
            return
        except Exception:
            yield sse(dumps({"error": error_object(internal_error())}))
            raise
        if self._request.include_usage:
            yield self._usage_chunk()
        yield DONE


async def create_chat_completion(request: Request) -> Response:
    """POST /v1/chat/completions."""
    services = services_of(request)
    services.check_ready()
    body = await read_json(request)
    chat = parse_chat(body, services)
    deadline = Deadline.of(body, services.config.max_request_s, request.headers)

    access = access_of(request)

    async def prepare() -> Prompt:
        return await access.prepare(
            await _render(chat, services, owner_of(request)),
            continue_final=chat.continue_final,
            tools=chat.calling.described,
            constraint=chat.params.constraint,
        )

    async def begin() -> Completion:
        prompt = await deadline.bound(prepare())
        generation = access.submit(new_id("chatcmpl"), prompt, chat.params)
        bound, model = deadline.bind(generation), services.info.name
        completion = Completion(chat, bound, model, services.chats.discard)
        services.chats.add(completion)
        return completion

    async def answer() -> dict[str, Any]:
        return await (await begin()).whole()

    if not chat.stream:
        return JSONBody(await while_connected(request, answer()))
    completion = await while_connected(request, begin())
    return EventStream(completion.frames(), services.stream_limits, completion.close)


ROUTES = [Route("/v1/chat/completions", create_chat_completion, methods=["POST"])]
