"""The chat page: static files built into the package, served beside the API.

Owns cache and security headers. Knows nothing of what the page does.
"""

from __future__ import annotations

from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from mmserve.server.auth import CLOSED_ROOTS
from mmserve.server.errors import NotFoundError, error_response, from_http_exception

# Nothing from elsewhere, and nothing inline but style attributes, which formulas need.
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "style-src-attr": "'unsafe-inline'",
    "img-src": "'self' blob: data:",
    "font-src": "'self'",
    "connect-src": "'self'",
    "worker-src": "'self'",
    "manifest-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
SECURITY = {
    "content-security-policy": "; ".join(f"{name} {allowed}" for name, allowed in POLICY.items()),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
ENTRIES = {"kv": "kv.html"}  # pages beside the first, by path
NOT_BUILT = "The chat page is not built. Run: cd web && npm ci && npm run build\n"


class Page:
    """Answers what no route of the API took."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = StaticFiles(directory=folder, html=True, check_dir=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1000})
        response = await self._respond(scope)
        await response(scope, receive, send)

    async def _respond(self, scope: Scope) -> Response:
        path = scope["path"].strip("/")
        if path.split("/", 1)[0] in CLOSED_ROOTS:
            return error_response(NotFoundError("There is nothing at this path."))
        if path in ("", "index.html", *ENTRIES) and not (self._folder / "index.html").is_file():
            return PlainTextResponse(NOT_BUILT, headers=SECURITY)
        try:
            file = ENTRIES.get(path) or self._files.get_path(scope)
            response = await self._files.get_response(file, scope)
        except HTTPException as error:
            return error_response(from_http_exception(error))
        response.headers.update(SECURITY)
        hashed = path.startswith("assets/")
        response.headers["cache-control"] = (
            "public, max-age=31536000, immutable" if hashed else "no-cache"
        )
        return response
