"""Pure rules: which durations are valid, how long to pause, which errors pass by themselves.

Rules this module obeys: no I/O, no clock of its own except `now`; seconds are floats in Python,
milliseconds are ints on the wire; bad input fails here, before any command is sent.
"""

from __future__ import annotations

import math
import os
import random
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import count

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

MAX_SECONDS = 10 * 366 * 86400.0
"""Ten years: longer is taken for a mistake in the unit."""

RETENTION = 7 * 86400.0
"""How long a fence outlives its last grant by default, in seconds."""

DRIFT = 0.02
"""The part of a lease given away for clocks that run at different speeds (I9)."""

if hasattr(time, "CLOCK_BOOTTIME"):
    # Seconds of a clock that never goes back and counts time spent suspended.
    now: Callable[[], float] = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
else:  # pragma: no cover - systems without such a clock
    now = time.monotonic


def seconds(value: float | timedelta, what: str, *, least: float = 0.001) -> float:
    """The duration in seconds, or a ValueError/TypeError that names the argument.

    >>> seconds(timedelta(minutes=1), "ttl"), seconds(0.5, "ttl")
    (60.0, 0.5)
    """
    if isinstance(value, timedelta):
        number = value.total_seconds()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    else:
        raise TypeError(f"{what} is seconds or a timedelta, not {type(value).__name__}")
    if not least <= number <= MAX_SECONDS:  # False for NaN too
        shortest = "1 ms" if least else "0"
        raise ValueError(f"{what} is between {shortest} and ten years, not {value!r}")
    return number


def waiting(value: float | timedelta | None) -> float:
    """A waiting time in seconds; None means for ever."""
    return math.inf if value is None else seconds(value, "wait", least=0.0)


def milliseconds(duration: float) -> int:
    """Whole milliseconds for the wire, rounded up: a lease is never shorter than it is believed."""
    return max(1, math.ceil(round(duration * 1000, 3)))


def deadline_after(sent: float, duration: float) -> float:
    """Until when a lease confirmed by a request sent at ``sent`` is surely good (I9)."""
    return sent + duration * (1 - DRIFT)


# Not the shared generator: programs seed that one, and two forked children would agree.
dice = random.SystemRandom()


def pause(failures: int, *, base: float = 0.02, most: float = 1.0) -> float:
    """How long to wait after so many failures: doubling, capped, with full jitter."""
    return dice.uniform(base / 2, min(most, base * 2 ** min(failures, 16)))


# Server states that pass by themselves. (LOADING and TRYAGAIN have classes in redis-py, but not
# in every version the same ones; the code word is the server's and does not change.)
_PASSING = re.compile(
    r"\b(LOADING|BUSY|READONLY|TRYAGAIN|CLUSTERDOWN|MASTERDOWN|OOM|NOREPLICAS|MISCONF)\b"
    r"|in loading state|is loading the dataset|busy running a script"
    r"|command not allowed when used memory|against a read only replica"
)
_PERMANENT = (AuthenticationError, AuthorizationError, NoPermissionError)


def passes(error: BaseException) -> bool:
    """Whether trying again may help: the connection broke, or the server says "not now"."""
    if isinstance(error, _PERMANENT):
        return False
    if isinstance(error, ResponseError):
        return bool(_PASSING.search(str(error)))
    return isinstance(error, (RedisConnectionError, RedisTimeoutError, OSError, TimeoutError))


def role_changed(error: BaseException) -> bool:
    """Whether the server on this connection is no longer the one to write to."""
    return isinstance(error, RedisError) and "READONLY" in str(error)


class Mutex:
    """A re-entrant lock that cannot hang the exit of the interpreter.

    Re-entrant, since a signal handler, or what the garbage collector runs, may come back to the
    same one. Passed over at the exit, when a daemon thread may have been ended in the middle of it.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire(timeout=0.1 if sys.is_finalizing() else -1)

    def __exit__(self, *exc: object) -> None:
        try:
            self._lock.release()
        except RuntimeError:
            if not sys.is_finalizing():
                raise


class _Process:
    """What is this process's own: replaced in a forked child, so that no two share a nonce."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.host = re.sub(r"[\s/]+", "-", socket.gethostname()) or "localhost"
        self.mutex = Mutex()
        self._start = secrets.token_hex(8)
        self._count = count()

    def nonce(self) -> bytes:
        return b"%s%x" % (self._start.encode(), next(self._count))


_process = _Process()


def _replace_process() -> None:
    global _process  # noqa: PLW0603 - one per process is the point
    _process = _Process()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replace_process)


def nonce() -> bytes:
    """A name for one attempt that no other attempt anywhere has."""
    return _process.nonce()


def pid() -> int:
    """This process, as known since its start or its fork."""
    return _process.pid


def mutex() -> Mutex:
    """One for the whole process, a new one after a fork."""
    return _process.mutex


def label(text: str) -> str:
    """The holder's label that others read: host/pid/text.

    >>> label("worker 1").count("/")
    2
    """
    return f"{_process.host}/{_process.pid}/{text}"


def owner() -> str:
    """A fresh owner id."""
    return secrets.token_hex(8)


def check_owner(value: object) -> str:
    """An owner id that a caller chose: text, not empty, at most 256 characters."""
    if not isinstance(value, str):
        raise TypeError(f"owner_id is text, not {type(value).__name__}")
    if not value or len(value) > 256:
        raise ValueError("owner_id has between 1 and 256 characters")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError("owner_id is not valid Unicode text") from error
    return value


def check_label(value: object) -> str:
    """A holder's label: short printable text."""
    if not isinstance(value, str):
        raise TypeError(f"label is text, not {type(value).__name__}")
    if len(value) > 200 or not value.isprintable():
        raise ValueError("label has at most 200 printable characters")
    return value
