"""What a step's joules are for: the engine's batches in the words of the energy meter.

Owns the weights of images beside text, and who is charged. Knows nothing of counters or metrics'
names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from mmserve.energy import Background, EnergyMeter, Part, Weights, Work, board_reader
from mmserve.metrics import Metrics
from mmserve.model.loader import LoadedModel
from mmserve.model.weights import Loaded, LoadedCheckpoint
from mmserve.request import ImageInput
from mmserve.scheduler.batch import Batch
from mmserve.sequence import Sequence

QUESTION = 32  # text tokens that read a found image, nominally


def board_meter(loaded: Loaded, metrics: Metrics) -> EnergyMeter:
    """A meter of the board that `loaded` is on; free, and zero, on a CPU.

    Call before the runner fuses the model. Encodes one blank image where there is a counter.
    """
    on_gpu = loaded.device.type == "cuda"
    counter = board_reader(board_uuid(loaded.device)) if on_gpu else None
    reader = Background(counter) if counter else None
    return EnergyMeter(
        reader,
        _weights(loaded) if reader else Weights(),
        on_spend=lambda part, joules: metrics.energy_joules[part.value].inc(joules),
    )


def _weights(loaded: Loaded) -> Weights:
    return image_weights(loaded) if isinstance(loaded, LoadedModel) else checkpoint_weights(loaded)


def board_uuid(device: torch.device) -> str:
    """The name NVML knows a GPU by, whichever of a machine's GPUs this process may see."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def image_weights(loaded: LoadedModel) -> Weights:
    """The formulas of `Weights` for one model."""
    lm: Any = loaded.lm
    config = lm.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_hidden_layers * config.num_attention_heads * dim
    token = 2.0 * sum(p.numel() for p in lm.model.layers.parameters())  # FLOPs
    tokens = loaded.spec.num_image_tokens
    return Weights(
        image_miss=tokens + image_flops(loaded) / token,
        image_hit=4.0 * width * tokens * QUESTION / token,
    )


def checkpoint_weights(loaded: LoadedCheckpoint) -> Weights:
    """Of a public checkpoint, whose images have many sizes: a visual token counts as any token, and
    a patch as 2 FLOPs for each weight that is not the language model's. Nothing for hits."""
    config = loaded.checkpoint.config
    vision = getattr(config, "vision_config", None)
    if vision is None:
        return Weights()
    lm, language = loaded.lm, loaded.lm.get_decoder()
    head = lm.get_output_embeddings()
    others = {id(p) for part in (language, head) for p in part.parameters()}
    tower = sum(p.numel() for p in lm.parameters() if id(p) not in others)
    decoder = sum(p.numel() for p in language.layers.parameters())
    side = vision.patch_size
    rows, columns = side if isinstance(side, (list, tuple)) else (side, side)
    values = 3 * rows * columns * getattr(vision, "temporal_patch_size", 1)
    return Weights(visual_token=1.0, pixel_value=tower / (decoder * values))


@torch.inference_mode()
def image_flops(loaded: LoadedModel) -> int:
    """Of the vision path, one image, counted while a blank one passes through."""
    loaded.vision.requires_grad_(False)  # the counter looks for gradients of what has them
    size = loaded.spec.image_size
    blank = torch.zeros(1, 3, size, size, dtype=torch.uint8, device=loaded.device)
    with FlopCounterMode(display=False) as counter:
        loaded.vision.encode(blank)
    return int(counter.get_total_flops())


def step_work(batch: Batch) -> list[Work]:
    """A launched step's tokens and images. An image is charged to the first that waits for it;
    what was computed for a request that has ended, to nobody. Of an image in two pieces the head
    counts as the image, and the tail brings what the tower was given: it is what is new where the
    tower has not seen the image before."""
    work = []
    for chunk in batch.chunks:
        seq, ends = chunk.seq, chunk.start + chunk.count
        decodes = chunk.count == 1 and ends > seq.num_prompt_tokens
        if chunk.images:
            images = [context.placed.image for context in chunk.images]
            work.append(_missed(len(images), images, _payer(seq)))
        if not chunk.count:
            continue
        work.append(Work(Part.DECODE if decodes else Part.PROMPT, chunk.count, _payer(seq)))
        if hits := _found(seq) if chunk.start == seq.num_cached_tokens else 0:
            work.append(Work(Part.IMAGE_HIT, hits, _payer(seq)))
    for job in batch.images:
        work.append(_missed(int(job.image.part_of is None), [job.image], _payer(job.seq)))
    return work


def _missed(count: int, images: list[ImageInput], request_id: str | None) -> Work:
    tokens = sum(image.num_tokens for image in images)
    return Work(Part.IMAGE_MISS, count, request_id, tokens, sum(map(_pixel_values, images)))


def _pixel_values(image: ImageInput) -> int:
    """Numbers the tower was given; 0 where it had seen the image, or another piece counts them."""
    is_head = image.part_of is not None and image.span == 0
    inputs = None if is_head else image.inputs
    return int(inputs["pixel_values"].numel()) if inputs else 0


def _payer(seq: Sequence) -> str | None:
    return None if seq.finished else seq.id


def _found(seq: Sequence) -> int:
    return sum(seq.images_found)
