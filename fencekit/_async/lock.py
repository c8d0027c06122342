"""The fenced lock: one live holder per resource, a larger token with every grant."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, TypeAlias

from fencekit import _policy
from fencekit._async.holding import Guarded
from fencekit._async.locking import Locking, Request, Wish, not_owned
from fencekit._replies import seen
from fencekit.errors import LeaseLost, LockNotAcquired, LockNotOwned
from fencekit.events import Broken, Listener
from fencekit.keys import check_name
from fencekit.records import Durability, LockHandle, LockInfo

DEFAULT_TTL = 30.0
"""The lease in seconds when none is given."""

Duration: TypeAlias = float | timedelta


class AsyncLock:
    """One live holder per resource; every grant carries a larger token.

    ``client`` is a redis-py client (standalone, Sentinel or Cluster); the lock borrows its
    connections. ``prefix`` starts every key. ``label`` is what others see of a holder, as
    host/pid/label. ``timeout`` is for how many seconds a call is tried again while Redis cannot be
    reached. ``retention`` is how long a fence outlives its last grant. ``lock_delay`` keeps a name
    back for so long after a lease that ended without a release, for resources that cannot check
    tokens. ``listeners`` get typed events (``fencekit.events``). ``heartbeat`` is a blocking
    ``redis.Redis`` client to renew with: leases are then renewed by a thread, which code that
    blocks the event loop does not stop.

    Errors: ``TypeError`` for the wrong client, ``ValueError`` for a bad prefix or duration.

    >>> lock = AsyncLock(client)
    >>> async with lock.hold("order:7", ttl=30) as handle:
    ...     print(handle.token.resource, handle.state.value)
    order:7 held
    """

    def __init__(
        self,
        client: Any,
        *,
        prefix: str = "fencekit",
        label: str = "",
        timeout: Duration = 10.0,
        retention: Duration = _policy.RETENTION,
        lock_delay: Duration = 0.0,
        listeners: Iterable[Listener] = (),
        heartbeat: Any = None,
    ) -> None:
        self._locking = Locking(
            client, type(self).__name__, prefix, label, timeout, retention, lock_delay, listeners,
            heartbeat,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"{type(self).__name__}(prefix={self._locking.backends.keys.prefix!r})"

    async def acquire(
        self,
        resource: str,
        *,
        ttl: Duration = DEFAULT_TTL,
        wait: Duration | None = 0,
        owner_id: str | None = None,
        durability: Durability | None = None,
    ) -> LockHandle:
        """Return a handle once this caller holds the resource.

        ``ttl`` is the lease, ``wait`` for how long to stand in line: 0 not at all, None for ever
        (both in seconds or as a timedelta). Nothing renews the lease: call ``extend``, or use
        ``hold``. ``owner_id`` is a label; what identifies the holder is owner and token.

        Raises ``LockNotAcquired`` when it stayed held by another, ``LockReentered`` when the caller
        would wait for itself, ``DurabilityNotReached``, and what redis-py raises when Redis cannot
        be reached for ``timeout`` or ``wait``, whichever is longer.

        >>> handle = await lock.acquire("invoice:1", ttl=5)
        >>> await lock.release(handle)
        """
        request = Request(self._locking, self._wish(resource, ttl, owner_id, durability))
        return await request.granted(_policy.waiting(wait))

    async def try_acquire(
        self,
        resource: str,
        *,
        ttl: Duration = DEFAULT_TTL,
        owner_id: str | None = None,
        durability: Durability | None = None,
    ) -> LockHandle | None:
        """Return a handle, or None when somebody else holds the resource.

        >>> handle = await lock.try_acquire("invoice:2", ttl=5)
        >>> print(await lock.try_acquire("invoice:2", ttl=5))
        None
        >>> await lock.release(handle)
        """
        try:
            return await self.acquire(resource, ttl=ttl, owner_id=owner_id, durability=durability)
        except LockNotAcquired:
            return None

    async def extend(self, handle: LockHandle, *, ttl: Duration | None = None) -> None:
        """Let the lease run for ``ttl`` from now (default: as acquired).

        Raises ``LockNotOwned`` when it is not this handle's any more; a lease that ran out is never
        taken anew. A handle that came from another process is extended by owner and token.

        >>> handle = await lock.acquire("invoice:3", ttl=5)
        >>> await lock.extend(handle, ttl=10)
        >>> await lock.release(handle)
        """
        _check_handle(handle)
        duration = _policy.seconds(handle.ttl if ttl is None else ttl, "ttl")
        lease = self._locking.lease_of(handle)
        if lease.inherited:
            raise not_owned(handle, "it belongs to the process that forked this one", "extend")
        if not lease.alive:
            raise not_owned(handle, lease.reason or "it was given back before", "extend")
        lease.shorten(duration)
        (reason,), sent = await self._locking.backends.get().store.renew(
            [(lease, lease.subjects[0])], deadline=self._locking.deadline(), ttl=duration
        )
        if reason is not None:
            lease.lose(reason)
            raise not_owned(handle, reason, "extend")
        lease.renewed(sent, duration, extended=True)
        self._locking.heartbeat().reschedule(lease)

    async def release(self, handle: LockHandle) -> None:
        """Give the resource back and wake the next in line.

        Raises ``LockNotOwned`` when it is not this handle's any more; then nothing is deleted.

        >>> handle = await lock.acquire("invoice:4", ttl=5)
        >>> await lock.release(handle)
        """
        _check_handle(handle)
        lease = self._locking.lease_of(handle)
        if lease.renewed_by is not None and not lease.inherited:
            self._locking.heartbeat().remove(lease)
        await self._locking.give_back(handle)

    def hold(
        self,
        resource: str,
        *,
        ttl: Duration = DEFAULT_TTL,
        wait: Duration | None = 0,
        owner_id: str | None = None,
        max_hold: Duration | None = None,
        durability: Durability | None = None,
    ) -> AsyncHold:
        """Hold the resource for a block, with a heartbeat, and give it back at the end.

        ``max_hold`` ends the renewals after so long, so that hung code does not hold for ever. When
        the lease is lost, a body in an event loop is cancelled and ``LeaseLost`` raised, unless the
        body itself raised something else; a body in a thread asks ``handle.check()``.

        Raises what ``acquire`` raises; then the body does not run.

        >>> async with lock.hold("invoice:5", ttl=5) as handle:
        ...     handle.check()
        """
        cap = None if max_hold is None else _policy.seconds(max_hold, "max_hold")
        wish = self._wish(resource, ttl, owner_id, durability, cap)
        return AsyncHold(self._locking, wish, _policy.waiting(wait))

    async def inspect(self, resource: str) -> LockInfo | None:
        """Who holds the resource, with which token and for how long yet, or None.

        >>> print(await lock.inspect("invoice:6"))
        None
        """
        check_name(resource)
        store = self._locking.backends.get().store
        return await store.inspect(resource, deadline=self._locking.deadline())

    async def break_lock(self, resource: str, *, reason: str) -> LockInfo | None:
        """Take the resource from its holder, for operators; returns who held it.

        The fence is raised first: from now on the holder's writes bounce, and its next renewal is
        told ``reason``. A holder whose lease has lapsed already is fenced out too.

        >>> print(await lock.break_lock("invoice:7", reason="its host is gone"))
        None
        """
        check_name(resource)
        if not isinstance(reason, str):
            raise TypeError(f"reason is text, not {type(reason).__name__}")
        if not reason.strip() or len(reason) > 1000:
            raise ValueError("reason has between 1 and 1000 characters")
        store, locking = self._locking.backends.get().store, self._locking
        held = await store.inspect(resource, deadline=locking.deadline())
        fence, holder, token = await store.break_lock(
            resource, reason=reason, held=held, retention=locking.retention,
            deadline=locking.deadline(),
        )  # fmt: skip
        if holder is None:
            return None
        locking.listeners.tell(Broken(resource, token, reason))
        if held is None or held.token != token:  # the holder changed between the two questions
            held = seen(resource, holder, token, fence)
        return held

    def lock_key(self, resource: str) -> str:
        """The Redis key of a resource's lock.

        >>> lock.lock_key("a b")
        'fencekit:{a%20b}:lock'
        """
        return self._locking.backends.keys.lock(resource).decode()

    def _wish(
        self,
        resource: str,
        ttl: Duration,
        owner_id: str | None,
        durability: Durability | None,
        max_hold: float | None = None,
    ) -> Wish:
        check_name(resource)
        owner = _policy.owner() if owner_id is None else _policy.check_owner(owner_id)
        if durability is not None and not isinstance(durability, Durability):
            raise TypeError(f"durability is a Durability, not {type(durability).__name__}")
        return Wish(resource, _policy.seconds(ttl, "ttl"), owner, durability, max_hold)


class AsyncHold:
    """The block of ``hold``; entered once."""

    def __init__(self, locking: Locking, wish: Wish, wait: float) -> None:
        self._locking = locking
        self._wish = wish
        self._wait = wait
        self._handle: LockHandle | None = None
        self._guarded: Guarded | None = None

    async def __aenter__(self) -> LockHandle:
        if self._handle is not None:
            raise RuntimeError("this hold was entered before: call hold() again")
        self._handle = await Request(self._locking, self._wish).granted(self._wait)
        assert self._handle._lease is not None
        try:
            self._guarded = Guarded(self._handle._lease, self._locking.heartbeat())
            self._locking.backends.get().keep_in_mind(self._handle._lease)
        except BaseException:  # no thread to renew with: the body does not run
            await self._locking.give_back(self._handle)
            raise
        return self._handle

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        assert self._guarded is not None
        cut_short = self._guarded.close((kind, error, trace))
        loss = await self._guarded.leave(self._give_back)
        if loss is not None and (error is None or cut_short):
            raise loss

    async def _give_back(self, within: float) -> None:
        assert self._handle is not None
        handle = self._handle
        try:
            await self._locking.give_back(handle, within)
        except LockNotOwned as error:
            raise LeaseLost(
                f"the lease of {handle.resource!r} (token {handle.token.value}) ended before the "
                f"block did: {error.reason}",
                resource=handle.resource,
                token=handle.token.value,
                reason=error.reason,
            ) from None


def _check_handle(handle: object) -> None:
    if not isinstance(handle, LockHandle):
        raise TypeError(f"this needs a LockHandle, not {type(handle).__name__}")
    check_name(handle.resource)
