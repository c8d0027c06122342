"""The narrow module: every operation on the records, and the only one that knows how they are kept.

Rules this module obeys:

* One method is one atomic step on the server (two on a Cluster where two names are involved).
* Every attempt has a nonce of its own, and an undo if a caller who vanished could leave something.
* Answers are typed; an error that passes by itself has been retried until the deadline before it is
  raised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fencekit import _policy, _replies, _scripts
from fencekit._lease import Lease, Subject
from fencekit._scripts import Call
from fencekit._seam import threads as seam
from fencekit._seam.shared import UNDO_SECONDS
from fencekit.keys import KeySpace, key_slot
from fencekit.records import Durability, FenceToken, LockInfo

OP_SECONDS = 30.0
"""How long a gated write is remembered, so that a repeat of it is recognised."""


def _surely(lease: Lease | None, call: Call, before: float) -> bool:
    """Whether an earlier copy of this call explains why the record is gone.

    `before` is the time before the first copy left: if the lease was good then, that copy found it.
    """
    return lease is not None and call.attempts > 1 and before < lease.deadline


class RedisStore:
    """The records of one key space behind one link."""

    def __init__(self, link: seam.Link, keys: KeySpace) -> None:
        self._link = link
        self.keys = keys

    @property
    def clustered(self) -> bool:
        """Whether records of two names may live on two servers."""
        return self._link.clustered

    # Locks

    def acquire(
        self, resource: str, *, owner: str, by: str, ttl: float, retention: float, delay: float,
        deadline: float, durability: Durability | None = None,
    ) -> tuple[_replies.Grant | _replies.Refusal | _replies.Spent, int | None]:  # fmt: skip
        """Ask for the lock once; with durability also how many replicas have the grant."""
        nonce = _policy.nonce()
        lock, channel = self.keys.lock(resource), self.keys.free_channel(resource)
        call = _scripts.acquire(
            lock, self.keys.fence(resource), owner=owner.encode(), by=by.encode(), nonce=nonce,
            ttl=ttl, retention=retention, delay=delay,
        )  # fmt: skip
        undo = _scripts.release(lock, channel, nonce=nonce, spent=UNDO_SECONDS)
        if durability is None:
            reply = self._link.calls.run(call, deadline=deadline, undo=undo)
            return _replies.acquire(call, reply), None
        wire = self._link.durable()
        if wire is None:
            raise ValueError("durability is not offered on a Redis Cluster")
        patience = _policy.seconds(durability.timeout, "a durability timeout")
        limit = b"%d" % _policy.milliseconds(patience)
        count = b"%d" % durability.replicas
        waiting = (b"WAITAOF", b"1", count, limit) if durability.disk else (b"WAIT", count, limit)
        call.follow, call.patience = _scripts.command(*waiting), patience
        until = deadline + patience
        reply = wire.run(call, deadline=until, undo=undo)
        reached = call.followed
        if isinstance(reached, Exception):
            self._link.calls.post(undo)
            raise call.explain(reached)
        if isinstance(reached, list):
            reached = min(reached[0], 1) and reached[1]
        return _replies.acquire(call, reply), reached

    def renew(
        self, pairs: Sequence[tuple[Lease, Subject]], *, deadline: float, ttl: float | None = None
    ) -> tuple[list[str | None], float]:
        """Extend leases in one step; why each is lost, or None, and when the request was sent."""
        call = _scripts.renew(pairs, ttl)
        wire = self._link.beats if ttl is None else self._link.calls
        reply = wire.run(call, deadline=deadline)
        return _replies.renew(call, reply), call.sent

    def release(
        self, resource: str, *, owner: str, token: int, lease: Lease | None, deadline: float
    ) -> str | None:
        """Give the lock back; why it was not ours any more, or None."""
        call = _scripts.release(
            self.keys.lock(resource),
            self.keys.free_channel(resource),
            owner=owner.encode(),
            token=token,
        )
        before = _policy.now()
        try:
            reply = self._link.calls.run(call, deadline=deadline)
        except Exception:
            raise
        except BaseException:  # cancelled: that must not keep the lock (I10)
            self._link.calls.post(call)
            raise
        reason = _replies.release(call, reply)
        if reason is not None and reason.startswith("broken"):
            return reason
        return None if _surely(lease, call, before) else reason

    def inspect(self, resource: str, *, deadline: float) -> LockInfo | None:
        """Who holds the lock, or None."""
        lock, fence = self.keys.lock(resource), self.keys.fence(resource)
        call = _scripts.inspect(lock, fence, self.keys.free_channel(resource))
        return _replies.inspect(call, self._link.calls.run(call, deadline=deadline), resource)

    def break_lock(
        self, resource: str, *, reason: str, held: LockInfo | None, retention: float,
        deadline: float,
    ) -> tuple[int, str | None, int]:  # fmt: skip
        """Raise the fence, take the lock away; the new fence, the holder and its token.

        `held` is who held it just before: what an earlier copy of this call has broken.
        """
        call = _scripts.break_(
            self.keys.lock(resource), self.keys.fence(resource), self.keys.free_channel(resource),
            reason=reason.encode(), retention=retention, remember=retention,
        )  # fmt: skip
        reply = self._link.calls.run(call, deadline=deadline)
        fence, holder, token = _replies.broken(call, reply)
        if holder is None and held is not None and call.attempts > 1:
            return fence, held.holder, held.token
        return fence, holder, token

    # Jobs

    def job_keys(self, key: str, resource: str | None) -> list[bytes]:
        """The job's own records, and its lock's where one step reaches both."""
        names = [self.keys.job(key), self.keys.job_fence(key)]
        if resource is not None:
            names += [self.keys.lock(resource), self.keys.fence(resource)]
        return names

    def one_step(self, key: str, resource: str) -> bool:
        """Whether a job and its lock can change in one step."""
        if not self.clustered:
            return True
        return key_slot(self.keys.job(key)) == key_slot(self.keys.lock(resource))

    def begin(
        self, key: str, *, resource: str | None, owner: str, by: str, ttl: float,
        lease: float | None, fingerprint: str, max_attempts: int, blocks: bool, retention: float,
        mode: str, deadline: float,
    ) -> (
        _replies.Started | _replies.Ended | _replies.Running | _replies.Unknown
        | _replies.Conflict | _replies.Spent
    ):  # fmt: skip
        """Try to start the job once."""
        nonce = _policy.nonce()
        names = self.job_keys(key, resource)
        call = _scripts.begin(
            names, owner=owner.encode(), by=by.encode(), nonce=nonce, ttl=ttl, lease=lease,
            fingerprint=fingerprint.encode(), max_attempts=max_attempts, blocks=blocks,
            retention=retention, mode=mode.encode(),
        )  # fmt: skip
        taken = names[0::2] if mode == "take" else names[:1]
        undo = _scripts.unclaim(
            taken, nonce=nonce, spent=UNDO_SECONDS, done=self.keys.done_channel(key),
            free=self.keys.free_channel(resource or key),
        )  # fmt: skip
        return _replies.begin(call, self._link.calls.run(call, deadline=deadline, undo=undo))

    def settle(
        self, key: str, *, resource: str | None, owner: str, token: int | None, state: str,
        kept: bytes | None, ttl: float | None, lease: Lease | None, deadline: float,
    ) -> _replies.NotSettled | None:  # fmt: skip
        """End a claim and free its lock; None if it was settled, else what is there instead."""
        names = [self.keys.job(key)]
        if resource is not None:
            names.append(self.keys.lock(resource))
        call = _scripts.settle(
            names, owner=owner.encode(), token=token, state=state.encode(), kept=kept, ttl=ttl,
            done=self.keys.done_channel(key), free=self.keys.free_channel(resource or key),
        )  # fmt: skip
        before = _policy.now()
        answer = _replies.settle(call, self._link.calls.run(call, deadline=deadline))
        # A job that was set free may have been begun again before the second copy came.
        return None if state == "x" and _surely(lease, call, before) else answer

    def job(self, key: str, *, deadline: float) -> _replies.Job | None:
        """The job's record, or None."""
        call = _scripts.job(self.keys.job(key))
        return _replies.job(call, self._link.calls.run(call, deadline=deadline))

    def clear(
        self, key: str, *, resolve: bool, kept: bytes | None, ttl: float | None, deadline: float
    ) -> bool:
        """Forget the job, or answer for one whose outcome is unknown; whether there was one."""
        call = _scripts.clear(
            self.keys.job(key),
            resolve=resolve,
            kept=kept,
            ttl=ttl,
            done=self.keys.done_channel(key),
        )
        return _replies.flag(call, self._link.calls.run(call, deadline=deadline))

    # Fences

    def _fence_keys(self, token: FenceToken) -> list[bytes]:
        if token.kind == "job":
            return [self.keys.job_fence(token.resource), self.keys.job(token.resource)]
        return [self.keys.fence(token.resource)] * 2

    def newest(self, token: FenceToken, *, deadline: float) -> int:
        """The newest token known for this token's resource, 0 if none."""
        call = _scripts.fence(self._fence_keys(token), kind=token.kind.encode())
        return _replies.fence(call, self._link.calls.run(call, deadline=deadline))

    def write(
        self, token: FenceToken, commands: Sequence[Sequence[bytes]], targets: Sequence[bytes], *,
        retention: float, deadline: float,
    ) -> _replies.Written | _replies.Stale:  # fmt: skip
        """Run the commands only if the token is fresh, and raise the fence to it."""
        first, second = self._fence_keys(token)
        # Without commands there is nothing that a repeat could do twice.
        remember = OP_SECONDS if commands else 0.0
        if deadline < math.inf:
            remember = remember and max(remember, 2 * (deadline - _policy.now()))
        names = [first, self.keys.once(token.resource, _policy.nonce().decode()), second, *targets]
        call = _scripts.gate(
            names, kind=token.kind.encode(), token=token.value, retention=retention,
            remember=remember, commands=commands,
        )  # fmt: skip
        reply: Any = self._link.calls.run(call, deadline=deadline)
        return _replies.gate(call, reply)
