"""One stored response: what it answered, its lineage, and what a next turn goes on from.

Owns `Turn`. Knows nothing of where turns are kept or of how they are delivered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mmserve.prompt import TextPart
from mmserve.server.history import Entry, History, Item
from mmserve.server.job import Job
from mmserve.server.transcript import Transcript, function_call_json
from mmserve.session import SessionState


@dataclass(eq=False)
class Turn:
    """One response with what it answered.

    `durable` where it and all before it may be written to the disk. `continued`: another turn of
    this process goes on from it. `foreign`: read from the database that other servers share.
    `base`: what is held of a conversation whose older turns were cut off; `session`: what the
    prompt was made by; `kept`: what is held after this turn, where it was cut at its end.
    """

    id: str
    owner: str
    items: tuple[Item, ...]
    parent: Turn | None = None
    base: History = History()
    session: SessionState = SessionState()
    kept: History | None = None
    continued: bool = False
    prefill: bool = False
    durable: bool = True
    removed: bool = False
    foreign: bool = False
    root: str | None = None  # of a conversation whose older turns were cut off: its name
    expires_at: float = 0.0
    job: Job | None = None  # until its log is evicted
    outputs: tuple[Item, ...] = ()
    spoken: tuple[Item, ...] = ()  # the outputs as a history shows them: one item, its exact tokens
    response: dict[str, Any] | None = None  # once ended and kept

    def current(self) -> dict[str, Any]:
        """The Response object as it stands."""
        if self.response is not None:
            return self.response
        assert self.job is not None
        response = self.job.transcript.response()
        if response["status"] != "in_progress":  # not kept yet, and so not to be told
            unknown = dict.fromkeys(("completed_at", "error", "incomplete_details"))
            response |= {**unknown, "status": "in_progress", "usage": None, "timings": None}
        return response

    @property
    def active(self) -> bool:
        return self.response is None

    def change(self, how: Callable[[SessionState], SessionState]) -> None:
        """What turns that continue this one from now on go by."""
        self.session = how(self.session)
        if self.kept is not None:
            self.kept = replace(self.kept, state=how(self.kept.state))

    @property
    def conversation(self) -> str:
        """A name for all turns that go back to one, however often it was cut in this process."""
        turn = self
        while turn.parent is not None:
            turn = turn.parent
        return turn.root or turn.id

    def finish(self) -> None:
        """Take over what the job made."""
        assert self.job is not None
        transcript = self.job.transcript
        if not self.prefill and transcript.status != "failed":
            self.outputs = _outputs(transcript)
            tokens = transcript.answer.spliceable_tokens()
            self.spoken = self.outputs
            if tokens is not None and self.outputs:
                self.spoken = (replace(self.outputs[0], token_ids=tokens, call=None),)
                if len(self.outputs) == 1 and self.outputs[0].call is None:
                    self.outputs = self.spoken

    def history(self) -> History:
        """What a turn that continues this one is laid on."""
        if self.kept is not None:
            return self.kept
        chain: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            chain.append(turn)
            turn = turn.parent
        entries = list(chain[-1].base.entries)
        for turn in reversed(chain):
            entries += [Entry(item) for item in turn.items]
            if turn.spoken:
                entries += [Entry(item) for item in turn.spoken]
            elif turn.prefill and entries:
                entries[-1] = Entry(entries[-1].item, open=True)
        return replace(chain[-1].base, entries=tuple(entries), state=self.session)


def _outputs(transcript: Transcript) -> tuple[Item, ...]:
    """What was said, if anything, and each call."""
    answer, format = transcript.answer, transcript.calling.format
    said = Item(transcript.message_id, "assistant", (TextPart(answer.text),))
    items = [said] if answer.text or not answer.calls else []
    for id, call in zip(transcript.call_ids, answer.calls, strict=True):
        assert format is not None
        text = TextPart(format.call(call.name, call.arguments))
        items.append(Item(id, "assistant", (text,), call=function_call_json(call)))
    items[0] = replace(items[0], tokens=len(answer.token_ids))  # of all of them together
    return tuple(items)
