"""`kill -9` at random moments under load: nothing that was acknowledged is lost.

A server over the fake engine is killed (or, gently, told to end by SIGTERM) and started anew over
one folder. After each start the
database is sound, every acknowledged answer and file is there, what was deleted is not, a response
that was being written is whole or has failed, and any turn asked again gives the answer it gave.

Run: python tests/checks/kill.py [--kills 50] [--seed 0] [--gently]
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
USERS = 4
PNG = b"\x89PNG\r\n\x1a\n"
Draw = Callable[[random.Random, int], bytes]  # of about so many bytes
PATIENCE_S = 300.0  # a real model may write long answers (`replicas.py`)
FIRST = "FIRST"  # the parent of a turn that has none


def rubbish(rng: random.Random, size: int) -> bytes:
    """What the fake engine takes for a picture."""
    return PNG + rng.randbytes(size)


@dataclass
class Told:
    """What the server said is done."""

    answers: dict[str, tuple[str, Any, str]] = field(default_factory=dict)  # parent, input, text
    files: dict[str, bytes] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)  # responses that were seen to start
    deleted: set[str] = field(default_factory=set)  # paths
    in_doubt: set[str] = field(default_factory=set)  # paths whose removal was not answered


@contextmanager
def mortal(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server over this folder and its address; killed afterwards."""
    command = [sys.executable, str(ROOT / "tests" / "server" / "mortal.py"), str(folder)]
    with started(command, stderr=subprocess.DEVNULL) as server:
        yield server


@contextmanager
def started(command: list[str], **options: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server's process and its address, once it is ready; killed afterwards."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert "ready: http" in line, f"the server ended with {process.wait()}"
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Leaving(Exception):
    """The server has said that it is about to end."""


def granted(answer: httpx.Response) -> httpx.Response:
    """Raises `Leaving`."""
    if answer.status_code == 503:
        answer.read()
        assert answer.json()["error"]["code"] == "shutting_down", answer.text
        raise Leaving
    assert answer.status_code == 200, answer.text
    return answer


class User:
    """Talks, uploads and deletes until the server is gone."""

    def __init__(self, url: str, told: Told, seed: int, draw: Draw = rubbish) -> None:
        self._draw = draw
        self._client = httpx.Client(base_url=url, timeout=PATIENCE_S)
        self._told = told
        self._random = random.Random(seed)
        self._mine: list[str] = []  # this life's turns, which others leave alone
        self._uploads: list[str] = []

    def run(self) -> None:
        self.run_until(threading.Event())

    def run_until(self, stop: threading.Event) -> None:
        with self._client:
            try:
                while not stop.is_set():
                    self._act()
            except (httpx.NetworkError, httpx.RemoteProtocolError, Leaving):  # killed, or told
                return

    def _act(self) -> None:
        number = self._random.random()
        if number < 0.2:
            self._upload()
        elif number < 0.3 and self._mine:
            self._delete(f"/v1/responses/{self._mine.pop(0)}")
        elif number < 0.35 and self._uploads:
            self._delete(f"/v1/files/{self._uploads.pop(0)}")
        else:
            self._ask()

    def question(self, rng: random.Random) -> str:
        return f"q{rng.random()}"

    def _upload(self) -> None:
        data = self._draw(self._random, self._random.choice((10, 10_000, 300_000)))
        upload = {"file": ("x.png", data)}
        answer = granted(self._client.post("/v1/files", files=upload, data={"purpose": "vision"}))
        self._told.files[answer.json()["id"]] = data
        self._uploads.append(answer.json()["id"])

    def _delete(self, path: str) -> None:
        self._told.in_doubt.add(path)
        granted(self._client.delete(path))
        self._told.deleted.add(path)

    def _ask(self) -> None:
        parent = self._random.choice([FIRST, *self._mine[-3:]])
        content: list[dict[str, str]] = [
            {"type": "input_text", "text": self.question(self._random)}
        ]
        if self._random.random() < 0.3:
            data = base64.b64encode(self._draw(self._random, 5000)).decode()
            content.append({"type": "input_image", "image_url": f"data:image/png;base64,{data}"})
        question = [{"role": "user", "content": content}]
        body = request(parent, question)
        if self._random.random() < 0.5:
            answer = granted(self._client.post("/v1/responses", json=body))
            return self._note(answer.json(), parent, question)
        with self._client.stream("POST", "/v1/responses", json={**body, "stream": True}) as lines:
            granted(lines)
            for line in lines.iter_lines():
                event: dict[str, Any] = {"type": None}
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                if event["type"] == "response.created":
                    self._told.begun.add(event["response"]["id"])
                elif event["type"] == "response.completed":
                    self._note(event["response"], parent, question)

    def _note(self, response: dict[str, Any], parent: str, question: Any) -> None:
        assert response["status"] == "completed", response
        self._told.answers[response["id"]] = (parent, question, text_of(response))
        self._mine.append(response["id"])


def request(parent: str, question: Any) -> dict[str, Any]:
    body = {"model": "mm/fake", "input": question}
    return body if parent == FIRST else {**body, "previous_response_id": parent}


def text_of(response: dict[str, Any]) -> str:
    (item,) = response["output"]
    text: str = item["content"][0]["text"]
    return text


def live(folder: Path, told: Told, rng: random.Random, *, gently: bool) -> None:
    """One life of a server: everything told before still holds; then load, and a kill."""
    with mortal(folder) as (process, url):
        check(url, told, rng)
        users = [User(url, told, rng.getrandbits(32)) for _ in range(USERS)]
        threads = [threading.Thread(target=user.run) for user in users]
        for thread in threads:
            thread.start()
        time.sleep(rng.uniform(0.02, 1.0))
        if gently:
            process.terminate()
            assert process.wait() == -signal.SIGTERM, "it did not end as it was told"
        process.kill()
        for thread in threads:
            thread.join()
    check_database(folder)


def check_database(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "mmserve.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def check(url: str, told: Told, rng: random.Random) -> None:
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        for path in told.deleted:
            assert client.get(path).status_code == 404, f"{path} came back"
        for id, data in told.files.items():
            if f"/v1/files/{id}" not in told.in_doubt:
                assert client.get(f"/v1/files/{id}/content").content == data, f"{id} is lost"
        for id, (_, _, text) in told.answers.items():
            if f"/v1/responses/{id}" not in told.in_doubt:
                answer = client.get(f"/v1/responses/{id}")
                assert answer.status_code == 200, f"{id} is lost"
                assert answer.json()["status"] == "completed"
                assert text_of(answer.json()) == text
        for id in told.begun - set(told.answers):
            response = client.get(f"/v1/responses/{id}").json()
            assert response["status"] in ("completed", "failed"), response
            assert (response["status"] == "failed") == bool(response["error"])
        check_conversations(client, told, rng)


def check_conversations(client: httpx.Client, told: Told, rng: random.Random) -> None:
    """Ask again what was asked: the same answer comes from the same history only."""
    for id in rng.sample(sorted(told.answers), min(20, len(told.answers))):
        parent, question, text = told.answers[id]
        if f"/v1/responses/{parent}" not in told.in_doubt:
            answer = client.post("/v1/responses", json={**request(parent, question)})
            assert answer.status_code == 200, answer.text
            assert text_of(answer.json()) == text, f"{id} has another history"


def run(folder: Path, kills: int, seed: int, *, gently: bool = False) -> Told:
    """Kill so many servers; the last check is of what the last of them told."""
    told, rng = Told(), random.Random(seed)
    for _ in range(kills):
        live(folder, told, rng, gently=gently)
    with mortal(folder) as (_, url):
        check(url, told, rng)
    check_database(folder)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gently", action="store_true", help="by SIGTERM")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        told = run(Path(folder), args.kills, args.seed, gently=args.gently)
    cut = len(told.begun - set(told.answers))
    print(
        f"{args.kills} kills: {len(told.answers)} answers, {len(told.files)} files and "
        f"{len(told.deleted)} removals held; {cut} streams were cut"
    )


if __name__ == "__main__":
    main()
