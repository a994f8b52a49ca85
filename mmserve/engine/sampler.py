"""Logits to tokens: penalties, filters, random choice and log-probabilities.

Owns the rules and their order. Knows nothing of pools, the model or text. For each row:

1. what the answer's grammar does not allow is out (`masks`);
2. repetition penalty over prompt and output (positive logits divided, negative multiplied);
3. frequency penalty times the count in the output, presence penalty if there is any;
4. logit bias;
5. temperature, then top-k, top-p of what top-k left, min-p;
6. one draw by inverting the cumulative distribution.

The log-probabilities reported are the model's own among what the grammar allows: of the logits
after the first of these steps.

Choosing and reading are two calls, `begin` and `Drawn.land`, so that the next step can be launched
with tokens that only the device has seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mmserve.engine.grammar import Matcher
from mmserve.engine.masks import mask
from mmserve.engine.transfer import download, resolve_pending, send, upload
from mmserve.kernels.chain import has_kernels
from mmserve.request import SamplingParams

if TYPE_CHECKING:
    from mmserve.engine.choice import Choice

# Below it, logits divided by the temperature overflow float32; the best token has all the mass.
GREEDY_TEMPERATURE = 1e-5

# Sorting a whole vocabulary costs more than a small model's step; nearly always the filters
# cut within the first few hundred tokens.
CANDIDATES = 512


class SampledToken(NamedTuple):
    token_id: int
    logprob: float | None = None  # natural log; None when not asked for
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


class SamplingState:
    """What one sequence brings to the sampler, kept from step to step.

    `token_ids` is the sequence's own growing list, prompt first, in which a pending token stands as
    -(row + 1); it is read, never changed. The counts behind the penalties follow it by the tokens
    that were added since the last step, and do not follow it when it loses some (`forget`).
    """

    def __init__(
        self,
        params: SamplingParams,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        matcher: Matcher | None = None,
    ) -> None:
        """`matcher`: what a constrained answer may go on with; it has seen all tokens so far
        whenever the next is chosen."""
        self.params = params
        self.matcher = matcher
        self._token_ids = token_ids
        self._num_prompt_tokens = num_prompt_tokens
        self._num_counted = 0
        self._seen: Tensor | None = None  # [V] bool: in prompt or output
        self._counts: Tensor | None = None  # [V] float32: times in the output
        self._generator: torch.Generator | None = None  # on the CPU, so that devices agree
        if params.seed is not None:
            self._generator = torch.Generator().manual_seed(params.seed)
        self._numbers: list[Tensor] = []  # drawn for places that are not reached yet

    def forget(self, count: int) -> None:
        """So many tokens, all of them counted, are gone from `token_ids`; they stay counted, and
        whatever is not counted yet is output."""
        self._num_counted -= count
        self._num_prompt_tokens = 0

    @property
    def greedy(self) -> bool:
        return self.params.temperature < GREEDY_TEMPERATURE

    @property
    def penalised(self) -> bool:
        p = self.params
        return p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0

    @property
    def plain(self) -> bool:
        """The best logit is the answer and nothing else is asked."""
        p = self.params
        asked = self.penalised or p.logit_bias or p.logprobs is not None or self.matcher
        return self.greedy and not asked

    def uniform(self, common: torch.Generator | None, ahead: int = 0) -> Tensor:
        """[1] float64 in [0, 1): the number of the token `ahead` of the next, which is always the
        same one where there is a seed; else one of the `common` generator's."""
        if self._generator is None:
            return _uniform(common)
        while len(self._numbers) <= ahead:
            self._numbers.append(_uniform(self._generator))
        return self._numbers[ahead]

    def spend(self, count: int) -> None:
        """So many more tokens are chosen for good."""
        del self._numbers[:count]

    def behind(self, path: tuple[int, ...], matcher: Matcher | None) -> SamplingState:
        """What it would be if the tokens of `path` came next; `matcher` has seen them."""
        return _Behind(self, path, matcher)

    def counts(
        self, vocab_size: int, device: torch.device, previous: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(seen [V] bool, output counts [V] float32) on `device`, up to date.

        `previous`: the last step's tokens, for what is pending.
        """
        if self._seen is None or self._counts is None:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._counts = torch.zeros(vocab_size, device=device)
        uncounted = list(self._token_ids[self._num_counted :])
        border = max(self._num_prompt_tokens - self._num_counted, 0)
        # A prompt may hold tokens that no answer can: placeholders of images.
        prompt = [token for token in uncounted[:border] if token < vocab_size]
        new = upload(prompt + uncounted[border:], torch.long, device)
        new = resolve_pending(new, previous)
        output = new[len(prompt) :]
        self._seen.index_fill_(0, new, True)
        self._counts.index_add_(0, output, torch.ones_like(output, dtype=torch.float32))
        self._num_counted = len(self._token_ids)
        return self._seen, self._counts


class _Behind(SamplingState):
    """The state of a token that is only guessed to come; of use for one step."""

    def __init__(
        self, known: SamplingState, path: tuple[int, ...], matcher: Matcher | None
    ) -> None:
        self.params, self.matcher = known.params, matcher
        self._known, self._path = known, path

    def uniform(self, common: torch.Generator | None, ahead: int = 0) -> Tensor:
        return self._known.uniform(common, ahead + len(self._path))

    def counts(
        self, vocab_size: int, device: torch.device, previous: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        seen, counts = self._known.counts(vocab_size, device, previous)
        new = upload(self._path, torch.long, device)
        more = counts.index_add(0, new, torch.ones_like(new, dtype=counts.dtype))
        return seen.index_fill(0, new, True), more


def _uniform(generator: torch.Generator | None) -> Tensor:
    return torch.rand(1, generator=generator, dtype=torch.float64)


class Drawn:
    """One step's tokens, chosen on the device and on their way to the host.

    `tokens` [B] int64, on the logits' device: what the next step needs of them.
    """

    def __init__(self, tokens: Tensor, logprobs: _Logprobs | None = None) -> None:
        self.tokens = tokens
        self._logprobs = logprobs
        held = (tokens,) if logprobs is None else (tokens, *logprobs.tensors)
        self._host = [download(tensor) for tensor in held]
        self._copied: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(tokens.device))

    @classmethod
    def nothing(cls, device: torch.device) -> Drawn:
        """Of a step without a token; landing still waits for the step's end."""
        return cls(torch.empty(0, dtype=torch.long, device=device))

    def land(self) -> list[SampledToken]:
        """Wait for the step and its copies: the only place where the host does."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens, *rest = (tensor.tolist() for tensor in self._host)
        result = [SampledToken(token) for token in tokens]
        if self._logprobs is not None:
            chosen, values, ids = rest
            for r, (row, wanted) in enumerate(self._logprobs.wanted.items()):
                pairs = zip(ids[r][:wanted], values[r][:wanted], strict=True)
                top = tuple(pair for pair in pairs if pair[1] > -math.inf)
                result[row] = SampledToken(tokens[row], chosen[r], top)
        return result


class _Logprobs(NamedTuple):
    """`wanted`: how many best tokens, by row of the batch, R rows in all. `tensors`: the chosen
    token's log-probability [R], and those [R, n] and the ids [R, n] of the n best."""

    wanted: dict[int, int]
    tensors: tuple[Tensor, Tensor, Tensor]


class Sampler:
    """Chooses one token per row. A row's token does not depend on the other rows."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        """`generator` (CPU) serves the rows without a seed; default: a randomly seeded one."""
        self._generator = generator
        if generator is None:
            self._generator = torch.Generator()
            self._generator.seed()
        self._choice: Choice | None = None  # the GPU's kernels

    def sample(self, logits: Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
        """One token for each row, here and now. Arguments as for `begin`."""
        drawn = self.begin(logits, states)
        for state in states:
            state.spend(1)
        return drawn.land()

    def begin(
        self,
        logits: Tensor,
        states: Sequence[SamplingState],
        previous: Tensor | None = None,
    ) -> Drawn:
        """Choose one token for each row, without waiting for the device where that can be. What is
        then chosen for good is for the caller to say (`SamplingState.spend`).

        logits: [B, V] floats, any device, left as they are. states: one per row. previous: the
        tokens of the step before, if it has not landed.
        """
        assert logits.ndim == 2 and len(logits) == len(states), "one state per row of logits"
        choice = self._kernels(logits)
        if all(state.plain for state in states):
            return Drawn(choice.best(logits) if choice else logits.argmax(-1))
        logits = mask(logits.float(), [state.matcher for state in states])
        adjusted = self._adjust(logits, states, previous)
        rows = [i for i, state in enumerate(states) if not state.greedy]
        if choice:
            tokens = self._draw_all(choice, adjusted, states) if rows else choice.best(adjusted)
        else:
            tokens = adjusted.argmax(-1)
            if rows:
                index = upload(rows, torch.long, logits.device)
                drawn = self._draw(adjusted[index], [states[i] for i in rows])
                tokens.index_copy_(0, index, drawn)
        return Drawn(tokens, _logprobs(logits, states, tokens))

    def _kernels(self, logits: Tensor) -> Choice | None:
        """The GPU's kernels, imported where there is a GPU; None where they do not serve."""
        if not has_kernels(logits.device):
            return None
        from mmserve.engine import choice

        if not choice.fits(logits.shape[1]):
            return None
        self._choice = self._choice or choice.Choice()
        return self._choice

    def _draw_all(self, choice: Choice, logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
        """The same numbers are drawn for the same rows as by `_draw`. [B, V] -> [B] int64."""
        uniform = [0.0 if state.greedy else float(self._uniform(state)) for state in states]
        return choice.draw(logits, [state.params for state in states], uniform)

    def _adjust(
        self, logits: Tensor, states: Sequence[SamplingState], previous: Tensor | None = None
    ) -> Tensor:
        """Logits with penalties and bias; the same tensor when no row has any."""
        rows = [i for i, s in enumerate(states) if s.penalised or s.params.logit_bias]
        if not rows:
            return logits
        adjusted = logits.clone()
        for i in rows:
            row, state = adjusted[i], states[i]
            if state.penalised:
                row.copy_(_penalise(row, state, previous))
            if bias := state.params.logit_bias:
                ids = upload(list(bias), torch.long, row.device)
                row.index_add_(0, ids, upload(list(bias.values()), row.dtype, row.device))
        return adjusted

    def _draw(self, logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
        """A random token for each row. logits: [R, V] -> [R] int64."""
        params = [state.params for state in states]
        scaled = logits / _column([p.temperature for p in params], logits)
        lowest = filter_threshold(scaled, params)
        scaled = scaled.masked_fill(scaled < lowest, -math.inf)
        # In float64 a sum over a vocabulary keeps every token's share.
        mass = scaled.softmax(-1).cumsum(-1, dtype=torch.float64)  # [R, V]
        total = mass[:, -1:]
        uniform = torch.cat([self._uniform(state) for state in states])
        at = total * send(uniform, mass.device).unsqueeze(-1)
        # A product rounded up to the total would point behind the last token.
        at = torch.minimum(at, torch.nextafter(total, torch.zeros_like(total)))
        # `right` steps over tokens without mass; the clamp is for logits that are NaN.
        chosen = torch.searchsorted(mass, at, right=True).squeeze(-1)
        return chosen.clamp_(max=logits.shape[1] - 1)

    def _uniform(self, state: SamplingState) -> Tensor:
        """[1]: a number of the row's own generator, or of the common one."""
        return state.uniform(self._generator)


def _logprobs(logits: Tensor, states: Sequence[SamplingState], tokens: Tensor) -> _Logprobs | None:
    """What the rows that ask for log-probabilities get; None when none does."""
    wanted = {i: n for i, s in enumerate(states) if (n := s.params.logprobs) is not None}
    if not wanted:
        return None
    rows = upload(list(wanted), torch.long, logits.device)
    logprobs = logits[rows].log_softmax(-1)  # [R, V]
    chosen = logprobs.gather(1, tokens[rows].unsqueeze(-1)).squeeze(-1)
    best = logprobs.topk(min(max(wanted.values()), logits.shape[1]))
    return _Logprobs(wanted, (chosen, best.values, best.indices))


def filter_threshold(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The lowest logit that top-k, top-p and min-p leave in each row.

    scaled: [R, V] float32, after temperature; -> [R, 1], -inf where nothing is cut. Tokens equal
    to the threshold stay, so ties do not depend on the order of a sort.
    """
    vocab_size = scaled.shape[1]
    lowest = scaled.new_full((len(params), 1), -math.inf)
    ranked = [i for i, p in enumerate(params) if 0 < p.top_k < vocab_size or p.top_p < 1]
    if ranked:
        chosen = [params[i] for i in ranked]
        index = upload(ranked, torch.long, scaled.device)
        lowest.index_copy_(0, index, _ranked_threshold(scaled[index], chosen, CANDIDATES))
    if any(p.min_p > 0 for p in params):
        floor = _column([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params], scaled)
        exact = scaled.amax(-1, keepdim=True).double() + floor
        near = exact.float()  # or the next one above, where this is below
        lowest = lowest.maximum(torch.where(near < exact, near.nextafter(near + math.inf), near))
    return lowest


def _ranked_threshold(scaled: Tensor, params: Sequence[SamplingParams], width: int) -> Tensor:
    """The threshold of top-k, then top-p, from each row's `width` best tokens. -> [R, 1]

    Rows that these do not settle are done again with the whole vocabulary, each for itself, so
    that no row's result depends on its neighbours.
    """
    vocab_size = scaled.shape[1]
    width = min(width, vocab_size)
    best = scaled.topk(width).values  # [R, width], descending
    limits = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    k = upload(limits, torch.long, scaled.device).unsqueeze(-1)  # [R, 1]
    rank = torch.arange(width, device=scaled.device)
    # Below the best: a sum of huge logits would be rounded to whole numbers.
    kept, rest = (best - best[:, :1]).masked_fill(rank >= k, -math.inf), scaled - best[:, :1]
    whole = torch.where(k < vocab_size, kept.logsumexp(-1, True), rest.logsumexp(-1, True))
    mass = (kept - whole).exp().cumsum(-1)  # [R, width]
    # The token that reaches top_p is the last to stay; top_p 1 is never cut for rounding.
    top_p = _column([p.top_p if p.top_p < 1 else math.inf for p in params], scaled)
    count = torch.minimum((mass < top_p).sum(-1, keepdim=True) + 1, k)
    lowest = best.gather(1, count.clamp(max=width) - 1)
    if max(limits) <= width:
        return lowest
    settled = (count <= width) & ((k <= width) | (k == vocab_size))
    # The one question that waits for the device; a small top_k spares it.
    open_rows = (~settled).squeeze(-1).nonzero().flatten().tolist()
    if open_rows:
        again = [params[i] for i in open_rows]
        lowest[open_rows] = _ranked_threshold(scaled[open_rows], again, vocab_size)
    return lowest


def _penalise(row: Tensor, state: SamplingState, previous: Tensor | None) -> Tensor:
    """A row of logits [V] after repetition, frequency and presence penalties."""
    p = state.params
    seen, counts = state.counts(len(row), row.device, previous)
    if p.repetition_penalty != 1:
        weaker = torch.where(row > 0, row / p.repetition_penalty, row * p.repetition_penalty)
        row = torch.where(seen, weaker, row)
    return row - p.frequency_penalty * counts - p.presence_penalty * (counts > 0)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """Per-row numbers as [R, 1], of the dtype and device of `like`."""
    return upload(values, like.dtype, like.device).unsqueeze(-1)
