"""Results as JSON text and back. Never pickle: data from Redis must not choose code.

Rules this module obeys: what comes back equals what went in (tuples come back as lists); what JSON
cannot say is refused before anything is sent.
"""

from __future__ import annotations

import base64
import json
import re
from typing import Any, Protocol

from fencekit.errors import CanonicalizeError


class Codec(Protocol):
    """Turns a result into bytes and back. Give your own to ``AsyncGuard(codec=...)``."""

    def encode(self, value: Any) -> bytes:
        """The bytes to remember; an exception refuses the value."""
        ...

    def decode(self, data: bytes) -> Any:
        """The value that ``encode`` was given."""
        ...


class JsonCodec:
    """JSON with bytes: None, booleans, numbers, text, bytes, lists and mappings with text keys.

    >>> codec = JsonCodec()
    >>> codec.decode(codec.encode({"pages": 3, "raw": b"ok"}))
    {'pages': 3, 'raw': b'ok'}
    """

    def encode(self, value: Any) -> bytes:
        """The value as compact ASCII JSON; ``CanonicalizeError`` names what it cannot say."""
        try:
            plain = _plain(value, "result")
            return json.dumps(plain, separators=(",", ":"), allow_nan=False).encode()
        except (ValueError, RecursionError) as error:
            raise CanonicalizeError(
                f"the result cannot be remembered as JSON: {error}", path="result"
            ) from error

    def decode(self, data: bytes) -> Any:
        """The value again."""
        return json.loads(data, object_hook=_revive)


# JSON would make one character of the two.
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def _plain(value: Any, path: str) -> Any:
    if isinstance(value, str):
        return _text(value, path)
    if value is None or isinstance(value, (int, float)):
        return value
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict):
        return _plain_mapping(value, path)
    raise CanonicalizeError(
        f"{path} is a {type(value).__name__}, which cannot be remembered as JSON: "
        "return plain data or pass a codec",
        path=path,
    )


def _text(value: str, path: str) -> str:
    if not value.isascii() and _PAIR.search(value):
        raise CanonicalizeError(
            f"{path} has a text with two surrogates in a row, which would come back as one "
            "character: decode it properly",
            path=path,
        )
    return value


def _plain_mapping(value: dict[Any, Any], path: str) -> Any:
    for key in value:
        if not isinstance(key, str):
            raise CanonicalizeError(
                f"{path} has a key of type {type(key).__name__}, which would come back as text: "
                "use text keys or pass a codec",
                path=path,
            )
    plain = {_text(key, path): _plain(item, f"{path}[{key!r}]") for key, item in value.items()}
    if len(plain) == 1 and next(iter(plain)).startswith("$"):
        # It would read like one of our own marks: write it as pairs.
        return {"$pairs": [list(pair) for pair in plain.items()]}
    return plain


def _revive(mapping: dict[str, Any]) -> Any:
    if len(mapping) != 1:
        return mapping
    if "$bytes" in mapping:
        return base64.b64decode(mapping["$bytes"])
    if "$pairs" in mapping:
        return dict(mapping["$pairs"])
    return mapping
