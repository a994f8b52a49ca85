"""A process in which a grammar is compiled for the first time.

A schema of a few hundred bytes can keep the compiler busy for minutes, or ask for gigabytes, and
native code cannot be interrupted. So it is tried where it can be killed. Owns that process, from
both sides.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import subprocess
import sys
from typing import Any

MAX_SECONDS = 2.0  # of processor time for one grammar
MAX_MEMORY = 4 * 2**30  # bytes of address space


class Checker:
    """Asks one grammar after the other; a dead process is replaced at the next question."""

    def __init__(self, vocabulary: str) -> None:
        """`vocabulary`: a `grammar.Vocabulary` as JSON."""
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[str] | None = None

    def check(self, source: str) -> str:
        """Why a grammar cannot be compiled; empty where it can."""
        if self._process is None:
            self._process = self._start()
        try:
            return self._ask(self._process, source)
        except (BrokenPipeError, json.JSONDecodeError):
            code = self._process.wait()
            self.close()
            if code == -signal.SIGPROF:
                return f"it takes more than {MAX_SECONDS:g} s to compile"
            return "it takes too much memory to compile"

    def close(self) -> None:
        """End the process; harmless when there is none."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with process:
                pass

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        self._ask(process, json.loads(self._vocabulary))
        return process

    @staticmethod
    def _ask(process: subprocess.Popen[str], question: Any) -> str:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        return str(json.loads(process.stdout.readline()))


def main() -> None:
    """First the vocabulary, then grammars, a JSON line each; answers a JSON line each."""
    from mmserve.engine.grammar import Vocabulary, compile_grammar

    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    tokenizer = Vocabulary(*json.loads(sys.stdin.readline())).load()
    print(json.dumps(""), flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)  # its default action ends the process
        grammar = compile_grammar(tokenizer, json.loads(line))
        error = grammar.get_error()
        if not error:
            grammar.compute_bitmask()
            error = "no answer fits it" if grammar.is_error() else ""
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    main()
