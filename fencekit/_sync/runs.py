"""Whole runs of a job: as a block, as a call, as a decorated function.

Rules this module obeys:

* The body runs only under a claim that was started here.
* A result that cannot be remembered does not make the job run again: its work is done. The job is
  completed without a result, and the error is raised.
* An exception ends the attempt: remembered if its type is listed, else the key is free again.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

from fencekit import _policy
from fencekit._sync.claiming import Claiming
from fencekit._sync.holding import Guarded
from fencekit._sync.waiting import Place
from fencekit._seam import threads as seam
from fencekit._terms import MISSING, Policy, Terms, describe, revive
from fencekit.errors import (
    IdempotencyAbandoned,
    IdempotencyAlreadyDone,
    IdempotencyFailed,
    IdempotencyInProgress,
    IdempotencyNotOwned,
    IdempotencyOutcomeUnknown,
    IdempotencyReentered,
    LockNotAcquired,
    LockReentered,
)
from fencekit.keys import call_key, idempotency_key
from fencekit.records import BeginOutcome, Claim, FenceToken, LeaseState


class Job:
    """What the body of a run works with: its token for writes, and where it puts its result."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.result: Any = MISSING
        """Set this to have it remembered; None is a result."""

    @property
    def key(self) -> str:
        """The job's idempotency key."""
        return self.claim.key

    @property
    def token(self) -> FenceToken:
        """The fencing token: present it on every write."""
        assert self.claim.token is not None
        return self.claim.token

    @property
    def attempts(self) -> int:
        """How often the job has been started, this time included."""
        return self.claim.attempts

    @property
    def state(self) -> LeaseState:
        """What this run may believe about its claim now."""
        return self.claim.state

    def check(self) -> None:
        """Raise ``LeaseLost`` when the claim is lost. Costs no round trip."""
        self.claim.check()


class Run:
    """The block of ``run``; entered once."""

    def __init__(
        self, claiming: Claiming, terms: Terms, policy: Policy, claim: Claim | None = None
    ) -> None:
        self._claiming = claiming
        self._terms = terms
        self._policy = policy
        self._claim = claim
        self._job: Job | None = None
        self._guarded: Guarded | None = None

    def __enter__(self) -> Job:
        if self._job is not None:
            raise RuntimeError("this run was entered before: call run() again")
        claim = self._claim or self._claiming.begin(self._terms)
        if not claim.started:
            raise not_started(claim, self._policy)
        assert claim._lease is not None
        self._job = Job(claim)
        self._guarded = Guarded(claim._lease, self._claiming.heartbeat())
        return self._job

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        assert self._guarded is not None
        cut_short = self._guarded.close((kind, error, trace))
        body_error = None if cut_short else error
        refused: list[Exception] = []
        # A late completion that nobody overtook counts; a body that was cut short has none.
        loss = self._guarded.leave(
            lambda within: self._settle(body_error, refused, within),
            though_late=not cut_short,
            within=self._claiming.timeout,
        )
        if body_error is not None:
            return
        if refused:
            raise refused[0]
        if loss is not None:
            raise loss

    def _settle(
        self, error: BaseException | None, refused: list[Exception], within: float
    ) -> None:
        assert self._job is not None
        claim, claiming, life = self._job.claim, self._claiming, self._terms.ttl
        try:
            if error is not None:
                if self._terms.blocks and not isinstance(error, Exception):
                    return  # cut off half-way: let it lapse, and somebody resolve it
                kept = isinstance(error, self._policy.remember)
                state, what = ("f", describe(error)) if kept else ("x", None)
                claiming.settle(claim, state, what, life, within=within)
                claiming.failed(claim, error, kept)
                return
            try:
                result = claiming.encode(claim.key, self._job.result)
            except Exception as unfit:  # the work is done: do not do it again for its result's sake
                refused.append(unfit)
                result = None
            claiming.settle(claim, "d", result, life, within=within)
        except IdempotencyNotOwned as late:
            refused.append(late)


def not_started(claim: Claim, policy: Policy) -> Exception:
    """The error that says why a claim was not started."""
    if claim.outcome is BeginOutcome.ALREADY_DONE:
        return IdempotencyAlreadyDone(
            f"{claim.key!r} is done already: use the remembered result",
            key=claim.key,
            has_result=claim.has_result,
            result=claim.result,
        )
    if claim.outcome is BeginOutcome.UNKNOWN:
        return IdempotencyOutcomeUnknown(
            f"an attempt at {claim.key!r} by {claim.holder} died half-way and nobody knows its "
            "outcome: resolve() it if its effect happened, clear() it if it may run again",
            key=claim.key,
            holder=claim.holder,
        )
    if claim.outcome is BeginOutcome.FAILED:
        return _failed(claim, policy)
    lasts = "" if claim.retry_after is None else f" (its lease has {claim.retry_after:.3f} s left)"
    return IdempotencyInProgress(
        f"{claim.key!r} is being run by {claim.holder}{lasts}: try again later",
        key=claim.key,
        holder=claim.holder,
        retry_after=claim.retry_after,
    )


def _failed(claim: Claim, policy: Policy) -> Exception:
    if claim.error_type == "abandoned":
        return IdempotencyAbandoned(
            f"{claim.key!r} was started {claim.attempts} times and never finished; it is given up: "
            "clear() it to allow another try",
            key=claim.key,
            attempts=claim.attempts,
            error_type="abandoned",
        )
    known = revive(claim._failure or {}, policy.remember)
    return known or IdempotencyFailed(
        f"{claim.key!r} failed before with {claim.error_type}: {claim.error_message}",
        key=claim.key,
        error_type=claim.error_type or "",
        error_message=claim.error_message or "",
    )


def call_once(
    claiming: Claiming,
    terms: Terms,
    policy: Policy,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run the function for this key, or wait for whoever does, and return the remembered result."""
    others = _Others(claiming, terms, _policy.now() + policy.wait)
    try:
        while True:
            try:
                claim = claiming.begin(terms)
                if claim.outcome is BeginOutcome.ALREADY_DONE and claim.has_result:
                    return claim.result
                if not claim.started:
                    raise not_started(claim, policy)
            except (IdempotencyInProgress, LockNotAcquired) as busy:
                others.wait(busy)
                continue
            others.leave()
            with Run(claiming, terms, policy, claim) as job:
                job.result = seam.call(function, *args, **kwargs)
            return job.result
    finally:
        others.leave()


class _Others:
    """Waiting for those who run the job, or hold its lock."""

    def __init__(self, claiming: Claiming, terms: Terms, until: float) -> None:
        self._claiming = claiming
        self._terms = terms
        self._until = until
        self._place: Place | None = None

    def wait(self, busy: IdempotencyInProgress | LockNotAcquired) -> None:
        """Sleep until the job or its lock may be free; raises `busy` when the time is up."""
        backend, keys = self._claiming.backends.get(), self._claiming.backends.keys
        if backend.waits_for_itself(keys.job(self._terms.key)):
            raise IdempotencyReentered(
                f"{self._terms.key!r} is being run by this very task or thread, which would "
                "wait for itself",
                key=self._terms.key,
            )
        channel = keys.done_channel(self._terms.key)
        if isinstance(busy, LockNotAcquired):
            channel = keys.free_channel(busy.resource)
            if backend.waits_for_itself(keys.lock(busy.resource)):
                raise LockReentered(
                    f"{busy.resource!r}, which {self._terms.key!r} needs, is held by this very "
                    "task or thread, which would wait for itself",
                    resource=busy.resource,
                )
        place, left = self._place, busy.retry_after
        if place is None or place.channel != channel:
            self.leave()
            # A result is for everyone who waits, a lock for the first in line.
            everyone = not isinstance(busy, LockNotAcquired)
            place = self._place = backend.room.join(channel, everyone=everyone)
            left = None  # subscribe first, then ask again
        if not backend.room.turn(place, self._until, left):
            raise busy

    def leave(self) -> None:
        """Stop waiting."""
        if self._place is not None:
            self._claiming.backends.get().room.leave(self._place)
            self._place = None


class Function:
    """A decorated function."""

    def __init__(
        self,
        claiming: Claiming,
        function: Any,
        key: Callable[..., Any] | None,
        namespace: str | None,
        run_without_key: bool,
    ) -> None:
        self._claiming = claiming
        self._function = function
        self._key = key
        self._namespace = namespace
        self._run_without_key = run_without_key

    def wrap(self, terms: Terms, policy: Policy, user: str) -> Any:
        """The function that runs once per key."""
        function = self._function
        if isinstance(function, (classmethod, staticmethod)):
            self._function = function.__func__
            return type(function)(self.wrap(terms, policy, user))
        seam.check_function(function, user)

        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            key = self._key_of(args, kwargs)
            if key is None:
                return seam.call(function, *args, **kwargs)
            own = replace(terms, key=key)
            return call_once(self._claiming, own, policy, function, args, kwargs)

        return functools.update_wrapper(seam.decorate(run), function)

    def _key_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        if self._key is None:
            function = self._function
            if args and isinstance(args[0], type) and inspect.isfunction(function):
                # A classmethod's class counts by its name.
                function, args = MethodType(function, args[0]), args[1:]
            return call_key(function, args, kwargs, namespace=self._namespace)
        chosen = self._key(*args, **kwargs)
        name = getattr(self._function, "__qualname__", repr(self._function))
        if chosen is None or (isinstance(chosen, str) and not chosen.strip()):
            if not self._run_without_key:
                raise ValueError(
                    f"key= of {name} gave {chosen!r}: calls without a key would share one record; "
                    'return text, or pass on_missing_key="run"'
                )
            warnings.warn(
                f"key= of {name} gave {chosen!r}; this call runs without a guard", stacklevel=4
            )
            return None
        if isinstance(chosen, str):
            return chosen
        return idempotency_key(chosen, namespace=self._namespace or "call")
