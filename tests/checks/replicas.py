"""Several replicas behind one router on one machine, by `mmserve deploy`.

Every client passes through; half of all pictures were shown before, and image-aware routing has
each encoded once (round robin beside it); replicas are killed (-9) and replaced by a rolling update
under load, and nothing that was acknowledged is lost.

Run: python tests/checks/replicas.py [--replicas 3] [--kills 3] [--only PART]
"""

from __future__ import annotations

import argparse
import contextlib
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil

sys.path.append(str(Path(__file__).parents[2]))

from tests.checks import lifetime, sdk, vqa
from tests.checks.kill import PATIENCE_S, Told, User, check
from tests.checks.served import Served, picture, serving, user

CLIENTS = 6
NEW, SHOWN = 60, 120  # different pictures, and how often one is shown in all
SERVER = "mmserve.deploy.supervised"
MODEL = "mm/fake"  # as `kill.py` calls whatever is served
# Ray ends processes on a machine that has little memory left.
POOLS = ("--kv-cache-memory-bytes", "128M", "--vision-kv-cache-memory-bytes", "64M")
PATIENT = ("--drain-seconds", "60")  # cores are shared by clients, servers and those that start
RESTART_S = 120


@contextlib.contextmanager
def deployed(folder: Path, replicas: int, *flags: str) -> Iterator[Served]:
    words = ("--replicas", str(replicas), "--data-dir", str(folder), *flags)
    with serving(
        *words, *POOLS, *PATIENT, "--served-model-name", MODEL, command="deploy"
    ) as served:
        yield served


def servers(served: Served) -> list[psutil.Process]:
    """The processes that serve, without the ranks and decoders that they have started."""
    assert served.pid is not None
    family = psutil.Process(served.pid).children(recursive=True)
    found = [each for each in family if SERVER in _words(each)]
    own = {each.pid for each in found}
    return [each for each in found if each.ppid() not in own]


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def count(served: Served) -> int:
    try:
        return int(httpx.get(f"{served.url}/health", timeout=10).json()["replicas"])
    except (httpx.TransportError, ValueError):
        return 0


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + RESTART_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.2)


# Pictures


def show(urls: Sequence[str], order: Sequence[int], salt: int) -> None:
    """Each picture of `order` in a conversation of its own, to one of `urls` after another."""

    def ask(number: int) -> None:
        question = user(picture(salt + order[number]), "What color is it?")
        body = {"model": MODEL, "messages": [question], "max_tokens": 4}
        url = urls[number % len(urls)]
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(ask, range(len(order))))


def addresses(served: Served) -> list[str]:
    """Of the replicas themselves."""
    found = []
    for each in servers(served):
        ports = [c.laddr.port for c in each.net_connections() if c.status == psutil.CONN_LISTEN]
        found += [f"http://127.0.0.1:{port}" for port in ports]
    return sorted(found)


def encodes(served: Served, urls: Sequence[str], salt: int) -> float:
    """How often each of `NEW` pictures is encoded, half of what is shown having been seen."""
    order = [*range(NEW), *random.Random(salt).choices(range(NEW), k=SHOWN - NEW)]
    random.Random(salt).shuffle(order)
    before = served.metric("vision_kv_writes_total")
    show(urls, order, salt)
    return (served.metric("vision_kv_writes_total") - before) / NEW


# Deaths


def drawn(rng: random.Random, size: int) -> bytes:
    return picture(rng.randrange(10_000))


class Asker(User):
    def question(self, rng: random.Random) -> str:
        """To which the model in the box has a short answer."""
        return f"What {rng.choice(('color', 'shape'))} is image {rng.randint(1, 9)}?"


class Client(threading.Thread):
    """A user that comes again where an answer broke off, until `stop`."""

    def __init__(self, url: str, told: Told, seed: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self._url, self._told, self._seed, self._stop_ = url, told, seed, stop
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._stop_.is_set():
                mine = Asker(self._url, self._told, self._seed, drawn)
                mine.run_until(self._stop_)
                self._seed += 1000
        except BaseException as error:
            self.failure = error


@contextlib.contextmanager
def load(served: Served, told: Told, seed: int) -> Iterator[None]:
    stop = threading.Event()
    clients = [Client(served.url, told, seed + number, stop) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    yield
    stop.set()
    for client in clients:
        client.join(PATIENCE_S)
        assert not client.is_alive() and client.failure is None, client.failure


def kill(served: Served, replicas: int, kills: int) -> Told:
    told, rng = Told(), random.Random(7)
    with load(served, told, 1):
        for _ in range(kills):
            until(lambda: count(served) == replicas, "a replica did not come again")
            time.sleep(3)
            victim = rng.choice(servers(served))
            victim.kill()
            until(lambda: count(served) < replicas, "nobody saw that a replica is dead")
        until(lambda: count(served) == replicas, "a replica did not come again")
    check(served.url, told, rng)
    return told


def update(served: Served, folder: Path, replicas: int, *flags: str) -> tuple[Told, int]:
    """Other flags, under load: what was told, and the fewest replicas that took work."""
    told, fewest, old = Told(), replicas, {each.pid for each in servers(served)}
    with load(served, told, 100):
        time.sleep(2)
        words = ["--replicas", str(replicas), "--data-dir", str(folder), *flags]
        words += ["--port", served.url.rpartition(":")[2], "--ray-address", "auto"]
        words += [*POOLS, *PATIENT, "--served-model-name", MODEL, "--max-num-seqs", "32"]
        command = [sys.executable, "-m", "mmserve", "deploy", *words]
        quiet = subprocess.DEVNULL
        with subprocess.Popen(command, stdout=quiet, stderr=quiet) as process:
            while process.poll() is None:
                fewest = min(fewest, count(served))
                time.sleep(0.2)
        assert process.returncode == 0
        until(lambda: not old & {each.pid for each in servers(served)}, "an old replica stays")
    check(served.url, told, random.Random(8))
    return told, fewest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--only", choices=("clients", "pictures", "kills", "update"))
    args = parser.parse_args()
    parts = (args.only,) if args.only else ("clients", "pictures", "kills", "update")
    with tempfile.TemporaryDirectory() as folder, deployed(Path(folder), args.replicas) as served:
        until(lambda: count(served) == args.replicas, "not all replicas came")
        if "clients" in parts:
            sdk.check(served)
            print(f"sdk passes; easy-VQA {vqa.accuracy(served, sample=40):.0%}", flush=True)
            lifetime.check(served)
        if "pictures" in parts:
            aware = encodes(served, [served.url], 1000)
            robin = encodes(served, addresses(served), 2000)
            print(f"each picture encoded {aware:.2f} times, round robin {robin:.2f}", flush=True)
            assert aware <= 1.1 < robin
        if "kills" in parts:
            told = kill(served, args.replicas, args.kills)
            print(f"{args.kills} kills: {held(told)}", flush=True)
        if "update" in parts:
            told, fewest = update(served, Path(folder), args.replicas)
            print(f"update: {held(told)}; at least {fewest} took work")
            assert fewest == args.replicas


def held(told: Told) -> str:
    cut = len(told.begun - set(told.answers))
    return f"{len(told.answers)} answers and {len(told.files)} files held, {cut} streams were cut"


if __name__ == "__main__":
    main()
