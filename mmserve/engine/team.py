"""A process's place among those that compute one model together, and what the first tells the rest.

Owns the process group, the sums over it, and the order of what is done to the pools. One rank has
the scheduler, the books and the sampler; what its runner does is told to the others first, which
then do the same to their part. Knows nothing of how ranks are started, nor of sequences.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial, wraps
from multiprocessing import connection
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from mmserve.engine import looking, wire
from mmserve.engine.sums import sums
from mmserve.model.adapter import Features
from mmserve.model.shard import Total, split_decoder
from mmserve.request import ImageInput

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
PATIENCE = timedelta(minutes=5)  # until all ranks have their weights

Pipe = Any  # multiprocessing's Connection, which mypy takes for generic and older Pythons do not


class RankLostError(Exception):
    """A rank is gone, or has not done what the others did."""


class Pipes(NamedTuple):
    """One end of each: what a rank is told to do, and the images that it looks at for the first."""

    orders: Pipe
    looks: Pipe


class Seat(NamedTuple):
    """`port`: where the ranks of this machine meet."""

    rank: int
    ranks: int
    port: int


class Team:
    """Of one process alone: nobody is told anything, and nothing is added up."""

    ranks = 1
    leads = True  # or is told what to do
    lost = False

    def split(self, lm: Any) -> None:
        """Leave of a model what this rank computes. Raises ValueError."""

    def begin(self, device: torch.device, dtype: torch.dtype) -> None:
        """The runner is made, of a model in `dtype`; from now on it runs."""

    def tell(self, name: str, arguments: tuple[Any, ...]) -> AbstractContextManager[None]:
        """The others do what this process does within."""
        return nullcontext()

    def look(self, rank: int, image: ImageInput, pixels: Any) -> Future[Features]:
        """What another rank's tower makes of an image."""
        raise AssertionError("there is no other rank")

    def check(self) -> None:
        """Raises `RankLostError`."""

    def close(self) -> None: ...


class _Rank(Team):
    """One of several."""

    def __init__(self, seat: Seat, store: TCPStore) -> None:
        self.ranks, self._seat, self._store = seat.ranks, seat, store
        self._total = Total(first=seat.rank == 0)

    def split(self, lm: Any) -> None:
        split_decoder(lm, self._seat.rank, self.ranks, self._total)

    def begin(self, device: torch.device, dtype: torch.dtype) -> None:
        on_gpu, rank = device.type == "cuda", self._seat.rank
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=self._store,
            rank=rank,
            world_size=self.ranks,
            timeout=PATIENCE,
            device_id=torch.device("cuda", rank) if on_gpu else None,
        )
        self._total.connect(sums(device, dtype, self.ranks))

    def spread(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, 0)


class Follower(_Rank):
    """A rank that is told what to do."""

    leads = False

    def __init__(self, seat: Seat, pipes: Pipes) -> None:
        super().__init__(seat, TCPStore(HOST, seat.port, is_master=False, timeout=PATIENCE))
        self._orders, self._looks = pipes

    def begin(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._orders.send(True)
        super().begin(device, dtype)

    def obey(self, runner: Any) -> None:
        """Do to a runner what it is told, until the first rank is gone."""
        runner.rehearse_look()
        # A stock model's tower is reached through the same modules as its decoder.
        turns: Any = threading.Lock() if runner.stock else nullcontext()
        look = partial(looking.answer, self._looks, runner, turns)
        threading.Thread(target=look, name="looks", daemon=True).start()
        while True:
            try:
                name, arguments = wire.receive(self._orders, self._device, self.spread)
            except (EOFError, OSError):
                return
            with turns:
                getattr(runner, name)(*arguments)


class Leader(_Rank):
    """The first rank. `start` starts another one and returns its process and the pipe to it."""

    def __init__(self, ranks: int, start: Callable[[Seat], tuple[Any, Pipes]]) -> None:
        store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
        super().__init__(Seat(0, ranks, store.port), store)
        self._closed = False
        self._device = torch.device("cpu")
        started = [start(Seat(rank, ranks, store.port)) for rank in range(1, ranks)]
        self.processes: Sequence[Any] = [process for process, _ in started]
        self._pipes: Sequence[Pipe] = [pipes.orders for _, pipes in started]
        atexit.register(self.close)  # before multiprocessing waits for them
        self._others = [looking.Other(pipes.looks) for _, pipes in started]

    def begin(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        for rank, pipe in enumerate(self._pipes, 1):
            try:
                pipe.recv()
            except (EOFError, OSError) as error:
                raise ValueError(f"rank {rank} of {self.ranks} could not start") from error
        super().begin(device, dtype)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def tell(self, name: str, arguments: tuple[Any, ...]) -> AbstractContextManager[None]:
        return self._together((name, arguments))

    @contextmanager
    def _together(self, order: tuple[str, tuple[Any, ...]]) -> Iterator[None]:
        self.check()
        try:
            wire.send(self._pipes, order, self.spread)
            yield
        except BaseException:
            self.lost = True  # what the others have done of it is not known
            raise

    def look(self, rank: int, image: ImageInput, pixels: Any) -> Future[Features]:
        self.check()
        return self._others[rank - 1].look(image, pixels, self._device)

    def check(self) -> None:
        if self.lost:
            raise RankLostError("a rank is gone, or has not done what the others did")

    def _watch(self) -> None:
        connection.wait([process.sentinel for process in self.processes])
        if self._closed:
            return
        self.lost = True
        logger.critical("a rank has ended")
        if self._device.type == "cuda":
            self._abort()  # else what waits for it on the device waits for ever

    def _abort(self) -> None:
        group: Any = dist.group.WORLD
        group._get_backend(self._device).abort()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for pipe in self._pipes:
            pipe.close()
        for other in self._others:
            other.close()
        if dist.is_initialized():
            if self._device.type == "cuda":
                self._abort()
            dist.destroy_process_group()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


class _Led(Protocol):
    team: Team


R = TypeVar("R", bound=_Led)
P = ParamSpec("P")
T = TypeVar("T")


def followed(method: Callable[Concatenate[R, P], T]) -> Callable[Concatenate[R, P], T]:
    """Of a runner: what is done to its model and pools, which every rank does in the same order.
    Its arguments are by position."""

    @wraps(method)
    def led(runner: R, *args: P.args, **kwargs: P.kwargs) -> T:
        assert not kwargs, "arguments are by position"
        with runner.team.tell(method.__name__, args):
            return method(runner, *args, **kwargs)

    return cast(Callable[Concatenate[R, P], T], led)
