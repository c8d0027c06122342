"""Plain starts: no lease, no takeover within ttl, except where a lock proves the worker gone."""

from __future__ import annotations

from typing import Any

from fencekit import _policy, _replies, _terms
from fencekit._async.claiming import Claiming
from fencekit._async.lock import AsyncLock
from fencekit._terms import DEFAULT_TTL, MISSING, Duration, Terms
from fencekit.events import Finished
from fencekit.keys import check_name
from fencekit.records import BeginOutcome


class Starts:
    """The guard's verbs for jobs that are started without a claim."""

    _claiming: Claiming

    async def try_begin(self, key: str, *, ttl: Duration = DEFAULT_TTL) -> bool:
        """True for the first caller, False for everybody else for ``ttl``: at most one start.

        A plain start has no lease: if its worker dies, nobody starts the job again before the
        record has expired, except by ``try_begin_or_reclaim``. Ends with ``mark_done``.

        >>> await guard.try_begin("report:1", ttl=60), await guard.try_begin("report:1", ttl=60)
        (True, False)
        """
        terms = _terms.plain(key, ttl)
        answer = await self._claiming.try_start(terms, "")
        outcome = self._plain_outcome(terms, answer)
        return outcome in (BeginOutcome.BEGUN, BeginOutcome.RECLAIMED)

    async def try_begin_or_reclaim(
        self, key: str, *, lock: AsyncLock, lock_resource: str, ttl: Duration = DEFAULT_TTL
    ) -> BeginOutcome:
        """Start the job, or take over a start whose worker holds ``lock_resource`` no more.

        The lock is asked about, not taken: acquire it before working. On a Cluster the two
        questions are two steps, and a lock acquired between them does not keep the job from being
        taken over.

        >>> outcome = await guard.try_begin_or_reclaim(
        ...     "report:2", lock=lock, lock_resource="report-2", ttl=60
        ... )
        >>> outcome.value
        'begun'
        """
        if not isinstance(lock, AsyncLock):
            raise TypeError(f"lock is an {AsyncLock.__name__}, not {type(lock).__name__}")
        check_name(lock_resource)
        terms = _terms.plain(key, ttl)
        claiming = self._claiming
        store = claiming.backends.get().store
        if lock._locking.backends.keys.prefix != claiming.backends.keys.prefix:
            raise ValueError("lock and guard need the same prefix to know each other's keys")
        if store.one_step(key, lock_resource):
            answer = await claiming.try_start(terms, "free", lock_resource)
            return self._plain_outcome(terms, answer)
        answer = await claiming.try_start(terms, "")
        if isinstance(answer, _replies.Running):
            record = await store.job(key, deadline=claiming.deadline())
            if record is not None and await lock.inspect(lock_resource) is None:
                answer = await claiming.try_start(terms, str(record.token))
        return self._plain_outcome(terms, answer)

    def _plain_outcome(
        self,
        terms: Terms,
        answer: _replies.Started | _replies.Ended | _replies.Running | _replies.Unknown,
    ) -> BeginOutcome:
        claim = self._claiming.claim_for(terms, answer)
        if isinstance(answer, _replies.Started):
            self._claiming.remember(terms.key, answer.token, terms.ttl)
        return claim.outcome

    async def mark_done(
        self, key: str, *, result: Any = MISSING, ttl: Duration | None = None
    ) -> None:
        """Complete a job that this guard started with ``try_begin`` or ``try_begin_or_reclaim``.

        ``result`` is remembered if given (None is a result). ``ttl`` is how long from now; default:
        as long as the start said. Raises ``IdempotencyNotOwned`` when the job is not this guard's
        any more, ``CanonicalizeError`` or ``ResultTooLarge`` for a result that cannot be
        remembered.

        >>> await guard.try_begin("report:3", ttl=60)
        True
        >>> await guard.mark_done("report:3", result=[1, 2])
        >>> await guard.get_result("report:3")
        [1, 2]
        """
        check_name(key)
        life = None if ttl is None else _policy.seconds(ttl, "ttl")
        claiming = self._claiming
        kept = claiming.encode(key, result)
        token = claiming.token_of(key)
        answer = await claiming.backends.get().store.settle(
            key, resource=None, owner=claiming.owner, token=token, state="d", kept=kept, ttl=life,
            lease=None, deadline=claiming.deadline(),
        )  # fmt: skip
        if answer is not None:  # not forgotten: the owner alone may be somebody else's too (I5)
            claiming.refuse(key, token or 0, answer)
        claiming.forget(key)
        claiming.listeners.tell(Finished(key, token or 0))
