"""A Llama of a few kilobytes as a GGUF file, with a vocabulary of its own."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

TOKENS = ["<unk>", "<s>", "</s>", "▁", *"abcdefghijklmnopqrstuvwxyz.?"]
CONTEXT, WIDTH, INNER = 256, 32, 64


def write(
    path: Path, architecture: str = "llama", chat_template: str | None = "{{ 'hi' }}"
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(CONTEXT)
    writer.add_block_count(1)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(WIDTH // 4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([-float(i) for i in range(len(TOKENS))])
    writer.add_token_types([2, 3, 3, *[1] * (len(TOKENS) - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    noise = np.random.default_rng(0)
    for name, shape in shapes().items():
        writer.add_tensor(name, noise.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def shapes() -> dict[str, tuple[int, ...]]:
    block = {
        "attn_norm": (WIDTH,),
        "ffn_norm": (WIDTH,),
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (WIDTH // 2, WIDTH),
        "attn_v": (WIDTH // 2, WIDTH),
        "attn_output": (WIDTH, WIDTH),
        "ffn_gate": (INNER, WIDTH),
        "ffn_up": (INNER, WIDTH),
        "ffn_down": (WIDTH, INNER),
    }
    around = {
        "token_embd.weight": (len(TOKENS), WIDTH),
        "output_norm.weight": (WIDTH,),
        "output.weight": (len(TOKENS), WIDTH),
    }
    return {**around, **{f"blk.0.{name}.weight": shape for name, shape in block.items()}}
