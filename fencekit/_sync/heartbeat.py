"""One background worker per client that renews every lease that is due.

Rules this module obeys:

* What is due together travels together: one script call per batch, per slot on a Cluster.
* Each request has a bounded time. A batch that failed is tried again in smaller ones, healthy
  leases first, so that one renewal that hangs costs its own lease only.
* Leases are held weakly: a dropped handle is not renewed. The worker ends with the last lease.
* Only the server's word or the lease's own deadline ends a lease; an error makes it unsure.
"""

from __future__ import annotations

import heapq
import math
import weakref
from collections.abc import Iterable, Iterator
from itertools import count

from fencekit import _policy
from fencekit._sync.store import RedisStore
from fencekit._lease import Lease, Subject
from fencekit._seam import threads as seam
from fencekit.keys import key_slot

BATCH = 256
"""Leases in one script call: about a millisecond of the server's time."""


class _Beat:
    """What one beat learns of one lease, subject by subject."""

    __slots__ = ("failed", "lease", "lost", "open", "sent", "ttl")

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.ttl = lease.ttl
        self.open = len(lease.subjects)
        self.sent = math.inf
        self.lost: str | None = None
        self.failed: Exception | None = None


class Heartbeat:
    """Keeps leases alive until they are removed, lost or dropped."""

    def __init__(self, link: seam.Link, store: RedisStore) -> None:
        self._link = link
        self._store = store
        self._mutex = _policy.Mutex()
        self._due: list[tuple[float, int, weakref.ref[Lease]]] = []
        self._kept: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._order = count()
        self._wake = seam.Event()
        self._worker: seam.Worker | None = None
        self.owner: object = None

    def add(self, lease: Lease) -> None:
        """Renew this lease from now on. Call it before the grant is handed out."""
        with self._mutex:
            self._kept.add(lease)
            lease.renewed_by = self
            sooner = not self._due or lease.next_beat < self._due[0][0]
            self._push(lease)
            if self._worker is None or not self._worker.alive:
                self._wake.clear()
                self._worker = seam.Worker(self._run, "heartbeat")
            elif sooner:
                self._wake.set()

    def reschedule(self, lease: Lease) -> None:
        """Its next beat has moved; nothing if it is not renewed here."""
        if lease in self._kept:
            self.add(lease)

    def _all(self) -> list[Lease]:
        with self._mutex:
            return list(self._kept)

    def remove(self, lease: Lease) -> None:
        """Do not renew this lease any more. Call it before the release is sent."""
        if lease.renewed_by is self:
            lease.renewed_by = None
            self._forget(lease)

    def _forget(self, lease: Lease) -> None:
        with self._mutex:
            self._kept.discard(lease)

    def _push(self, lease: Lease) -> None:
        if len(self._due) > 2 * len(self._kept) + 64:  # most are leases that have been removed
            self._due = [due for due in self._due if due[2]() in self._kept]
            heapq.heapify(self._due)
        moment = min(lease.next_beat, lease.deadline)
        heapq.heappush(self._due, (moment, next(self._order), weakref.ref(lease)))

    def _run(self) -> None:
        try:
            while True:
                self._wake.wait(self._until_next())
                self._wake.clear()
                self._beat(self._take())
                if not self._kept:
                    self._link.rest()
                    if self._finished():
                        return
        except BaseException:  # the loop is being closed
            self._worker = None
            self._link.rest()
            raise

    def _until_next(self) -> float:
        with self._mutex:
            return max(0.0, self._due[0][0] - _policy.now()) if self._due else 0.0

    def _finished(self) -> bool:
        with self._mutex:
            if self._kept:
                return False
            self._due.clear()
            self._worker = None
            return True

    def _take(self) -> list[Lease]:
        """The leases that are due, and those due so soon that they may as well come along."""
        moment = _policy.now()
        taken: dict[Lease, None] = {}
        with self._mutex:
            while self._due:
                lease = self._due[0][2]()
                if lease is None or lease not in self._kept:
                    heapq.heappop(self._due)
                    continue
                if self._due[0][0] > moment + lease.ttl / 12:
                    break
                heapq.heappop(self._due)
                taken[lease] = None
        return [lease for lease in taken if self._wanted(lease, moment)]

    def _wanted(self, lease: Lease, moment: float) -> bool:
        if not lease.alive:
            self._forget(lease)
            return False
        if lease.renew_until is not None and moment >= lease.renew_until:
            # The cap is reached: let the lease lapse, and be there to say so.
            with self._mutex:
                lease.next_beat = lease.deadline
                self._push(lease)
            return False
        return True

    def _beat(self, leases: list[Lease]) -> None:
        beats = {lease: _Beat(lease) for lease in leases}
        # No request may take longer than the most impatient lease can wait for its turn.
        budget = min((lease.ttl for lease in self._all()), default=1.0) / 6
        for pairs in self._batches(leases):
            told = [beats[lease] for lease, _ in pairs]
            try:
                reasons, when = self._store.renew(pairs, deadline=_policy.now() + budget)
            except Exception as error:  # could not ask: unsure, never lost
                for beat in told:
                    beat.failed = error
                    self._conclude(beat)
                continue
            for beat, reason in zip(told, reasons, strict=True):
                beat.sent = min(when, beat.sent)
                beat.lost = beat.lost or reason
                self._conclude(beat)

    def _conclude(self, beat: _Beat) -> None:
        beat.open -= 1
        if beat.open:
            return
        lease = beat.lease
        if beat.lost is not None:
            if not lease.leaving:
                lease.lose(beat.lost)
        elif beat.failed is not None:
            lease.renewal_failed(beat.failed)
        else:
            lease.renewed(beat.sent, beat.ttl)
        with self._mutex:
            if lease in self._kept:
                self._push(lease)

    def _batches(self, leases: Iterable[Lease]) -> Iterator[list[tuple[Lease, Subject]]]:
        """Pairs that travel in one call: healthy ones in large batches, then doubtful in small."""
        groups: dict[tuple[int, int], list[tuple[Lease, Subject]]] = {}
        for lease in leases:
            for subject in lease.subjects:
                slot = key_slot(subject.key) if self._link.clustered else 0
                groups.setdefault((lease.failures, slot), []).append((lease, subject))
        for failures, slot in sorted(groups):
            pairs = groups[failures, slot]
            size = max(1, BATCH >> (2 * min(failures, 4)))
            if failures and size >= len(pairs):
                size = max(1, len(pairs) // 4)
            for start in range(0, len(pairs), size):
                yield pairs[start : start + size]
