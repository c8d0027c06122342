"""On which terms a job is begun, and how a failure is remembered. No I/O.

Rules this module obeys: bad input fails here, before anything is sent; a failure is data (a type's
name, a message, plain arguments) and is revived only as a type that the caller named.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias

from fencekit import _policy
from fencekit.keys import check_name

Duration: TypeAlias = float | timedelta
OnLapse: TypeAlias = Literal["reclaim", "block"]

DEFAULT_TTL = 86400.0
"""How long a job is remembered when nothing else is said: a day."""

DEFAULT_LEASE = 30.0
"""The lease of a claim in seconds: a dead worker's job is taken over after at most this."""


class Missing:
    """Stands for "no result given": None is a result."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Any = Missing()


@dataclass(frozen=True)
class Terms:
    """On which terms a job is begun."""

    key: str
    ttl: float
    lease: float | None
    lock: str | None = None
    fingerprint: str = ""
    max_attempts: int = 0
    blocks: bool = False
    max_hold: float | None = None


def plain(key: str, ttl: Duration) -> Terms:
    """The terms of a start without a lease."""
    check_name(key, "key")
    return Terms(key, _policy.seconds(ttl, "ttl"), None)


def leased(
    key: str, ttl: Duration, lease: Duration, lock: str | None, fingerprint: str | None,
    max_attempts: int | None, on_lapse: OnLapse, max_hold: Duration | None = None,
) -> Terms:  # fmt: skip
    """The terms of a start with a lease."""
    check_name(key, "key")
    if lock is not None:
        check_name(lock, "lock")
    if fingerprint is not None:
        if not isinstance(fingerprint, str):
            raise TypeError(f"fingerprint is text, not {type(fingerprint).__name__}")
        if not 0 < len(fingerprint) <= 1024:
            raise ValueError("fingerprint has between 1 and 1024 characters; pass None for none")
    if max_attempts is not None:
        if isinstance(max_attempts, bool) or not isinstance(max_attempts, int):
            raise TypeError(f"max_attempts is an int, not {type(max_attempts).__name__}")
        if not 1 <= max_attempts <= 1_000_000:
            raise ValueError(f"max_attempts is between 1 and a million, not {max_attempts}")
    if on_lapse not in ("reclaim", "block"):
        raise ValueError(f"on_lapse is 'reclaim' or 'block', not {on_lapse!r}")
    return Terms(
        key,
        _policy.seconds(ttl, "ttl"),
        _policy.seconds(lease, "lease"),
        lock,
        fingerprint or "",
        max_attempts or 0,
        on_lapse == "block",
        None if max_hold is None else _policy.seconds(max_hold, "max_hold"),
    )


@dataclass(frozen=True)
class Policy:
    """What a whole run does with failures, and how long it waits for somebody else's."""

    remember: tuple[type[Exception], ...]
    wait: float


def policy(remember: Any, wait: Duration | None) -> Policy:
    """The policy, checked."""
    types = (remember,) if isinstance(remember, type) else remember
    if not isinstance(types, (tuple, list)) or not all(
        isinstance(kind, type) and issubclass(kind, Exception) for kind in types
    ):
        raise TypeError("remember is a tuple of exception types")
    return Policy(tuple(types), _policy.waiting(wait))


MOST_TEXT = 10_000


def describe(error: BaseException | None) -> bytes:
    """A failure as it is remembered."""
    what: dict[str, Any] = {"type": "", "message": ""}
    if error is not None:
        what = {"type": _name(type(error)), "message": shown(error, str)[:MOST_TEXT]}
        if all(isinstance(arg, (str, int, float, type(None))) for arg in error.args):
            what["args"] = [arg[:MOST_TEXT] if isinstance(arg, str) else arg for arg in error.args]
    try:
        return json.dumps(what).encode()
    except ValueError:  # an integer with more digits than Python writes
        del what["args"]
        return json.dumps(what).encode()


def shown(error: BaseException | None, how: Callable[[object], str] = repr) -> str:
    """The error in words. One that cannot be shown must not hide itself behind another."""
    try:
        return how(error)
    except Exception:
        return f"<{_name(type(error))}, which cannot be shown>"


def revive(kept: dict[str, Any], types: tuple[type[Exception], ...]) -> Exception | None:
    """The remembered failure as it was, if its type is one that the caller named."""
    message = kept.get("message", "")
    for kind in types:
        if _name(kind) == kept.get("type"):
            try:
                revived = kind(*kept.get("args", [message]))
                return revived if str(revived)[:MOST_TEXT] == message else None
            except Exception:  # a constructor of its own kind: the caller gets the facts instead
                return None
    return None


def failure(kept: bytes | None) -> dict[str, Any]:
    """What was remembered of a failure."""
    try:
        what = json.loads(kept or b"{}")
    except (ValueError, RecursionError):
        what = {}
    return what if isinstance(what, dict) else {}


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class Started:
    """Which tokens this guard's own plain starts were given, for as long as their records live."""

    def __init__(self) -> None:
        self._tokens: dict[str, tuple[int, float]] = {}
        self._sweep_at = 1024

    def put(self, key: str, token: int, ttl: float) -> None:
        moment = _policy.now()
        if len(self._tokens) >= self._sweep_at:
            alive = {name: known for name, known in self._tokens.items() if known[1] >= moment}
            self._tokens, self._sweep_at = alive, max(1024, 2 * len(alive))
        self._tokens[key] = (token, moment + ttl)

    def get(self, key: str) -> int | None:
        known = self._tokens.get(key)
        return None if known is None else known[0]

    def drop(self, key: str) -> None:
        self._tokens.pop(key, None)
