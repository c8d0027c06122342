"""The idempotency guard: a named job starts once, and its result is remembered."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from fencekit import _policy, _terms
from fencekit._sync.claiming import STATES, Claiming
from fencekit._sync.runs import Run, Function, call_once
from fencekit._sync.starts import Starts
from fencekit._codec import Codec, JsonCodec
from fencekit._seam import threads as seam
from fencekit._terms import DEFAULT_LEASE, DEFAULT_TTL, MISSING, Duration, OnLapse, describe
from fencekit.errors import IdempotencyNotOwned, IdempotencyResultMissing
from fencekit.events import Listener
from fencekit.keys import check_name
from fencekit.records import Claim


class IdempotencyGuard(Starts):
    """A named job is started once; a redelivery gets the remembered result.

    ``client`` is a redis-py client (standalone, Sentinel or Cluster). ``prefix`` starts every key.
    ``owner_id`` is a label for this worker (default: one for each process). ``label`` is what
    others see of a holder. ``timeout`` is for how many seconds a call is tried again while Redis
    cannot be reached. ``max_result`` is the most bytes of a remembered result; ``codec`` turns
    results into bytes and back (JSON). ``listeners`` get typed events. ``heartbeat`` is a blocking
    ``redis.Redis`` client, to renew claims by a thread.

    Errors: ``TypeError`` for the wrong client, ``ValueError`` for a bad prefix or duration.

    >>> guard = IdempotencyGuard(client)
    >>> def charge():
    ...     return {"paid": 990}
    >>> guard.once("charge:7", charge, ttl=3600)
    {'paid': 990}
    >>> guard.once("charge:7", charge, ttl=3600)  # does not run again
    {'paid': 990}
    """

    def __init__(
        self,
        client: Any,
        *,
        prefix: str = "fencekit",
        owner_id: str | None = None,
        label: str = "",
        timeout: Duration = 10.0,
        retention: Duration = _policy.RETENTION,
        max_result: int = 1 << 20,
        codec: Codec | None = None,
        listeners: Iterable[Listener] = (),
        heartbeat: Any = None,
    ) -> None:
        self._claiming = Claiming(
            client, type(self).__name__, prefix, owner_id, label, timeout, retention, max_result,
            JsonCodec() if codec is None else codec, listeners, heartbeat,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"{type(self).__name__}(prefix={self._claiming.backends.keys.prefix!r})"

    @property
    def owner_id(self) -> str:
        """The label under which this guard begins jobs; one for each process unless chosen."""
        return self._claiming.owner

    # A claim: a lease with a token, kept by the heartbeat, taken over when it runs out

    def begin(
        self,
        key: str,
        *,
        ttl: Duration = DEFAULT_TTL,
        lease: Duration = DEFAULT_LEASE,
        lock: str | None = None,
        fingerprint: str | None = None,
        max_attempts: int | None = None,
        on_lapse: OnLapse = "reclaim",
    ) -> Claim:
        """Start the job, or say why not: one round trip.

        ``ttl`` is how long the job is remembered, ``lease`` after how long a dead worker's job is
        taken over (both seconds or timedelta). A started claim is renewed until ``finish``,
        ``fail`` or until it is dropped. ``lock`` names a resource to take in the same step; then
        the claim's token is that resource's. ``fingerprint`` identifies the input: another one
        under the same key raises ``IdempotencyConflict``. After ``max_attempts`` starts without an
        end the job counts as failed. ``on_lapse="block"`` asks a human after a crash instead of
        starting again.

        Look at ``claim.started`` and ``claim.outcome``. Raises ``LockNotAcquired`` when somebody
        else holds ``lock``.

        >>> claim = guard.begin("report:4", ttl=60, lease=10)
        >>> claim.started, claim.attempts
        (True, 1)
        >>> guard.finish(claim, {"pages": 3})
        >>> (guard.begin("report:4")).result
        {'pages': 3}
        """
        terms = _terms.leased(key, ttl, lease, lock, fingerprint, max_attempts, on_lapse)
        return self._claiming.begin(terms)

    def finish(
        self, claim: Claim, result: Any = MISSING, *, ttl: Duration | None = None
    ) -> None:
        """Complete the job, remember the result and free the claim's lock: one round trip.

        ``ttl`` is how long the job is remembered from now; default: the one of ``begin``. A late
        completion that nobody overtook counts. Raises ``IdempotencyNotOwned`` (with the newer
        result, if there is one) when somebody did, ``CanonicalizeError`` or ``ResultTooLarge``
        before anything is sent.

        >>> claim = guard.begin("report:5")
        >>> guard.finish(claim)
        >>> guard.status("report:5")
        'done'
        """
        _check_claim(claim)
        life = claim._ttl if ttl is None else _policy.seconds(ttl, "ttl")
        self._claiming.settle(claim, "d", self._claiming.encode(claim.key, result), life)

    def fail(
        self,
        claim: Claim,
        error: BaseException | None = None,
        *,
        retry: bool = True,
        ttl: Duration | None = None,
    ) -> None:
        """End the attempt without a result: one round trip.

        With ``retry`` (the default) the job may be started again at once; its attempts stay
        counted. Without, the failure is remembered for ``ttl`` from now and the job is not started
        again before.

        >>> claim = guard.begin("report:6")
        >>> guard.fail(claim, ValueError("no input"))
        >>> (guard.begin("report:6")).attempts
        2
        """
        _check_claim(claim)
        life = claim._ttl if ttl is None else _policy.seconds(ttl, "ttl")
        kept = None if retry else describe(error)
        self._claiming.settle(claim, "x" if retry else "f", kept, life)
        self._claiming.failed(claim, error, not retry)

    # Reading and answering for a job

    def status(self, key: str) -> str | None:
        """'pending', 'done', 'failed' (remembered), or None: absent or free for another attempt.

        >>> print(guard.status("report:7"))
        None
        """
        check_name(key)
        record = self._claiming.backends.get().store.job(
            key, deadline=self._claiming.deadline()
        )
        return None if record is None else STATES[record.state]

    def get_result(self, key: str) -> Any:
        """The remembered result.

        Raises ``IdempotencyResultMissing``, whose text and ``state`` tell an absent job from a
        pending one, a failed one, and one that was completed without a stored result.

        >>> claim = guard.begin("report:8")
        >>> guard.finish(claim, None)
        >>> print(guard.get_result("report:8"))
        None
        """
        check_name(key)
        record = self._claiming.backends.get().store.job(
            key, deadline=self._claiming.deadline()
        )
        state = "" if record is None else record.state
        if record is not None and state == "d" and record.kept is not None:
            return self._claiming.read(key, record.kept)
        why = {
            "": "there is no record of it",
            "p": "it is still pending",
            "d": "it was completed without a stored result",
            "f": "it failed, and its failure is remembered",
            "x": "its last attempt failed and it may be started again",
        }[state]
        raise IdempotencyResultMissing(
            f"no remembered result for {key!r}: {why}", key=key, state=STATES[state]
        )

    def clear(self, key: str) -> None:
        """Forget the job, so that it may start again; a completion of an older start is refused.

        >>> guard.clear("report:9")
        """
        check_name(key)
        self._claiming.forget(key)
        self._claiming.backends.get().store.clear(
            key, resolve=False, kept=None, ttl=None, deadline=self._claiming.deadline()
        )

    def resolve(
        self, key: str, result: Any = MISSING, *, ttl: Duration | None = None
    ) -> None:
        """Say that a job whose outcome is unknown did happen, and with which result.

        Only for jobs begun with ``on_lapse="block"`` whose worker died; if it did not happen,
        ``clear`` it. Raises ``IdempotencyNotOwned`` when the outcome is not unknown.

        >>> guard.resolve("report:10")
        Traceback (most recent call last):
        ...
        fencekit.errors.IdempotencyNotOwned: the outcome of 'report:10' is not unknown: nothing to
        resolve
        """
        check_name(key)
        life = None if ttl is None else _policy.seconds(ttl, "ttl")
        done = self._claiming.backends.get().store.clear(
            key, resolve=True, kept=self._claiming.encode(key, result), ttl=life,
            deadline=self._claiming.deadline(),
        )  # fmt: skip
        if not done:
            raise IdempotencyNotOwned(
                f"the outcome of {key!r} is not unknown: nothing to resolve", key=key
            )

    # Whole runs

    def run(
        self,
        key: str,
        *,
        ttl: Duration = DEFAULT_TTL,
        lease: Duration = DEFAULT_LEASE,
        lock: str | None = None,
        fingerprint: str | None = None,
        max_attempts: int | None = None,
        on_lapse: OnLapse = "reclaim",
        remember: tuple[type[Exception], ...] = (),
        max_hold: Duration | None = None,
    ) -> Run:
        """Run the job's body in a block that is entered only by the one who may.

        Raises ``IdempotencyAlreadyDone`` (with the result), ``IdempotencyInProgress``,
        ``IdempotencyFailed``, ``IdempotencyOutcomeUnknown`` or ``LockNotAcquired`` instead of
        running the body. Set ``job.result`` in the block to have it remembered. **An exception
        frees the key for another attempt, so what the body did before it may be done again**;
        exceptions of the types in ``remember`` are kept instead. ``max_hold`` ends the renewals
        after so long. When the claim is lost, a body in an event loop is cancelled and
        ``LeaseLost`` raised; a body in a thread asks ``job.check()``. ``ttl`` counts from the end
        of the run.

        >>> with guard.run("report:11", ttl=60) as job:
        ...     job.result = job.attempts
        >>> guard.get_result("report:11")
        1
        """
        terms = _terms.leased(key, ttl, lease, lock, fingerprint, max_attempts, on_lapse, max_hold)
        return Run(self._claiming, terms, _terms.policy(remember, 0))

    def once(
        self,
        key: str,
        function: Callable[..., Any],
        *args: Any,
        ttl: Duration = DEFAULT_TTL,
        lease: Duration = DEFAULT_LEASE,
        lock: str | None = None,
        fingerprint: str | None = None,
        max_attempts: int | None = None,
        on_lapse: OnLapse = "reclaim",
        remember: tuple[type[Exception], ...] = (),
        max_hold: Duration | None = None,
        wait: Duration | None = None,
    ) -> Any:
        """Call the function once for this key, or return what it returned then.

        Waits for whoever runs it now, for ``wait`` (None: until it is done or its lease ran out,
        when this caller takes over). A remembered exception is raised again, as its own type if
        that is in ``remember``. The other settings are those of ``run``.

        ``functools.partial`` passes keyword arguments on.

        Raises what ``run`` raises; ``IdempotencyAlreadyDone`` only for a job that was done without
        a result; ``IdempotencyInProgress`` after ``wait``; ``IdempotencyReentered`` from within the
        same job.

        >>> guard.once("report:12", max, 3, 4)
        4
        """
        policy = _terms.policy(remember, wait)
        terms = _terms.leased(key, ttl, lease, lock, fingerprint, max_attempts, on_lapse, max_hold)
        seam.check_function(function, type(self).__name__)
        return call_once(self._claiming, terms, policy, function, args, {})

    def idempotent(
        self,
        *,
        key: Callable[..., Any] | None = None,
        namespace: str | None = None,
        on_missing_key: Literal["error", "run"] = "error",
        ttl: Duration = DEFAULT_TTL,
        lease: Duration = DEFAULT_LEASE,
        lock: str | None = None,
        max_attempts: int | None = None,
        on_lapse: OnLapse = "reclaim",
        remember: tuple[type[Exception], ...] = (),
        max_hold: Duration | None = None,
        wait: Duration | None = None,
    ) -> Callable[[Any], Any]:
        """Decorate a function so that equal calls run once and return the remembered result.

        ``key`` gets the call's arguments and returns text (the key) or a payload to make one from;
        default: the function's full name and all its arguments with defaults filled in. A missing
        key (None or blank) is an error, unless ``on_missing_key="run"``: then that call runs
        unguarded, with a warning. The other settings are those of ``once``. Refuses generators.

        >>> @guard.idempotent(key=lambda order: f"ship:{order}", ttl=60)
        ... def ship(order):
        ...     return f"shipped {order}"
        >>> ship(13), ship(order=13)
        ('shipped 13', 'shipped 13')
        """
        if on_missing_key not in ("error", "run"):
            raise ValueError(f"on_missing_key is 'error' or 'run', not {on_missing_key!r}")
        policy = _terms.policy(remember, wait)
        # The terms are checked now, not at the first call; each call has a key of its own.
        terms = _terms.leased("-", ttl, lease, lock, None, max_attempts, on_lapse, max_hold)

        def decorate(function: Any) -> Any:
            return Function(self._claiming, function, key, namespace, on_missing_key == "run").wrap(
                terms, policy, type(self).__name__
            )

        return decorate


def _check_claim(claim: object) -> None:
    if not isinstance(claim, Claim):
        raise TypeError(f"this needs a Claim from begin(), not {type(claim).__name__}")
