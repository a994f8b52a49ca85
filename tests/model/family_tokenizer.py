"""Small tokenizers for tiny checkpoints: a byte-level BPE with a family's own special tokens.

Owns the training text, the chat templates and the special tokens' order. Knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

# Newlines in twos and threes become tokens, as in Gemma's vocabulary: whoever tokenizes the text
# before a picture and the newlines of the picture's own run apart gets other ids.
CORPUS = [
    "What is in this picture? A red circle and two blue squares stand on the green table.\n",
    "user\n\n\nassistant\n\nUSER: ASSISTANT: system model\n\n\n",
    "The quick brown fox jumps over the lazy dog; 12 dogs, 345 foxes and 67890 birds.\n\n",
    "Which of these pictures shows the larger square? Describe it in one short sentence.\n\n",
]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}{{ IMAGE }}{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}{{ IMAGE }}{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ ' ' }}{% else %}{{ '[INST]' }}{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}{{ IMAGE }}{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% else %}{{ '[/INST]' }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}{{ IMAGE }}{% else %}{{ part.text | trim }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
IDEFICS = (
    "{% if OPEN %}{{ OPEN }}{% endif %}{% for m in messages %}{{ m.role.capitalize() }}"
    "{% if m.content is not string and m.content[0].type == 'image' %}{{ ':' }}"
    "{% else %}{{ ': ' }}{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}{{ IMAGE }}{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<end_of_utterance>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
LLAVA = (
    "{% for m in messages %}{{ m.role.upper() + ': ' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}{{ IMAGE + '\n' }}{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def template(text: str, image: str, opening: str = "") -> str:
    """A chat template with the family's image placeholder (and opening token) written in."""
    return text.replace("IMAGE", repr(image)).replace("OPEN", repr(opening))


def tokenizer(
    special: Sequence[str],
    *,
    bos: str | None,
    eos: str,
    pad: str,
    add_bos: bool = False,
    roles: Mapping[str, str] | None = None,
    last: Sequence[str] = (),
    chat_template: str | None = None,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE of some 340 ids: `special` first, `last` after the trained ones.

    `roles` names tokens as the family's processor looks them up (`image_token`, `boi_token`, ...);
    `add_bos` puts the first token before every encoded text, as Llama's and Gemma's do.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        CORPUS * 4,
        trainers.BpeTrainer(
            vocab_size=320 + len(special),
            special_tokens=list(special),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    backend.add_special_tokens(list(last))
    if add_bos:
        assert bos is not None
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, backend.token_to_id(bos))],
        )
    named: dict[str, Any] = {} if bos is None else {"bos_token": bos}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=eos,
        pad_token=pad,
        extra_special_tokens=dict(roles or {}),
        chat_template=chat_template,
        padding_side="left",
        **named,
    )
