"""Company changes nothing: 16 conversations at once answer as each does alone, 200 aborts leave
the pools idle, and 2,000 distinct pictures leave memory flat.

Run: python tests/checks/company.py [--pictures 2000]   (starts its own server)
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from tests.checks.served import Served, ask, picture, serving, user

QUESTIONS = ("Describe the image.", "What shape is in the image?", "What color is it?")


def check_together_equals_alone(served: Served, count: int = 16) -> None:
    client, model = served.client(), served.model()
    talks = [[user(picture(100 + i), QUESTIONS[i % 3])] for i in range(count)]
    with ThreadPoolExecutor(count) as pool:
        together = [
            reply.choices[0].message.content
            for reply in pool.map(lambda talk: ask(client, model, talk), talks)
        ]
    alone = [ask(client, model, talk).choices[0].message.content for talk in talks]
    assert together == alone, list(zip(together, alone, strict=True))


def check_aborts_leave_nothing(served: Served, count: int = 200) -> None:
    client, model = served.client(), served.model()
    rng = random.Random(5)
    plans = [(picture(500 + i % 40), rng.randrange(0, 12)) for i in range(count)]

    def abort(plan: tuple[bytes, int]) -> None:
        data, events = plan
        talk = [user(data, "Tell me a long story about this picture.")]
        with ask(client, model, talk, stream=True, max_tokens=200) as stream:
            for _, _ in zip(range(events), stream, strict=False):
                pass

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(abort, plans))
    served.wait_idle()
    reply = ask(client, model, [user(picture(1), "What is this?")])
    assert reply.choices[0].message.content


def check_memory_stays_flat(served: Served, count: int) -> None:
    """The first quarter fills the pools and caches; after it, memory must not grow."""
    client, model = served.client(), served.model()
    lock, done = threading.Lock(), [0]
    levels: list[int] = []

    def one(seed: int) -> None:
        ask(client, model, [user(picture(seed), "What?")], max_tokens=1)
        with lock:
            done[0] += 1
            if done[0] % (count // 8) == 0:
                levels.append(served.memory())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(10_000, 10_000 + count)))
    served.wait_idle()
    grown = (levels[-1] - levels[1]) / 2**20
    print(f"memory over {count} pictures: {[round(level / 2**20) for level in levels]} MiB")
    assert grown < 48, f"{grown:.0f} MiB more"


def check(pictures: int) -> None:
    # A small vision pool, so that the pictures pass through it several times.
    with serving("--vision-kv-cache-memory-bytes", "128M") as served:
        check_together_equals_alone(served)
        check_aborts_leave_nothing(served)
        check_memory_stays_flat(served, pictures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=2000)
    check(parser.parse_args().pictures)
    print("16 at once answer as alone; aborts leave nothing; memory is flat")
