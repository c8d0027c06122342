"""A lease as its holder sees it: held, unsure, lost or released. No I/O.

Rules this module obeys:

* I9: `deadline` is counted from before the request that was confirmed last was sent.
* Lost is final. It is reached by the server's word, or by the deadline, or in a forked child.
* An answer that comes after the release changes nothing.
* The mutex guards transitions only, so that exactly one caller sees each; callbacks run outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from fencekit import _policy
from fencekit.errors import LeaseLost
from fencekit.events import Event, LeaseInDanger, Listeners, Lost, RenewalFailed, Renewed, logger
from fencekit.records import LeaseState

LAPSED = "its deadline passed without a renewal"


class Subject(NamedTuple):
    """One record on the server that a lease keeps alive."""

    kind: Literal["lock", "job"]
    key: bytes
    fence: bytes
    owner: bytes
    token: int


class Lease:
    """The mutable half of a handle or claim."""

    def __init__(
        self,
        name: str,
        token: int,
        ttl: float,
        sent: float,
        subjects: tuple[Subject, ...],
        listeners: Listeners,
        *,
        retention: float,
        delay: float = 0.0,
        max_hold: float | None = None,
        task: object = None,
    ) -> None:
        self.name = name
        self.token = token
        self.ttl = ttl
        self.subjects = subjects
        self.retention = retention
        self.delay = delay
        self.deadline = _policy.deadline_after(sent, ttl)
        self.renew_until = None if max_hold is None else sent + max_hold
        self.next_beat = sent + ttl / 3
        self.failures = 0
        self.task = task
        self.reason: str | None = None
        self.renewed_by: object = None
        """The heartbeat that has it."""
        self.leaving = False
        """A release or completion is under way: a renewal that crossed it proves nothing."""
        self._listeners = listeners
        self._pid = _policy.pid()
        self._mutex = _policy.Mutex()
        self._state = LeaseState.HELD
        self._warned = False
        self._on_loss: list[Callable[[], object]] = []

    @property
    def state(self) -> LeaseState:
        """The state now; a passed deadline is noticed here too."""
        if self._pid != _policy.pid():
            return LeaseState.LOST
        if self._state in (LeaseState.HELD, LeaseState.UNSURE) and _policy.now() >= self.deadline:
            self.lose(LAPSED)
        return self._state

    @property
    def lapsed(self) -> bool:
        """Lost by the own clock alone: the server may still have it."""
        return self.state is LeaseState.LOST and self.reason == LAPSED

    @property
    def inherited(self) -> bool:
        """True in a forked child: the lease is the parent's."""
        return self._pid != _policy.pid()

    @property
    def alive(self) -> bool:
        """Held or unsure: worth renewing and worth releasing."""
        state = self.state
        return state is LeaseState.HELD or state is LeaseState.UNSURE

    @property
    def remaining(self) -> float:
        """Seconds until the own deadline."""
        return max(0.0, self.deadline - _policy.now()) if self.alive else 0.0

    def check(self) -> None:
        """Raise LeaseLost unless held or unsure."""
        if self.alive:
            return
        reason = self.reason
        if self.inherited:
            reason = f"it belongs to process {self._pid}, which forked this one"
        elif self._state is LeaseState.RELEASED:
            reason = "it was released"
        raise LeaseLost(
            f"the lease of {self.name!r} (token {self.token}) is gone: {reason}; "
            "stop working on it",
            resource=self.name,
            token=self.token,
            reason=reason,
        )

    def renewed(self, sent: float, ttl: float, *, extended: bool = False) -> None:
        """The server confirmed that the lease runs for ``ttl`` from ``sent``.

        A beat that an extension overtook says nothing about the new length.
        """
        with self._mutex:
            if self._state not in (LeaseState.HELD, LeaseState.UNSURE):
                return
            self._state = LeaseState.HELD
            if extended or ttl == self.ttl:
                self.ttl = ttl
                self.deadline = _policy.deadline_after(sent, ttl)
                self.next_beat = sent + ttl / 3
            self.failures = 0
            self._warned = False
        if self._listeners:
            self._listeners.tell(Renewed(self.name, self.token))

    def shorten(self, ttl: float) -> None:
        """An extension by so long is about to be asked for: if it is less than what is left, count
        on no more from now on, whatever becomes of the answer (I9)."""
        with self._mutex:
            deadline = _policy.deadline_after(_policy.now(), ttl)
            self.deadline = min(self.deadline, deadline)

    def renewal_failed(self, error: BaseException) -> None:
        """A renewal got no answer: unsure, and due again soon."""
        with self._mutex:
            if self._state not in (LeaseState.HELD, LeaseState.UNSURE):
                return
            self._state = LeaseState.UNSURE
            self.failures += 1
            moment = _policy.now()
            self.next_beat = moment + _policy.pause(
                self.failures, base=self.ttl / 50, most=self.ttl / 10
            )
            remaining = self.deadline - moment
            danger = not self._warned and remaining < self.ttl / 3
            self._warned = self._warned or danger
        logger.warning(
            "renewal %d of the lease of %r failed (%s); %.3f s left",
            self.failures,
            self.name,
            error,
            max(0.0, remaining),
        )
        self._listeners.tell(RenewalFailed(self.name, self.token, str(error)))
        if danger:
            self._listeners.tell(LeaseInDanger(self.name, self.token, max(0.0, remaining)))

    def lose(self, reason: str) -> None:
        """The lease is gone; tell whoever asked to be told. Once."""
        with self._mutex:
            if self._state not in (LeaseState.HELD, LeaseState.UNSURE):
                return
            self._state = LeaseState.LOST
            self.reason = reason
            callbacks, self._on_loss = self._on_loss, []
        logger.warning("the lease of %r (token %d) is lost: %s", self.name, self.token, reason)
        for callback in callbacks:
            try:
                callback()
            except Exception:  # its loop may be closed by now
                logger.exception("could not tell the holder of %r", self.name)
        self._listeners.tell(Lost(self.name, self.token, reason))

    def release(self) -> bool:
        """Mark it given back; False when there was nothing left to give back."""
        if self.inherited:  # before the mutex: a parent's thread may have held it at the fork
            return False
        with self._mutex:
            if self._state not in (LeaseState.HELD, LeaseState.UNSURE):
                return False
            self._state = LeaseState.RELEASED
            self._on_loss = []
            return True

    def on_loss(self, callback: Callable[[], object]) -> None:
        """Call back when the lease is lost; at once if it is already."""
        with self._mutex:
            if self._state in (LeaseState.HELD, LeaseState.UNSURE):
                self._on_loss.append(callback)
                return
        callback()

    def tell(self, event: Event) -> None:
        """Pass an event about this lease to its listeners."""
        self._listeners.tell(event)
