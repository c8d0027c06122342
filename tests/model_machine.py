"""Drives lock, guard and gate of one half by random steps, and holds them against the reference.

Rules this module obeys:

* The rules are the same for both halves; `Half` is all that differs.
* What is judged is what the server answered to the very call that the step sent; that the step said
  the same to its caller is asserted on top.
* Nothing lapses by itself here: lives are hours, and records are moved instead of slept for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from redis.exceptions import ResponseError

from fencekit import (
    AsyncFenceGate,
    AsyncGuard,
    AsyncLock,
    DistributedLock,
    FenceGate,
    IdempotencyGuard,
    _policy,
    _replies,
    _scripts,
)
from fencekit._async.backend import Backends as AsyncBackends
from fencekit._async.heartbeat import Heartbeat as AsyncHeartbeat
from fencekit._async.store import RedisStore as AsyncStore
from fencekit._codec import JsonCodec
from fencekit._seam import aio, threads
from fencekit._sync.backend import Backends
from fencekit._sync.heartbeat import Heartbeat
from fencekit._sync.store import RedisStore
from fencekit._terms import MISSING
from fencekit.errors import (
    FencedOutError,
    FenceKitError,
    ForeignValue,
    IdempotencyConflict,
    IdempotencyNotOwned,
    IdempotencyResultMissing,
    LockNotAcquired,
    LockNotOwned,
)
from fencekit.records import BeginOutcome, Claim, FenceToken, LeaseState, LockHandle
from fencekit.testing import RedisServer
from tests.model_reference import (
    KINDS,
    RETENTION,
    TOLERANCE,
    Answer,
    Due,
    Foreign,
    Reference,
    Start,
    Token,
    Window,
    agree,
    key_of,
    require,
)
from tests.site import OPTIONS

NAMES = ("a", "{a}")
"""Each is the name of a lock and of a job, and one looks like the other's tag (I11)."""

HOUR = 3600.0
TTLS = (6 * HOUR, 9 * HOUR)
LIVES = (24 * HOUR, 36 * HOUR)
SPENT = 5 * HOUR
DELAY = 3 * HOUR

FOREIGN: dict[str, tuple[Any, ...]] = {
    "lock": ("text", ["item"], {"x": "1"}, {"owner": "me"}),
    "fence": ("text", "007", "9007199254740991", ["item"]),
    "job": ("text", ["item"], {"x": "1"}, {"s": "pending"}, {"s": "d"}),
    "jobfence": ("text", "-5", ["item"]),
}

VALUES = (None, 0, "", "ü\n", [1, {"a": None}], {"$bytes": "x"}, b"\x00\xff", 2**70, 1.5, MISSING)

LOOK = """
local out = {redis.call('TIME')}
for _, key in ipairs(redis.call('KEYS', '*')) do
  local kind, value = redis.call('TYPE', key).ok, false
  if kind == 'hash' then
    value = redis.call('HGETALL', key)
  elseif kind == 'string' then
    value = redis.call('GET', key)
  elseif kind == 'list' then
    value = redis.call('LRANGE', key, 0, -1)
  end
  out[#out + 1] = {key, kind, value, redis.call('PTTL', key)}
end
return out
"""


class Half:
    """The blocking half."""

    name = "sync"
    Lock: Any = DistributedLock
    Guard: Any = IdempotencyGuard
    Gate: Any = FenceGate
    Backends: Any = Backends
    Store: Any = RedisStore
    Heartbeat: Any = Heartbeat
    Link: Any = threads.Link

    def client(self, server: RedisServer) -> Any:
        return server.client(**OPTIONS)

    def run(self, doing: Callable[[], Any]) -> Any:
        """What a call returns."""
        return doing()

    def inside(self, doing: Callable[[], Any]) -> Any:
        """What a plain function returns that has to be called where the half lives."""
        return doing()

    def spied(self, wire: Any, call: Any, options: Any, log: list[Any]) -> Any:
        """Pass a call on and note what it was answered."""
        try:
            reply = wire.run(call, **options)
        except FenceKitError as error:
            log.append((call, error))
            raise
        log.append((call, reply))
        return reply

    def close(self, client: Any) -> None:
        client.close()


class AsyncHalf(Half):
    """The asynchronous half, in one event loop that runs while a step does."""

    name = "async"
    Lock = AsyncLock
    Guard = AsyncGuard
    Gate = AsyncFenceGate
    Backends = AsyncBackends
    Store = AsyncStore
    Heartbeat = AsyncHeartbeat
    Link = aio.Link

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def client(self, server: RedisServer) -> Any:
        return server.async_client(**OPTIONS)

    def run(self, doing: Callable[[], Any]) -> Any:
        return self._loop.run_until_complete(doing())

    def inside(self, doing: Callable[[], Any]) -> Any:
        async def once() -> Any:
            return doing()

        return self.run(once)

    async def spied(self, wire: Any, call: Any, options: Any, log: list[Any]) -> Any:
        try:
            reply = await wire.run(call, **options)
        except FenceKitError as error:
            log.append((call, error))
            raise
        log.append((call, reply))
        return reply

    def close(self, client: Any) -> None:
        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await getattr(client, "aclose", client.close)()

        self.run(end)
        self._loop.close()


class Spy:
    """Stands before a wire and remembers the calls that went over it."""

    def __init__(self, half: Half, wire: Any, log: list[Any]) -> None:
        self._half = half
        self.wire = wire
        self._log = log

    def run(self, call: Any, **options: Any) -> Any:
        return self._half.spied(self.wire, call, options, self._log)

    def post(self, call: Any) -> None:
        raise AssertionError(f"nothing here is given up, so nothing is taken back: {call}")


class Arena:
    """A server, a client of one half, and what watches its calls."""

    def __init__(self, server: RedisServer, half: Half) -> None:
        self.half = half
        self.admin = server.client(decode_responses=False, protocol=2)
        self._look = self.admin.register_script(LOOK)
        self.client = half.client(server)
        self.log: list[tuple[Any, Any]] = []
        backends = half.Backends(self.client, "fencekit", "model")
        # Held here, so that the locks, guards and gates of all machines share it.
        self.backend = half.inside(backends.get)
        link = self.backend.store._link
        link.calls = self.spy = Spy(half, link.calls, self.log)
        # Beats come when the machine says so, on a connection that no worker uses.
        self.own_link = half.inside(lambda: half.Link(self.client))
        keys = self.backend.store.keys
        self.beats = half.inside(
            lambda: half.Heartbeat(self.own_link, half.Store(self.own_link, keys))
        )

    def look(self) -> tuple[int, dict[bytes, tuple[str, Any, float | None]]]:
        """The server's clock in microseconds, and all there is, with when it expires (ms)."""
        (seconds, micros), *rows = self._look()
        now = int(seconds) * 1_000_000 + int(micros)
        found = {}
        for key, kind, value, left in rows:
            if kind == b"hash":
                value = dict(zip(value[0::2], value[1::2], strict=True))  # noqa: PLW2901
            found[key] = (kind.decode(), value, None if left < 0 else now / 1000 + left)
        return now, found

    def close(self) -> None:
        self.half.run(self.own_link.rest)
        self.half.inside(self.backend.heartbeat._wake.set)
        if self.half.name == "sync":
            worker = self.backend.heartbeat._worker
            if worker is not None:
                worker._thread.join(10)
        self.half.close(self.client)
        self.admin.close()


def told(call: Any, reply: Any) -> Answer:  # noqa: PLR0912 - one row for each kind of answer
    """What a call was answered, as the reference says it."""
    if isinstance(reply, ForeignValue):
        return ("foreign", reply.key.encode())
    assert not isinstance(reply, Exception), reply
    match call.script.name:
        case "acquire":
            answer: Any = _replies.acquire(call, reply)
        case "release":
            return ("gone",) if _replies.release(call, reply) else ("released",)
        case "renew":
            return ("lost",) if _replies.renew(call, reply)[0] else ("renewed",)
        case "break":
            fence, _, token = _replies.broken(call, reply)
            return ("broken", fence, token)
        case "begin":
            answer = _replies.begin(call, reply)
        case "settle":
            answer = _replies.settle(call, reply)
        case "clear" | "unclaim":
            return ("flag", _replies.flag(call, reply))
        case "gate":
            answer = _replies.gate(call, reply)
        case name:
            raise AssertionError(name)
    match answer:
        case None:
            return ("settled",)
        case _replies.Grant():
            return ("granted", answer.token)
        case _replies.Refusal():
            return ("busy", answer.owner)
        case _replies.Spent():
            return ("spent",)
        case _replies.Started():
            outcome = "reclaimed" if answer.reclaimed else "begun"
            return (outcome, answer.attempts, answer.token)
        case _replies.Ended(True, attempts, kept):
            return ("failed", attempts, _plain(kept).get("type", ""))
        case _replies.Ended():
            return ("done", answer.attempts, answer.kept)
        case _replies.Running():
            return ("locked", answer.owner) if answer.locked else ("busy", answer.attempts)
        case _replies.Unknown():
            return ("unknown", answer.attempts)
        case _replies.Conflict():
            return ("conflict", answer.known)
        case _replies.NotSettled():
            state = {"p": "pending", "d": "done", "f": "failed"}.get(answer.state)
            return ("refused", state, answer.kept if answer.state == "d" else None)
        case _replies.Written():
            shown = ["error" if isinstance(r, Exception) else r for r in answer.replies]
            return ("written", shown)
        case _replies.Stale():
            return ("stale", answer.newest)
    raise AssertionError(answer)


def _plain(kept: bytes | None) -> dict[str, Any]:
    return dict(JsonCodec().decode(kept or b"{}"))


Judge = Callable[[Answer, Window], None]


@dataclass
class Sent:
    """A call that was sent, how to judge it when it comes again, and how to take it back."""

    call: Any
    judge: Judge
    undo: Callable[[], tuple[Any, Judge]] | None = None


@dataclass
class Bearer:
    """A handle or a claim, and what its holder may believe."""

    token: Token
    owner: str
    ttl: float
    worker: int
    proof: LockHandle | Claim | None
    """None when its worker has crashed."""
    header: str = ""
    delay: float = 0.0
    start: Start | None = None
    job_token: int = 0
    belief: LeaseState = LeaseState.HELD
    alone: bool = True
    """Nobody else has changed the length of its lease."""

    @property
    def lease(self) -> Any:
        assert self.proof is not None
        return self.proof._lease

    @property
    def fence_token(self) -> FenceToken:
        return FenceToken(self.token.value, self.token.name, self.token.kind)


@dataclass
class Worker:
    """A process: its lock, its guard, and the plain starts that the guard remembers."""

    lock: Any
    guard: Any
    owner: str
    delay: float
    starts: dict[str, int] = field(default_factory=dict)


handles: Bundle[Bearer] = Bundle("handles")
claims: Bundle[Bearer] = Bundle("claims")
bearers = st.one_of(handles, claims)
names = st.sampled_from(NAMES)
workers = st.integers(0, 2)
ttls = st.sampled_from(TTLS)
lives = st.sampled_from(LIVES)
values = st.sampled_from(VALUES)
locks = st.sampled_from((None, None, *NAMES))


def has(*kinds: str) -> Callable[[Any], bool]:
    """Whether there is such a record: steps that find nothing teach little."""
    return lambda self: any(kind in kinds for kind, _ in self.reference.records)


class Model(RuleBasedStateMachine):
    """Lock, guard and gate of one half. Subclasses say where (see `model_of`)."""

    arena: ClassVar[Arena]

    def __init__(self) -> None:
        super().__init__()
        self.half = self.arena.half
        self.admin = self.arena.admin
        self.admin.flushall()
        self.reference = Reference()
        self.sent: list[Sent] = []
        self.bearers: list[Bearer] = []
        client = self.arena.client
        # The last two workers were configured with the same owner id.
        self.workers = [
            Worker(
                self.half.Lock(client, lock_delay=delay),
                self.half.Guard(client, owner_id=owner),
                owner,
                delay,
            )
            for owner, delay in (("w0", 0.0), ("w1", 0.0), ("w1", DELAY))
        ]
        self.gate = self.half.Gate(client)
        self.now, self.seen = self.arena.look()
        self._repeating = False

    @initialize()
    def start(self) -> None:
        """The server is empty."""
        agree(self.seen, {}, "I11")

    def teardown(self) -> None:
        heartbeat = self.arena.backend.heartbeat
        for lease in list(heartbeat._kept):
            heartbeat.remove(lease)
        self.bearers.clear()
        self.sent.clear()

    # How a step is made

    def act(self, doing: Callable[[], Any]) -> tuple[Any, Window]:
        """What a call returned or raised, and when the server did it."""
        self.arena.log.clear()
        try:
            outcome = self.half.run(doing)
        except (FenceKitError, ResponseError) as error:
            outcome = error
        return outcome, self.look()

    def look(self) -> Window:
        before = self.now
        self.now, self.seen = self.arena.look()
        return Window(before, self.now)

    def judged(
        self, doing: Callable[[], Any], judge: Judge, *, keep: bool = True, at: int = 0
    ) -> tuple[Any, Answer, Window]:
        """Make a step that sends one call (or look at number `at`), judge the answer to it."""
        outcome, window = self.act(doing)
        assert self.arena.log, f"nothing was sent: {outcome!r}"
        call, reply = self.arena.log[at]
        answer = told(call, reply)
        judge(answer, window)
        if keep:
            self.sent.append(Sent(call, judge))
        if answer[0] == "foreign":
            agree(type(outcome), ForeignValue, "I12")
        return outcome, answer, window

    def arrange(self, change: Callable[[], Any]) -> Window:
        """Change the server from outside."""
        change()
        return self.look()

    @invariant()
    def server_is_as_promised(self) -> None:
        self.reference.compare(self.seen)

    @invariant()
    def beliefs_are_right(self) -> None:
        for bearer in self.bearers:
            if bearer.proof is None:
                continue
            agree(bearer.proof.state, bearer.belief, "I9")
            if bearer.belief is LeaseState.HELD and bearer.alone:
                end = self.now / 1000 + bearer.lease.remaining * 1000
                for due in self._ends(bearer):
                    require(end <= due.latest + TOLERANCE, "I9", f"{bearer} ends before it knows")

    def _ends(self, bearer: Bearer) -> Iterator[Due]:
        """When the server lets go of it, if nobody has moved its records."""
        lock, job = self.reference.held(bearer.token.name), None
        if bearer.start is not None:
            job = self.reference.job(bearer.start.name)
        if bearer.token.kind == "lock" and lock and lock.token == bearer.token.value:
            yield lock.due
        if job and job.lease and not job.lapsed and job.token == bearer.job_token:
            yield job.lease

    # Locks

    @rule(
        target=handles, worker=workers, name=names, ttl=ttls,
        owner=st.sampled_from((None, "shared")), trying=st.booleans(), twice=st.booleans(),
    )  # fmt: skip
    def acquire(
        self, worker: int, name: str, ttl: float, owner: str | None, trying: bool, twice: bool
    ) -> Any:
        who = self.workers[worker]
        method = who.lock.try_acquire if trying else who.lock.acquire

        def judge(answer: Answer, window: Window) -> None:
            owner_now, nonce = call.args[0].decode(), call.args[2]
            self.reference.acquire(name, owner_now, nonce, ttl, who.delay, answer, window)

        outcome, window = self.act(lambda: method(name, ttl=ttl, owner_id=owner))
        ((call, reply),) = self.arena.log
        answer = told(call, reply)
        judge(answer, window)

        def undo() -> tuple[Any, Judge]:
            nonce = call.args[2]
            keys = self.arena.backend.store.keys
            back = _scripts.release(
                keys.lock(name), keys.free_channel(name), nonce=nonce, spent=SPENT
            )
            return back, lambda a, w: self.reference.give_up(name, nonce, SPENT, a, w)

        self.sent.append(Sent(call, judge, undo))
        if twice:
            self.server_is_as_promised()
            self.repeat(0)
        if answer[0] == "granted":
            assert outcome.token == FenceToken(answer[1], name)
            owner_now = call.args[0].decode()
            agree(outcome.owner_id, owner or owner_now, "I2")
            return self._bear(
                Bearer(
                    Token(name, "lock", answer[1]),
                    owner_now,
                    ttl,
                    worker,
                    outcome,
                    outcome.to_header(),
                    who.delay,
                )
            )
        if answer[0] == "foreign":
            assert isinstance(outcome, ForeignValue)
        elif trying:
            assert outcome is None
        else:
            assert isinstance(outcome, LockNotAcquired)
            assert str(outcome.holder).endswith(f"/{answer[1]}")
            assert outcome.retry_after is not None
        return multiple()

    def _bear(self, bearer: Bearer) -> Bearer:
        self.bearers.append(bearer)
        return bearer

    def _handle(self, bearer: Bearer, detached: bool) -> tuple[LockHandle, bool]:
        """The handle as its worker has it, or as it came through a header to another process."""
        if detached or bearer.proof is None:
            return LockHandle.from_header(bearer.header), True
        assert isinstance(bearer.proof, LockHandle)
        return bearer.proof, False

    @rule(bearer=handles, detached=st.booleans())
    def release(self, bearer: Bearer, detached: bool) -> None:
        handle, detached = self._handle(bearer, detached)
        lock = self.workers[bearer.worker].lock
        if not detached and bearer.belief is not LeaseState.HELD:
            self._refuses_unasked(lambda: lock.release(handle), LockNotOwned)
            return
        name, owner, token = bearer.token.name, bearer.owner, bearer.token.value
        outcome, answer, _ = self.judged(
            lambda: lock.release(handle),
            lambda a, w: self.reference.release(name, owner, token, a, w),
        )
        if answer == ("released",):
            assert outcome is None
        elif answer == ("gone",):
            assert isinstance(outcome, LockNotOwned)
            assert outcome.token == token
        if not detached and answer[0] != "foreign":
            released = answer == ("released",)
            bearer.belief = LeaseState.RELEASED if released else LeaseState.LOST

    @rule(bearer=handles, detached=st.booleans(), ttl=st.sampled_from((None, *TTLS)))
    def extend(self, bearer: Bearer, detached: bool, ttl: float | None) -> None:
        handle, detached = self._handle(bearer, detached)
        lock = self.workers[bearer.worker].lock
        if not detached and bearer.belief is not LeaseState.HELD:
            self._refuses_unasked(lambda: lock.extend(handle), LockNotOwned)
            return
        name, owner, token = bearer.token.name, bearer.owner, bearer.token.value
        life = ttl or handle.ttl / timedelta(seconds=1)

        def judge(answer: Answer, window: Window) -> None:
            self.reference.extend(name, owner, token, life, bearer.delay, answer, window)
            bearer.alone = bearer.alone and not detached and not self._repeating

        outcome, answer, _ = self.judged(lambda: lock.extend(handle, ttl=ttl), judge)
        if answer == ("renewed",):
            assert outcome is None
            if not detached:
                bearer.ttl = life
        else:
            assert isinstance(outcome, LockNotOwned)
            if not detached:
                bearer.belief = LeaseState.LOST

    def _refuses_unasked(self, doing: Callable[[], Any], kind: type[Exception]) -> None:
        outcome, _ = self.act(doing)
        assert isinstance(outcome, kind)
        assert not self.arena.log

    @rule(
        target=handles, bearer=handles, worker=workers, then=st.sampled_from(("release", "extend"))
    )
    def freeze(self, bearer: Bearer, worker: int, then: str) -> Any:
        """A holder froze, another of the same owner id came after it, and then it goes on."""
        name = bearer.token.name
        self.gone("lock", name)
        after = self.acquire(worker, name, bearer.ttl, bearer.owner, False, False)
        self.server_is_as_promised()
        if then == "release":
            self.release(bearer, True)
        else:
            self.extend(bearer, True, None)
        return after

    @precondition(has("lock"))
    @rule(name=names)
    def lock_delay_begins(self, name: str) -> None:
        """A lease with a lock delay has run out; the name is kept back."""
        lock = self.reference.held(name)
        if lock and lock.delayed:
            self.arrange(lambda: self.admin.hset(key_of(("lock", name)), "until", "1"))
            lock.over = True

    @precondition(has("lock"))
    @rule(name=names)
    def break_lock(self, name: str) -> None:
        outcome, window = self.act(lambda: self.workers[0].lock.break_lock(name, reason="model"))
        held = self.reference.held(name)
        asked, *rest = self.arena.log
        if not rest:  # asking who holds it met a foreign value
            agree(told(*asked), self.reference.foreign(("lock", name), ("fence", name)), "I12")
            assert isinstance(outcome, ForeignValue)
            return
        ((call, reply),) = rest

        def judge(answer: Answer, window: Window) -> None:
            self.reference.break_lock(name, "model", answer, window)

        judge(told(call, reply), window)
        self.sent.append(Sent(call, judge))
        assert (outcome and outcome.token) == (held and held.token)

    @precondition(has("lock"))
    @rule(name=names)
    def inspect(self, name: str) -> None:
        outcome, _ = self.act(lambda: self.workers[0].lock.inspect(name))
        bad = self.reference.foreign(("lock", name), ("fence", name))
        if bad:
            agree(told(*self.arena.log[0]), bad, "I12")
            return
        held = self.reference.held(name)
        shown = outcome and (outcome.owner_id, outcome.token, outcome.fence)
        fence = self.reference.fence(("fence", name))
        agree(shown, held and (held.owner, held.token, fence), "I2")

    # Jobs

    @rule(
        target=claims, worker=workers, name=names, lock=locks, ttl=lives, lease=ttls,
        fingerprint=st.sampled_from((None, None, None, "f", "g")),
        most=st.sampled_from((None, None, 1, 3)),
        on_lapse=st.sampled_from(("reclaim", "reclaim", "reclaim", "block")),
    )  # fmt: skip
    def begin(
        self, worker: int, name: str, lock: str | None, ttl: float, lease: float,
        fingerprint: str | None, most: int | None, on_lapse: str,
    ) -> Any:  # fmt: skip
        start = Start(
            name, self.workers[worker].owner, ttl, lease, lock, True, fingerprint or "", most or 0,
            on_lapse == "block",
        )  # fmt: skip
        return self._begin(worker, start)

    def _begin(self, worker: int, start: Start) -> Any:
        guard = self.workers[worker].guard
        outcome, answer, call = self._started(
            start,
            lambda: guard.begin(
                start.name, ttl=start.ttl, lease=start.lease, lock=start.lock,
                fingerprint=start.fingerprint or None, max_attempts=start.most or None,
                on_lapse="block" if start.blocks else "reclaim",
            ),
        )  # fmt: skip
        match answer:
            case ("begun" | "reclaimed", attempts, value):
                assert isinstance(outcome, Claim)
                agree((outcome.outcome.value, outcome.attempts), answer[:2], "I5")
                kind, name = ("job", start.name) if start.lock is None else ("lock", start.lock)
                agree(outcome.token, FenceToken(value, name, kind), "I1")
                assert start.lease is not None
                agree(attempts > 0, True, "I5")
                return self._bear(
                    Bearer(
                        Token(name, kind, value),
                        start.owner,
                        start.lease,
                        worker,
                        outcome,
                        start=start,
                        job_token=value,
                    )
                )
            case ("done", attempts, kept):
                agree(outcome.outcome, BeginOutcome.ALREADY_DONE, "I5")
                self._same_memo(outcome.has_result, outcome.result, kept)
            case ("failed", attempts, error):
                agree((outcome.outcome, outcome.error_type), (BeginOutcome.FAILED, error), "I5")
            case ("busy", attempts):
                agree((outcome.outcome, outcome.attempts), ("in_progress", attempts), "I5")
            case ("unknown", attempts):
                agree(outcome.outcome, BeginOutcome.UNKNOWN, "I5")
            case ("conflict", known):
                assert isinstance(outcome, IdempotencyConflict)
                assert outcome.known == known
            case ("locked", owner):
                assert isinstance(outcome, LockNotAcquired)
                assert str(outcome.holder).endswith(f"/{owner}")
            case _:
                assert isinstance(outcome, ForeignValue)
        del call
        return multiple()

    def _started(self, start: Start, doing: Callable[[], Any]) -> tuple[Any, Answer, Any]:
        """A step that asks for a start."""
        outcome, window = self.act(doing)
        ((call, reply),) = self.arena.log
        nonce = call.args[2]

        def judge(answer: Answer, window: Window) -> None:
            self.reference.begin(start, nonce, answer, window)

        def undo() -> tuple[Any, Judge]:
            keys = self.arena.backend.store.keys
            taken = call.keys[0::2] if start.lock and start.takes else call.keys[:1]
            back = _scripts.unclaim(
                taken, nonce=nonce, spent=SPENT, done=keys.done_channel(start.name),
                free=keys.free_channel(start.lock or start.name),
            )  # fmt: skip
            return back, lambda a, w: self.reference.unclaim(start, nonce, SPENT, a, w)

        answer = told(call, reply)
        judge(answer, window)
        self.sent.append(Sent(call, judge, undo))
        return outcome, answer, call

    def _same_memo(self, has_result: bool, result: Any, kept: bytes | None) -> None:
        """I6: the result that a caller gets is what the stored bytes say."""
        agree(has_result, kept is not None, "I6")
        if kept is not None:
            agree(JsonCodec().encode(result), kept, "I6")

    @rule(claim=claims, value=values, ttl=st.sampled_from((None, *LIVES)))
    def finish(self, claim: Bearer, value: Any, ttl: float | None) -> None:
        guard = self.workers[claim.worker].guard
        kept = None if value is MISSING else JsonCodec().encode(value)
        self._settle(claim, "d", kept, ttl, lambda: guard.finish(claim.proof, value, ttl=ttl))

    @rule(claim=claims, retry=st.booleans(), ttl=st.sampled_from((None, *LIVES)))
    def fail(self, claim: Bearer, retry: bool, ttl: float | None) -> None:
        guard = self.workers[claim.worker].guard
        error = ValueError("model")
        self._settle(
            claim, "x" if retry else "f", None, ttl,
            lambda: guard.fail(claim.proof, error, retry=retry, ttl=ttl),
        )  # fmt: skip

    def _settle(
        self, claim: Bearer, state: str, kept: bytes | None, ttl: float | None,
        doing: Callable[[], Any],
    ) -> None:  # fmt: skip
        if claim.proof is None:
            return
        start = claim.start
        assert start is not None

        def judge(answer: Answer, window: Window) -> None:
            call = self.arena.log[0][0] if answered is None else answered
            memo = call.args[4] if call.args[3] == b"1" else None
            if state == "d":
                agree(memo, kept, "I6")
            self.reference.settle(
                start.name, start.owner, claim.job_token, state, memo, ttl, start.lock, answer,
                window,
            )  # fmt: skip

        answered: Any = None
        outcome, answer, _ = self.judged(doing, judge)
        answered = self.sent[-1].call
        self._was_settled(outcome, answer)
        if answer[0] == "foreign" or claim.belief is not LeaseState.HELD:
            return
        claim.belief = LeaseState.RELEASED if answer == ("settled",) else LeaseState.LOST

    def _was_settled(self, outcome: Any, answer: Answer) -> None:
        if answer == ("settled",):
            assert outcome is None
        elif answer[0] == "refused":
            assert isinstance(outcome, IdempotencyNotOwned)
            agree(outcome.state, answer[1], "I5")
            self._same_memo(outcome.has_result, outcome.result, answer[2])

    @precondition(has("job"))
    @rule(name=names)
    def lapse(self, name: str) -> None:
        """The lease of a claim has run out on the server."""
        job = self.reference.job(name)
        if job and job.lease is not None:
            self.arrange(lambda: self.admin.hset(key_of(("job", name)), "l", "1"))
            job.lapsed = True

    @rule(
        target=claims, claim=claims, worker=workers, late=st.booleans(), value=values,
        writing=st.booleans(),
    )  # fmt: skip
    def take_over(self, claim: Bearer, worker: int, late: bool, value: Any, writing: bool) -> Any:
        """A worker froze, its job is started by another, and then it may go on."""
        assert claim.start is not None
        if writing:
            self.check_and_advance(claim)
        self.lapse(claim.start.name)
        if claim.start.lock is not None:
            self.gone("lock", claim.start.lock)
        start = Start(**{**claim.start.__dict__, "owner": self.workers[worker].owner})
        taken = self._begin(worker, start)
        self.server_is_as_promised()
        if writing and isinstance(taken, Bearer):
            self.check_and_advance(taken)
            self.server_is_as_promised()
        if late:
            self.finish(claim, value, None)
        return taken

    @rule(worker=workers, name=names, ttl=lives)
    def try_begin(self, worker: int, name: str, ttl: float) -> None:
        who = self.workers[worker]
        start = Start(name, who.owner, ttl)
        outcome, answer, _ = self._started(start, lambda: who.guard.try_begin(name, ttl=ttl))
        if answer[0] in ("begun", "reclaimed"):
            who.starts[name] = answer[2]
        if answer[0] == "foreign":
            assert isinstance(outcome, ForeignValue)
        else:
            agree(outcome, answer[0] in ("begun", "reclaimed"), "I5")

    @rule(worker=workers, name=names, lock=names, ttl=lives)
    def try_begin_or_reclaim(self, worker: int, name: str, lock: str, ttl: float) -> None:
        who = self.workers[worker]
        start = Start(name, who.owner, ttl, None, lock, takes=False)
        outcome, answer, _ = self._started(
            start,
            lambda: who.guard.try_begin_or_reclaim(
                name, lock=who.lock, lock_resource=lock, ttl=ttl
            ),
        )
        if answer[0] in ("begun", "reclaimed"):
            who.starts[name] = answer[2]
        if answer[0] == "foreign":
            assert isinstance(outcome, ForeignValue)
            return
        shown = {"done": "already_done", "busy": "in_progress"}.get(answer[0], answer[0])
        agree(outcome.value, shown, "I5")

    @precondition(has("job"))
    @rule(
        worker=workers, name=names, value=values, ttl=st.sampled_from((None, *LIVES)),
        twice=st.booleans(),
    )  # fmt: skip
    def mark_done(self, worker: int, name: str, value: Any, ttl: float | None, twice: bool) -> None:
        who = self.workers[worker]
        kept = None if value is MISSING else JsonCodec().encode(value)
        token = who.starts.get(name)

        def judge(answer: Answer, window: Window) -> None:
            self.reference.settle(name, who.owner, token, "d", kept, ttl, None, answer, window)

        outcome, answer, _ = self.judged(
            lambda: who.guard.mark_done(name, result=value, ttl=ttl), judge
        )
        self._was_settled(outcome, answer)
        if answer == ("settled",):
            who.starts.pop(name, None)
        if twice:
            self.server_is_as_promised()
            self.mark_done(worker, name, value, ttl, False)

    @precondition(has("job"))
    @rule(name=names)
    def read(self, name: str) -> None:
        """What the guard says of a job."""
        guard = self.workers[0].guard
        bad = self.reference.foreign(("job", name))
        job = self.reference.job(name)
        status, _ = self.act(lambda: guard.status(name))
        if bad:
            agree(("foreign", status.key.encode()), bad, "I12")
            return
        shown = {"p": "pending", "d": "done", "f": "failed"}.get(job.state if job else "")
        agree(status, shown, "I5")
        result, _ = self.act(lambda: guard.get_result(name))
        if job and job.state == "d" and job.kept is not None:
            self._same_memo(True, result, job.kept)
        else:
            assert isinstance(result, IdempotencyResultMissing)
            assert result.state == shown

    @precondition(has("job"))
    @rule(worker=workers, name=names)
    def clear(self, worker: int, name: str) -> None:
        who = self.workers[worker]
        self.judged(lambda: who.guard.clear(name), lambda a, w: self.reference.clear(name, a, w))
        who.starts.pop(name, None)

    @precondition(has("job"))
    @rule(name=names, value=values, ttl=st.sampled_from((None, *LIVES)))
    def resolve(self, name: str, value: Any, ttl: float | None) -> None:
        guard = self.workers[0].guard
        kept = None if value is MISSING else JsonCodec().encode(value)
        outcome, answer, _ = self.judged(
            lambda: guard.resolve(name, value, ttl=ttl),
            lambda a, w: self.reference.resolve(name, kept, ttl, a, w),
        )
        if answer == ("flag", False):
            assert isinstance(outcome, IdempotencyNotOwned)

    # Gates

    def _write(
        self, token: Token, commands: list[list[bytes]], doing: Callable[[], Any]
    ) -> tuple[Any, Answer]:
        outcome, window = self.act(doing)
        ((call, reply),) = self.arena.log
        memory, remembered = call.keys[1], call.args[3] != b"0"

        def judge(answer: Answer, window: Window) -> None:
            self.reference.write(token, memory, remembered, commands, answer, window)

        answer = told(call, reply)
        judge(answer, window)
        self.sent.append(Sent(call, judge))
        if answer[0] == "stale":
            assert isinstance(outcome, FencedOutError)
            agree((outcome.token, outcome.current), (token.value, answer[1]), "I3")
        elif answer[0] == "foreign":
            assert isinstance(outcome, ForeignValue)
        return outcome, answer

    @rule(bearer=bearers, key=st.sampled_from(("x", "y")), number=st.integers(0, 9))
    def set_if_fresh(self, bearer: Bearer, key: str, number: int) -> None:
        life = HOUR if number % 2 else None
        words = [b"SET", key.encode(), b"%d" % number]
        if life:
            words += [b"PX", b"%d" % (life * 1000)]
        outcome, answer = self._write(
            bearer.token,
            [words],
            lambda: self.gate.set_if_fresh(bearer.fence_token, key, number, ttl=life),
        )
        if answer[0] == "written":
            assert outcome is None

    @rule(
        bearer=bearers, key=st.sampled_from(("x", "y")), spoil=st.booleans(), twice=st.booleans()
    )  # fmt: skip
    def pipeline(self, bearer: Bearer, key: str, spoil: bool, twice: bool) -> None:
        pipe = self.half.inside(lambda: self.gate.pipeline(bearer.fence_token))
        commands = [[b"INCR", key.encode()]]
        pipe.incr(key)
        if spoil:
            pipe.set(key, "text").incr(key)
            commands += [[b"SET", key.encode(), b"text"], [b"INCR", key.encode()]]
        outcome, answer = self._write(bearer.token, commands, pipe.execute)
        if answer[0] == "written":
            failed = "error" in answer[1]
            assert isinstance(outcome, ResponseError) if failed else outcome == answer[1]
        if twice:
            self.repeat(0)

    @rule(bearer=bearers)
    def check_and_advance(self, bearer: Bearer) -> None:
        self._write(bearer.token, [], lambda: self.gate.check_and_advance(bearer.fence_token))

    @rule(bearer=bearers)
    def check(self, bearer: Bearer) -> None:
        token = bearer.token
        outcome, _ = self.act(lambda: self.gate.check(bearer.fence_token))
        newest, _ = self.act(lambda: self.gate.current_max(token.name, kind=token.kind))
        bad = self.reference.unreadable(token)
        if bad:
            agree(
                [("foreign", error.key.encode()) for error in (outcome, newest)], [bad] * 2, "I12"
            )
            return
        agree(newest, self.reference.newest(token), "I3")
        agree(type(outcome) is FencedOutError, token.value < newest, "I3")

    # Heartbeats

    @precondition(lambda self: self.bearers)
    @rule()
    def beat(self) -> None:
        """All that is held is due: one batch."""
        due = [b for b in self.bearers if b.proof is not None and b.belief is LeaseState.HELD]
        if not due:
            return
        beats = self.arena.beats
        # Among those it keeps, for how long a beat may take; its worker is never started.
        beats._kept.update(bearer.lease for bearer in due)
        _, window = self.act(lambda: beats._beat([bearer.lease for bearer in due]))
        beats._kept.clear()
        beats._due.clear()
        for bearer in due:
            token, start = bearer.token, bearer.start
            kept = True
            if start is not None:
                kept = self.reference.renew_job(
                    start.name, bearer.owner, bearer.job_token, bearer.ttl, window
                )
            if token.kind == "lock":
                alive = self.reference.renew_lock(
                    token.name, bearer.owner, token.value, bearer.ttl, bearer.delay, window
                )
                kept = kept and alive
            bearer.belief = LeaseState.HELD if kept else LeaseState.LOST

    # What happens to workers, calls and the server

    @precondition(lambda self: self.bearers)
    @rule(worker=workers)
    def crash(self, worker: int) -> None:
        """A worker is gone without a word; what it had sent elsewhere is still there."""
        for bearer in self.bearers:
            if bearer.worker == worker:
                bearer.proof = None
        who = self.workers[worker]
        who.guard = self.half.Guard(self.arena.client, owner_id=who.owner)
        who.starts.clear()

    @precondition(lambda self: self.sent)
    @rule(back=st.integers(0, 9))
    def repeat(self, back: int) -> None:
        """A copy of an earlier call arrives: it was sent again, or was on its way for long."""
        sent = self.sent[-1 - back % len(self.sent)]
        self._send(sent.call, sent.judge)

    @precondition(lambda self: any(sent.undo for sent in self.sent))
    @rule(back=st.integers(0, 5))
    def give_up(self, back: int) -> None:
        """The caller of an earlier call had given up; what takes it back arrives."""
        given = [sent for sent in self.sent if sent.undo]
        sent = given[-1 - back % len(given)]
        assert sent.undo is not None
        self._send(*sent.undo())

    def _send(self, call: Any, judge: Judge) -> None:
        deadline = _policy.now() + 60
        _, window = self.act(lambda: self.arena.spy.run(call, deadline=deadline))
        self._repeating = True
        judge(told(*self.arena.log[0]), window)
        self._repeating = False

    @precondition(has(*KINDS))
    @rule(kind=st.sampled_from(KINDS), name=names)
    def gone(self, kind: str, name: str) -> None:
        """A key has expired, or was evicted."""
        self.arrange(lambda: self.admin.pexpire(key_of((kind, name)), 0))
        self.reference.lose((kind, name))

    @precondition(has(*KINDS))
    @rule()
    def flush(self) -> None:
        self.arrange(self.admin.flushall)
        self.reference.flush()

    @precondition(lambda self: self.sent)
    @rule()
    def forget_scripts(self) -> None:
        self.arrange(self.admin.script_flush)

    @rule(kind=st.sampled_from(("fence", "jobfence")), name=names, ahead=st.integers(1, 10_000))
    def clock_steps_back(self, kind: str, name: str, ahead: int) -> None:
        """The server's clock had been ahead at the last accepted token."""
        place = (kind, name)
        token = self.now + ahead * 1_000_000
        if self.reference.foreign(place) or token <= self.reference.fence(place):
            return
        life = int(RETENTION * 1000)
        window = self.arrange(lambda: self.admin.set(key_of(place), token, px=life))
        self.reference.clock_was_ahead(place, token, window.after(RETENTION))

    @rule(
        kind=st.sampled_from(KINDS), name=names, which=st.integers(0, 9), worker=workers,
        probed=st.booleans(),
    )  # fmt: skip
    def foreign(self, kind: str, name: str, which: int, worker: int, probed: bool) -> None:
        """Somebody else uses one of fencekit's keys."""
        values = FOREIGN[kind]
        value, key = values[which % len(values)], key_of((kind, name))
        self.gone(kind, name)
        if isinstance(value, str):
            self.arrange(lambda: self.admin.set(key, value))
        elif isinstance(value, list):
            self.arrange(lambda: self.admin.rpush(key, *value))
        else:
            self.arrange(lambda: self.admin.hset(key, mapping=value))
        type_, stored, _ = self.seen[key]
        self.reference.records[kind, name] = Foreign(type_, stored)
        if probed and kind in ("lock", "fence"):
            if kind == "fence":
                self.gone("lock", name)
            self.acquire(worker, name, TTLS[0], None, True, False)
        elif probed:
            self.try_begin(worker, name, LIVES[0])

    @precondition(lambda self: any(isinstance(r, Foreign) for r in self.reference.records.values()))
    @rule()
    def foreign_is_moved_away(self) -> None:
        for place, record in list(self.reference.records.items()):
            if isinstance(record, Foreign):
                self.gone(*place)


def model_of(arena: Arena) -> type[Model]:
    """The machine for one half and server."""
    return type(f"Model_{arena.half.name}", (Model,), {"arena": arena})


__all__ = ["Arena", "AsyncHalf", "Half", "Model", "model_of"]
