"""How many questions of easy-VQA's test split a server answers right, asked over the API.

Run: python tests/checks/vqa.py [--url http://127.0.0.1:8000] [--sample 1000]
"""

from __future__ import annotations

import argparse
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import easy_vqa

sys.path.append(str(Path(__file__).parents[2]))

from tests.checks.served import Served, ask, given, user


def accuracy(served: Served, sample: int | None, workers: int = 8) -> float:
    """Share of exact answers (case and a final full stop ignored)."""
    questions = list(zip(*easy_vqa.get_test_questions(), strict=True))
    if sample is not None:
        questions = random.Random(11).sample(questions, sample)
    paths = easy_vqa.get_test_image_paths()
    client, model = served.client(), served.model()

    def right(item: tuple[str, str, int]) -> bool:
        question, answer, image = item
        reply = ask(client, model, [user(Path(paths[image]).read_bytes(), question)])
        said = (reply.choices[0].message.content or "").strip().lower().rstrip(".")
        if said != answer:
            print(f"image {image}: {question} -> {said!r}, not {answer!r}")
        return said == answer

    with ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(right, questions))
    return sum(results) / len(results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url")
    parser.add_argument("--sample", type=int)
    args = parser.parse_args()
    with given(args.url) as served:
        print(f"easy-VQA test: {100 * accuracy(served, args.sample):.2f} % right")
