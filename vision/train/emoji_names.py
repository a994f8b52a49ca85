"""Which emoji there are, and what CLDR calls each in English and Chinese.

Owns the names as answers: lower case but for names of countries, flags as "flag of France". Reads
npm's unpacked packages; knows nothing of pictures.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FLAGS = ("country-flag", "subdivision-flag")


@dataclass(frozen=True)
class Emoji:
    code: str  # code points in hexadecimal, joined by hyphens, as vendors name their files
    name: str
    chinese: str
    kind: str  # "flag", "face", or CLDR's group in lower case


def emoji_list(npm: Path) -> list[Emoji]:
    """Every emoji without a skin tone that has a name of its own, in the vendors' order."""
    listed = json.loads((npm / "emoji-datasource-google" / "emoji.json").read_text("utf-8"))
    listed.sort(key=lambda entry: entry["sort_order"])
    english, chinese = short_names(npm, "en"), short_names(npm, "zh")
    found: dict[str, Emoji] = {}
    for entry in listed:
        code = entry["unified"].lower()
        character = "".join(chr(int(c, 16)) for c in code.split("-"))
        bare = character.replace("\ufe0f", "")
        names = [english.get(bare), chinese.get(bare)]
        if entry["category"] == "Component" or None in names:
            continue
        name, translated = flag_names(entry["subcategory"], *map(str, names))
        kind = kind_of(entry["category"], entry["subcategory"])
        found.setdefault(name, Emoji(code, name, translated, kind))
    return list(found.values())


def short_names(npm: Path, language: str) -> dict[str, str]:
    """CLDR's short name of each character, without the mark that asks for colour."""
    found: dict[str, str] = {}
    for package, folder, root in (
        ("cldr-annotations-full", "annotations", "annotations"),
        ("cldr-annotations-derived-full", "annotationsDerived", "annotationsDerived"),
    ):
        path = npm / package / folder / language / "annotations.json"
        entries: dict[str, Any] = json.loads(path.read_text("utf-8"))[root]["annotations"]
        for character, entry in entries.items():
            if "tts" in entry:
                found[character.replace("\ufe0f", "")] = entry["tts"][0]
    return found


def flag_names(subcategory: str, english: str, chinese: str) -> tuple[str, str]:
    if subcategory not in FLAGS:
        return english.lower().replace("\u2019", "'"), chinese
    country, land = english.removeprefix("flag: "), chinese.split(":")[-1].strip()
    return f"flag of {country}", land + ("国旗" if subcategory == "country-flag" else "旗帜")


def kind_of(category: str, subcategory: str) -> str:
    if subcategory in FLAGS:
        return "flag"
    return "face" if subcategory.startswith("face") else category.lower()
