"""The cases of the `engine` suite: decoding, first tokens and joules of one engine under load.

Owns what each case asks and which bound stands beside it. Knows nothing of how lines are shown.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mmserve.bench.ceilings import Ceilings
from mmserve.bench.load import Load, Window, kv_bytes
from mmserve.bench.sizes import Sizes
from mmserve.bench.stats import percentile
from mmserve.bench.suite import Case, Line
from mmserve.request import Segment

WINDOW = "TTFT window of"  # what its line's name begins with
Prompts = Callable[[], Sequence[Segment]]


@dataclass(frozen=True)
class Plan:
    """How large the cases are; counts in sequences, tokens and images."""

    decode: tuple[tuple[int, int], ...] = ((1, 512), (64, 1024), (64, 4096), (1, 1024))
    energy_decode: tuple[int, int] = (64, 1024)
    prefill: int = 8192
    question: int = 32  # text tokens behind images
    view: int = 5  # images
    repeats: int = 20  # first tokens
    image_repeats: int = 10  # those of new images
    sessions: int = 64
    shared: tuple[int, ...] = (4, 16)  # images that all sessions see
    private: int = 256  # text tokens of a session
    window: Window = field(default_factory=Window)

    @property
    def grown(self) -> int:
        """Tokens a sequence grows by while it is measured, energy and edges included."""
        return 2 * self.window.max_steps + 2 * self.window.warm_up + 160

    def text_tokens(self) -> int:
        """Of the largest case, as the pool must hold them."""
        cases = [*self.decode, self.energy_decode, (self.sessions, self.private)]
        return max(self.prefill, *(n * (context + self.grown) for n, context in cases))


@dataclass
class EngineCases:
    """`peers` maps (sequences, context) to the peer's tokens/s, where it was measured."""

    load: Load
    sizes: Sizes
    ceilings: Ceilings
    plan: Plan
    peers: Mapping[tuple[int, int], float] = field(default_factory=dict)
    images: bool = True  # whether the shape's own images are worth measuring

    def all(self) -> list[Case]:
        """What is asked of every model comes first: a budget that is cut loses the least."""
        plan = self.plan
        cases = [self._decode_case(*of) for of in plan.decode[:2]]
        cases.append(self._case(self._name_question, self._first_token))
        cases.append(self._case(f"prefill {self._prefill_tokens()}", self._prefill))
        if self.images:
            cases.append(self._case(f"TTFT {plan.view} images", self._first_tokens_of_images))
            for count in plan.shared:
                name = f"decode {plan.sessions} sessions, the same {count} images"
                cases.append(self._case(name, functools.partial(self._shared, name, count)))
        if self.load.read_joules is not None:
            cases.append(self._case("energy of a token", self._energy_of_tokens))
            if self.images:
                cases.append(self._case("energy of an image", self._energy_of_images))
        return cases + [self._decode_case(*of) for of in plan.decode[2:]]

    def single(self) -> list[Case]:
        """One sequence of text: the first decoding, and the first token."""
        return [
            self._decode_case(*self.plan.decode[0]),
            self._case(self._name_question, self._first_token),
        ]

    def _case(self, name: str, run: Callable[[], Iterable[Line]]) -> Case:
        def alone() -> list[Line]:
            self.load.clear()
            try:
                return list(run())
            finally:
                self.load.clear()

        return Case(name, alone)

    # -- decoding -------------------------------------------------------------------------------

    def _decode_case(self, batch: int, context: int) -> Case:
        name = f"decode {batch} x {context}"
        return self._case(name, lambda: [self._decode(name, batch, context)])

    def _decode(self, name: str, batch: int, context: int) -> Line:
        self._start([[self.load.text(context)] for _ in range(batch)])
        line = self._steps(name, batch)
        peer = self.peers.get((batch, context))
        if peer is None or line.value is None:
            return line
        return replace(line, figures={**line.figures, "x generate": line.value / peer})

    def _start(self, prompts: Sequence[Sequence[Segment]]) -> None:
        self.load.start_decoding(prompts, self.plan.grown)

    def _shared(self, name: str, images: int) -> Iterator[Line]:
        """All sessions look at the same images; once more with each reading them for itself."""
        load = self.load
        runner: Any = load.engine.runner
        shown = load.images(images)
        load.ask([*shown, load.text(self.plan.question)])
        prompts = [[*shown, load.text(self.plan.private)] for _ in range(self.plan.sessions)]
        line, answers = self._sessions(name, prompts)
        if not getattr(runner, "shares", False):
            yield line
            return
        load.clear()
        runner.shares = False
        try:
            apart, others = self._sessions(name, prompts)
        finally:
            runner.shares = True
        assert line.value is not None and apart.value is not None
        pairs = [p for pair in zip(answers, others, strict=True) for p in zip(*pair, strict=False)]
        more = {
            "x faster than unshared": line.value / apart.value,
            "% of tokens equal": 100 * statistics.fmean(x == y for x, y in pairs),
        }
        yield replace(line, figures={**line.figures, **more})

    def _sessions(
        self, name: str, prompts: Sequence[Sequence[Segment]]
    ) -> tuple[Line, list[list[int]]]:
        """The line, and each session's tokens."""
        self._start(prompts)
        line = self._steps(name, len(prompts))
        once, each = kv_bytes(self.load)
        figures = {**line.figures, "GB of KV": once / 1e9, "GB if read by each": each / 1e9}
        return replace(line, figures=figures), [list(a) for a in self.load.answers.values()]

    def _steps(self, name: str, batch: int) -> Line:
        load = self.load
        before, _ = kv_bytes(load)
        seconds, steps, tokens = load.time_steps(self.plan.window)
        load.check_running(batch)
        after, _ = kv_bytes(load)
        step = seconds / steps
        floor = self.sizes.step_seconds((before + after) / 2, self.ceilings)
        figures = {"ms a step": 1e3 * step, "TB/s": floor * self.ceilings.bytes_per_s / step / 1e12}
        return Line(name, tokens / seconds, "tokens/s", batch / floor, figures)

    # -- first tokens ---------------------------------------------------------------------------

    @property
    def _name_question(self) -> str:
        return f"TTFT {self.plan.question} text tokens"

    def _first_token(self) -> Iterator[Line]:
        yield self._asked(self._name_question, lambda: [self.load.text(self.plan.question)])

    def _asked(self, name: str, prompt: Prompts, new: int = 0, again: int = 0) -> Line:
        """p50 of requests, one at a time, after two that warm up. `new` images are encoded, `again`
        so many others pass the decoder once more."""
        repeats = self.plan.image_repeats if new else self.plan.repeats
        times = [self.load.ask(prompt()) for _ in range(repeats + 2)][2:]
        bound = self.sizes.first_token_seconds(new, self.ceilings, again)
        worst = {"ms p90": 1e3 * percentile(times, 0.9)}
        return Line(name, 1e3 * statistics.median(times), "ms", 1e3 * bound, worst)

    def _prefill_tokens(self) -> int:
        return min(self.plan.prefill, self.load.engine.max_model_len - 1)

    def _prefill(self) -> Iterator[Line]:
        count = self._prefill_tokens()
        times = [self.load.ask([self.load.text(count)]) for _ in range(6)][1:]
        seconds = statistics.median(times)
        rate = self.sizes.prefill_flops(count) / seconds / 1e12
        figures = {"ms": 1e3 * seconds, "tokens/s": count / seconds}
        bound = self.ceilings.flops_per_s / 1e12
        yield Line(f"prefill {count}", rate, "TFLOP/s", bound, figures)

    def _first_tokens_of_images(self) -> Iterator[Line]:
        load, view, question = self.load, self.plan.view, self.plan.question
        window = load.images(view)
        # Images in their context are computed again where that is another one.
        moved = view if load.engine.runner.in_context else 0

        def slide() -> Sequence[Segment]:
            window.append(load.image())
            del window[0]
            return [*window, load.text(question)]

        def behind_text() -> Sequence[Segment]:
            return [load.text(question), *window, load.text(question)]

        new = self._asked(
            f"TTFT {view} new images", lambda: [*load.images(view), load.text(question)], view
        )
        load.ask([*window, load.text(question)])
        same = f"TTFT {view} known images, same place"
        other = f"TTFT {view} known images behind other text"
        yield new
        known = ((same, lambda: [*window, load.text(question)], 0), (other, behind_text, moved))
        for name, prompt, again in known:
            line = self._asked(name, prompt, again=again)
            assert line.value is not None and new.value is not None
            sooner = {"x sooner than new": new.value / line.value}
            yield replace(line, figures={**line.figures, **sooner})
        yield self._asked(f"{WINDOW} {view}, 1 new", slide, 1, max(moved - 1, 0))

    # -- joules ---------------------------------------------------------------------------------

    def _energy_of_tokens(self) -> Iterator[Line]:
        batch, context = self.plan.energy_decode
        load = self.load
        self._start([[load.text(context)] for _ in range(batch)])
        load.time_steps(self.plan.window)
        joules = load.joules_each(load.step, self.plan.window)
        load.check_running(batch)
        yield Line(f"energy of a token, {batch} x {context}", joules, "J")

    def _energy_of_images(self) -> Iterator[Line]:
        """A request with images less one without, over the number of images."""
        load, view, question = self.load, self.plan.view, self.plan.question
        known = load.images(view)
        load.ask([*known, load.text(question)])

        def joules(prompt: Prompts) -> float:
            def once() -> int:
                load.ask(prompt())
                return 1

            each = load.joules_each(once, self.plan.window)
            assert each is not None
            return each

        text = joules(lambda: [load.text(question)])
        hit = joules(lambda: [*known, load.text(question)])
        miss = joules(lambda: [*load.images(view), load.text(question)])
        yield Line(f"energy of a request of {question} tokens", text, "J")
        yield Line("energy of an image found", (hit - text) / view, "J")
        yield Line("energy of an image encoded", (miss - text) / view, "J")
