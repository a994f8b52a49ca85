"""Prompts of stock checkpoints: ids are transformers' own, and users write no control tokens."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from PIL import Image
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mmserve.errors import RequestError
from mmserve.hub_prompt import HubTemplate
from mmserve.prompt import ImagePart, Message, TextPart, TokensPart
from mmserve.request import ImageSegment, TextSegment
from mmserve.tools import HERMES
from tests.model import families
from tests.model.border import Border, Open, Parts, flat, message, open_border, opener, template_of

SMALL, WIDE, TALL = (families.picture(0), families.picture(1, 120, 40), families.picture(2, 33, 90))
CASES: dict[str, Parts] = {
    "one image": [SMALL, "What is this?"],
    "image first": [WIDE, "\n\n\nfox"],
    "image last": ["What is in this picture?\n\n", TALL],
    "between words": ["What", SMALL, "is this?"],
    "two sizes": ["a ", SMALL, " and\n", TALL, " differ"],
    "three images": [SMALL, WIDE, " two\n", TALL, "one"],
    "the same twice, adjacent": [SMALL, SMALL, "which?"],
    "nothing but an image": [SMALL],
}

# Templates as published: items only; images before all text; the system text a string only.
LLAVA_15 = (
    "{% for message in messages %}{% if message['role'] != 'system' %}"
    "{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] + ' '}}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
GEMMA_2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{{ '<start_of_turn>' + message['role'] + '\n' + message['content'] | trim"
    " + '<end_of_turn>\n' }}{% endfor %}"
)

JOINING = (  # nothing between messages, and no image without a processor's own token
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)
QWEN_3_CODER = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }}{% endfor %}\nCall a function so:\n"
    "<tool_call>\n<function=NAME>\n<parameter=P>\nVALUE\n</parameter>\n</function>\n</tool_call>"
    "{% endif %}{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ '<tool_call>\\n<function=' + call.name + '>' }}"
    "{% for k in call.arguments %}{{ k }}{% endfor %}"
    "{{ '</function>\\n</tool_call>' }}{% endfor %}{% endfor %}"
)
QWEN_2_5 = (
    "{% if tools %}{{ 'return a json object within <tool_call></tool_call> XML tags:\\n' }}"
    '{{ \'<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n\' }}'
    "{{ '</tool_call>' }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="session")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Open:
    return opener(tmp_path_factory.mktemp("families"))


def with_template(border: Border, text: str) -> HubTemplate:
    return template_of(border.checkpoint, text)


def text_ids(border: Border, prompt: Any) -> list[int]:
    return [t for s in prompt.segments if isinstance(s, TextSegment) for t in s.token_ids]


def ours(border: Border, *parts: str | Image.Image) -> list[int]:
    prompt = border.render(*parts)
    # A cross-attention model's images stand beside their placeholders, not in the text.
    return text_ids(border, prompt) if border.template.cross_attention else flat(prompt)


@pytest.mark.parametrize("name", families.VISION)
@pytest.mark.parametrize("case", CASES)
def test_ids_with_images_are_transformers_own(opened: Open, name: str, case: str) -> None:
    border, parts = opened(name), CASES[case]
    assert ours(border, *parts) == border.theirs(*parts)


@pytest.mark.parametrize("name", (*families.VISION, *families.TEXT))
def test_ids_of_text_are_transformers_own(opened: Open, name: str) -> None:
    border = opened(name)
    for text in ("What is this?", " two\n\n\nblue  squares\n", "é 🦊 12"):
        assert ours(border, text) == border.theirs(text)


@pytest.mark.parametrize("name", (*families.VISION, *families.TEXT))
def test_a_conversation_and_its_continuation_are_transformers_own(opened: Open, name: str) -> None:
    border = opened(name)
    if name in families.NO_CHAT_TEMPLATE:
        pytest.skip("it has no turns")
    messages = [message("user", "Hello"), message("assistant", "Red."), message("user", "Why?")]
    said = [{"role": m.role, "content": m.parts[0].text} for m in messages]  # type: ignore[union-attr]
    reader, first = border.checkpoint.processor, border.checkpoint.takes_images
    for turns, final in ((3, False), (2, True)):
        theirs = reader.apply_chat_template(
            said[:turns],
            tokenize=True,
            return_dict=True,
            add_generation_prompt=not final,
            continue_final_message=final,
        )["input_ids"]
        prompt = border.render_all(messages[:turns], continue_final=final)
        assert flat(prompt) == list(theirs[0] if first else theirs)


@pytest.mark.parametrize("name", (*families.VISION, *families.TEXT))
def test_a_user_writes_no_special_token_and_no_picture(opened: Open, name: str) -> None:
    border = opened(name)
    tokenizer = border.checkpoint.tokenizer
    special = {t.content: i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    hostile = " x ".join(special)
    pictures: list[Image.Image] = [SMALL] if border.checkpoint.takes_images else []
    calm, attacked = (border.render(*pictures, text) for text in ("hello", hostile))
    counts = [
        [text_ids(border, prompt).count(i) for i in special.values()] for prompt in (calm, attacked)
    ]
    assert counts[0] == counts[1]
    assert len([s for s in attacked.segments if isinstance(s, ImageSegment)]) == len(pictures)
    shown = tokenizer.decode(text_ids(border, attacked), skip_special_tokens=False)
    assert hostile in shown


@pytest.mark.parametrize("name", ("qwen2_5_vl", "gemma3", "idefics3", "pixtral", "internvl"))
def test_two_texts_side_by_side_do_not_make_up_a_special_token(opened: Open, name: str) -> None:
    border = opened(name)
    token = border.template.image_token
    prompt = border.render(token[:3], SMALL, token[3:])
    assert border.checkpoint.image_token_id not in text_ids(border, prompt)


@pytest.mark.parametrize("name", (*families.VISION, *families.TEXT))
def test_two_messages_do_not_make_up_a_special_token(opened: Open, name: str) -> None:
    border = opened(name)
    tokenizer = border.checkpoint.tokenizer
    ids = {tokenizer.bos_token_id, tokenizer.eos_token_id, border.checkpoint.image_token_id}
    joining = with_template(border, JOINING)
    for id_ in ids - {None}:
        token = tokenizer.convert_ids_to_tokens(id_)
        for template in (border.template, joining):
            calm = template.render(two_turns("a x", "y b"), [])
            for cut in range(1, len(token)):
                turns = two_turns(f"a {token[:cut]}", f"{token[cut:]} b")
                prompt = template.render(turns, [])
                assert text_ids(border, prompt).count(id_) == text_ids(border, calm).count(id_)


def two_turns(user: str, assistant: str) -> list[Message]:
    return [message("user", user), message("assistant", assistant), message("user", "?")]


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_a_tokenizer_that_sets_spaces_before_words_gives_its_own_ids_too(
    opened: Open, tmp_path: Path, scheme: str
) -> None:
    """Llama 2's kind, where a text alone and behind a token are encoded differently."""
    source = opened("llava").checkpoint.source.folder
    folder = Path(shutil.copytree(source, tmp_path / "llava"))
    word_level(scheme).save_pretrained(folder)
    border = open_border(folder)
    for parts in (["fox"], [SMALL, "fox"], ["a fox ", SMALL, TALL, "  two"], ["a\n", SMALL]):
        assert ours(border, *parts) == border.theirs(*parts)


def word_level(scheme: str) -> PreTrainedTokenizerFast:
    special = ["<unk>", "<s>", "</s>", "<pad>", "<image>"]
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=special, show_progress=False)
    backend.train_from_iterator(["USER: a red fox\n ASSISTANT: two foxes "] * 4, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", special.index("<s>"))]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def test_segments_keep_text_and_images_in_order(opened: Open) -> None:
    border = opened("qwen2_5_vl")
    prompt = border.render("a", SMALL, TALL, "b")
    kinds = [type(segment).__name__ for segment in prompt.segments]
    assert kinds == ["TextSegment", "ImageSegment", "TextSegment", "ImageSegment", "TextSegment"]
    images = [s.image for s in prompt.segments if isinstance(s, ImageSegment)]
    assert prompt.num_image_tokens == sum(i.num_tokens for i in images)
    assert prompt.num_tokens == len(flat(prompt))


def test_a_cross_attention_image_stands_before_its_placeholder(opened: Open) -> None:
    border = opened("mllama")
    first, image, rest = border.render("Hello ", SMALL, "?").segments
    assert isinstance(first, TextSegment) and isinstance(rest, TextSegment)
    assert isinstance(image, ImageSegment)
    assert rest.token_ids[0] == border.checkpoint.image_token_id
    assert (image.image.token_ids, image.image.width) == ((), 0)
    assert image.image.num_tokens > 0


def test_an_image_that_is_gone_is_left_out_and_a_marked_one_takes_no_tokens(opened: Open) -> None:
    border = opened("llava")
    first, *others = message("user", SMALL, " or ", WIDE, "?").parts
    assert isinstance(first, ImagePart)
    whole = [border.see(png_of(picture), alone=False) for picture in (SMALL, WIDE)]
    marked = Message("user", (replace(first, state="marked"), *others))
    prompt = border.template.render([marked], whole)
    images = [s for s in prompt.segments if isinstance(s, ImageSegment)]
    assert [s.marked for s in images] == [True, False]
    assert prompt.num_image_tokens == images[1].image.num_tokens
    gone = Message("user", (replace(first, state="gone", data=b""), *others))
    without = border.render(" or ", WIDE, "?")
    assert flat(border.template.render([gone], whole[1:])) == flat(without)


def test_an_earlier_answer_keeps_its_exact_tokens(opened: Open) -> None:
    border = opened("qwen3_vl")
    tokenizer = border.checkpoint.tokenizer
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    odd = [tokenizer.encode(letter, add_special_tokens=False)[-1] for letter in "table"]
    assert odd != tokenizer.encode("table", add_special_tokens=False)
    head = flat(border.render(SMALL, "What?"))
    answer = Message("assistant", (TokensPart((*odd, end)),))
    turns = [message("user", SMALL, "What?"), answer, message("user", "Why?")]
    ids = flat(border.render_all(turns))
    assert ids[: len(head) + len(odd) + 1] == [*head, *odd, end]
    assert ids[len(head) + len(odd) + 1] != end
    continued = border.render_all(turns[:2], continue_final=True)
    assert flat(continued)[: len(head) + len(odd)] == [*head, *odd]


@pytest.mark.parametrize("name", families.VISION)
def test_an_image_token_in_an_earlier_answer_is_no_picture(opened: Open, name: str) -> None:
    border = opened(name)
    image = border.checkpoint.image_token_id
    assert image is not None
    said = [border.checkpoint.tokenizer.encode(w, add_special_tokens=False)[-1] for w in "ab"]

    def prompt(*answer: int) -> tuple[list[str], list[int]]:
        turns = [message("user", "What?"), Message("assistant", (TokensPart(answer),))]
        made = border.render_all([*turns, message("user", SMALL, "Why?")])
        return [type(s).__name__ for s in made.segments], flat(made)

    assert prompt(said[0], image, said[1], image) == prompt(*said)


def test_an_image_token_that_a_template_writes_by_itself_is_refused(opened: Open) -> None:
    border = opened("gemma3")  # it shows an image by another token than the processor writes
    template = with_template(border, "{{ '<image_soft_token>' }}" + JOINING)
    with pytest.raises(RequestError, match="hold 0 images.* makes 1 image tokens"):
        template.render([message("user", "Hello")], [])


def test_images_reach_a_template_that_takes_items_only(opened: Open) -> None:
    border = opened("llava")
    template = with_template(border, LLAVA_15)
    picture = border.see(message("user", SMALL).parts[0].data)  # type: ignore[union-attr]
    parts = (TextPart("What "), ImagePart(b""), TextPart("is it?"))
    prompt = template.render([Message("system", (TextPart("Be kind."),)), Message("user", parts)],
                             [picture])  # fmt: skip
    conversation = [
        {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": families.chat("What ", SMALL, "is it?")[0]["content"]},
    ]
    theirs = border.checkpoint.processor.apply_chat_template(
        conversation,
        chat_template=LLAVA_15,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
    )
    assert flat(prompt) == list(theirs["input_ids"][0])


def test_a_template_that_takes_strings_only_gets_strings(opened: Open) -> None:
    border = opened("gemma2")
    template = with_template(border, GEMMA_2)
    parts = (TextPart("One."), TextPart("Two."))
    prompt = template.render([Message("user", parts)], [])
    tokenizer = border.checkpoint.tokenizer
    shown = "<bos><start_of_turn>user\nOne.\nTwo.<end_of_turn>\n"
    assert flat(prompt) == tokenizer.encode(shown, add_special_tokens=False)


def test_what_a_template_refuses_is_said_in_its_own_words(opened: Open) -> None:
    template = with_template(opened("gemma2"), GEMMA_2)
    hello = Message("user", (TextPart("Hello"),))
    with pytest.raises(RequestError, match="System role not supported") as refused:
        template.render([Message("system", (TextPart("Be kind."),)), hello], [])
    assert (refused.value.status, refused.value.param) == (400, "messages")
    with pytest.raises(RequestError, match="must alternate"):
        template.render([hello, hello], [])


def test_tools_reach_the_template_with_their_strings_quoted(opened: Open) -> None:
    border = opened("qwen2")
    template = with_template(border, "{{ tools | tojson }}<|im_start|>")
    tool = {"type": "function", "function": {"name": "f", "description": "<|im_end|> x"}}
    prompt = template.render([Message("user", (TextPart("Hi"),))], [], tools=[tool])
    tokenizer = border.checkpoint.tokenizer
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in flat(prompt)
    assert "<|im_end|> x" in tokenizer.decode(flat(prompt))


def test_tools_are_for_templates_that_tell_of_json_calls(opened: Open) -> None:
    border = opened("qwen2")
    assert with_template(border, QWEN_2_5).tool_format is HERMES
    assert with_template(border, QWEN_3_CODER).tool_format is None
    assert border.template.tool_format is None


def test_an_image_that_the_template_drops_is_refused(opened: Open) -> None:
    border = opened("llava")
    dropping = "{% for m in messages %}{{ m.content[-1].text }}{% endfor %}"
    template = with_template(border, dropping)
    with pytest.raises(RequestError, match="hold 1 images.* shows 0 of them"):
        template.render([message("user", SMALL, "What?")], [border.see(png_of(SMALL))])


def png_of(picture: Image.Image) -> bytes:
    part = message("user", picture).parts[0]
    assert isinstance(part, ImagePart)
    return part.data


def test_a_text_model_takes_no_images(opened: Open) -> None:
    template = opened("qwen3").template
    picture = Message("user", (ImagePart(b"", param="messages[0].content[1]"),))
    with pytest.raises(RequestError, match="this model takes no images") as refused:
        template.render([picture], [])
    assert (refused.value.status, refused.value.param) == (400, "messages[0].content[1]")


@pytest.mark.parametrize(
    ("messages", "continue_final", "said"),
    [
        ([], False, "messages is empty"),
        ([Message("robot", (TextPart("Hi"),))], False, "role 'robot' is none of"),
        ([Message("user", (TextPart("Hi"),))], True, "role 'assistant'"),
    ],
)
def test_a_malformed_conversation_is_refused(
    opened: Open, messages: list[Message], continue_final: bool, said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        opened("qwen3").template.render(messages, [], continue_final=continue_final)


def test_a_template_that_is_no_jinja_is_refused_with_its_line(opened: Open) -> None:
    with pytest.raises(ValueError, match="default chat template cannot be read: line 2"):
        with_template(opened("qwen3"), "hello\n{% for %}")


def test_a_named_template_is_needed_under_the_name_default(opened: Open, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no default"):
        HubTemplate(opened("qwen3").checkpoint.processor, chat_template={"rag": "x"})
