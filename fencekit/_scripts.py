"""Loads lua/*.lua and builds their calls: one typed function per script. No I/O.

Rules this module obeys: a script's header is its contract (a test reads it); words are bytes from
here on; a call knows how to pack itself once and how to name the key in a FOREIGN answer.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

from redis.exceptions import (
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)

from fencekit import _policy
from fencekit._lease import Lease, Subject
from fencekit.errors import FenceKitError, ForeignValue

_LENGTHS = [b"\r\n$%d\r\n" % length for length in range(256)]


def command(*words: bytes) -> bytes:
    """A whole command as the protocol writes it."""
    parts = [b"*%d" % len(words)]
    for word in words:
        length = len(word)
        parts.append(_LENGTHS[length] if length < 256 else b"\r\n$%d\r\n" % length)
        parts.append(word)
    parts.append(b"\r\n")
    return b"".join(parts)


class Script:
    """One Lua script: its text with the shared prelude in front, and its digest."""

    def __init__(self, name: str) -> None:
        folder = files("fencekit") / "lua"
        self.name = name
        self.source = (
            (folder / "_prelude.lua").read_text("utf-8")
            + "\n"
            + (folder / f"{name}.lua").read_text("utf-8")
        )
        self.digest = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()
        self._digest = self.digest.encode()
        self.load = command(b"SCRIPT", b"LOAD", self.source.encode())

    def pack(self, keys: Sequence[bytes], args: Sequence[bytes]) -> bytes:
        """The EVALSHA command: scripts travel by digest."""
        return command(b"EVALSHA", self._digest, b"%d" % len(keys), *keys, *args)


class Call:
    """One attempt: a script with its keys and arguments, the same bytes however often it is sent.

    ``sent`` is the time before its last sending, ``attempts`` how often it may have been sent.
    ``follow`` is a command that must travel right behind it (WAIT); its reply is in ``followed``
    and may take ``patience`` seconds longer than another.
    """

    __slots__ = ("args", "attempts", "follow", "followed", "keys", "patience", "script", "sent")

    def __init__(self, script: Script, keys: Sequence[bytes], args: Sequence[bytes]) -> None:
        self.script = script
        self.keys = keys
        self.args = args
        self.sent = 0.0
        self.attempts = 0
        self.follow: bytes | None = None
        self.followed: Any = None
        self.patience = 0.0

    def packed(self) -> bytes:
        """What goes over the wire."""
        packed = self.script.pack(self.keys, self.args)
        return packed if self.follow is None else packed + self.follow

    def explain(self, error: Exception) -> Exception:
        """The error to raise for what the server answered."""
        text = str(error)
        if isinstance(error, ResponseError) and text.startswith("FOREIGN "):
            key = self.keys[int(text.split()[1]) - 1].decode()
            return ForeignValue(
                f"the key {key!r} holds something that fencekit did not write; it was left alone: "
                "move it away or use another prefix",
                key=key,
            )
        if isinstance(error, ResponseError) and text.startswith("ACL failure in script"):
            return NoPermissionError(text)
        wrapped = _WRAPPED.match(text) if isinstance(error, ResponseError) else None
        if wrapped is None:
            return error
        return _INNER.get(wrapped["code"].split()[0], ResponseError)(wrapped["code"])


# Before Redis 7 what a command answers inside a script comes wrapped in where that was.
_WRAPPED = re.compile(
    r"Error running script .*?@user_script: ?\d+: -?(?P<code>[A-Z]{2,} .*|The user .*)"
)
_INNER: dict[str, type[ResponseError]] = {
    "READONLY": ReadOnlyError,
    "OOM": OutOfMemoryError,
    "The": NoPermissionError,
}


SCRIPTS = {
    name: Script(name)
    for name in (
        "acquire renew release break inspect begin settle unclaim job clear gate fence"
    ).split()
}


def _number(value: float) -> bytes:
    return b"%d" % value


@lru_cache(256)
def _ms(duration: float) -> bytes:
    return b"%d" % _policy.milliseconds(duration)


def acquire(
    lock: bytes, fence: bytes, *, owner: bytes, by: bytes, nonce: bytes, ttl: float,
    retention: float, delay: float,
) -> Call:  # fmt: skip
    args = (owner, by, nonce, _ms(ttl), _ms(retention), _ms(delay) if delay else b"0")
    return Call(SCRIPTS["acquire"], (lock, fence), args)


def renew(pairs: Iterable[tuple[Lease, Subject]], ttl: float | None = None) -> Call:
    # With a ttl of its own it is one lock's extension, which may also shorten.
    keys: list[bytes] = []
    args: list[bytes] = []
    for lease, subject in pairs:
        keys += (subject.key, subject.fence)
        args += (
            subject.kind.encode() if ttl is None else b"exact",
            subject.owner,
            _number(subject.token),
            _ms(ttl or lease.ttl),
            _ms(lease.retention),
            _ms(lease.delay) if lease.delay else b"0",
        )
    return Call(SCRIPTS["renew"], keys, args)


def release(
    lock: bytes, channel: bytes, *, owner: bytes = b"", token: int | None = None,
    nonce: bytes = b"", spent: float = 0.0,
) -> Call:  # fmt: skip
    name = b"" if token is None else _number(token)
    args = (owner, name, nonce, _ms(spent) if spent else b"0", channel)
    return Call(SCRIPTS["release"], (lock,), args)


def break_(
    lock: bytes, fence: bytes, channel: bytes, *, reason: bytes, retention: float, remember: float
) -> Call:
    return Call(SCRIPTS["break"], (lock, fence), (reason, _ms(retention), _ms(remember), channel))


def inspect(lock: bytes, fence: bytes, channel: bytes) -> Call:
    return Call(SCRIPTS["inspect"], (lock, fence), (channel,))


def begin(
    keys: Sequence[bytes], *, owner: bytes, by: bytes, nonce: bytes, ttl: float,
    lease: float | None, fingerprint: bytes, max_attempts: int, blocks: bool, retention: float,
    mode: bytes,
) -> Call:  # fmt: skip
    args = (
        owner,
        by,
        nonce,
        _ms(ttl),
        b"0" if lease is None else _ms(lease),
        fingerprint,
        _number(max_attempts),
        b"1" if blocks else b"0",
        _ms(retention),
        mode,
    )
    return Call(SCRIPTS["begin"], keys, args)


def settle(
    keys: Sequence[bytes], *, owner: bytes, token: int | None, state: bytes, kept: bytes | None,
    ttl: float | None, done: bytes, free: bytes,
) -> Call:  # fmt: skip
    args = (
        owner,
        b"" if token is None else _number(token),
        state,
        b"0" if kept is None else b"1",
        kept or b"",
        b"0" if ttl is None else _ms(ttl),
        done,
        free,
    )
    return Call(SCRIPTS["settle"], keys, args)


def unclaim(keys: Sequence[bytes], *, nonce: bytes, spent: float, done: bytes, free: bytes) -> Call:
    return Call(SCRIPTS["unclaim"], keys, (nonce, _ms(spent), done, free))


def job(key: bytes) -> Call:
    return Call(SCRIPTS["job"], (key,), ())


def clear(key: bytes, *, resolve: bool, kept: bytes | None, ttl: float | None, done: bytes) -> Call:
    args = (
        b"resolve" if resolve else b"clear",
        b"0" if kept is None else b"1",
        kept or b"",
        b"0" if ttl is None else _ms(ttl),
        done,
    )
    return Call(SCRIPTS["clear"], (key,), args)


def gate(
    keys: Sequence[bytes], *, kind: bytes, token: int, retention: float, remember: float,
    commands: Iterable[Sequence[bytes]],
) -> Call:  # fmt: skip
    args = [kind, _number(token), _ms(retention), _ms(remember) if remember else b"0"]
    for words in commands:
        args.append(_number(len(words)))
        args.extend(words)
    return Call(SCRIPTS["gate"], keys, args)


def fence(keys: Sequence[bytes], *, kind: bytes) -> Call:
    return Call(SCRIPTS["fence"], keys, (kind,))


def unexpected(call: Call, reply: object) -> FenceKitError:
    """For an answer that no version of the script gives."""
    return FenceKitError(
        f"the script {call.script.name} answered {str(reply)[:200]}; is it fencekit's own?"
    )
