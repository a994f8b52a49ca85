"""Triton's interpreter, several times as quick.

Before every call of one kernel function by another it looks through the whole language for what is
to be replaced by its own, although the launch has replaced it already.
"""

from __future__ import annotations

from typing import Any

import torch


def quicken() -> None:
    """Where kernels are interpreted, and the interpreter is one that we know; else nothing."""
    if torch.cuda.is_available():
        return
    import triton.language as tl
    from triton.runtime import interpreter

    known: Any = interpreter
    whole = getattr(known, "_patch_lang", None)
    scope = getattr(known, "_LangPatchScope", None)
    if whole is None or scope is None or getattr(whole, "quick", False):
        return

    def patch(fn: Any) -> Any:
        languages = [v for v in fn.__globals__.values() if v is tl or v is tl.core]
        if any(tl.core.is_builtin(language.load) for language in languages):
            return whole(fn)
        return scope()

    patch.quick = True  # type: ignore[attr-defined]
    known._patch_lang = patch


quicken()
