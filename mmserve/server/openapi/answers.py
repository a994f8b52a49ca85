"""What is answered: every JSON object that an answer may be or hold.

Each is closed: what is not described here is not said.
"""

from __future__ import annotations

from mmserve.server.content import DETAILS
from mmserve.server.files import PURPOSES
from mmserve.server.openapi import texts
from mmserve.server.openapi.schema import (
    BOOLEAN,
    COUNT,
    DIGEST,
    INTEGER,
    NUMBER,
    PAGED,
    STRING,
    TIME,
    Schema,
    array,
    either,
    listed,
    nullable,
    ref,
    said,
    words,
)

ERROR = said(
    {
        "error": said(
            {
                "message": STRING,
                "type": words("invalid_request_error", "rate_limit_error", "server_error"),
                "param": nullable({**STRING, "description": "The field that is at fault."}),
                "code": STRING,
            }
        )
    }
)

_LIMITS = said(
    {
        **dict.fromkeys(("max_body_bytes", "max_frame_bytes", "max_file_bytes"), COUNT),
        **dict.fromkeys(("max_images", "max_image_bytes", "max_image_pixels"), COUNT),
        "max_image_side": COUNT,
        "image_formats": array(STRING),
        "lanes_per_socket": COUNT,
        "queue_per_lane": COUNT,
    }
)
_MODEL = said(
    {
        "id": STRING,
        "object": {"const": "model"},
        "created": TIME,
        "owned_by": STRING,
        "max_model_len": COUNT,
        "image_tokens": COUNT,
        "modalities": said(
            {"input": array(words("text", "image")), "output": array({"const": "text"})}
        ),
        "limits": ref("Limits"),
    },
    {
        "vision_mode": words("isolated", "prefix", "blend"),
        "blend_tokens": COUNT,
        "image_details": said(dict.fromkeys(DETAILS, COUNT)),
        "image_crops": said({"above": COUNT, "most": COUNT}),
    },
)
_FILE = said(
    {
        "id": STRING,
        "object": {"const": "file"},
        "bytes": COUNT,
        "created_at": TIME,
        "filename": STRING,
        "purpose": words(*PURPOSES),
        "status": {"const": "processed"},
        "expires_at": TIME,
    }
)

# KV

_PART = said(dict.fromkeys(("new", "known", "left_out"), COUNT))
_IMPORTED = said(
    {"text": _PART, "images": _PART},
    {"divergence": said({"prompts": COUNT, "same_first_token": COUNT, "nats": nullable(NUMBER)})},
)
_WHOSE = {"id": COUNT, "request": nullable(STRING), "session": nullable(STRING)}
_OWNER = either(
    said(
        {
            **_WHOSE,
            "kind": {"const": "prefix"},
            "parent": nullable(COUNT),
            **dict.fromkeys(("start", "tokens", "readers"), COUNT),
        }
    ),
    said(
        {
            **_WHOSE,
            "kind": {"const": "image"},
            "key": DIGEST,
            "state": words("writing", "ready", "failed"),
            **dict.fromkeys(("tokens", "readers", "hits"), COUNT),
            "pinned": BOOLEAN,
        },
        {"kv_dtype": STRING},
    ),
    said({**_WHOSE, "kind": {"const": "request"}, "tokens": COUNT, "computed": COUNT}),
)
_POOL = {"window": nullable(COUNT), "pages": COUNT, "page_bytes": COUNT}
_PAGES = said(
    {
        "type": {"const": "kv.pages"},
        "version": COUNT,
        "page_size": COUNT,
        "pools": array(said({"kind": words("text", "vision"), **_POOL})),
        "runs": array(
            {
                **array(INTEGER, minItems=4, maxItems=4),
                "description": "Pool, first page, pages, owner or -1.",
            }
        ),
        "owners": array(_OWNER),
        "gone": array(COUNT),
        "figures": {"type": "object", "additionalProperties": NUMBER},
        "running": COUNT,
        "waiting": COUNT,
    }
)

SCHEMAS: dict[str, Schema] = {
    "Error": ERROR,
    "Limits": _LIMITS,
    "Model": _MODEL,
    "ModelList": listed(ref("Model")),
    "Health": said({"status": STRING}, {"stages": {"type": "object"}}),
    "Version": said({"version": STRING}, {"model": STRING, "limits": ref("Limits")}),
    "File": _FILE,
    "FileList": listed(ref("File"), PAGED),
    "FileDeleted": said({"id": STRING, "object": {"const": "file"}, "deleted": {"const": True}}),
    "KVImported": _IMPORTED,
    "KVPages": _PAGES,
    "KVImage": said({"object": {"const": "kv.image"}, "key": DIGEST, "dropped": {"const": True}}),
    **texts.SCHEMAS,
}
