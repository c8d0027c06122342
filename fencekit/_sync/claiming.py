"""What stands behind the guard's verbs: its settings, and the steps of a claim.

Rules this module obeys:

* A claim's lease is registered before the claim is handed out and taken off when it is settled.
* What cannot be remembered is found out before anything is sent.
* An answer of Redis becomes a claim or a typed error here, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from fencekit import _policy, _replies
from fencekit._sync.backend import Backends
from fencekit._sync.holding import ThreadBeats
from fencekit._codec import Codec
from fencekit._lease import Lease, Subject
from fencekit._seam import threads as seam
from fencekit._terms import MISSING, Started, Terms, failure, shown
from fencekit.errors import (
    FenceKitError,
    ForeignValue,
    IdempotencyConflict,
    IdempotencyNotOwned,
    LockNotAcquired,
    ResultTooLarge,
)
from fencekit.events import (
    Abandoned,
    Begun,
    Duplicate,
    Failed,
    FencedOut,
    Finished,
    Listener,
    Listeners,
    Reclaimed,
    Replayed,
    logger,
)
from fencekit.records import BeginOutcome, Claim, FenceToken


class Claiming:
    """A guard's settings and the steps that its verbs share."""

    def __init__(
        self, client: Any, user: str, prefix: str, owner_id: str | None, label: str,
        timeout: float | timedelta, retention: float | timedelta, max_result: int, codec: Codec,
        listeners: Iterable[Listener], heartbeat: Any,
    ) -> None:  # fmt: skip
        self.backends = Backends(client, prefix, user)
        self._chosen = None if owner_id is None else _policy.check_owner(owner_id)
        self._made = (_policy.owner(), _policy.pid())
        self._mutex = _policy.Mutex()
        self._started = Started()
        self.label = _policy.check_label(label)
        self.timeout = _policy.seconds(timeout, "timeout")
        self.retention = _policy.seconds(retention, "retention")
        if isinstance(max_result, bool) or not isinstance(max_result, int):
            raise TypeError(f"max_result is a number of bytes, not {type(max_result).__name__}")
        if max_result < 1:
            raise ValueError(f"max_result is at least 1 byte, not {max_result}")
        self.max_result = max_result
        for verb in ("encode", "decode"):
            if not callable(getattr(codec, verb, None)):
                raise TypeError(f"codec has encode and decode, unlike {type(codec).__name__}")
        self.codec = codec
        self.listeners = Listeners(listeners)
        self._beats = None if heartbeat is None else ThreadBeats(heartbeat, prefix)

    @property
    def owner(self) -> str:
        """The owner id: the chosen one, else one for each process."""
        self._after_fork()
        return self._chosen or self._made[0]

    def _after_fork(self) -> None:
        if self._made[1] != _policy.pid():
            self._mutex = _policy.Mutex()
            self._started = Started()
            self._made = (_policy.owner(), _policy.pid())

    def remember(self, key: str, token: int, ttl: float) -> None:
        """Note the token of a plain start, for `mark_done`."""
        self._after_fork()
        with self._mutex:
            self._started.put(key, token, ttl)

    def token_of(self, key: str) -> int | None:
        """The token of this guard's own plain start of this job."""
        self._after_fork()
        with self._mutex:
            return self._started.get(key)

    def forget(self, key: str) -> None:
        """The plain start of this job has ended."""
        self._after_fork()
        with self._mutex:
            self._started.drop(key)

    def deadline(self, within: float = math.inf) -> float:
        """Until when a call that starts now is tried."""
        return _policy.now() + min(self.timeout, within)

    def heartbeat(self) -> Any:
        """Who renews."""
        return self.backends.get().heartbeat if self._beats is None else self._beats.get()

    def encode(self, key: str, result: Any) -> bytes | None:
        """The result as it is remembered, None for MISSING."""
        if result is MISSING:
            return None
        kept = self.codec.encode(result)
        if not isinstance(kept, bytes):
            raise TypeError(f"a codec encodes to bytes, not {type(kept).__name__}")
        if len(kept) > self.max_result:
            raise ResultTooLarge(
                f"the result of {key!r} takes {len(kept)} bytes, more than the {self.max_result} "
                "that are remembered: store it elsewhere and return where, or raise max_result",
                key=key,
                size=len(kept),
                limit=self.max_result,
            )
        return kept

    def try_start(
        self, terms: Terms, mode: str, resource: str | None = None
    ) -> _replies.Started | _replies.Ended | _replies.Running | _replies.Unknown:
        """One attempt to start; conflicts raise."""
        answer = self.backends.get().store.begin(
            terms.key,
            resource=resource if mode == "free" else terms.lock if mode == "take" else None,
            owner=self.owner,
            by=_policy.label(self.label or self.owner),
            ttl=terms.ttl,
            lease=terms.lease,
            fingerprint=terms.fingerprint,
            max_attempts=terms.max_attempts,
            blocks=terms.blocks,
            retention=self.retention,
            mode=mode,
            deadline=self.deadline(),
        )
        if isinstance(answer, _replies.Conflict):
            raise self._conflict(terms, answer.known)
        if isinstance(answer, _replies.Spent):
            raise FenceKitError(f"this attempt to begin {terms.key!r} was given up: begin again")
        return answer

    def begin(self, terms: Terms) -> Claim:
        """Start the job, with its lock if it has one."""
        store = self.backends.get().store
        if terms.lock is None:
            return self.claim_for(terms, self.try_start(terms, ""))
        if store.one_step(terms.key, terms.lock):
            return self.claim_for(terms, self.try_start(terms, "take"))
        return self._begin_in_two_steps(terms, terms.lock)

    @staticmethod
    def _conflict(terms: Terms, known: str) -> IdempotencyConflict:
        return IdempotencyConflict(
            f"{terms.key!r} is known with fingerprint {known!r}, not {terms.fingerprint!r}: "
            "different input needs another key",
            key=terms.key,
            fingerprint=terms.fingerprint,
            known=known,
        )

    def _begin_in_two_steps(self, terms: Terms, resource: str) -> Claim:
        """On a Cluster the lock is taken first, so that a started job always has it."""
        assert terms.lease is not None
        store = self.backends.get().store
        grant, _ = store.acquire(
            resource, owner=self.owner, by=_policy.label(self.label or self.owner), ttl=terms.lease,
            retention=self.retention, delay=0.0, deadline=self.deadline(),
        )  # fmt: skip
        if not isinstance(grant, _replies.Grant):
            # Whether the job is done or runs matters more than who holds its lock.
            record = store.job(terms.key, deadline=self.deadline())
            known = "" if record is None else record.fingerprint
            if known and terms.fingerprint not in ("", known):
                raise self._conflict(terms, known)
            if record is not None and record.state in "df":
                ended = _replies.Ended(record.state == "f", record.attempts, record.kept)
                return self.claim_for(terms, ended)
            if record is not None and record.state == "p" and (record.left or 1) > 0:
                running = _replies.Running(record.attempts, record.left, record.holder)
                return self.claim_for(terms, running)
            left = grant.left if isinstance(grant, _replies.Refusal) else None
            holder = grant.holder if isinstance(grant, _replies.Refusal) else ""
            return self.claim_for(terms, _replies.Running(0, left, holder, True))
        claim = None
        try:
            answer = self.try_start(terms, "")
            claim = self.claim_for(terms, answer, grant)
            return claim
        finally:
            if claim is None or not claim.started:
                try:
                    seam.protected(
                        lambda _: self._free_lock(resource, grant.token, None), self.timeout
                    )
                except Exception as error:  # the lease bounds it; what happened before counts
                    logger.warning("the lock %r could not be given back: %s", resource, error)

    def _free_lock(self, resource: str, token: int, lease: Lease | None) -> None:
        self.backends.get().store.release(
            resource, owner=self.owner, token=token, lease=lease, deadline=self.deadline()
        )

    def claim_for(
        self,
        terms: Terms,
        answer: _replies.Started | _replies.Ended | _replies.Running | _replies.Unknown,
        grant: _replies.Grant | None = None,
    ) -> Claim:
        """The claim that an answer stands for; a started one is renewed from now on."""
        if isinstance(answer, _replies.Started):
            return self._started_claim(terms, answer, grant)
        if isinstance(answer, _replies.Ended):
            return self._ended_claim(terms.key, answer)
        if isinstance(answer, _replies.Unknown):
            return Claim(
                terms.key, BeginOutcome.UNKNOWN, self.owner, answer.attempts, holder=answer.holder
            )
        if answer.locked:
            lasts = "" if answer.left is None else f" for up to {answer.left:.3f} s more"
            raise LockNotAcquired(
                f"{terms.lock!r}, which {terms.key!r} needs, is held by {answer.holder}{lasts}: "
                "try again later",
                resource=terms.lock or "",
                holder=answer.holder,
                retry_after=answer.left,
            )
        self.listeners.tell(Duplicate(terms.key, answer.holder, answer.left))
        return Claim(
            terms.key, BeginOutcome.IN_PROGRESS, self.owner, answer.attempts,
            holder=answer.holder, retry_after=answer.left,
        )  # fmt: skip

    def _started_claim(
        self, terms: Terms, answer: _replies.Started, grant: _replies.Grant | None
    ) -> Claim:
        keys, owner = self.backends.keys, self.owner
        subjects = [
            Subject(
                "job", keys.job(terms.key), keys.job_fence(terms.key), owner.encode(), answer.token
            )
        ]
        number, sent = answer.token, answer.sent
        token = FenceToken(number, terms.key, "job")
        if terms.lock is not None:
            number = answer.token if grant is None else grant.token
            sent = sent if grant is None else min(sent, grant.sent)
            token = FenceToken(number, terms.lock)
            fence = keys.fence(terms.lock)
            subjects.append(Subject("lock", keys.lock(terms.lock), fence, owner.encode(), number))
        lease = Lease(
            terms.key, number, terms.lease or terms.ttl, sent, tuple(subjects), self.listeners,
            retention=self.retention, max_hold=terms.max_hold, task=seam.current_task(),
        )  # fmt: skip
        self.backends.get().keep_in_mind(lease)
        if terms.lease is not None:
            self.heartbeat().add(lease)
        event = Reclaimed if answer.reclaimed else Begun
        self.listeners.tell(event(terms.key, number, answer.attempts))
        outcome = BeginOutcome.RECLAIMED if answer.reclaimed else BeginOutcome.BEGUN
        return Claim(
            terms.key, outcome, owner, answer.attempts, token, terms.lock,
            _ttl=terms.ttl, _lease=lease,
        )  # fmt: skip

    def read(self, key: str, kept: bytes) -> Any:
        """The remembered result; ForeignValue if this guard's codec did not write it."""
        try:
            return self.codec.decode(kept)
        except Exception as error:
            raise ForeignValue(
                f"the memo of {key!r} cannot be read by this guard's codec: use the one that "
                "wrote it, or clear the key",
                key=key,
            ) from error

    def _ended_claim(self, key: str, answer: _replies.Ended) -> Claim:
        kept = answer.kept
        if not answer.failed:
            self.listeners.tell(Replayed(key))
            result = None if kept is None else self.read(key, kept)
            return Claim(
                key, BeginOutcome.ALREADY_DONE, self.owner, answer.attempts,
                has_result=kept is not None, result=result,
            )  # fmt: skip
        what = failure(kept)
        if what.get("type") == "abandoned":
            self.listeners.tell(Abandoned(key, answer.attempts))
        return Claim(
            key, BeginOutcome.FAILED, self.owner, answer.attempts,
            holder=what.get("holder"), error_type=what.get("type", ""),
            error_message=what.get("message", ""), _failure=what,
        )  # fmt: skip

    def settle(
        self, claim: Claim, state: str, kept: bytes | None, ttl: float | None,
        *, within: float = math.inf,
    ) -> None:  # fmt: skip
        """End a started claim and free its lock; IdempotencyNotOwned if it is another's now."""
        lease = claim._lease
        if not claim.started or claim.token is None or lease is None:
            raise IdempotencyNotOwned(
                f"this claim of {claim.key!r} ({claim.outcome.value}) was not started here: "
                "only the one who runs the job settles it",
                key=claim.key,
            )
        if lease.inherited:
            raise IdempotencyNotOwned(
                f"the claim of {claim.key!r} belongs to the process that forked this one",
                key=claim.key,
                token=lease.token,
            )
        backend = self.backends.get()
        one_step = claim.lock_resource is not None and backend.store.one_step(
            claim.key, claim.lock_resource
        )
        heartbeat = self.heartbeat()
        heartbeat.remove(lease)
        lease.leaving = True
        try:
            answer = backend.store.settle(
                claim.key,
                resource=claim.lock_resource if one_step else None,
                owner=claim.owner_id,
                token=lease.subjects[0].token,
                state=state,
                kept=kept,
                ttl=ttl,
                lease=lease,
                deadline=self.deadline(within),
            )
            if claim.lock_resource is not None and not one_step:
                self._free_lock(claim.lock_resource, lease.token, lease)
        except BaseException:
            if lease.alive:
                heartbeat.add(lease)  # it was not settled: the caller may try again
            raise
        finally:
            lease.leaving = False
        if answer is not None:
            lease.lose("its completion was refused")
            self.refuse(claim.key, lease.token, answer)
        lease.release()
        if state == "d":
            self.listeners.tell(Finished(claim.key, lease.token))

    def failed(self, claim: Claim, error: BaseException | None, remembered: bool) -> None:
        """Tell of a failed attempt."""
        token = 0 if claim.token is None else claim.token.value
        self.listeners.tell(Failed(claim.key, token, remembered, shown(error)))

    def refuse(self, key: str, token: int, answer: _replies.NotSettled) -> None:
        """Raise for a completion that came from somebody who is not the owner."""
        self.listeners.tell(FencedOut(key, token, answer.token))
        kept = answer.kept if answer.state == "d" else None
        what = {
            "": "there is no such record any more (it expired or was cleared)",
            "p": f"{answer.holder or 'another'} runs it now",
            "d": "it was completed by another attempt",
            "f": "its failure is on record",
            "x": "it was set free for another attempt",
        }[answer.state]
        error = IdempotencyNotOwned(
            f"cannot complete {key!r} (token {token}): {what}; discard this result",
            key=key,
            token=token,
            state=STATES[answer.state],
        )
        if kept is not None:
            with suppress(ForeignValue):
                error.result = self.read(key, kept)
                error.has_result = True
        raise error


STATES: dict[str, str | None] = {"": None, "p": "pending", "d": "done", "f": "failed", "x": None}
"""A record's state as callers see it."""
