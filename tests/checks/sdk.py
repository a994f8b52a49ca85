"""The Python SDK of OpenAI against the served default model: HTTP, WebSockets, files, Realtime.

Run: python tests/checks/sdk.py [--url http://127.0.0.1:8000]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from tests.checks.served import Served, ask, given, input_parts, picture, user

RED_CIRCLE = picture(24)  # 24 % 3 = 0 and 24 % 8 = 0


def check_chat(served: Served) -> None:
    client, model = served.client(), served.model()
    talk = [user(RED_CIRCLE, "What color is the circle?")]
    plain = ask(client, model, talk)
    assert "red" in plain.choices[0].message.content.lower(), plain
    stream = ask(client, model, talk, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content
    assert chunks[-1].usage.prompt_tokens_details.image_tokens == 64


def check_responses(served: Served) -> None:
    client, model = served.client(), served.model()
    file = client.files.create(file=("circle.png", RED_CIRCLE), purpose="vision")
    image: Any = {"type": "input_image", "file_id": file.id, "detail": "auto"}
    question: Any = {"type": "input_text", "text": "What color is the circle?"}
    first = client.responses.create(
        model=model, input=[{"role": "user", "content": [image, question]}]
    )
    assert "red" in first.output_text.lower(), first.output_text
    again = client.responses.create(
        model=model, input="What shape is in image 1?", previous_response_id=first.id
    )
    assert "circle" in again.output_text.lower(), again.output_text
    assert again.usage is not None and again.usage.input_tokens_details.cached_tokens > 64
    with client.responses.stream(
        model=model, input="What color is it?", previous_response_id=again.id
    ) as stream:
        deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
        assert "".join(deltas) == stream.get_final_response().output_text != ""


def check_socket(served: Served) -> None:
    client, model = served.client(), served.model()
    file = client.files.create(file=("circle.png", RED_CIRCLE), purpose="vision")
    content: Any = [
        {"type": "input_image", "file_id": file.id, "detail": "auto"},
        {"type": "input_text", "text": "What shape is in the image?"},
    ]
    with client.responses.connect() as connection:
        connection.response.create(model=model, input=[{"role": "user", "content": content}])
        text = ""
        for event in connection:
            if event.type == "response.output_text.delta":
                text += event.delta
            if event.type == "response.completed":
                break
    assert "circle" in text.lower(), text


def check_realtime(served: Served) -> None:
    """Five turns and four images; one image item is deleted, and the conversation goes on."""
    client, model = served.client(), served.model()
    with client.realtime.connect(model=model) as connection:
        talk = Talk(connection)
        assert "red" in talk.turn(RED_CIRCLE, "What color is the circle?").lower()
        first = talk.item
        for seed in (25, 26, 27):
            talk.turn(picture(seed), "What shape is in this image?")
        assert "circle" in talk.turn("What shape is in image 1?").lower()
        runs = served.metric("vision_encoder_runs_total"), served.metric("vision_kv_writes_total")
        assert first is not None
        connection.conversation.item.delete(item_id=first)
        assert talk.until("conversation.item.deleted").item_id == first
        assert talk.turn("What color is the last image?")
        assert talk.usage.input_token_details.image_tokens == 3 * 64
        after = served.metric("vision_encoder_runs_total"), served.metric("vision_kv_writes_total")
        assert after == runs, "the other images were computed again"


class Talk:
    """A Realtime conversation; `item` and `usage` are the last user item's and answer's."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.item: str | None = None
        self.usage: Any = None

    def until(self, type: str) -> Any:
        for event in self.connection:
            assert event.type != "error", event
            if event.type == type:
                return event

    def turn(self, *parts: bytes | str) -> str:
        item: Any = {"type": "message", "role": "user", "content": input_parts(*parts)}
        self.connection.conversation.item.create(item=item)
        self.item = self.until("conversation.item.done").item.id
        self.connection.response.create(response={"max_output_tokens": 40})
        response = self.until("response.done").response
        assert response.status == "completed", response.status_details
        self.usage = response.usage
        return str(response.output[0].content[0].text)


def check(served: Served) -> None:
    check_chat(served)
    check_responses(served)
    check_socket(served)
    check_realtime(served)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url")
    with given(parser.parse_args().url) as served:
        check(served)
    print("chat, responses, WebSocket, files and Realtime work with the OpenAI SDK")
