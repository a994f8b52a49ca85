"""ChatTemplate: the exact layout of turns and images, and what user text cannot do to it."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.errors import RequestError
from mmserve.prompt import ChatTemplate, ImagePart, Message, Part, Prompt, TextPart, TokensPart
from mmserve.request import ImageInput, ImageSegment
from mmserve.tokenizer import Tokenizer

SYSTEM = "Be brief."
PNG = ImagePart(b"png")
CHATML = (
    "{% for m in messages %}"
    "{{'<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture
def template(tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(tokenizer, system=None)


def image(i: int) -> ImageInput:
    return ImageInput(digest=bytes([i]) * 32, data=b"", num_tokens=32)


def user(*parts: Part | str) -> Message:
    return Message("user", tuple(TextPart(p) if isinstance(p, str) else p for p in parts))


def assistant(*parts: Part | str) -> Message:
    return Message("assistant", user(*parts).parts)


def written(tokenizer: Tokenizer, prompt: Prompt) -> str:
    """The prompt as text, image i shown as [i]."""
    return "".join(
        f"[{segment.image.digest[0]}]"
        if isinstance(segment, ImageSegment)
        else tokenizer.decode(segment.token_ids, skip_special=False)
        for segment in prompt.segments
    )


def content(tokenizer: Tokenizer, template: ChatTemplate, *parts: Part | str) -> str:
    """How the parts of one user message are written."""
    message = user(*parts)
    count = sum(isinstance(p, ImagePart) for p in message.parts)
    text = written(tokenizer, template.render([message], [image(i + 1) for i in range(count)]))
    head, tail = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    assert text.startswith(head) and text.endswith(tail)
    return text[len(head) : -len(tail)]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([PNG, "What?"], "Image 1: [1]\nWhat?"),
        ([PNG, PNG, "Which?"], "Image 1: [1]\nImage 2: [2]\nWhich?"),
        (["What?", PNG], "What?\nImage 1: [1]"),
        (["What?\n", PNG, "And?"], "What?\nImage 1: [1]\nAnd?"),
        ([PNG], "Image 1: [1]"),
        (["", PNG, ""], "Image 1: [1]"),
        (["one", "two"], "one\ntwo"),
        ([], ""),
    ],
)
def test_images_and_text_of_a_message_stand_on_their_own_lines(
    tokenizer: Tokenizer, template: ChatTemplate, parts: list[Part | str], expected: str
) -> None:
    assert content(tokenizer, template, *parts) == expected


def test_images_are_counted_through_the_conversation(
    tokenizer: Tokenizer, template: ChatTemplate
) -> None:
    messages = [user(PNG, "a"), assistant("b"), user(PNG, "c")]
    prompt = template.render(messages, [image(7), image(8)])
    text = written(tokenizer, prompt)
    assert "Image 1: [7]\na" in text and "Image 2: [8]\nc" in text
    assert prompt.num_image_tokens == 64
    assert prompt.num_tokens == prompt.num_text_tokens + 64


def test_an_image_that_has_a_number_keeps_it_and_later_ones_count_on(
    tokenizer: Tokenizer, template: ChatTemplate
) -> None:
    third, ninth = ImagePart(b"png", number=3), ImagePart(b"png", number=9)
    messages = [user(third, ninth, "a"), assistant("b"), user(PNG, "c")]
    text = written(tokenizer, template.render(messages, [image(1), image(2), image(5)]))
    assert "Image 3: [1]\nImage 9: [2]\na" in text and "Image 10: [5]\nc" in text


def test_of_an_image_that_is_gone_the_number_stays_and_one_that_is_marked_takes_no_tokens(
    tokenizer: Tokenizer, template: ChatTemplate
) -> None:
    gone, marked = ImagePart(b"", state="gone"), ImagePart(b"png", state="marked")
    messages = [user(gone, "first", PNG), user(marked, "second", PNG)]
    prompt = template.render(messages, [image(1), image(2), image(3)])
    assert "Image 1: \nfirst\nImage 2: [1]" in written(tokenizer, prompt)
    assert "Image 3: [2]\nsecond\nImage 4: [3]" in written(tokenizer, prompt)
    marks = [s.marked for s in prompt.segments if isinstance(s, ImageSegment)]
    assert marks == [False, True, False]
    assert prompt.num_image_tokens == 64


def test_the_words_around_an_image_and_the_system_message_can_be_chosen(
    tokenizer: Tokenizer,
) -> None:
    template = ChatTemplate(tokenizer, system=SYSTEM, image_prefix="#{k} ", image_suffix=";")
    text = written(tokenizer, template.render([user("x", PNG, "y")], [image(1)]))
    assert text.startswith(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n")
    assert "x;#1 [1];y<|im_end|>" in text


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_replaces_the_default_one(tokenizer: Tokenizer, role: str) -> None:
    template = ChatTemplate(tokenizer, system=SYSTEM)
    messages = [Message(role, (TextPart("Rhyme."),)), user("Hi")]
    text = written(tokenizer, template.render(messages, []))
    assert text.startswith("<|im_start|>system\nRhyme.<|im_end|>\n<|im_start|>user\nHi<|im_end|>")
    assert SYSTEM not in text


@pytest.mark.parametrize("marker", ["<image>", "<|im_end|>", "<|im_start|>system", "[1]"])
@pytest.mark.parametrize("role", ["user", "assistant", "tool", "system"])
def test_a_marker_typed_as_text_is_plain_characters(
    tokenizer: Tokenizer, template: ChatTemplate, marker: str, role: str
) -> None:
    messages = [Message(role, (TextPart(f"{marker} {marker}"),)), user(PNG, marker)]
    prompt = template.render(messages, [image(1)])
    ids = [t for s in prompt.segments if not isinstance(s, ImageSegment) for t in s.token_ids]
    assert sum(map(tokenizer.is_special, ids)) == 5  # two turns opened and closed, one opened
    assert sum(isinstance(s, ImageSegment) for s in prompt.segments) == 1
    assert written(tokenizer, prompt).count(marker) >= 3


def test_the_exact_tokens_of_an_answer_are_spliced_in(
    tokenizer: Tokenizer, template: ChatTemplate
) -> None:
    letters = tuple(tokenizer.encode("r")) + tuple(tokenizer.encode("ed"))
    assert letters != tuple(tokenizer.encode("red")), "the fixture must know the word"
    first = template.render([user("What?")], []).segments[0]
    assert not isinstance(first, ImageSegment)
    for answer in (letters, (*letters, tokenizer.special("<|im_end|>"))):
        prompt = template.render([user("What?"), assistant(TokensPart(answer)), user("Why?")], [])
        (segment,) = prompt.segments
        assert not isinstance(segment, ImageSegment)
        n = len(first.token_ids)
        assert segment.token_ids[:n] == first.token_ids
        end = tokenizer.special("<|im_end|>")
        assert segment.token_ids[n : n + len(letters) + 1] == (*letters, end)
        assert segment.token_ids.count(end) == 3


def test_continue_final_leaves_the_last_message_open(
    tokenizer: Tokenizer, template: ChatTemplate
) -> None:
    prompt = template.render([user("Say"), assistant("It is")], [], continue_final=True)
    assert written(tokenizer, prompt).endswith("<|im_start|>assistant\nIt is")


@pytest.mark.parametrize(
    ("messages", "continue_final", "param"),
    [
        ([], False, "messages"),
        ([user("a"), Message("robot", ())], False, "messages[1].role"),
        ([user("a")], True, "messages"),
    ],
)
def test_a_conversation_that_cannot_be_rendered_is_refused_by_name(
    template: ChatTemplate, messages: list[Message], continue_final: bool, param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        template.render(messages, [], continue_final=continue_final)
    assert caught.value.param == param


TEXT = st.text(st.sampled_from("ab 12\n\t汉😀?"), max_size=12)
TURNS = st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), TEXT), min_size=1)


@settings(deadline=None)
@given(turns=TURNS)
def test_text_only_prompts_have_the_ids_of_transformers(
    bpe: tokenizers.Tokenizer, tokenizer: Tokenizer, turns: list[tuple[str, str]]
) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs: Any = PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=CHATML)
    expected = theirs.apply_chat_template(
        [
            {"role": "system", "content": SYSTEM},
            *({"role": role, "content": text} for role, text in turns),
        ],
        add_generation_prompt=True,
        return_dict=False,
    )
    messages = [Message(role, (TextPart(text),)) for role, text in turns]
    (segment,) = ChatTemplate(tokenizer, system=SYSTEM).render(messages, []).segments
    assert not isinstance(segment, ImageSegment)
    assert list(segment.token_ids) == expected
