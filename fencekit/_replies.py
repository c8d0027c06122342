"""Turns script replies into typed answers. No I/O.

Rules this module obeys: a reply is bytes, ints, None and lists of them; whatever no version of the
script can have said raises, so that nothing is taken for a "yes" by accident.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from fencekit import _scripts
from fencekit._scripts import Call
from fencekit.records import LockInfo


class Grant(NamedTuple):
    """The lock is the caller's, confirmed for a request that was sent at `sent`."""

    token: int
    sent: float


@dataclass(frozen=True)
class Refusal:
    """Somebody else holds the lock; `left` is None when nobody knows for how long."""

    left: float | None
    owner: str
    token: int
    holder: str


@dataclass(frozen=True)
class Spent:
    """This attempt was given up before."""


def text(value: Any) -> str:
    """Bytes as text; what is not valid UTF-8 stays readable."""
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def _left(milliseconds: int) -> float | None:
    return None if milliseconds < 0 else milliseconds / 1000


def acquire(call: Call, reply: Any) -> Grant | Refusal | Spent:
    match reply:
        case [1, token]:
            return Grant(int(token), call.sent)
        case [0, left, owner, token, holder]:
            return Refusal(_left(left), text(owner), int(token), text(holder or owner))
        case [-1]:
            return Spent()
    raise _scripts.unexpected(call, reply)


def renew(call: Call, reply: Any) -> list[str | None]:
    """For each lease None if it was renewed, else why it is lost."""
    if not isinstance(reply, list) or len(reply) * 2 != len(call.keys):
        raise _scripts.unexpected(call, reply)
    return [None if answer == 1 else text(answer) for answer in reply]


def release(call: Call, reply: Any) -> str | None:
    """None if it was given back, else why not."""
    if reply == 1:
        return None
    if isinstance(reply, bytes):
        return text(reply)
    raise _scripts.unexpected(call, reply)


def broken(call: Call, reply: Any) -> tuple[int, str | None, int]:
    """The raised fence, and the evicted holder and its token if there was one."""
    match reply:
        case [fence]:
            return int(fence), None, 0
        case [fence, owner, token, holder]:
            return int(fence), text(holder or owner), int(token)
    raise _scripts.unexpected(call, reply)


def _where(label: str) -> tuple[str, int]:
    host, _, rest = label.partition("/")
    number, _, _ = rest.partition("/")
    return host, int(number) if number.isdigit() else 0


def seen(resource: str, label: str, token: int, fence: int) -> LockInfo:
    """What is known of a holder that was evicted before it could be looked at."""
    host, pid = _where(label)
    return LockInfo(resource, label, "", host, pid, token, 0.0, 0.0, 0, fence)


def inspect(call: Call, reply: Any, resource: str) -> LockInfo | None:
    match reply:
        case [_]:
            return None
        case [fence, owner, token, holder, age, left, waiters]:
            return LockInfo(
                resource=resource,
                holder=text(holder or owner),
                owner_id=text(owner),
                host=_where(text(holder or b""))[0],
                pid=_where(text(holder or b""))[1],
                token=int(token),
                age=max(0, int(age)) / 1000,
                remaining=max(0, int(left)) / 1000,
                waiters=int(waiters),
                fence=int(fence),
            )
    raise _scripts.unexpected(call, reply)


@dataclass(frozen=True)
class Started:
    """The job is the caller's."""

    reclaimed: bool
    attempts: int
    token: int
    sent: float


@dataclass(frozen=True)
class Ended:
    """The job is done or failed; `kept` is the stored result or error."""

    failed: bool
    attempts: int
    kept: bytes | None


@dataclass(frozen=True)
class Running:
    """Somebody else runs the job, or holds its lock when `locked`."""

    attempts: int
    left: float | None
    holder: str
    locked: bool = False
    owner: str = ""
    token: int = 0


@dataclass(frozen=True)
class Unknown:
    """An attempt died and asked to block."""

    attempts: int
    holder: str


@dataclass(frozen=True)
class Conflict:
    """The key is known with another fingerprint."""

    known: str


def begin(call: Call, reply: Any) -> Started | Ended | Running | Unknown | Conflict | Spent:
    match reply:
        case [b"begun" | b"reclaimed" as outcome, attempts, token]:
            return Started(outcome == b"reclaimed", attempts, int(token), call.sent)
        case [b"done" | b"failed" as outcome, attempts, kept]:
            return Ended(outcome == b"failed", attempts, kept)
        case [b"done", attempts]:
            return Ended(False, attempts, None)
        case [b"busy", attempts, left, holder]:
            return Running(attempts, _left(int(left)), text(holder))
        case [b"locked", attempts, left, holder, owner, token]:
            label = text(holder or owner)
            return Running(attempts, _left(left), label, True, text(owner), int(token))
        case [b"unknown", attempts, holder]:
            return Unknown(attempts, text(holder))
        case [b"conflict", known]:
            return Conflict(text(known))
        case [b"spent"]:
            return Spent()
    raise _scripts.unexpected(call, reply)


@dataclass(frozen=True)
class NotSettled:
    """The claim is not the caller's any more."""

    state: str
    token: int
    kept: bytes | None
    holder: str


def settle(call: Call, reply: Any) -> NotSettled | None:
    """None if the claim was settled."""
    match reply:
        case [1]:
            return None
        case [0, state, token, kept, holder]:
            return NotSettled(text(state), int(token or 0), kept, text(holder))
    raise _scripts.unexpected(call, reply)


@dataclass(frozen=True)
class Job:
    """A job's record; `left` is the time its lease has left, None without a lease."""

    state: str
    attempts: int
    token: int
    kept: bytes | None
    left: float | None
    holder: str
    fingerprint: str


def job(call: Call, reply: Any) -> Job | None:
    match reply:
        case []:
            return None
        case [state, attempts, token, kept, left, holder, known]:
            rest = int(left) / 1000 if left else None
            return Job(text(state), attempts, int(token), kept, rest, text(holder), text(known))
    raise _scripts.unexpected(call, reply)


def flag(call: Call, reply: Any) -> bool:
    if reply in (0, 1):
        return bool(reply)
    raise _scripts.unexpected(call, reply)


@dataclass(frozen=True)
class Written:
    """The commands ran; what they answered."""

    replies: list[Any]


@dataclass(frozen=True)
class Stale:
    """The token is older than `newest`; nothing ran."""

    newest: int


def gate(call: Call, reply: Any) -> Written | Stale:
    match reply:
        case [0, newest]:
            return Stale(int(newest))
        case [1, _, *replies]:
            return Written(replies)
    raise _scripts.unexpected(call, reply)


def fence(call: Call, reply: Any) -> int:
    if isinstance(reply, bytes):
        return int(reply)
    raise _scripts.unexpected(call, reply)
