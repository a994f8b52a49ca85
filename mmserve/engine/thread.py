"""The thread that steps an engine, and replaces one that fails.

Owns the thread, the commands that it obeys between two steps, and how far it has come. Knows
nothing of event loops or readers: it tells a `Listener`, on its own thread.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

from mmserve.engine.engine import Engine, Event
from mmserve.engine.figures import describe
from mmserve.engine.recovery import BrokenEngineError, EngineLostError, Recovery
from mmserve.faults import Faults

log = logging.getLogger(__name__)

Command = Callable[[Engine], None]


class Listener(Protocol):
    """Is told on the engine's thread."""

    def began(self, engine: Engine) -> None:
        """An engine is there and takes requests; what an earlier one had has ended."""

    def happened(self, events: list[Event]) -> None: ...

    def broke(self) -> None:
        """The engine takes nothing more; another is being made."""

    def lost(self, error: Exception) -> None:
        """No engine will come any more; the first of all may have failed to."""


class Pulse(NamedTuple):
    """How often the thread has come round, how often something came of it, and whether there is
    anything to do."""

    turns: int
    moves: int
    busy: bool


class EngineThread:
    """From `start` to `stop`."""

    _listener: Listener

    def __init__(self, build: Callable[[], Engine], faults: Faults) -> None:
        self._build, self._faults = build, faults
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._recovery = Recovery(faults)
        self._engine: Engine | None = None
        self._turns = self._moves = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, listener: Listener) -> None:
        self._listener = listener
        self._thread.start()

    def send(self, command: Command) -> None:
        """To be obeyed between two steps; one that raises is the engine's fault."""
        self._commands.put(command)

    def stop(self) -> None:
        """Stop behind all that was sent. Waits for it."""
        self.abandon()
        self._thread.join()

    def abandon(self) -> None:
        """As `stop`, but nobody waits for it; it may stand still for ever."""
        self._commands.put(None)

    def restart(self, why: str) -> None:
        """Replace the engine, as after a fault."""

        def fail(engine: Engine) -> None:
            raise BrokenEngineError(f"{why}: {describe(engine.scheduler)}")

        self.send(fail)

    def pulse(self) -> Pulse:
        """Any thread may ask."""
        engine = self._engine
        # What waits for files does not for ever.
        return Pulse(self._turns, self._moves, engine is not None and engine.scheduler.has_work)

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            engine = self._build()
        except Exception as error:
            return self._listener.lost(error)
        while True:
            self._engine = engine
            self._listener.began(engine)
            try:
                self._step_until_stopped(engine)
                return engine.close()
            except EngineLostError as error:
                return self._give_up(engine, error)
            except Exception as error:
                self._engine = None
                self._listener.broke()
                try:
                    engine = self._recovery.anew(engine, error)
                except EngineLostError as lost:
                    return self._give_up(engine, lost)

    def _give_up(self, engine: Engine, error: EngineLostError) -> None:
        log.critical("the engine cannot go on", exc_info=error)
        self._listener.lost(error)
        try:
            engine.close()
        except Exception:
            log.exception("what the engine held is not kept")

    def _step_until_stopped(self, engine: Engine) -> None:
        while self._take_commands(engine):
            self._turns += 1
            launched = engine.num_launched
            try:
                events = engine.step()
            except Exception as error:
                self._recovery.after_step(engine, error)
                continue
            if events:
                self._listener.happened(events)
            if events or engine.num_launched > launched:
                self._moves += 1
            if any(event.token_ids for _, event in events):
                self._recovery.succeeded()
        self._listener.happened(engine.step())

    def _take_commands(self, engine: Engine) -> bool:
        """Obey what has been sent; wait if there is nothing else to do. False: stop."""
        block = not engine.has_work
        while True:
            try:
                command = self._commands.get(block)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._faults.at("engine.command")
            command(engine)
            block = False
