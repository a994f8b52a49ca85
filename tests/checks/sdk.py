"""OpenAI's Python SDK against the served default model: chat, responses, WebSocket, files.

Run: python tests/checks/sdk.py [--url http://127.0.0.1:8000]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from tests.checks.served import Served, ask, given, picture, user

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
    assert chunks[-1].usage.prompt_tokens_details.image_tokens == 32


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
    assert again.usage is not None and again.usage.input_tokens_details.cached_tokens > 32
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


def check(served: Served) -> None:
    check_chat(served)
    check_responses(served)
    check_socket(served)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url")
    with given(parser.parse_args().url) as served:
        check(served)
    print("chat, responses, WebSocket and files work with the OpenAI SDK")
