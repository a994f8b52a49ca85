"""What is measured: one row a skill, with the figure it must not fall below and the one to reach.

Owns floors (of the first weights that shipped, measured when they were trained, on similar tasks)
and aims. Measures nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

LARGE = 672  # pixels: three times what is drawn, which is seen in crops where there are any


@dataclass(frozen=True)
class Row:
    """`detail`: of every image; `longer`: pixels of their longer side, where they are not as drawn.
    `floor` and `aim` in percent, where there is one."""

    skill: str
    floor: float | None = None
    aim: float | None = None
    detail: str = "auto"
    longer: int | None = None

    @property
    def name(self) -> str:
        if self.longer:
            return f"{self.skill}, {self.longer} pixels"
        return self.skill if self.detail == "auto" else f"{self.skill}, {self.detail} detail"


ROWS = (
    Row("easy_vqa", 99.9, 99.8),
    Row("easy_vqa", detail="low"),
    Row("colour", 89.8, 99),
    Row("colour", detail="low"),
    Row("shape", 98.2, 99),
    Row("count", 100, 99),
    Row("count", longer=LARGE),
    Row("count_mixed", 71.4, 97),
    Row("exists", 92.9),
    Row("position", 25.9, 95),
    Row("relation", 66.7, 95),
    Row("size", 37.5, 95),
    Row("background", 30.4, 95),
    Row("caption", 6.0, 90),
    Row("texture", 100),
    Row("word", 90.7, 97),
    Row("word", longer=LARGE),
    Row("number", 97.3, 99),
    Row("word_pair", 30.0, 90),
    Row("code", 83.3, 95),
    Row("chinese", None, 85),
    Row("digit"),
    Row("emoji", 28.4, 65),
    Row("emoji", longer=LARGE),
    Row("emoji_chinese"),
    Row("emoji_at"),
    Row("flag", 47.8, 80),
    Row("bar_chart", None, 95),
    Row("clock"),
    Row("grid"),
    Row("table"),
    Row("screen"),
    Row("small_text"),
    Row("small_emoji"),
    Row("two_images", 80.0, 95),
    Row("three_images", 66.0, 95),
    Row("by_order", None, 95),
    Row("by_turn", 98.3, 95),
    Row("changed", None, 95),
    Row("unknown"),
    Row("absent"),
)
