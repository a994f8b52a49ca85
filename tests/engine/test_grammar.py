"""Constrained answers: each fits its constraint whatever the seed, the temperature, the company and
the overlap of steps; and what cannot be a constraint is refused by name."""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.engine import grammar_check
from mmserve.engine.detokenizer import IncrementalDetokenizer
from mmserve.engine.grammar import CACHED, MAX_BYTES, Grammars, Matcher, fill_masks
from mmserve.engine.masks import mask, spread, unpack
from mmserve.errors import RequestError
from mmserve.request import Constraint, FinishReason, SamplingParams, TextSegment
from mmserve.tokenizer import Tokenizer
from tests.engine.driver import Driver, words
from tests.engine.tiny import END, VOCAB, build_tiny, tiny_config, tiny_tokenizer
from tests.test_guarded import KINDS as TOKENIZERS

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", None]}, "maxItems": 3},
        "old": {"type": "boolean"},
    },
    "required": ["name", "tags", "old"],
    "additionalProperties": False,
}


def schema(value: Any, **options: Any) -> Constraint:
    return Constraint("schema", json.dumps(value), **options)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(Tokenizer(tiny_tokenizer(), ["<|im_end|>"]))


@pytest.fixture(scope="module")
def drivers() -> dict[bool, Driver]:
    """One that overlaps its steps, and one that does not."""
    made = {}
    for overlaps in (False, True):
        engine = build_tiny(tiny_config())
        engine.overlaps = overlaps
        made[overlaps] = Driver(engine)
    return made


def allowed(matcher: Matcher) -> set[int]:
    bits = torch.zeros(1, matcher.mask_words, dtype=torch.int32)
    fill_masks([matcher], bits.data_ptr(), 4 * matcher.mask_words)
    return set(unpack(bits, 32 * matcher.mask_words)[0].nonzero().flatten().tolist())


def walk(matcher: Matcher, text: str) -> None:
    for token in tiny_tokenizer().encode(text).ids:
        assert token in allowed(matcher), text
        assert matcher.accept(token) is None


# -- what an answer may be -------------------------------------------------------------------------


@st.composite
def schemas(draw: st.DrawFn, depth: int = 2) -> dict[str, Any]:
    """Small finite ones, so that even a greedy random model comes to an end."""
    kinds = ["string", "boolean", "null", "enum", "bounded"]
    kind = draw(st.sampled_from(kinds + (["object", "array", "any"] if depth else [])))
    if kind == "string":
        return {"type": "string", "maxLength": draw(st.integers(0, 5))}
    if kind == "enum":
        values: list[Any] = ["x", 'a"b', "é\n", 7, -1.5, None, True]
        return {"enum": draw(st.lists(st.sampled_from(values), min_size=1, max_size=3))}
    if kind == "bounded":
        low = draw(st.integers(-300, 300))
        return {"type": "integer", "minimum": low, "maximum": low + draw(st.integers(0, 99))}
    if kind == "array":
        low = draw(st.integers(0, 2))
        bounds = {"minItems": low, "maxItems": low + draw(st.integers(0, 2))}
        return {"type": "array", "items": draw(schemas(depth - 1)), **bounds}
    if kind == "any":
        return {"anyOf": draw(st.lists(schemas(depth - 1), min_size=1, max_size=3))}
    if kind == "object":
        names = draw(st.lists(st.sampled_from("pqr"), unique=True, max_size=3))
        needed = [name for name in names if draw(st.booleans())]
        properties = {name: draw(schemas(depth - 1)) for name in names}
        shape = {"properties": properties, "required": needed, "additionalProperties": False}
        return {"type": "object", **shape}
    return {"type": kind}


def fits(value: Any, wanted: dict[str, Any]) -> bool:
    """Whether a value is of one of the `schemas`."""
    if "enum" in wanted:
        return any(type(v) is type(value) and v == value for v in wanted["enum"])
    if "anyOf" in wanted:
        return any(fits(value, one) for one in wanted["anyOf"])
    match wanted["type"]:
        case "string":
            return isinstance(value, str) and len(value) <= wanted["maxLength"]
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            whole = isinstance(value, int) and not isinstance(value, bool)
            return whole and wanted["minimum"] <= value <= wanted["maximum"]
        case "array":
            size = isinstance(value, list) and wanted["minItems"] <= len(value)
            return (
                size
                and len(value) <= wanted["maxItems"]
                and all(fits(v, wanted["items"]) for v in value)
            )
        case _:
            known = isinstance(value, dict) and set(wanted["required"]) <= set(value)
            properties = wanted["properties"]
            return known and all(
                k in properties and fits(v, properties[k]) for k, v in value.items()
            )


SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.just(300),
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.9]),
    top_p=st.sampled_from([1.0, 0.9, 0.2]),
    top_k=st.sampled_from([0, 3]),
    min_p=st.sampled_from([0.0, 0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    frequency_penalty=st.sampled_from([0.0, 0.8]),
    logit_bias=st.sampled_from([{}, {END: 50.0}, {70: 100.0, 20: -100.0}]),
    seed=st.integers(0, 9),
    logprobs=st.sampled_from([None, 3]),
    ignore_eos=st.booleans(),
)


@given(st.lists(st.tuples(schemas(), SAMPLING), min_size=1, max_size=4), st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_answer_is_json_of_its_schema_in_any_company(
    drivers: dict[bool, Driver], wanted: list[tuple[dict[str, Any], SamplingParams]], overlaps: bool
) -> None:
    d = drivers[overlaps]
    free = d.submit((words(99, 20),), SamplingParams(max_tokens=20, temperature=0.0))
    requests = [
        d.submit((words(n, 9 + n),), replace(params, constraint=schema(one)))
        for n, (one, params) in enumerate(wanted)
    ]
    d.run()
    for (one, _), request in zip(wanted, requests, strict=True):
        assert d.last(request).finish_reason is FinishReason.STOP, d.last(request)
        assert fits(json.loads(d.text(request)), one), d.text(request)
        assert d.tokens(request)[-1] == END and END not in d.tokens(request)[:-1]
    assert len(d.tokens(free)) == 20 or d.tokens(free)[-1] == END
    d.assert_idle()


KINDS = {
    "regex": (Constraint("regex", r"[a-c]{2,4}-\d+!"), r"[a-c]{2,4}-\d+!"),
    "choice": (Constraint("choice", '["yes", "yes, but", "n\\"o\\n"]'), 'yes|yes, but|n"o\n'),
    "lark": (Constraint("grammar", 'start: "<" WORD ">"\nWORD: /[xy]{1,3}/'), "<[xy]{1,3}>"),
    "gbnf": (Constraint("grammar", 'root ::= "<" word ">"\nword ::= [xy] [0-9]?'), "<[xy][0-9]?>"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlaps", [False, True])
def test_other_kinds_are_kept_to_the_letter(
    drivers: dict[bool, Driver], kind: str, overlaps: bool
) -> None:
    constraint, pattern = KINDS[kind]
    d, texts = drivers[overlaps], set()
    for seed in range(6):
        params = SamplingParams(max_tokens=60, seed=seed, constraint=constraint)
        request = d.submit((words(seed, 12),), params)
        d.run()
        if d.last(request).finish_reason is FinishReason.STOP:
            assert re.fullmatch(pattern, d.text(request)), d.text(request)
            texts.add(d.text(request))
    assert len(texts) > 1


# -- alone, together, ahead ------------------------------------------------------------------------


def ask(d: Driver, n: int, **options: Any) -> str:
    constraint = schema(PERSON) if n % 3 else None
    params = SamplingParams(max_tokens=60, seed=n, constraint=constraint, **options)
    return d.submit((words(n, 10 + 7 * n),), params)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"repetition_penalty": 1.3}])
def test_answers_are_the_same_alone_together_and_launched_ahead(
    drivers: dict[bool, Driver], options: dict[str, Any]
) -> None:
    alone = []
    for n in range(7):
        request = ask(drivers[False], n, **options)
        drivers[False].run()
        alone.append(drivers[False].tokens(request))
    for d in drivers.values():
        requests = [ask(d, n, **options) for n in range(7)]
        d.run()
        assert [d.tokens(request) for request in requests] == alone
        d.assert_idle()
    assert all(json.loads(tiny_tokenizer().decode(t)) for n, t in enumerate(alone) if n % 3)


def test_a_constrained_row_is_chosen_only_after_its_last_token_landed_but_computed_before() -> None:
    """Its forward pass is launched ahead like any other; in steps it is as fast as a free one."""
    engine = build_tiny(tiny_config())
    engine.overlaps = True
    d = Driver(engine)
    seen: list[tuple[int, int]] = []
    begin, run = engine._sampler.begin, engine.runner.run

    def watched_begin(logits: Any, states: Any, previous: Any = None) -> Any:
        (state,) = states
        seen.append((min(state._token_ids), len(state._token_ids)))
        return begin(logits, states, previous)

    launches: list[bool] = []

    def watched_run(batch: Any, previous: Any = None) -> Any:
        launches.append(any(chunk.seq.num_pending for chunk in batch.chunks))
        return run(batch, previous)

    engine._sampler.begin = watched_begin  # type: ignore[method-assign]
    engine.runner.run = watched_run  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=30, seed=1, constraint=schema(PERSON))
    request = d.submit((words(1, 9),), params)
    d.run()
    count = len(d.tokens(request))
    assert launches[1:] == [True] * (len(launches) - 1) and len(launches) <= count + 1
    assert all(lowest >= 0 for lowest, _ in seen)
    assert [length for _, length in seen[:count]] == list(range(9, 9 + count))
    d.assert_idle()


@pytest.mark.parametrize("count", [5, 6, 7, 8, 22])
def test_the_next_turn_finds_what_it_would_have_found_without_overlap(count: int) -> None:
    def cached(overlaps: bool) -> int:
        engine = build_tiny(tiny_config())
        engine.overlaps = overlaps
        d = Driver(engine)
        constraint = Constraint("regex", f"a{{{count}}}")
        said = d.ask(words(1, 9), params=SamplingParams(max_tokens=40, constraint=constraint))
        assert len(said) == count + 1
        engine.scheduler.check_invariants()
        request = d.submit((words(1, 9), TextSegment(tuple(said)), words(2, 20)))
        d.run()
        usage = d.last(request).usage
        assert usage is not None
        return usage.cached_tokens

    assert cached(True) == cached(False)


def test_preempted_answers_go_on_in_their_grammar() -> None:
    engine = build_tiny(tiny_config(text_pages=12, max_num_batched_tokens=20))
    engine.overlaps = True
    d = Driver(engine)
    requests = [ask(d, n) for n in range(1, 9)]
    d.run()
    preemptions = next(iter(engine.metrics.num_preemptions.collect())).samples[0].value
    assert preemptions > 0
    for n, request in enumerate(requests, 1):
        if n % 3 and d.last(request).finish_reason is FinishReason.STOP:
            assert json.loads(d.text(request)).keys() == PERSON["properties"].keys()  # type: ignore[attr-defined]
    d.assert_idle()


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlaps", [False, True])
def test_abort_and_length_free_everything(drivers: dict[bool, Driver], overlaps: bool) -> None:
    d = drivers[overlaps]
    requests = [ask(d, 1), ask(d, 2)]
    while len(d.tokens(requests[0])) < 3:
        d.step()
    d.abort(requests[0])
    d.run()
    assert d.last(requests[0]).finish_reason is FinishReason.ABORT
    params = SamplingParams(max_tokens=4, constraint=schema(PERSON), seed=0)
    short = d.submit((words(3, 9),), params)
    d.run()
    assert d.last(short).finish_reason is FinishReason.LENGTH
    assert '{"name": "'.startswith(d.text(short))
    d.assert_idle()


class Stuck:
    """A matcher that fails at its third token, as one does that has become too complex."""

    def __init__(self, inner: Matcher) -> None:
        self.inner, self.mask_words, self._left = inner.inner, inner.mask_words, 2

    def accept(self, token_id: int) -> str | None:
        self._left -= 1
        return None if self._left >= 0 else "The answer got stuck in its grammar: too hard."


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_grammar_that_gets_stuck_ends_its_request_and_no_other(
    drivers: dict[bool, Driver], overlaps: bool
) -> None:
    d = drivers[overlaps]
    other = ask(d, 2)
    request = ask(d, 1)
    live = d.engine._live[request]
    assert live.matcher is not None
    live.matcher = live.sampling.matcher = Stuck(live.matcher)  # type: ignore[assignment]
    d.run()
    last = d.last(request)
    assert last.finish_reason is FinishReason.ERROR and last.error is not None
    assert "stuck in its grammar: too hard" in last.error
    assert d.last(other).finish_reason is FinishReason.STOP
    d.assert_idle()


def test_a_real_matcher_that_fails_offers_the_end_and_says_why(grammars: Grammars) -> None:
    matcher = grammars.matcher(schema(PERSON))
    reason = matcher.accept(70)
    assert reason is not None and reason.startswith("The answer got stuck in its grammar")
    assert allowed(matcher) == {END}
    assert matcher.accept(END) is not None
    assert grammars.matcher(schema(PERSON)).accept(VOCAB - 1) is not None


def test_log_probabilities_are_of_what_the_grammar_allows() -> None:
    d = Driver(build_tiny(tiny_config()))
    constraint = Constraint("regex", "[ab]c")
    params = SamplingParams(max_tokens=9, seed=1, logprobs=5, constraint=constraint)
    request = d.submit((words(1, 9),), params)
    d.run()
    first, second, end = [entry for e in d.events[request] for entry in e.logprobs]
    assert {text for _, text, _ in first.top} == {"a", "b"}
    logits = d.logits[request][0]
    ids = [token for token, _, _ in first.top]
    expected = logits[ids].float().log_softmax(-1).tolist()
    assert [value for _, _, value in first.top] == pytest.approx(expected, abs=1e-5)
    assert (second.text, second.logprob) == ("c", 0.0) and len(second.top) == 1
    assert end.token_id == END and end.logprob == 0.0


# -- masks -----------------------------------------------------------------------------------------


def test_masks_touch_their_own_rows_alone_and_never_allow_padding(grammars: Grammars) -> None:
    matcher = grammars.matcher(Constraint("regex", "[a-z]+"))
    logits = torch.randn(3, VOCAB)
    masked = mask(logits, [None, matcher, None])
    assert torch.equal(masked[[0, 2]], logits[[0, 2]])
    kept = masked[1].isfinite().nonzero().flatten().tolist()
    assert set(kept) == allowed(matcher) and len(kept) == 26
    assert torch.equal(masked[1][kept], logits[1][kept])
    assert mask(logits, [None] * 3) is logits
    assert torch.equal(mask(logits, [matcher] * 3)[2].isfinite(), masked[1].isfinite())


def test_bits_are_spread_alike_on_the_host_and_on_a_device() -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (3, 5), dtype=torch.int32)
    for width in (150, 160, 170):
        expected = torch.zeros(3, width, dtype=torch.bool)
        expected[:, :160] = spread(bits)[:, :width]
        assert torch.equal(unpack(bits, width), expected)
    assert spread(torch.tensor([[5, -(2**31)]], dtype=torch.int32)).nonzero()[:, 1].tolist() == [
        *(0, 2, 63)
    ]


def test_masks_filled_by_threads_are_the_same(grammars: Grammars) -> None:
    wanted = [grammars.matcher(Constraint("regex", f"[{c}-z]+")) for c in "abcdefgh"]
    logits = torch.zeros(8, VOCAB)
    together = mask(logits, wanted)
    for row, matcher in enumerate(wanted):
        assert torch.equal(together[row], mask(logits[:1], [matcher])[0])


@pytest.mark.parametrize("kind", TOKENIZERS, ids=lambda kind: str(kind.__name__))
def test_every_kind_of_vocabulary_says_what_its_grammar_allows(kind: Any) -> None:
    """Byte-level, Llama's and pieces alone: random walks through the masks, read as answers are."""
    tokenizer = Tokenizer(kind(), ["<|im_end|>", "</s>"])
    pattern = r"(answer: )?(the red fox|two dogs)( is| are)( in the picture\.){1,2}"
    grammars, said = Grammars(tokenizer), set()
    for seed in range(8):
        matcher = grammars.matcher(Constraint("regex", pattern))
        detokenizer, text, token = IncrementalDetokenizer(tokenizer), "", -1
        random = torch.Generator().manual_seed(seed)
        while token not in tokenizer.eos_token_ids:
            choices = sorted(allowed(matcher))
            token = choices[int(torch.randint(len(choices), (1,), generator=random))]
            assert matcher.accept(token) is None
            text += "" if token in tokenizer.eos_token_ids else detokenizer.push([token])
        text += detokenizer.flush()
        assert re.fullmatch(pattern, text), text
        said.add(text)
    assert len(said) > 1


# -- compiling -------------------------------------------------------------------------------------

BAD = [
    (schema({"type": "foo"}), "Invalid type: foo"),
    (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    (schema({"not": {}}), "not"),
    (schema({"type": "string", "format": "bogus"}), "bogus"),
    (schema({"minimum": 5, "maximum": 3, "type": "integer"}), "minimum (5) is greater"),
    (schema({"$ref": "http://elsewhere/schema"}), "elsewhere"),
    (schema({"$ref": "#/nowhere"}), "nowhere"),
    (schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
    (schema({"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}), "no answer fits"),
    (Constraint("regex", "("), "unclosed group"),
    (Constraint("regex", "a" * (MAX_BYTES + 1)), str(MAX_BYTES)),
    (Constraint("grammar", "start: undefined_rule"), "undefined_rule"),
    (Constraint("grammar", 'root ::= "a" other'), "other"),
    (Constraint("grammar", "start: start"), "no answer fits"),
    (Constraint("grammar", "(" * 5000 + "::="), "GBNF"),
]


@pytest.mark.parametrize(("constraint", "reason"), BAD, ids=[b[0].text[:40] for b in BAD])
def test_what_cannot_be_enforced_is_refused_with_its_field(
    grammars: Grammars, constraint: Constraint, reason: str
) -> None:
    with pytest.raises(RequestError) as refused:
        grammars.matcher(replace(constraint, param="text.format.schema"))
    assert refused.value.param == "text.format.schema" and refused.value.status == 400
    assert reason in refused.value.message and len(refused.value.message) < 400


def test_a_lenient_schema_leaves_out_what_cannot_be_enforced(grammars: Grammars) -> None:
    wanted = {"type": "array", "items": {"enum": [1]}, "uniqueItems": True}
    walk(grammars.matcher(schema(wanted, lenient=True)), "[1, 1]")


def test_json_is_written_on_one_line_as_python_writes_it(grammars: Grammars) -> None:
    value = {"name": "Zoë\n", "tags": ["a", None], "old": True}
    walk(grammars.matcher(schema(PERSON)), json.dumps(value, ensure_ascii=False))
    matcher = grammars.matcher(schema({"type": "object"}))
    walk(matcher, '{"any": {"depth": [1.5e3, []]}}')
    assert allowed(matcher) == {END}


def test_a_slow_grammar_is_given_up_and_the_next_one_compiles(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each compiles for minutes, in native code that nobody can interrupt."""
    for slow in (
        {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(40)]},
        {"type": "integer", "multipleOf": 99999989},
    ):
        with pytest.raises(RequestError, match=f"more than {grammar_check.MAX_SECONDS:g} s"):
            grammars.matcher(schema(slow, param="p"))
    walk(grammars.matcher(Constraint("regex", "after(wards)?")), "after")


def test_a_known_grammar_waits_for_nobody_who_compiles(grammars: Grammars) -> None:
    known = Constraint("regex", "known")
    grammars.matcher(known)
    entered, leave = threading.Event(), threading.Event()

    class Slow:
        def check(self, source: str) -> str:
            entered.set()
            leave.wait(60)
            return "never mind"

    held, grammars._checker = grammars._checker, Slow()  # type: ignore[assignment]
    thread = threading.Thread(
        target=lambda: pytest.raises(
            RequestError, grammars.matcher, Constraint("regex", "being compiled")
        )
    )
    thread.start()
    assert entered.wait(60)
    grammars.matcher(known)
    assert thread.is_alive()
    leave.set()
    thread.join()
    grammars._checker = held


def test_compiled_grammars_are_kept_and_the_least_recently_used_goes(grammars: Grammars) -> None:
    first = Constraint("regex", "first")
    grammars.matcher(first)
    for i in range(CACHED - 1):
        grammars.matcher(Constraint("regex", f"{i}"))
    grammars.matcher(replace(first, param="elsewhere"))
    grammars.matcher(Constraint("regex", "one more"))
    assert first in grammars._known and Constraint("regex", "0") not in grammars._known
    assert len(grammars._known) == CACHED


def test_the_process_ends_with_its_owner() -> None:
    grammars = Grammars(Tokenizer(tiny_tokenizer(), ["<|im_end|>"]))
    grammars.matcher(Constraint("regex", "a"))
    assert grammars._checker is not None
    process = grammars._checker._process
    assert process is not None and process.poll() is None
    del grammars
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.poll() is not None
