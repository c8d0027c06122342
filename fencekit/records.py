"""The frozen values that callers hold: tokens, handles, claims and what `inspect` reads.

Rules this module obeys: values never change, compare by content, survive pickling and do no I/O.
What changes (is the lease still held?) lives in a `Lease`, which a handle only points to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from fencekit.errors import LeaseLost

if TYPE_CHECKING:
    from fencekit._lease import Lease


class LeaseState(str, Enum):
    """What a holder may believe about its lease."""

    HELD = "held"
    """The server confirmed it and the own deadline has not passed."""

    UNSURE = "unsure"
    """The last renewal failed; the own deadline has not passed yet."""

    LOST = "lost"
    """The server said so, or the own deadline passed, or this is a forked child."""

    RELEASED = "released"
    """The holder gave it back."""


class BeginOutcome(str, Enum):
    """What became of an attempt to begin a job."""

    BEGUN = "begun"
    """The caller starts the job."""

    RECLAIMED = "reclaimed"
    """The caller starts the job and takes it over from an attempt that died."""

    ALREADY_DONE = "already_done"
    """The job is finished; the result is remembered if one was stored."""

    IN_PROGRESS = "in_progress"
    """Somebody else runs the job; do not start."""

    FAILED = "failed"
    """The job failed and its failure is remembered, or it was abandoned; do not start."""

    UNKNOWN = "unknown"
    """An attempt died half-way and asked to block; somebody has to resolve it."""


@dataclass(frozen=True)
class FenceToken:
    """A number that grows with every grant for a resource; present it on every write.

    ``kind`` is "lock" for a resource's token and "job" for that of a claim without a lock: the two
    are never compared with each other.

    >>> FenceToken(41, "order:7") < FenceToken(42, "order:7")
    True
    """

    value: int
    resource: str
    kind: str = "lock"

    def __post_init__(self) -> None:
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            raise TypeError(f"a token's value is an int, not {type(self.value).__name__}")
        if not 1 <= self.value <= MAX_TOKEN:
            raise ValueError(f"a token's value is between 1 and 2**53 - 2, not {self.value}")
        if not isinstance(self.resource, str):
            raise TypeError(f"a token's resource is text, not {type(self.resource).__name__}")
        if not self.resource:
            raise ValueError("a token's resource is not empty")
        if self.kind not in ("lock", "job"):
            raise ValueError(f"a token's kind is 'lock' or 'job', not {self.kind!r}")

    def _same_resource(self, other: object) -> bool:
        if not isinstance(other, FenceToken):
            return False
        if (self.resource, self.kind) != (other.resource, other.kind):
            raise ValueError(
                f"tokens of different resources do not compare: {self.resource!r} ({self.kind}) "
                f"and {other.resource!r} ({other.kind})"
            )
        return True

    def __lt__(self, other: object) -> bool:
        if not self._same_resource(other):
            return NotImplemented
        return self.value < other.value  # type: ignore[attr-defined, no-any-return]

    def __gt__(self, other: object) -> bool:
        if not self._same_resource(other):
            return NotImplemented
        return self.value > other.value  # type: ignore[attr-defined, no-any-return]

    def __le__(self, other: object) -> bool:
        if not self._same_resource(other):
            return NotImplemented
        return self.value <= other.value  # type: ignore[attr-defined, no-any-return]

    def __ge__(self, other: object) -> bool:
        if not self._same_resource(other):
            return NotImplemented
        return self.value >= other.value  # type: ignore[attr-defined, no-any-return]

    def __int__(self) -> int:
        return self.value

    def to_header(self) -> str:
        """Text that carries the token in a message or HTTP header.

        >>> FenceToken(42, "order 7").to_header()
        'v1;lock;42;order%207'
        """
        return f"v1;{self.kind};{self.value};{quote(self.resource, safe=':/-._')}"

    @classmethod
    def from_header(cls, text: str) -> FenceToken:
        """The token that ``to_header`` wrote; ``ValueError`` for anything else.

        >>> FenceToken.from_header("v1;lock;42;order%207").resource
        'order 7'
        """
        _, kind, value, resource = _header_parts(text, 4)
        return cls(_digits(value), unquote(resource, errors="strict"), kind)


MAX_TOKEN = 2**53 - 2
"""The largest token: it and its successor are exact in Lua's numbers."""


def _header_parts(text: str, count: int) -> list[str]:
    if not isinstance(text, str):
        raise TypeError(f"a header is text, not {type(text).__name__}")
    parts = text.split(";")
    if len(parts) != count or parts[0] != "v1" or len(text) > 8192 or not text.isprintable():
        raise ValueError(f"not a fencekit v1 header with {count} parts: {text[:80]!r}")
    return parts


def _digits(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 16):
        raise ValueError(f"not a token in a fencekit header: {text[:40]!r}")
    return int(text)


@dataclass(frozen=True)
class LockHandle:
    """Proof that this owner was granted this resource, with the token for its writes.

    ``ttl`` is the lease as asked for. ``replicas`` is how many replicas (or disks, with
    ``Durability(disk=True)``) had confirmed the grant, or None when that was not asked.
    A handle made by hand, unpickled or read by ``from_header`` is *detached*: it proves nothing
    about now. Ask ``gate.check(handle.token)``.
    """

    resource: str
    owner_id: str
    token: FenceToken
    ttl: timedelta
    replicas: int | None = None
    _lease: Lease | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.owner_id, str) or not self.owner_id:
            raise ValueError("a handle's owner_id is text and not empty")
        if self.token.resource != self.resource or self.token.kind != "lock":
            raise ValueError("a handle's token belongs to the handle's resource")
        if self.ttl <= timedelta(0):
            raise ValueError("a handle's ttl is positive")

    @classmethod
    def _granted(
        cls, resource: str, owner_id: str, token: int, lease: Lease, replicas: int | None
    ) -> LockHandle:
        """One for what was checked before it was asked for: made on every grant."""
        number = object.__new__(FenceToken)
        number.__dict__.update(value=token, resource=resource, kind="lock")
        handle = object.__new__(cls)
        handle.__dict__.update(
            resource=resource, owner_id=owner_id, token=number, ttl=timedelta(seconds=lease.ttl),
            replicas=replicas, _lease=lease,
        )  # fmt: skip
        return handle

    @property
    def state(self) -> LeaseState:
        """What the holder may believe now, by its own clock. Costs no round trip."""
        return LeaseState.LOST if self._lease is None else self._lease.state

    @property
    def lost(self) -> bool:
        """True from the moment the lease is known to be lost."""
        return self.state is LeaseState.LOST

    @property
    def remaining(self) -> float:
        """Seconds until the own deadline, 0.0 when it has passed."""
        return 0.0 if self._lease is None else self._lease.remaining

    def check(self) -> None:
        """Raise ``LeaseLost`` unless the lease is still good by the own clock.

        Costs no round trip, so call it often in long work.
        """
        if self._lease is None:
            raise LeaseLost(
                f"this handle of {self.resource!r} is detached from its lease; "
                "ask gate.check(handle.token) instead",
                resource=self.resource,
                token=self.token.value,
                reason="detached",
            )
        self._lease.check()

    def to_header(self) -> str:
        """Text that carries the handle to a sub-task or another service.

        >>> token = FenceToken(42, "order:7")
        >>> LockHandle("order:7", "me", token, timedelta(seconds=30)).to_header()
        'v1;lock;42;order:7;me;30000'
        """
        owner = quote(self.owner_id, safe=":/-._")
        milliseconds = self.ttl // timedelta(milliseconds=1)
        return f"{self.token.to_header()};{owner};{milliseconds}"

    @classmethod
    def from_header(cls, text: str) -> LockHandle:
        """A detached handle as ``to_header`` wrote it; ``ValueError`` for anything else."""
        *_, owner, ttl = _header_parts(text, 6)
        token = FenceToken.from_header(text.rsplit(";", 2)[0])
        owner_id = unquote(owner, errors="strict")
        return cls(token.resource, owner_id, token, timedelta(milliseconds=_digits(ttl)))

    def __reduce__(self) -> tuple[Any, ...]:
        # The lease belongs to this process; a copy elsewhere is detached.
        return (LockHandle, (self.resource, self.owner_id, self.token, self.ttl, self.replicas))


@dataclass(frozen=True)
class Claim:
    """What ``begin`` answered for a job, and the right to finish it if it was begun.

    ``attempts`` counts every start of the job, this one included. ``result`` is the remembered
    result when ``has_result``. ``holder`` and ``retry_after`` (seconds) describe whoever runs the
    job.
    """

    key: str
    outcome: BeginOutcome
    owner_id: str
    attempts: int
    token: FenceToken | None = None
    lock_resource: str | None = None
    has_result: bool = False
    result: Any = None
    holder: str | None = None
    retry_after: float | None = None
    error_type: str | None = None
    error_message: str | None = None
    _ttl: float | None = field(default=None, repr=False, compare=False)
    _failure: dict[str, Any] | None = field(default=None, repr=False, compare=False)
    _lease: Lease | None = field(default=None, repr=False, compare=False)

    @property
    def started(self) -> bool:
        """True when the caller is the one who runs the job."""
        return self.outcome in (BeginOutcome.BEGUN, BeginOutcome.RECLAIMED)

    @property
    def state(self) -> LeaseState:
        """What the claim's holder may believe now, by its own clock."""
        return LeaseState.LOST if self._lease is None else self._lease.state

    @property
    def lost(self) -> bool:
        """True from the moment the claim is known to be lost."""
        return self.state is LeaseState.LOST

    def check(self) -> None:
        """Raise ``LeaseLost`` unless the claim is still good by the own clock."""
        if self._lease is None:
            raise LeaseLost(
                f"this claim of {self.key!r} carries no lease here ({self.outcome.value})",
                resource=self.key,
                reason="detached",
            )
        self._lease.check()

    def __reduce__(self) -> tuple[Any, ...]:
        values = [getattr(self, name) for name in self.__dataclass_fields__ if name != "_lease"]
        return (Claim, tuple(values))


@dataclass(frozen=True)
class LockInfo:
    """What the server knows about a resource at one moment.

    ``age`` and ``remaining`` are seconds. ``waiters`` counts processes that wait (on a
    Cluster, those subscribed through the node that was asked). ``fence`` is the highest token.
    """

    resource: str
    holder: str
    owner_id: str
    host: str
    pid: int
    token: int
    age: float
    remaining: float
    waiters: int
    fence: int


@dataclass(frozen=True)
class Durability:
    """How many replicas must have a grant before it is handed out.

    With ``disk=True`` their append-only files must have it (WAITAOF, Redis 7.2+; the primary's own
    disk counts as one). ``timeout`` is in seconds. A grant that falls short is released and
    ``DurabilityNotReached`` raised, unless ``required=False``: then the handle says what was
    reached.
    """

    replicas: int = 1
    timeout: float | timedelta = 1.0
    disk: bool = False
    required: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.replicas, bool) or not isinstance(self.replicas, int):
            raise TypeError("replicas is an int")
        if not 0 <= self.replicas <= 100:
            raise ValueError("replicas is between 0 and 100")
        if isinstance(self.timeout, timedelta):
            object.__setattr__(self, "timeout", self.timeout.total_seconds())
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, (int, float)):
            raise TypeError("a durability timeout is seconds or a timedelta")
        if not 0.001 <= self.timeout <= 3600:
            raise ValueError("a durability timeout is between 1 ms and 1 h")
