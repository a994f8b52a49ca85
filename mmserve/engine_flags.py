"""The flags of everything that runs an engine, and the part of the configuration that they make.

Owns their names, which are vLLM's where it has one. Knows nothing of commands.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from mmserve import flags
from mmserve.config import (
    COLD_FORMATS,
    KV_FORMATS,
    METHODS,
    CacheConfig,
    EngineConfig,
    ImageLimits,
    ModelConfig,
    SchedulerConfig,
    SpecConfig,
    TierConfig,
)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    model = ModelConfig()
    add = parser.add_argument
    add(
        "--model",
        default=model.model,
        help="a name in configs/models/ or a JSON like those, a checkpoint folder, a .gguf file, "
        "or a hub id (org/name[@revision])",
    )
    add("--served-model-name", help="the id in /v1/models (default: the model's own name)")
    dtypes = ("auto", "float32", "bfloat16", "int8")
    add("--dtype", default=model.dtype, choices=dtypes, help="weights")
    add("--deterministic", action="store_true", help="the same bits in any company")
    add("--device", default=model.device, choices=("auto", "cpu", "cuda"))
    add("--no-lora", action="store_true", help="serve the base model's own text weights")
    add(
        "--vision-mode",
        default=model.vision_mode,
        choices=("auto", "isolated", "prefix", "blend"),
        help="whether images see what stands before them: not, wholly, or their first tokens only, "
        "which is approximate (auto: as the model was made)",
    )
    add(
        "--blend-tokens",
        type=flags.count,
        default=model.blend_tokens,
        metavar="N",
        help="how many of an image's first tokens do in blend mode",
    )
    add(
        "--image-max-tokens",
        type=flags.count,
        metavar="N",
        help="of an image, of models trained to see with fewer (default: as many as they have)",
    )
    add("--max-model-len", type=flags.count, help="tokens, text and image")
    add(
        "--rope-scaling",
        type=flags.settings,
        metavar="JSON",
        help='for sequences beyond the trained length, such as {"rope_type": "yarn", "factor": 4}',
    )
    add("--num-threads", type=flags.count, help="CPU threads (default: PyTorch's choice)")
    add("--cache-dir", type=Path, help="where fetched weights live (default: ~/.cache/mmserve)")
    add(
        "--mm-processor-kwargs",
        type=flags.settings,
        default={},
        metavar="JSON",
        help="settings of a checkpoint's image processor",
    )
    add("--chat-template", type=flags.file, help="a Jinja file instead of a checkpoint's own")
    _add_pool_flags(parser)


def _add_pool_flags(parser: argparse.ArgumentParser) -> None:
    cache, steps = CacheConfig(), SchedulerConfig()
    add = parser.add_argument
    add("--kv-cache-memory-bytes", type=flags.size, default=cache.text_bytes, help="text KV pool")
    add("--vision-kv-cache-memory-bytes", type=flags.size, default=cache.vision_bytes)
    add(
        "--kv-cache-dtype",
        default=cache.text_format,
        choices=KV_FORMATS,
        help="of text KV; auto: as the model computes it (docs/kv-quantisation.md)",
    )
    add(
        "--vision-kv-cache-dtype",
        default=cache.vision_format,
        choices=KV_FORMATS,
        help="of images' KV",
    )
    add(
        "--kv-cache-dtype-skip-layers",
        type=flags.layers,
        default=cache.skip_layers,
        metavar="LIST",
        help="decoder layers whose KV stays as the model computes it, such as 0,1,29",
    )
    add(
        "--vision-kv-cold-dtype",
        choices=COLD_FORMATS,
        help="hold images that have to leave the pool in fewer bits, step by step down to this; "
        "answers that read them so are approximate and say it (default: they are forgotten)",
    )
    add(
        "--vision-kv-cold-memory-bytes",
        type=flags.size,
        default=cache.cold_bytes,
        help="for those, beside the pool (default: 128M)",
    )
    add("--no-enable-prefix-caching", action="store_true")
    add("--max-num-seqs", type=flags.count, default=steps.max_num_seqs)
    add("--max-num-batched-tokens", type=flags.count, default=steps.max_num_batched_tokens)
    add(
        "--limit-mm-per-prompt",
        type=flags.count,
        default=ImageLimits.max_images,
        metavar="N",
        help="images in one request",
    )
    add(
        "--speculative-config",
        type=flags.speculation,
        default=SpecConfig(),
        metavar="JSON",
        help=f"drafting: {', '.join(METHODS)}, none, or a JSON object such as "
        '{"method": "ngram"} (default: auto; docs/speculation.md)',
    )


def add_parallel_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tensor-parallel-size",
        type=flags.count,
        default=EngineConfig().tensor_parallel_size,
        metavar="N",
        help="processes that compute the model together, on a GPU each (docs/parallel.md)",
    )


def add_stage_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--stages",
        type=flags.stages,
        default=(),
        metavar="KIND=WHERE,…",
        help="workers that may compute parts of prompts: kinds are encode and prefill; where is a "
        "number of processes, cpu, cuda:N, or host:port of an `mmserve stage` (docs/stages.md)",
    )


def add_tier_flags(parser: argparse.ArgumentParser) -> None:
    tiers = parser.add_argument_group("KV that has no room in the pools (docs/sessions.md)")
    tiers.add_argument(
        "--host-kv-bytes",
        type=flags.budget,
        help="of host memory, 0 for none (default: an eighth of it beside a GPU, else none)",
    )
    tiers.add_argument(
        "--disk-kv-bytes",
        type=flags.budget,
        default=TierConfig.disk_bytes,
        help="in the data folder, 0 for none (default: 4G)",
    )
    tiers.add_argument(
        "--kv-object-store",
        metavar="URL",
        help="such as s3://bucket/folder; needs the extra `tiers`",
    )
    tiers.add_argument(
        "--kv-compatible-with",
        action="append",
        default=[],
        metavar="FINGERPRINT",
        help="other weights whose KV files are taken, by what `mmserve kv inspect` shows",
    )


def tier_config(args: argparse.Namespace, folder: Path | None) -> TierConfig:
    """`folder`: where data outlive the server."""
    return TierConfig(
        host_bytes=args.host_kv_bytes,
        disk_bytes=args.disk_kv_bytes,
        folder=None if folder is None else folder / "kv",
        object_store=args.kv_object_store,
    )


def _decode_processes() -> int:
    """For strangers' images: as many as keep a GPU busy, or leave a small machine its cores."""
    if os.name != "posix":
        return 0
    return min(max(2, (os.cpu_count() or 1) // 4), 8)


def add_image_flags(parser: argparse.ArgumentParser) -> None:
    images = parser.add_argument_group("images of strangers (docs/images.md)")
    images.add_argument(
        "--allow-image-host",
        action="append",
        metavar="HOST",
        help="images may be fetched from there by URL: example.org, *.example.org, "
        "http://example.org:8080 or * for any public host; several times",
    )
    images.add_argument(
        "--image-decode-processes",
        type=flags.number,
        default=_decode_processes(),
        metavar="N",
        help="beside the server's, with bounded memory and time, so that a fault in a codec costs "
        "one image; 0: none (default: a quarter of the cores, from 2 to 8)",
    )


def cache_dir(args: argparse.Namespace) -> Path | None:
    """Where fetched weights live, if not in the usual place."""
    base = os.environ.get("XDG_CACHE_HOME")
    return args.cache_dir or (Path(base) / "mmserve" if base else None)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's part of the configuration from parsed flags."""
    return EngineConfig(
        model=ModelConfig(
            model=args.model,
            served_name=args.served_model_name,
            dtype=args.dtype,
            deterministic=args.deterministic,
            device=args.device,
            lora=not args.no_lora,
            vision_mode=args.vision_mode,
            blend_tokens=args.blend_tokens,
            image_max_tokens=args.image_max_tokens,
            max_model_len=args.max_model_len,
            rope_scaling=args.rope_scaling,
            num_threads=args.num_threads,
            cache_dir=cache_dir(args),
            processor_kwargs=args.mm_processor_kwargs,
            chat_template=args.chat_template,
        ),
        cache=CacheConfig(
            text_bytes=args.kv_cache_memory_bytes,
            vision_bytes=args.vision_kv_cache_memory_bytes,
            page_size=CacheConfig.usual_page_size(args.kv_cache_dtype, args.vision_kv_cache_dtype),
            text_format=args.kv_cache_dtype,
            vision_format=args.vision_kv_cache_dtype,
            skip_layers=args.kv_cache_dtype_skip_layers,
            cold_format=args.vision_kv_cold_dtype,
            cold_bytes=args.vision_kv_cold_memory_bytes,
            prefix_caching=not args.no_enable_prefix_caching,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
        ),
        images=ImageLimits(max_images=args.limit_mm_per_prompt),
        speculative=args.speculative_config,
    )
