"""A device that fails for good while an answer is written: the answer ends with an error that says
so, the process ends with 75, and the next one goes on with every stored conversation.

On a GPU the fault is a real one, an index out of range in a kernel, after which CUDA refuses all
else in that process; on a CPU the step and the look at the device behind it are made to fail.

Run: python tests/checks/lost_device.py [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx

sys.path.append(str(Path(__file__).parents[2]))

from mmserve.__main__ import EXIT_ENGINE_LOST
from tests.checks.kill import started, text_of
from tests.checks.served import input_parts, picture

PATIENCE_S = 120
STEPS = 30  # that the first questions may take; the long answer takes more
FAULTS = {
    "cuda": f"engine.launch=device_assert@{STEPS}",
    "cpu": f"engine.launch=error@{STEPS},device.probe=error*9",
}


def serving(
    device: str, folder: str, faults: str
) -> AbstractContextManager[tuple[subprocess.Popen[str], str]]:
    words = [sys.executable, "-m", "mmserve", "serve", "--port", "0", "--device", device]
    words += ["--data-dir", folder, "--speculative-config", "none"]
    return started(words, env={**os.environ, "MMSERVE_FAULTS": faults})


def body(*parts: bytes | str, tokens: int, **more: Any) -> dict[str, Any]:
    made = {"input": [{"role": "user", "content": input_parts(*parts)}], **more}
    return made | {"model": "smolvision-135m", "temperature": 0, "max_output_tokens": tokens}


def told(answer: httpx.Response) -> tuple[str, str]:
    """Its id and text."""
    response = answer.raise_for_status().json()
    return response["id"], text_of(response)


def last_event(url: str, asked: dict[str, Any]) -> dict[str, Any]:
    events = []
    with httpx.stream("POST", url, json=asked | {"stream": True}, timeout=PATIENCE_S) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
    last: dict[str, Any] = events[-1]
    return last


def check(device: str, folder: str) -> None:
    with serving(device, folder, FAULTS[device]) as (process, base):
        url = f"{base}/v1/responses"
        first = httpx.post(
            url, json=body(picture(3), "What shape is this?", tokens=4), timeout=PATIENCE_S
        )
        id, text = told(first)
        event = last_event(url, body("Tell me a long story.", tokens=400))
        assert event["type"] == "response.failed", event
        error = event["response"]["error"]
        assert error["code"] == "engine_unavailable", error
        code = process.wait(PATIENCE_S)
        assert code == EXIT_ENGINE_LOST, f"the process ended with {code}"
    print(f"{error['code']}: {error['message']} Exit code {code}.")
    with serving(device, folder, "") as (_, base):
        url = f"{base}/v1/responses"
        assert told(httpx.get(f"{url}/{id}")) == (id, text)
        failed = httpx.get(f"{url}/{event['response']['id']}").json()
        assert failed["status"] == "failed", failed
        more = body("And what color is it?", tokens=4, previous_response_id=id)
        _, next = told(httpx.post(url, json=more, timeout=PATIENCE_S))
    print(f"Started anew, the conversation goes on: {text!r}, {next!r}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=FAULTS, default="cpu")
    with tempfile.TemporaryDirectory() as folder:
        check(parser.parse_args().device, folder)


if __name__ == "__main__":
    main()
