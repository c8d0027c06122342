"""The words of fencekit's own calls, as the headers of its scripts describe them.

The limits send these: what they cost is what the wire, redis-py and the server cost alone.
"""

from __future__ import annotations

import itertools

from fencekit._scripts import SCRIPTS
from fencekit.keys import KeySpace

KEYS = KeySpace()
OWNER = b"3f0b0844d3ab0500"
LABEL = b"benchmark/29080/3f0b0844d3ab0500"
RETENTION = b"604800000"
MEMO = b'"' + b"x" * 18 + b'"'
USED = ("acquire", "release", "begin", "settle", "gate")

_numbers = itertools.count(1 << 60)


def nonce() -> bytes:
    """A name for one attempt, as long as fencekit's."""
    return b"r%x" % next(_numbers)


class Words:
    """What follows the digest, for one name. The first word is the number of keys."""

    def __init__(self, name: str) -> None:
        self.lock, self.fence = KEYS.lock(name), KEYS.fence(name)
        self.free = KEYS.free_channel(name)
        self.job, self.job_fence = KEYS.job(name), KEYS.job_fence(name)
        self.done = KEYS.done_channel(name)
        self.target = f"{name}:status".encode()
        self.tag = KEYS.fence(name).removesuffix(b":fence")

    def acquire(self) -> tuple[bytes, ...]:
        return (
            b"2", self.lock, self.fence, OWNER, LABEL, nonce(), b"30000", RETENTION, b"0",
        )  # fmt: skip

    def release(self, token: bytes) -> tuple[bytes, ...]:
        return (b"1", self.lock, OWNER, token, b"", b"0", self.free)

    def begin(self) -> tuple[bytes, ...]:
        return (
            b"4", self.job, self.job_fence, self.lock, self.fence, OWNER, LABEL, nonce(),
            b"86400000", b"30000", b"", b"0", b"0", RETENTION, b"take",
        )  # fmt: skip

    def settle(self, token: bytes) -> tuple[bytes, ...]:
        return (
            b"2", self.job, self.lock, OWNER, token, b"d", b"1", MEMO, b"86400000",
            self.done, self.free,
        )  # fmt: skip

    def write(self, token: bytes) -> tuple[bytes, ...]:
        operation = self.tag + b":op:" + nonce()
        return (
            b"4", self.fence, operation, self.fence, self.target, b"lock", token, RETENTION,
            b"30000", b"3", b"SET", self.target, b"x" * 20,
        )  # fmt: skip


def digest(script: str) -> str:
    """By what name the server knows the script."""
    return SCRIPTS[script].digest


def sources() -> list[str]:
    """The scripts that have to be loaded first."""
    return [SCRIPTS[name].source for name in USED]


def answered(reply: object, first: object) -> None:
    """The limit measures work that was done, not refusals."""
    got = reply[0] if isinstance(reply, list) else reply
    if got != first:
        raise RuntimeError(f"the script answered {reply!r}, not {first!r}")
