"""What stands behind the lock's verbs: its settings, and one caller's way to a grant.

Rules this module obeys:

* A grant that arrives too late to be held is given back, not handed out.
* Whoever stands in line here comes before whoever comes later; only the first in line asks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from redis.exceptions import TimeoutError as RedisTimeoutError

from fencekit import _policy, _replies
from fencekit._async.backend import Backend, Backends
from fencekit._async.holding import ThreadBeats
from fencekit._lease import Lease, Subject
from fencekit.errors import DurabilityNotReached, LockNotAcquired, LockNotOwned, LockReentered
from fencekit.events import Granted, Listener, Listeners, Refused, Released, Waited
from fencekit.records import Durability, LockHandle


class Locking:
    """A lock's settings and the steps that its verbs share."""

    def __init__(
        self, client: Any, user: str, prefix: str, label: str, timeout: float | timedelta,
        retention: float | timedelta, delay: float | timedelta, listeners: Iterable[Listener],
        heartbeat: Any,
    ) -> None:  # fmt: skip
        self.backends = Backends(client, prefix, user)
        self.label = _policy.check_label(label)
        self.timeout = _policy.seconds(timeout, "timeout")
        self.retention = _policy.seconds(retention, "retention")
        self.delay = _policy.seconds(delay, "lock_delay", least=0.0)
        self.listeners = Listeners(listeners)
        self._beats = None if heartbeat is None else ThreadBeats(heartbeat, prefix)

    def deadline(self, within: float = math.inf) -> float:
        """Until when a call that starts now is tried."""
        return _policy.now() + min(self.timeout, within)

    def heartbeat(self) -> Any:
        """Who renews."""
        return self.backends.get().heartbeat if self._beats is None else self._beats.get()

    def lease_for(self, wish: Wish, token: int, sent: float) -> Lease:
        """The lease of a grant that was asked for at `sent`."""
        keys = self.backends.keys
        subject = Subject(
            "lock", keys.lock(wish.resource), keys.fence(wish.resource), wish.owner.encode(), token
        )
        return Lease(
            wish.resource, token, wish.ttl, sent, (subject,), self.listeners,
            retention=self.retention, delay=self.delay, max_hold=wish.max_hold,
        )  # fmt: skip

    def lease_of(self, handle: LockHandle) -> Lease:
        """The handle's lease, or one made up for a handle that comes from elsewhere."""
        if handle._lease is not None:
            return handle._lease
        wish = Wish(handle.resource, handle.ttl.total_seconds(), handle.owner_id)
        return self.lease_for(wish, handle.token.value, _policy.now())

    async def give_back(self, handle: LockHandle, within: float = math.inf) -> None:
        """Release on the server; LockNotOwned when it was not this handle's any more."""
        lease = self.lease_of(handle)
        if lease.inherited:
            raise not_owned(handle, "it belongs to the process that forked this one", "release")
        if not lease.alive and not lease.lapsed:
            raise not_owned(handle, lease.reason or "it was given back before", "release")
        lease.leaving = True
        try:
            reason = await self.backends.get().store.release(
                handle.resource,
                owner=handle.owner_id,
                token=handle.token.value,
                lease=handle._lease,
                deadline=self.deadline(within),
            )
        except Exception:
            raise
        except BaseException:  # cancelled: the release follows by itself
            lease.release()
            raise
        finally:
            lease.leaving = False
        if reason is not None:
            lease.lose(reason)
            raise not_owned(handle, reason, "release")
        lease.release()
        if self.listeners:
            self.listeners.tell(Released(handle.resource, handle.token.value))


class Wish(NamedTuple):
    """What one caller asks for."""

    resource: str
    ttl: float
    owner: str
    durability: Durability | None = None
    max_hold: float | None = None


def not_owned(handle: LockHandle, reason: str, verb: str) -> LockNotOwned:
    """The error for a handle that has lost its resource."""
    return LockNotOwned(
        f"cannot {verb} {handle.resource!r} with token {handle.token.value}: {reason}; "
        "stop working on it and acquire it again",
        resource=handle.resource,
        token=handle.token.value,
        reason=reason,
    )


class Request:
    """One caller's way to one grant."""

    def __init__(self, locking: Locking, wish: Wish) -> None:
        self._locking = locking
        self._wish = wish
        self._deadline = 0.0
        self._refusal: _replies.Refusal | None = None

    async def granted(self, wait: float) -> LockHandle:
        """The handle, after standing in line for as long as allowed."""
        backend = self._locking.backends.get()
        keys, resource = self._locking.backends.keys, self._wish.resource
        started = _policy.now()
        self._deadline = started + max(wait, self._locking.timeout)
        channel = keys.free_channel(resource)
        handle = None
        if wait > 0 and backend.waits_for_itself(keys.lock(resource)):
            raise self._reentered()
        if wait == 0 or not backend.room.occupied(channel):
            handle = await self._ask(backend)
        if handle is None and wait > 0:
            handle = await self._stand_in_line(backend, channel, started + wait)
        waited = _policy.now() - started
        listeners = self._locking.listeners
        if listeners and wait > 0:
            listeners.tell(Waited(resource, waited, handle is not None))
        if handle is None:
            raise self._refused(waited)
        if listeners:
            listeners.tell(Granted(resource, handle.token.value, waited))
        return handle

    async def _stand_in_line(
        self, backend: Backend, channel: bytes, until: float
    ) -> LockHandle | None:
        place = backend.room.join(channel)
        next_asks = 0.0
        left: float | None = None
        try:
            while await backend.room.turn(place, until, left):
                handle = await self._ask(backend)
                if handle is not None:
                    next_asks = _policy.now() + self._wish.ttl
                    return handle
                left = None if self._refusal is None else self._refusal.left
                left = math.inf if left is None else left + 0.001  # a key lives through its last ms
        finally:
            backend.room.leave(place, ask_at=next_asks)
        return await self._ask(backend)  # the last chance, and whom to name in the error

    async def _ask(self, backend: Backend) -> LockHandle | None:
        locking, wish = self._locking, self._wish
        answer, replicas = await backend.store.acquire(
            wish.resource,
            owner=wish.owner,
            by=_policy.label(locking.label or wish.owner),
            ttl=wish.ttl,
            retention=locking.retention,
            delay=locking.delay,
            deadline=self._deadline,
            durability=wish.durability,
        )
        if isinstance(answer, _replies.Refusal):
            self._refusal = answer
            return None
        if isinstance(answer, _replies.Spent):
            return None
        lease = locking.lease_for(wish, answer.token, answer.sent)
        handle = LockHandle._granted(wish.resource, wish.owner, answer.token, lease, replicas)
        if wish.durability is not None or not lease.alive:
            await self._worth_having(handle, lease)
        return handle

    async def _worth_having(self, handle: LockHandle, lease: Lease) -> None:
        wanted, reached = self._wish.durability, handle.replicas or 0
        if wanted is not None and wanted.required and reached < wanted.replicas:
            with suppress(LockNotOwned):
                await self._locking.give_back(handle)
            raise DurabilityNotReached(
                f"only {reached} of {wanted.replicas} replicas have the grant of "
                f"{handle.resource!r}; it was given back: try again or ask for fewer",
                resource=handle.resource,
                wanted=wanted.replicas,
                reached=reached,
            )
        if not lease.alive:
            with suppress(LockNotOwned):  # its time may be up on the server too
                await self._locking.give_back(handle)
            raise RedisTimeoutError(
                f"the grant of {handle.resource!r} took longer than its ttl of {lease.ttl:g} s "
                "to arrive and was given back: use a longer ttl"
            )

    def _reentered(self) -> LockReentered:
        return LockReentered(
            f"{self._wish.resource!r} is already held by this very task or thread, which would "
            "wait for itself; pass the handle down instead",
            resource=self._wish.resource,
        )

    def _refused(self, waited: float) -> LockNotAcquired:
        resource, refusal = self._wish.resource, self._refusal
        holder = None if refusal is None else refusal.holder
        left = None if refusal is None else refusal.left
        self._locking.listeners.tell(Refused(resource, holder, waited))
        lasts = "" if left is None else f" for up to {left:.3f} s more"
        return LockNotAcquired(
            f"{resource!r} is held by {holder or 'another'}{lasts}; gave up after {waited:.3f} s: "
            "try again later or pass a longer wait",
            resource=resource,
            holder=holder,
            retry_after=left,
        )
