"""Sessions as the API writes them: the field `session_policy`, and `session` of a Response.

Owns both JSON forms. Knows nothing of how a conversation is cut.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from mmserve.errors import RequestError
from mmserve.server.engine_face import ModelInfo
from mmserve.server.errors import UnsupportedParameterError
from mmserve.server.fields import Fields
from mmserve.server.history import History
from mmserve.server.window import MIN_WINDOW, largest_window
from mmserve.session import SINKS, SessionPolicy, SessionState

FIELD = "session_policy"
NAMES = ("window", "sinks", "images", "summary")
MAX_IMAGES = 2**20
MARKED = "Text that was computed while it saw an image marked as forgotten is used as it is."
BLENDED = "Images are not computed wholly in their context (--vision-mode blend)."


@dataclass(frozen=True)
class PolicyChange:
    """What a request says of the policy; `inherited` where it says nothing."""

    policy: SessionPolicy | None = None
    inherited: bool = False

    def apply(self, state: SessionState) -> SessionState:
        return state if self.inherited else replace(state, policy=self.policy)


INHERITED = PolicyChange(inherited=True)


def _images(fields: Fields) -> int | Literal["all", "pinned"]:
    value, param = fields.get("images"), fields.param("images")
    if value is None or value == "all":
        return "all"
    if value == "pinned":
        return "pinned"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        count = fields.integer("images", 0, MAX_IMAGES)
        assert count is not None
        return count
    raise RequestError(f"'{param}' must be 'all', 'pinned' or a number.", param=param)


def _window(fields: Fields, max_model_len: int) -> int | None:
    limit, param = largest_window(max_model_len), fields.param("window")
    window = fields.integer("window", 0, 2**31 - 1)
    if window is not None and not MIN_WINDOW <= window <= limit:
        raise RequestError(
            f"'{param}' must be from {MIN_WINDOW} to {limit} text tokens: the model's context has "
            f"{max_model_len}, and images and answers take the rest.",
            param=param,
        )
    return window


def parse_policy(fields: Fields, info: ModelInfo) -> PolicyChange:
    """`session_policy`: absent, it is inherited; null turns it off. Raises `RequestError`s."""
    if FIELD not in fields.values:
        return INHERITED
    if fields.values[FIELD] is None:
        return PolicyChange()
    policy = fields.object(FIELD)
    for name in policy.values:
        if name not in NAMES:
            raise UnsupportedParameterError(
                f"'{policy.param(name[:64])}' is unknown; a policy has {', '.join(NAMES)}.",
                param=policy.param(name[:64]),
            )
    window = _window(policy, info.max_model_len)
    most = (window or largest_window(info.max_model_len)) // 4  # half is for the newest text
    sinks = policy.integer("sinks", 0, most)
    if sinks is None:
        sinks = min(SINKS, most)
    return PolicyChange(SessionPolicy(window, sinks, _images(policy), policy.flag("summary")))


def session_json(history: History, info: ModelInfo) -> dict[str, Any] | None:
    """What a Response says of the conversation that it was made from; None: nothing special."""
    state = history.state
    if state == SessionState(num_images=state.num_images):
        return None
    shown = {image.digest for entry in history.entries for image in entry.item.images}
    marked = any(state.forgotten.get(digest) == "mark" for digest in shown)
    why = MARKED if marked else BLENDED if info.vision_mode == "blend" else None
    return {
        "policy": None if state.policy is None else state.policy.to_json(),
        "dropped_items": state.dropped,
        "dropped_tokens": state.dropped_tokens,
        "dropped_images": state.dropped_images,
        "kept_images": len(history.shown),
        "summary": state.summary,
        "summary_missing": state.missing,
        "approximate": why is not None,
        "why": why,
    }
