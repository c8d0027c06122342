"""What both wires share: redis-py's versions, and settings of our own connections. No I/O."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import SlotNotCoveredError

from fencekit import _policy

IO_TIMEOUT = 5.0
"""Seconds without an answer after which a connection is given up, or less if the client says."""

LINE_TIMEOUT = 5.0
"""Seconds within which a connection of our own must be made and take what is written to it."""

LEAST_PAUSE = 0.05
"""Seconds between two tries at least, however many calls are waiting for the next one."""

PARTING = 1.0
"""Seconds for which a closing event loop is held up at most by what its tasks give back."""

UNDO_SECONDS = 30.0
"""How long an undo is tried, and an attempt that was given up is remembered as spent."""


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int("".join(filter(str.isdigit, minor)) or 0)


REDIS_PY = _version(redis.__version__)

# Before 5.3 a pool wants a command's name, from then on it warns about it.
GET_CONNECTION_ARGS: tuple[str, ...] = ("EVALSHA",) if REDIS_PY < (5, 3) else ()

_NOT_OURS = (
    "maint_notifications",
    "orig_",
    "oss_cluster",
    "cache",
    "retry_on_error",
    "event_dispatcher",
)


def own_settings(kwargs: dict[str, Any], retry: type, timeout: float) -> dict[str, Any]:
    """Settings for a connection of our own.

    The client's, but plain RESP2, undecoded, without re-sending, and without the read timeout that
    would break a long wait.
    """
    ours = {name: value for name, value in kwargs.items() if not name.startswith(_NOT_OURS)}
    ours.update(
        protocol=2,
        decode_responses=False,
        retry=retry(NoBackoff(), 0),
        retry_on_timeout=False,
        health_check_interval=0,
        socket_timeout=timeout,
        socket_connect_timeout=min(kwargs.get("socket_connect_timeout") or timeout, timeout),
    )
    if "path" in ours:
        del ours["socket_connect_timeout"]
    return ours


def node_of(client: Any, key: bytes) -> Any:
    """The node that a cluster client would ask for this key; None while it has to find out."""
    try:
        return client.get_node_from_key(key)
    except SlotNotCoveredError:
        return None


def function_behind(target: Any) -> Any:
    """What runs when it is called: behind partials, and the method of a callable object.

    A wrapper is taken at its word: it may well run a coroutine to its end and return its value.
    """
    while isinstance(target, functools.partial):
        target = target.func
    if inspect.isroutine(target) or isinstance(target, type):
        return target
    return getattr(type(target), "__call__", target)  # noqa: B004 -- the method itself is wanted


def finished(result: Any) -> Any:
    """The result, or TypeError for one that is work still to be done: it would remember nothing."""
    kinds = (inspect.isgenerator, inspect.iscoroutine, inspect.isasyncgen)
    if not any(kind(result) for kind in kinds):
        return result
    if hasattr(result, "close"):
        result.close()
    raise TypeError(
        f"the function returned a {type(result).__name__}, which is work still to be done: "
        "return its result"
    )


def did_not_run(error: Exception) -> bool:
    """Whether this answer says that the script did nothing: such a sending is no attempt."""
    return is_missing(error) or _policy.passes(error) or str(error).startswith("FOREIGN ")


def is_missing(error: Exception) -> bool:
    """Whether the server does not know the script (any more)."""
    return str(error).startswith(("NOSCRIPT", "No matching script"))
