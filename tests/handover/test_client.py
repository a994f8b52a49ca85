"""A server's end of a connection, over TCP, to whatever may answer there."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mmserve.handover import wire
from mmserve.handover.client import Client, Order
from mmserve.handover.wire import End, Hello, Home, Job, Piece, Probe, Rates
from mmserve.request import TextSegment
from mmserve.tiers.kv_object import KVObject
from mmserve.tiers.stack import Fetch
from tests.tiers.objects import OWNER, PAGES, item

KEY = b"a key of this test"
A, B = b"a" * 32, b"b" * 32
HOME = Home("here", threads=2, cores=4)
HELLO = Hello("prefill", OWNER.seed, Rates(1e-3, 1e-3), HOME)
ORDER = Order((TextSegment((1, 2)),), b"", (A, B), frozenset((A, B)), frozenset(), (A, B), 0.1)


class Heard:
    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.moved = 0

    def stage_ended(self, kind: str, how: str, seconds: float) -> None:
        self.ends[how] += 1

    def stage_moved(self, kind: str, num_bytes: int) -> None:
        self.moved += num_bytes


class Peer:
    """What answers: `answer` is told of each job of each connection."""

    def __init__(self, answer: Callable[[Any, Job], None], hello: Any = HELLO) -> None:
        self._listener = wire.listen("127.0.0.1:0", KEY)
        self.address = "{}:{}".format(*self._listener.address)
        self._answer, self._hello = answer, hello
        self.num_connections = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                with self._listener.accept() as socket:
                    self.num_connections += 1
                    self._converse(socket)
            except (OSError, EOFError):
                pass

    def _converse(self, socket: Any) -> None:
        wire.say(socket, self._hello)
        while True:
            word = wire.hear(socket)
            if isinstance(word, Probe):
                socket.send_bytes(bytes(word.num_bytes))
            elif isinstance(word, Job):
                self._answer(socket, word)


Start = Callable[..., tuple[Client, Heard, Peer]]


@pytest.fixture
def start() -> Iterator[Start]:
    clients: list[Client] = []

    def make(answer: Callable[[Any, Job], None], hello: Any = HELLO) -> tuple[Client, Heard, Peer]:
        peer, heard = Peer(answer, hello), Heard()
        address, device = peer.address, torch.device("cpu")
        clients.append(Client("prefill", address, KEY, OWNER, device, heard, HOME))
        return clients[-1], heard, peer

    yield make
    for client in clients:
        client.close()


def wait_until(condition: Callable[[], Any]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def ask(client: Client) -> Fetch:
    wait_until(lambda: client.connected)
    fetch = client.order(ORDER)
    fetch.wait(60)
    assert fetch.finished
    return fetch


def payload(objects: list[KVObject], start: int, end: int) -> bytes:
    rows: Tensor = torch.stack([thing.memory for thing in objects])[:, start:end]
    return bytes(rows.contiguous().numpy().data)


def send_pieces(socket: Any, job: Job, cuts: list[int], names: tuple[bytes, ...] = (A, B)) -> None:
    objects = [item(name) for name in names]
    for start, end in zip(cuts, cuts[1:], strict=False):
        wire.say(socket, Piece(job.id, names, PAGES, start, end - start))
        socket.send_bytes(payload(objects, start, end))


def test_objects_come_in_pieces_in_any_order_and_are_whole(start: Start) -> None:
    size = OWNER.num_bytes(PAGES)

    def answer(socket: Any, job: Job) -> None:
        send_pieces(socket, job, [size // 2, size])
        send_pieces(socket, job, [0, 64, size // 2])
        wire.say(socket, End(job.id, Rates(2e-3, None)))

    client, heard, _ = start(answer)
    fetch = ask(client)
    for name in (A, B):
        found = fetch.got(name)
        assert found is not None and found.parts == PAGES
        assert torch.equal(found.memory, item(name).memory)
    wait_until(lambda: heard.ends["done"] == 1)
    assert heard.moved == 2 * size and client.num_jobs == 0
    assert client.unknown([A, B, b"c"]) == 1
    seconds = client.estimate(100, 0, 0)
    assert seconds is not None and seconds >= 0.2  # it has become twice as slow
    assert client.estimate(100, 1, 0) is None


def test_what_is_not_sent_is_not_found(start: Start) -> None:
    def answer(socket: Any, job: Job) -> None:
        send_pieces(socket, job, [0, OWNER.num_bytes(PAGES)], (B,))
        wire.say(socket, End(job.id, HELLO.rates))

    client, _, _ = start(answer)
    fetch = ask(client)
    assert fetch.got(A) is None and fetch.got(B) is not None


def cut_off(socket: Any, job: Job) -> None:
    send_pieces(socket, job, [0, 64])
    raise EOFError


def too_long(socket: Any, job: Job) -> None:
    wire.say(socket, Piece(job.id, (A, B), PAGES, 0, 64))
    socket.send_bytes(bytes(1000))


def too_short(socket: Any, job: Job) -> None:
    wire.say(socket, Piece(job.id, (A, B), PAGES, 0, 64))
    socket.send_bytes(bytes(100))


def beyond_the_end(socket: Any, job: Job) -> None:
    size = OWNER.num_bytes(PAGES)
    wire.say(socket, Piece(job.id, (A, B), PAGES, size - 8, 64))
    socket.send_bytes(bytes(128))


def nonsense(socket: Any, job: Job) -> None:
    wire.say(socket, "nonsense")


def no_pickle(socket: Any, job: Job) -> None:
    socket.send_bytes(b"\x00\x01 no pickle")


@pytest.mark.parametrize(
    "answer", [cut_off, too_long, too_short, beyond_the_end, nonsense, no_pickle]
)
def test_a_worker_that_sends_nonsense_or_goes_is_left_and_nobody_waits(
    start: Start, answer: Callable[[Any, Job], None]
) -> None:
    client, heard, peer = start(answer)
    fetch = ask(client)
    assert fetch.got(A) is None and fetch.got(B) is None
    wait_until(lambda: heard.ends["lost"] == 1)
    wait_until(lambda: client.connected and peer.num_connections == 2)
    assert client.unknown([A, B]) == 2  # another one has computed nothing yet


def test_who_waits_no_more_says_so_and_what_comes_is_dropped(start: Start) -> None:
    going = threading.Event()

    def answer(socket: Any, job: Job) -> None:
        going.wait(60)
        send_pieces(socket, job, [0, OWNER.num_bytes(PAGES)])
        wire.say(socket, End(job.id, HELLO.rates))

    client, heard, _ = start(answer)
    wait_until(lambda: client.connected)
    fetch = client.order(ORDER)
    fetch.cancel()
    assert fetch.finished and client.num_jobs == 0 and heard.ends["cancelled"] == 1
    going.set()
    assert ask(client).got(A) is not None


@pytest.mark.parametrize(
    "hello", [HELLO._replace(seed=b"another"), HELLO._replace(kind="encode"), "hello"]
)
def test_another_model_s_worker_is_not_taken_for_one(start: Start, hello: Any) -> None:
    client, _, peer = start(lambda *_: None, hello)
    wait_until(lambda: peer.num_connections > 1)
    assert not client.connected and client.estimate(1, 0, 0) is None
    assert client.order(ORDER).finished  # with nothing


def test_who_computes_on_the_same_cores_or_gpu_shares_them() -> None:
    assert not HOME.shares(HOME) and HOME.shares(Home("here", threads=3, cores=4))
    assert not HOME.shares(Home("there", threads=4, cores=4))
    assert Home("gpu 0").shares(Home("gpu 0")) and not Home("gpu 0").shares(Home("gpu 1"))


def test_an_address_is_a_socket_s_path_or_a_host_and_port() -> None:
    assert wire.where("/tmp/a/0") == "/tmp/a/0"
    assert wire.where("10.0.0.2:9000") == ("10.0.0.2", 9000)
    for wrong in ("host", ":9", "host:port"):
        with pytest.raises(ValueError, match="neither"):
            wire.where(wrong)
