"""Every exception of fencekit, under one root.

Rules this module obeys:

* A fencekit error is *certain*: the server, or a monotonic deadline, said so. "Could not
  ask" is never one of these; what redis-py or the network raised passes through as it is.
* Busy, lost and not-yours are different classes.
* The message is one sentence: what happened, to which key, and what to do. The facts in it
  are attributes too, and both survive pickling unchanged.
"""

from __future__ import annotations

from typing import Any


class FenceKitError(Exception):
    """Root of every error that fencekit raises by itself.

    The first argument is the sentence; the facts are keyword arguments and become
    attributes. A fact that the class does not declare is a ``TypeError``.

    >>> import pickle
    >>> error = LockNotAcquired("'a' is held", resource="a", retry_after=1.5)
    >>> copy = pickle.loads(pickle.dumps(error))
    >>> str(copy), copy.resource, copy.retry_after
    ("'a' is held", 'a', 1.5)
    """

    def __init__(self, message: str = "", /, **facts: Any) -> None:
        super().__init__(message)
        for name, value in facts.items():
            if name.startswith("_") or not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} has no fact called {name!r}")
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_restore, (type(self), self.args, dict(self.__dict__)))


def _restore(cls: type[FenceKitError], args: tuple[Any, ...], facts: dict[str, Any]) -> object:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(facts)
    return error


class LockNotAcquired(FenceKitError):
    """The resource is held by somebody else and stayed so for as long as the caller would wait.

    Normal under contention. ``holder`` is the holder's label (host/pid/name) and
    ``retry_after`` the seconds its lease has left, both None when they are not known.
    """

    resource: str = ""
    holder: str | None = None
    retry_after: float | None = None


class LockReentered(LockNotAcquired):
    """The task or thread that asks already holds the resource, so waiting would never end."""


class LockNotOwned(FenceKitError):
    """The handle no longer owns the resource: it lapsed, was released, broken or taken over."""

    resource: str = ""
    token: int = 0
    reason: str | None = None


class LeaseLost(FenceKitError):
    """The lease ended while its holder was still working: stop, and let the fence refuse the rest.

    An incident, unlike LockNotAcquired. Raised by ``hold`` and ``run`` on the way out and by
    ``check()``. ``reason`` says how it was noticed.
    """

    resource: str = ""
    token: int = 0
    reason: str | None = None


class FencedOutError(FenceKitError):
    """A write carried an older token than the newest one known for its resource; nothing was
    written.

    ``token`` is the refused one, ``current`` the newest. For an SQL write ``table`` names the table
    and ``key`` the row, as a mapping, where the statement meant one row by its key.
    """

    resource: str = ""
    token: int = 0
    current: int = 0
    table: str | None = None
    key: Any = None


class RowMissing(FenceKitError):
    """No row, or fewer rows than the caller expected, are what a fenced SQL write meant.

    Nothing that it meant carries a newer token. ``written`` rows were written: roll back if that is
    not what you want.
    """

    table: str = ""
    key: Any = None
    token: int = 0
    written: int = 0


class RowExists(FenceKitError):
    """A fenced insert found its row already there, with no newer token; nothing was written."""

    table: str = ""
    key: Any = None
    token: int = 0


class UnexpectedRows(FenceKitError):
    """A fenced SQL write changed more rows than the caller said, or than its key can have.

    ``written`` rows were written in the open transaction: roll back.
    """

    table: str = ""
    token: int = 0
    written: int = 0
    expected: int = 0


class RowCountUnknown(FenceKitError):
    """The database driver does not say how many rows it wrote, so nobody knows what happened.

    Roll back, and use a driver, or a statement, that can tell.
    """

    table: str = ""
    token: int = 0


class IdempotencyNotOwned(FenceKitError):
    """The claim was taken over, cleared or never made by this caller; its completion is refused.

    ``state`` is the record's state now (None: no record). When a newer owner has finished
    already, ``has_result`` is true and ``result`` is what it stored.
    """

    key: str = ""
    token: int = 0
    state: str | None = None
    has_result: bool = False
    result: Any = None


class IdempotencyResultMissing(FenceKitError):
    """There is no remembered result: the job is absent, pending, failed, or kept none."""

    key: str = ""
    state: str | None = None


class IdempotencyConflict(FenceKitError):
    """The key is known with another fingerprint: the same key was used for different input."""

    key: str = ""
    fingerprint: str = ""
    known: str = ""


class IdempotencyInProgress(FenceKitError):
    """Somebody else is running this job now.

    ``retry_after`` is the time its lease has left in seconds, ``holder`` its label.
    """

    key: str = ""
    holder: str | None = None
    retry_after: float | None = None


class IdempotencyReentered(IdempotencyInProgress):
    """The task or thread that asks is running this very job, so waiting would never end."""


class IdempotencyAlreadyDone(FenceKitError):
    """The job is finished; ``result`` is the remembered result if ``has_result``."""

    key: str = ""
    has_result: bool = False
    result: Any = None


class IdempotencyFailed(FenceKitError):
    """The job failed before and the failure is remembered.

    ``error_type`` and ``error_message`` are what the body raised then.
    """

    key: str = ""
    error_type: str = ""
    error_message: str = ""


class IdempotencyAbandoned(IdempotencyFailed):
    """The job was started as often as allowed and never finished; it will not be started again."""

    attempts: int = 0


class IdempotencyOutcomeUnknown(FenceKitError):
    """A run with ``on_lapse="block"`` died half-way; nobody knows whether its effect happened.

    Answer with ``resolve(key, result)`` if it did or ``clear(key)`` if the job may run again.
    """

    key: str = ""
    holder: str | None = None


class ResultTooLarge(FenceKitError):
    """The encoded result is larger than the guard remembers; nothing was stored."""

    key: str = ""
    size: int = 0
    limit: int = 0


class ForeignValue(FenceKitError):
    """A Redis key that fencekit owns holds something fencekit did not write; it was left alone."""

    key: str = ""


class DurabilityNotReached(FenceKitError):
    """Fewer replicas or disks confirmed the grant than asked for; the lock was given back."""

    resource: str = ""
    wanted: int = 0
    reached: int = 0


class CanonicalizeError(FenceKitError):
    """The payload has no canonical form; ``path`` says where, as in ``payload['a'][0]``."""

    path: str = ""
