"""A long day: 64 clients with two keys, one of which floods, ask, leave, return and send rubbish.

A server over the tiny model runs in a process of its own. In the end every answer was what a quiet
server said before, no page is held, memory was flat, the slowest first tokens were not far from the
usual ones, each key had its half, and nothing failed but as it is written in docs/operations.md.

Run: python tests/checks/soak.py [--seconds 1200] [--clients 64]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
from websockets.exceptions import WebSocketException

sys.path.append(str(Path(__file__).parents[2]))

from tests.checks import crowd
from tests.checks.served import Served
from tests.checks.soak_clients import NUMBERS, Book, Client, Fault, Firsts, Refused

ADMIN, FLOOD, CALM = "sk-admin", "sk-flood", "sk-calm"
SEATS = 8  # requests in one step: fewer than either key asks for
PAGES = 48  # for pictures, each of which takes two
LOOKS = 60  # at the server's memory
PATIENCE_S = 30  # until nothing is held
GROWTH, SPREAD, SHARE = 1.1, 3.0, 0.2  # of memory; of first tokens; away from half
FEW = 100  # first tokens of a kind, of which no hundredth is looked for
MET = ("chat", "response", "socket", "forget")  # in quiet; the others are checked by them


class Verdict(NamedTuple):
    what: str
    held: bool
    shown: str
    timed: bool = False  # follows the machine's mood, too


def serve(limit: int) -> None:
    """The process that is looked at."""
    import torch

    from mmserve.config import ServerConfig
    from mmserve.engine.async_engine import AsyncEngine
    from mmserve.server.runner import make_server
    from tests.engine.tiny import build_telling, tiny_config

    torch.set_num_threads(1)  # so small a model gains nothing from more
    # Pictures of two keys do not all fit, so that they come and go; nor do responses.
    sizes = tiny_config(text_pages=400, vision_pages=PAGES, max_num_seqs=SEATS)
    engine = AsyncEngine(sizes, build_telling)
    keys = (f"{FLOOD} name=flood concurrency={limit}", f"{CALM} name=calm")
    config = ServerConfig(
        port=0,
        api_keys=keys,
        admin_keys=(ADMIN,),
        max_stored_responses=200,
        sockets_per_key=1000,
        host_memory_limit=0,
    )
    make_server(config, engine).run()


def memory(process: psutil.Process) -> int:
    """Resident bytes, with those of the processes that decode pictures."""
    family = [process, *process.children(recursive=True)]
    return sum(each.memory_info().rss for each in family)


async def learn(url: str, book: Book) -> None:
    """What each question is answered with nobody else there."""
    async with Client(url, CALM, book, 0) as client:
        for kind in MET:
            for number in range(NUMBERS):
                await client.act(kind, number)
    book.learning = False
    book.acts.clear()
    book.tokens.clear()


async def live(client: Client, book: Book, until: float) -> None:
    while time.monotonic() < until:
        try:
            await client.any()
        except Refused as refused:
            await asyncio.sleep(refused.seconds)
        except (Fault, httpx.HTTPError, OSError, WebSocketException) as fault:
            book.faults.append(f"{client.doing}: {fault!r}")


async def watch(process: psutil.Process, seconds: float) -> list[int]:
    levels = []
    for _ in range(LOOKS):
        await asyncio.sleep(seconds / LOOKS)
        levels.append(memory(process))
    return levels


class Day(NamedTuple):
    book: Book
    levels: list[int]
    tokens: dict[str, int]  # by key, while all were there


async def day(url: str, process: psutil.Process, seconds: float, clients: int) -> Day:
    book = Book()
    await learn(url, book)
    async with AsyncExitStack() as stack:
        keys = [CALM if number % 4 == 0 else FLOOD for number in range(clients)]
        crew = [Client(url, key, book, seed) for seed, key in enumerate(keys, 1)]
        for client in crew:
            await stack.enter_async_context(client)
        until = time.monotonic() + seconds
        lives = asyncio.gather(*(live(client, book, until) for client in crew))
        levels = await watch(process, seconds)
        tokens = dict(book.tokens)
        await lives
    return Day(book, levels, tokens)


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def judge_rest(served: Served) -> Verdict:
    """Of what is held when all have gone."""

    def held() -> dict[str, float]:
        sockets = served.metric("websockets_open")
        return served.busy() | ({"sockets": sockets} if sockets else {})

    deadline = time.monotonic() + PATIENCE_S
    while (left := held()) and time.monotonic() < deadline:
        time.sleep(0.1)
    shown = ", ".join(f"{count:.0f} {what}" for what, count in left.items())
    return Verdict("no request, page or socket is left", not left, shown)


def some(found: list[str]) -> str:
    return f"{len(found)}, such as {'; '.join(found[:3])}" if found else ""


class Spread(NamedTuple):
    """The largest p99 over p50 of first tokens, and of which kind."""

    most: float
    kind: str

    def __str__(self) -> str:
        return f"{self.most:.1f} of {self.kind}"


def spread(firsts: Firsts) -> Spread:
    spreads = [
        Spread(quantile(seconds, 0.99) / statistics.median(seconds), " of ".join(kind))
        for kind, seconds in firsts.items()
        if len(seconds) >= FEW
    ]
    return max(spreads, default=Spread(0, "too few"))


def judge(found: Day) -> list[Verdict]:
    book, third = found.book, len(found.levels) // 3
    second = statistics.median(found.levels[third : 2 * third])
    last = statistics.median(found.levels[2 * third :])
    seen, served = spread(book.firsts), spread(book.served)
    calm, both = found.tokens.get("calm", 0), max(sum(found.tokens.values()), 1)
    return [
        Verdict("each answer is that of the quiet run", not book.wrong, some(book.wrong)),
        Verdict("nothing failed", not book.faults, some(book.faults)),
        Verdict(
            f"memory's last third is within {GROWTH - 1:.0%} of the second",
            last <= second * GROWTH,
            f"{second / 2**20:.0f} and {last / 2**20:.0f} MiB",
            timed=True,
        ),
        Verdict(
            f"first tokens: p99 within {SPREAD:g} times p50",
            seen.most <= SPREAD,
            f"clients saw at most {seen}, the server says {served}",
            timed=True,
        ),
        Verdict(
            f"each key has its half, within {SHARE:.0%}",
            abs(calm / both - 0.5) <= SHARE / 2,
            f"the calm one {calm / both:.0%} of {both:,} tokens",
            timed=True,
        ),
    ]


def show(found: Day) -> None:
    book = found.book
    for who, firsts in (("by the clients", book.firsts), ("by the server", book.served)):
        print(f"first tokens, {who:<20}{'count':>6}{'p50':>9}{'p99':>9}{'most':>9}")
        for (kind, key), seconds in sorted(firsts.items()):
            shown = (quantile(seconds, share) * 1e3 for share in (0.5, 0.99, 1))
            figures = "".join(f"{ms:>6.0f} ms" for ms in shown)
            print(f"  {kind:<14}{key:<18}{len(seconds):>6}{figures}")
    print("acts: " + ", ".join(f"{kind} {count}" for kind, count in sorted(book.acts.items())))
    print(f"refused for now: {dict(book.refused)}")


def check(seconds: float, clients: int) -> list[Verdict]:
    """One day, shown and judged."""
    with crowd.served(__file__, str(max(clients * 5 // 8, 1))) as (host, port, process):
        served = Served(f"http://{host}:{port}", process.pid, ADMIN)
        found = asyncio.run(day(served.url, process, seconds, clients))
        show(found)
        return [*judge(found), judge_rest(served)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve)
    verdicts = check(args.seconds, args.clients)
    for verdict in verdicts:
        print(
            f"{'PASS' if verdict.held else 'FAIL'}  {verdict.what}: {verdict.shown or 'none else'}"
        )
    sys.exit(not all(verdict.held for verdict in verdicts))


if __name__ == "__main__":
    main()
