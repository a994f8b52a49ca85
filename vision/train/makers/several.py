"""Questions on two and three images: which of them, all together, what changed, and one of many.

Owns how images are compared and referred to, by order and by turn. What is true of each image
comes from the maker that drew it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from mmserve.vision.train.example import Draw, Example, Turn
from mmserve.vision.train.makers import emoji, scenes, text
from mmserve.vision.train.makers.canvas import COLORS, SHAPES, near
from mmserve.vision.train.makers.scenes import Scene, Thing
from mmserve.vision.train.makers.talk import Maker, a, say

ORDER = ("first", "second", "third")


@dataclass(frozen=True)
class Part:
    """One of several images: what is asked of it alone, and what it shows, in words."""

    image: Image.Image
    turns: tuple[Turn, ...]
    kind: str
    shows: frozenset[str]
    count: int  # of shapes


def scene_part(draw: Draw, count: int) -> Part:
    rng = draw.rng
    drawn = scenes.scene(rng, count)
    asked = scenes.facts(rng, drawn)
    turns = [t for skill in ("colour", "shape", "count", "exists") for t in asked.get(skill, ())]
    image = scenes.picture(rng, drawn)
    shows = frozenset(a(name) for name in drawn.names)
    return Part(image, tuple(turns), "shapes", shows, count)


def word_part(draw: Draw) -> Part:
    rng = draw.rng
    shown = text.written(rng, (text.word(draw),))
    facts = text.facts(rng, "word", shown)
    turns = (*facts["word"], *facts["ink"])
    phrase = f'the word "{shown.text}"'
    return Part(text.picture(draw, shown), turns, "text", frozenset((phrase,)), 0)


def emoji_part(draw: Draw) -> Part:
    one, vendor = emoji.pick(draw, emoji.is_thing)
    turns = tuple(emoji.facts(draw, "emoji", one)["emoji"])
    image = emoji.alone(draw, one, vendor)
    return Part(image, turns, "emoji", frozenset((f'the emoji "{one.name}"',)), 0)


def part(draw: Draw) -> Part:
    kind = draw.rng.random()
    if kind < 0.6:
        return scene_part(draw, draw.rng.choice((1, 1, 2, 3)))
    return word_part(draw) if kind < 0.85 else emoji_part(draw)


def parts(draw: Draw, count: int) -> list[Part]:
    """Images to compare: of any kinds, or scenes alone."""
    if draw.rng.random() < 0.5:
        return [scene_part(draw, draw.rng.choice((1, 1, 2, 3, 5))) for _ in range(count)]
    return [part(draw) for _ in range(count)]


def which(rng: random.Random, images: Sequence[Part]) -> list[Turn]:
    """Questions whose answer is one of the images."""
    of = "of the two images" if len(images) == 2 else "image"
    turns = []
    for i, image in enumerate(images):
        for phrase in sorted(image.shows):
            if sum(phrase in other.shows for other in images) == 1:
                ask = [f"Which image shows {phrase}?", f"Which {of} has {phrase}?"]
                turns.append(say(rng, ask, f"Image {i + 1}"))
    counts = [image.count for image in images]
    if all(counts) and counts.count(max(counts)) == 1:
        most = "Which image has the most shapes?"
        turns.append(say(rng, [most], f"Image {counts.index(max(counts)) + 1}"))
    return turns


def together(rng: random.Random, images: Sequence[Part]) -> list[Turn]:
    """Questions on all the images at once."""
    turns = []
    if all(image.count for image in images):
        ask = "How many shapes are there in all images together?"
        turns.append(say(rng, [ask], str(sum(image.count for image in images))))
    if len(images) == 2:
        same = "Yes." if images[0].kind == images[1].kind else "No."
        turns.append(Turn("Do both images show the same kind of content?", same))
    return turns


def of_one(rng: random.Random, image: Part, number: int) -> Turn:
    """A question on one image that says which by its order."""
    asked = rng.choice(image.turns)
    low = asked.question[0].lower() + asked.question[1:]
    ways = (
        f"In image {number + 1}, {low}",
        f"Look at the {ORDER[number]} image. {asked.question}",
        f"In the {ORDER[number]} image, {low}",
    )
    return dataclasses.replace(asked, question=rng.choice(ways))


def shown_at_once(skill: str, images: Sequence[Part], turns: Sequence[Turn]) -> Example:
    first = dataclasses.replace(turns[0], shows=tuple(range(len(images))))
    return Example(skill, tuple(image.image for image in images), (first, *turns[1:]))


def compare(skill: str, count: int) -> Maker:
    """Some images in one turn, with a question on them."""

    def make(draw: Draw) -> Example:
        rng = draw.rng
        while True:
            images = parts(draw, count)
            kinds = [which(rng, images), together(rng, images)]
            number = rng.randrange(count)
            kinds.append([of_one(rng, images[number], number)])
            turns = [rng.choice(kind) for kind in kinds if kind]
            if len(turns) > 1:
                break
        rng.shuffle(turns)
        return shown_at_once(skill, images, turns[: 1 if draw.held_out else rng.randint(1, 3)])

    return make


def by_order(draw: Draw) -> Example:
    """A question on all of some images, and then one on one of them."""
    rng = draw.rng
    count = rng.choice((2, 3))
    images = [part(draw) for _ in range(count)]
    first, second = rng.sample(range(count), 2)
    turns = [of_one(rng, images[i], i) for i in (first, second)]
    return shown_at_once("by_order", images, turns)


def by_turn(draw: Draw) -> Example:
    """An image a turn, and then a question on one that came before."""
    rng = draw.rng
    count = rng.choice((2, 3))
    images = [part(draw) for _ in range(count)]
    turns = [
        dataclasses.replace(rng.choice(image.turns), shows=(i,)) for i, image in enumerate(images)
    ]
    back = rng.randrange(count)
    turn = of_one(rng, images[back], back)
    if back == count - 2 and rng.random() < 0.4:
        asked = rng.choice(images[back].turns)
        low = asked.question[0].lower() + asked.question[1:]
        turn = dataclasses.replace(asked, question=f"In the image before the last one, {low}")
    return Example("by_turn", tuple(image.image for image in images), (*turns, turn))


def changed(draw: Draw) -> Example:
    """Two scenes that differ in one thing: its colour, its shape, or that it is there."""
    rng = draw.rng
    while True:
        before = scenes.scene(rng, rng.randint(2, 4))
        if len(set(before.names)) == len(before.names):
            break
    what, kind = rng.randrange(len(before.things)), rng.choice(("color", "shape", "gone", "new"))
    after, answer = change(rng, before, what, kind)
    if kind == "new":
        before, after = after, before
    images = tuple(scenes.picture(rng, scene) for scene in (before, after))
    ask = ("What changed between the two images?", "What is different in image 2?")
    turn = Turn(rng.choice(ask), answer, shows=(0, 1))
    return Example("changed", images, (turn,))


def change(rng: random.Random, scene: Scene, what: int, kind: str) -> tuple[Scene, str]:
    """The scene with one thing changed, and the change in words."""
    thing = scene.things[what]
    things: list[Thing] = list(scene.things)
    if kind in ("gone", "new"):
        del things[what]
        said = "is gone" if kind == "gone" else "is new"
        return dataclasses.replace(scene, things=tuple(things)), f"The {thing.name} {said}."
    if kind == "color":
        used = {scene.ground.name, *scene.colors}
        color = rng.choice([c for c in COLORS if c not in used and distinct(scene, c)])
        things[what] = dataclasses.replace(thing, color=color)
        answer = f"The {thing.shape} changed from {thing.color} to {color}."
    else:
        shape = rng.choice([s for s in SHAPES if s not in scene.shapes])
        things[what] = dataclasses.replace(thing, shape=shape)
        answer = f"The {thing.name} became {a(shape)}."
    return dataclasses.replace(scene, things=tuple(things)), answer


def distinct(scene: Scene, color: str) -> bool:
    return not near(scene.ground.color, COLORS[color])


MAKERS: dict[str, Maker] = {
    "two_images": compare("two_images", 2),
    "three_images": compare("three_images", 3),
    "by_order": by_order,
    "by_turn": by_turn,
    "changed": changed,
}
