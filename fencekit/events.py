"""What happened, as typed values for listeners.

Rules this module obeys: an event is a frozen value; a listener is a plain callable that takes one
event, is called in the task or thread in which the thing happened, and must not block. Its
exceptions are logged and go no further: a listener never breaks a job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

logger = logging.getLogger("fencekit")


@dataclass(frozen=True)
class Event:
    """Something that happened to ``subject``: a resource's name or an idempotency key."""

    subject: str


@dataclass(frozen=True)
class Granted(Event):
    """A lock was granted."""

    token: int
    waited: float


@dataclass(frozen=True)
class Refused(Event):
    """A lock was not granted: somebody else holds it."""

    holder: str | None
    waited: float


@dataclass(frozen=True)
class Waited(Event):
    """A caller stopped waiting, with a grant or a result or without; seconds."""

    waited: float
    granted: bool


@dataclass(frozen=True)
class Renewed(Event):
    """A lease was extended."""

    token: int


@dataclass(frozen=True)
class RenewalFailed(Event):
    """A renewal got no answer; the lease is unsure and will be tried again soon."""

    token: int
    error: str


@dataclass(frozen=True)
class LeaseInDanger(Event):
    """Renewals keep failing and the own deadline is near; seconds."""

    token: int
    remaining: float


@dataclass(frozen=True)
class Lost(Event):
    """A lease ended under its holder."""

    token: int
    reason: str


@dataclass(frozen=True)
class Released(Event):
    """A lock was given back."""

    token: int


@dataclass(frozen=True)
class ReleaseFailed(Event):
    """A lock could not be given back; its lease ends by itself."""

    token: int
    error: str


@dataclass(frozen=True)
class Broken(Event):
    """An operator took a lock from its holder."""

    token: int
    reason: str


@dataclass(frozen=True)
class Begun(Event):
    """A job was started."""

    token: int
    attempt: int


@dataclass(frozen=True)
class Reclaimed(Event):
    """A job was taken over from an attempt that died."""

    token: int
    attempt: int


@dataclass(frozen=True)
class Duplicate(Event):
    """A job was not started because somebody else runs it; seconds."""

    holder: str | None
    retry_after: float | None


@dataclass(frozen=True)
class Finished(Event):
    """A job was completed and its result remembered."""

    token: int


@dataclass(frozen=True)
class Failed(Event):
    """An attempt failed; ``remembered`` says whether that stands or the job may run again."""

    token: int
    remembered: bool
    error: str


@dataclass(frozen=True)
class Replayed(Event):
    """A remembered result was returned instead of running the job."""


@dataclass(frozen=True)
class Abandoned(Event):
    """A job was given up after its last allowed attempt."""

    attempts: int


@dataclass(frozen=True)
class FencedOut(Event):
    """A write or completion with an older token was refused."""

    token: int
    current: int


Listener = Callable[[Event], object]


class Listeners:
    """The listeners of one lock, guard or gate."""

    def __init__(self, listeners: Iterable[Listener] = ()) -> None:
        self._listeners = tuple(listeners)
        for listener in self._listeners:
            if not callable(listener):
                raise TypeError(f"a listener is callable, not {type(listener).__name__}")

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def tell(self, event: Event) -> None:
        """Pass the event to every listener, whatever the others do."""
        for listener in self._listeners:
            try:
                listener(event)
            except (Exception, SystemExit):  # a heartbeat may be who tells it
                logger.exception("a fencekit listener failed on %r", event)
