"""A training's log as a picture.

Owns what is drawn of it. Knows nothing of how the numbers came to be.
"""

from __future__ import annotations

import json
from pathlib import Path

from mmserve.whole_file import replacing

SHOWN = {"loss": "loss of answers", "right": "answers' tokens right", "kl": "divergence on text"}


def draw_curves(log: Path, out: Path) -> None:
    """Writes a PNG. Raises OSError, and ImportError without matplotlib."""
    from matplotlib.figure import Figure

    lines = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    figure = Figure(figsize=(12, 3.5), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(1, len(SHOWN)), SHOWN.items(), strict=True):
        axes.plot([line["seconds"] / 60 for line in lines], [line[name] for line in lines])
        axes.set_title(title)
        axes.set_xlabel("minutes")
        axes.grid(alpha=0.3)
    with replacing(out) as part:
        figure.savefig(part, format="png", dpi=110)
