"""One request to an ASGI application, without a server and without a client library."""

from __future__ import annotations

import json
from typing import Any


async def get(app: Any, path: str) -> tuple[int, Any]:
    """The status and the JSON body of the answer."""
    answers: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        answers.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET",
        "scheme": "http", "path": path, "raw_path": path.encode(), "root_path": "",
        "query_string": b"", "headers": [], "client": ("client", 1), "server": ("server", 80),
    }  # fmt: skip
    await app(scope, receive, send)
    body = b"".join(answer.get("body", b"") for answer in answers)
    return answers[0]["status"], json.loads(body)
