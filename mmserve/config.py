"""One frozen tree of configuration, read at the border (the command line) and passed down.

Owns names, defaults, units and validation. Standard library only, and the faults that tests arm;
nothing below reads the environment or a flag.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mmserve.faults import NO_FAULTS, Faults

GIB = 1024**3
MIB = 1024**2


@dataclass(frozen=True)
class ImageLimits:
    """What an image may be before it is decoded."""

    max_bytes: int = 20 * MIB
    max_pixels: int = 40_000_000
    max_side: int = 16_384
    max_images: int = 32  # a request
    max_frames: int = 10_000  # of an animation, of which the first is shown
    formats: tuple[str, ...] = ("PNG", "JPEG", "WEBP", "GIF")


@dataclass(frozen=True)
class DecodingConfig:
    """Where images are decoded."""

    # Beside the caller's, for images of strangers: what a codec does wrong is then its process's
    # end and no more. 0: in the caller's.
    processes: int = 0
    max_seconds: float = 10.0  # an image in such a process


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and how its weights are held."""

    # A name in configs/models/, the path of such a JSON, a checkpoint folder, a .gguf file, or a
    # hub id (org/name, maybe @revision).
    model: str = "smolvision-135m"
    served_name: str | None = None  # the id in /v1/models; default: the model's own name
    dtype: str = "auto"  # auto | float32 | int8 (CPU) | bfloat16 (CUDA)
    deterministic: bool = False  # a request's bits do not depend on what runs beside it
    device: str = "auto"  # auto | cpu | cuda
    lora: bool = True  # False serves the untouched base model's text weights
    # Whether images see the text before them: isolated | prefix | blend; auto: as the model was
    # made. In blend, the first `blend_tokens` of each image do.
    vision_mode: str = "auto"
    blend_tokens: int = 16
    # Visual tokens of an image, at most; None: as many as the model has. Of models that are trained
    # to see with fewer.
    image_max_tokens: int | None = None
    max_model_len: int | None = None  # tokens, text and image; default: the model's own
    # For sequences beyond the trained length; max_model_len grows by its factor.
    rope_scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    num_threads: int | None = None  # CPU threads; default: torch's
    cache_dir: Path | None = None  # where fetched weights live; default: ~/.cache/mmserve
    # Of checkpoints that transformers defines: settings of the image processor, and a chat template
    # instead of their own.
    processor_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    chat_template: Path | None = None


# Of KV (mmserve.kernels.kv_formats), those of which a page is stored as a whole, and all.
WHOLE_PAGE_FORMATS = ("int4", "int2", "int4_outliers", "int2_outliers")
KV_FORMATS = ("auto", "fp8_e4m3", "fp8_e5m2", "int8", *WHOLE_PAGE_FORMATS)
COLD_FORMATS = ("int8", "int4", "int2")  # one step down after another
BITS = (  # of an element
    dict.fromkeys(KV_FORMATS, 8)
    | {"auto": 16}
    | {name: int(name[3]) for name in WHOLE_PAGE_FORMATS}
)
WHOLE_PAGE = 64  # tokens of such a page: its scales are then an eighth of an element's 4 bits


@dataclass(frozen=True)
class CacheConfig:
    """The two KV pools: budgets in bytes, pages in tokens. Raises ValueError for what cannot be."""

    page_size: int = 16
    text_format: str = "auto"
    vision_format: str = "auto"
    skip_layers: tuple[int, ...] = ()  # decoder layers whose KV stays as the model computes it
    text_bytes: int = 1 * GIB
    vision_bytes: int = GIB // 2
    # Down to which of COLD_FORMATS images may step that have to leave the pool, None: not at all;
    # and what is held of them beside the pool.
    cold_format: str | None = None
    cold_bytes: int = 128 * MIB
    # What the vision tower made of images, for when they are seen behind other text.
    feature_bytes: int = GIB // 4
    prefix_caching: bool = True
    # Fingerprints of weights whose KV files are taken for these weights', which is approximate.
    kv_compatible_with: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for what, name in (("text", self.text_format), ("vision", self.vision_format)):
            if name not in KV_FORMATS:
                known = ", ".join(KV_FORMATS)
                raise ValueError(f"KV of {what} cannot be {name!r}; known are {known}")
        if self.cold_format is not None and not self.cold_formats:
            raise ValueError(
                f"images cannot step down from {self.vision_format!r} to {self.cold_format!r}; "
                f"steps are {', '.join(COLD_FORMATS)}"
            )

    @property
    def cold_formats(self) -> tuple[str, ...]:
        """The steps, from the pool's format down."""
        if self.cold_format not in COLD_FORMATS:
            return ()
        last, first = BITS[self.cold_format], BITS[self.vision_format]
        return tuple(name for name in COLD_FORMATS if last <= BITS[name] < first)

    @staticmethod
    def usual_page_size(text_format: str, vision_format: str) -> int:
        whole = {text_format, vision_format} & {*WHOLE_PAGE_FORMATS}
        return WHOLE_PAGE if whole else CacheConfig.page_size

    def fitted(self, image_tokens: int) -> CacheConfig:
        """With pages no larger than a model's images, which are stored in whole ones: of 64 tokens
        half a page would stay empty behind 32. As it is where another size was asked for, or where
        text is stored so, too, of which there is more."""
        whole = [kind in WHOLE_PAGE_FORMATS for kind in (self.text_format, self.vision_format)]
        if whole != [False, True] or self.page_size != WHOLE_PAGE:
            return self
        size = 1 << max(image_tokens - 1, 15).bit_length()
        return replace(self, page_size=min(size, WHOLE_PAGE))

    @property
    def formats(self) -> str:
        """What of this keys of KV contain; empty where all is plain."""
        kinds = (self.text_format, self.vision_format)
        if kinds == ("auto", "auto"):
            return ""
        return " ".join(("kv", *kinds, *map(str, sorted(self.skip_layers))))


@dataclass(frozen=True)
class TierConfig:
    """Where KV goes that has no room in the pools, and what of it outlives the process: bytes of
    each tier, 0 for none."""

    # None: an eighth of the machine's memory beside a GPU, else none: there the pools lie in it.
    host_bytes: int | None = 0
    disk_bytes: int = 4 * GIB
    folder: Path | None = None  # None: no disk tier
    object_store: str | None = None  # its URL, as obstore takes it


MOST_DRAFTED = 63  # tokens of one draft
METHODS = ("auto", "ngram", "suffix", "draft_model", "medusa", "eagle", "lookahead")


@dataclass(frozen=True)
class SpecConfig:
    """Speculative drafting, in vLLM's words where it has one (docs/speculation.md). Raises
    ValueError for what cannot be."""

    # One of METHODS; auto: earlier answers, then the head that came with the model, and nothing
    # where none did; None: off.
    method: str | None = "auto"
    model: str | None = None  # of a head or a draft model: a folder or hub id
    num_speculative_tokens: int | None = None  # how far ahead a draft reaches, at most
    tree_tokens: int | None = None  # of a head's draft; 0: a chain; None: by the device
    adaptive: bool = True  # False: always as far as it may, also where that does not pay
    # ngram: how many of the last tokens have to occur earlier, at least and at most.
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 16
    answers_bytes: int = 64 * MIB  # of earlier answers that are remembered

    def __post_init__(self) -> None:
        if self.method is not None and self.method not in METHODS:
            raise ValueError(f"method {self.method!r} is none of {', '.join(METHODS)}")
        if self.method == "draft_model" and self.model is None:
            raise ValueError("the method draft_model needs a model")
        if self.model is not None and self.method not in ("draft_model", "medusa", "eagle"):
            raise ValueError(f"the method {self.method} takes no model")
        for name, least, most in (
            ("num_speculative_tokens", 1, MOST_DRAFTED),
            ("tree_tokens", 0, MOST_DRAFTED),
            ("prompt_lookup_min", 1, self.prompt_lookup_max),
            ("prompt_lookup_max", 1, 64),
            ("answers_bytes", 0, 1 << 40),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ValueError(f"{name} {value} is not between {least} and {most}")


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int = 64  # sequences running in one step
    max_num_batched_tokens: int = 512  # text tokens in one step
    max_images_per_step: int = 16  # encoder runs in one step
    max_waiting: int = 1024  # requests beyond max_num_seqs before 429
    # Seconds to a first token and between two that are promised; 0: nothing is.
    slo_ttft_s: float = 0.0
    slo_itl_s: float = 0.0


STAGES = ("encode", "prefill")  # that workers may have


@dataclass(frozen=True)
class StageConfig:
    """Workers that may compute parts of prompts for this process: their addresses, as
    `mmserve.handover.wire` takes them, and the key that they know, too (docs/stages.md)."""

    encode: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    key: bytes = b""

    def __bool__(self) -> bool:
        return bool(self.encode or self.prefill)


@dataclass(frozen=True)
class EngineConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    images: ImageLimits = field(default_factory=ImageLimits)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    tiers: TierConfig = field(default_factory=TierConfig)
    speculative: SpecConfig = field(default_factory=SpecConfig)
    tensor_parallel_size: int = 1  # processes that compute the model together, on a GPU each
    stages: StageConfig = field(default_factory=StageConfig)
    # Seconds in which nothing moves though there is work, before that is reported and the engine
    # started anew; 0: nobody looks.
    watchdog_s: float = 60.0
    faults: Faults = NO_FAULTS  # made on purpose, for tests


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP and WebSocket border."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    api_key_file: Path | None = None  # see server/key_file.py; read again when it changes
    admin_keys: tuple[str, ...] = ()  # for what reads or plants everybody's; empty: nobody may
    allow_origins: tuple[str, ...] = ()
    # Whom images are fetched from by URL, each with a scheme and port; empty: nobody.
    allow_image_hosts: tuple[str, ...] = ()
    log_format: str = "text"  # or json
    otlp_traces_endpoint: str | None = None  # None: nothing is traced
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    data_dir: Path | None = None  # for what must outlive the process; None: nothing does
    database_url: str | None = None  # SQLAlchemy's; None: SQLite in data_dir
    # Among servers that share data_dir and the database: letters and digits; None: it is alone.
    replica: str | None = None
    max_body_bytes: int = 64 * MIB
    max_frame_bytes: int = 32 * MIB
    max_file_bytes: int = 32 * MIB
    max_files_bytes: int = 2 * GIB
    file_ttl_s: int = 24 * 3600
    store_ttl_s: int = 24 * 3600
    max_stored_responses: int = 10_000
    max_log_events: int = 20_000  # events kept per response for resume
    grace_s: float = 60.0  # a stored WebSocket response runs on this long without a reader
    heartbeat_s: float = 15.0
    drain_s: float = 10.0  # that running answers get after a first SIGTERM
    max_request_s: float = 0.0  # from a request to the end of its answer; 0: any time
    slow_reader_s: float = 30.0  # a reader that takes nothing for so long is let go
    sockets_per_key: int = 64
    host_memory_limit: float = 0.95  # share in use above which new work is refused; 0: any
    lanes_per_socket: int = 16
    queue_per_lane: int = 8
    faults: Faults = NO_FAULTS  # made on purpose, for tests

    def prefix(self, kind: str) -> str:
        """Of ids of what is stored: one says which replica it came from."""
        return kind if self.replica is None else f"{kind}_{self.replica}"


@dataclass(frozen=True)
class Config:
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
