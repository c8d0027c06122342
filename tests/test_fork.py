"""A forked child neither frees nor keeps what its parent holds, and works with the same objects.

Every case runs in a process of its own, so that the one that runs the tests is never forked.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import multiprocessing
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from fencekit import (
    AsyncGuard,
    AsyncLock,
    DistributedLock,
    FenceGate,
    IdempotencyGuard,
    IdempotencyNotOwned,
    LeaseLost,
    LeaseState,
    LockHandle,
    LockNotOwned,
    _policy,
)
from fencekit.events import Event, Renewed
from fencekit.testing import RedisServer
from tests import aio, threads

ROOT = Path(__file__).resolve().parents[1]
TTL = 1.2
"""Long enough for a heartbeat on a busy machine, short enough to outlast in a test."""


# In the forking process


class Child:
    """A forked child that runs a function; what it returned or raised comes back."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._result, writing = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(writing)
            return
        status = 1
        try:
            try:
                outcome = (function(), "")
            except BaseException:
                outcome = (None, traceback.format_exc())
            data = pickle.dumps(outcome)
            os.write(writing, struct.pack("!I", len(data)) + data)
            status = 0
        finally:
            os._exit(status)

    def result(self, timeout: float = 20.0) -> Any:
        """What the function returned; the child is ended if it takes too long."""
        try:
            (size,) = struct.unpack("!I", self._read(4, timeout))
            value, error = pickle.loads(self._read(size, timeout))
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)  # tell where it stands: see main()
                time.sleep(0.5)
                os.kill(self.pid, signal.SIGKILL)
            raise
        finally:
            os.close(self._result)
            os.waitpid(self.pid, 0)
        assert not error, f"in the child:\n{error}"
        return value

    def _read(self, size: int, timeout: float) -> bytes:
        data = b""
        while len(data) < size:
            assert select.select([self._result], [], [], timeout)[0], "the child hangs"
            piece = os.read(self._result, size - len(data))
            assert piece, "the child ended without a word"
            data += piece
        return data


class Beats:
    """Counts renewals."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, event: Event) -> None:
        self.count += isinstance(event, Renewed)


def is_lost_here(handle: LockHandle) -> None:
    """An inherited handle is lost, and says whose it is."""
    assert handle.lost
    assert handle.state is LeaseState.LOST
    assert handle.remaining == 0.0
    with pytest.raises(LeaseLost, match="forked"):
        handle.check()


def token_at(admin: redis.Redis, name: str) -> int:
    return int(admin.hget(f"fencekit:{{{name}}}:lock", "token") or 0)  # type: ignore[arg-type]


# Cases of the blocking half


def sync_child_leaves_the_block(client: redis.Redis, admin: redis.Redis) -> None:
    beats = Beats()
    lock = DistributedLock(client, listeners=[beats])
    parent = os.getpid()
    try:
        with lock.hold("a", ttl=TTL) as handle:
            threads.until(lambda: beats.count > 0)
            Child(lambda: is_lost_here(handle)).result()
            pid = os.fork()
            if pid == 0:
                raise SystemExit(7)  # leaves the block in the child, as its end would
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
            assert token_at(admin, "a") == handle.token.value
            before = beats.count
            threads.until(lambda: beats.count > before + 3)  # longer than one lease
            handle.check()
            assert token_at(admin, "a") == handle.token.value
    except SystemExit:
        assert os.getpid() != parent
        raise
    assert token_at(admin, "a") == 0


def sync_child_cannot_touch_the_parents_handle(client: redis.Redis, admin: redis.Redis) -> None:
    lock = DistributedLock(client)
    held = lock.acquire("a", ttl=60)

    def child() -> None:
        is_lost_here(held)
        with pytest.raises(LockNotOwned):
            lock.release(held)
        with pytest.raises(LockNotOwned):
            lock.extend(held, ttl=1)
        assert lock.try_acquire("a") is None

    Child(child).result()
    assert token_at(admin, "a") == held.token.value
    held.check()
    lock.release(held)


def sync_child_uses_the_same_objects(client: redis.Redis, admin: redis.Redis) -> None:
    lock, gate, guard = DistributedLock(client), FenceGate(client), IdempotencyGuard(client)
    beats = Beats()
    listening = DistributedLock(client, listeners=[beats])

    def child() -> tuple[int, int]:
        before = beats.count
        with listening.hold("b", ttl=TTL) as handle:
            threads.until(lambda: beats.count > before)  # a heartbeat of the child's own
            gate.set_if_fresh(handle.token, "row", "child")
            handle.check()
        assert guard.once("job", lambda: os.getpid()) == os.getpid()  # noqa: PLW0108
        waiting = threads.Running(lambda: lock.acquire("a", ttl=60, wait=20))
        released.wait(20)
        waiting.result()
        return os.getpid(), handle.token.value

    released = multiprocessing.get_context("fork").Event()
    with listening.hold("a", ttl=TTL) as handle:
        threads.until(lambda: beats.count > 0)
        gate.set_if_fresh(handle.token, "row", "parent")
        forked = Child(child)
        channel = "fencekit:{a}:free"
        threads.until(lambda: admin.pubsub_numsub(channel)[0][1] > 0)
    released.set()
    pid, token = forked.result()
    assert pid == forked.pid
    assert token > handle.token.value
    assert admin.get("row") == b"child"
    assert guard.once("job", lambda: 0) == pid


def sync_connections_are_not_shared(client: redis.Redis, admin: redis.Redis) -> None:
    lock = DistributedLock(client)
    with lock.hold("a", ttl=60):
        ours = addresses(admin)

        def child() -> set[str]:
            lock.release(lock.acquire("b"))
            return addresses(admin_of_child())

        def admin_of_child() -> redis.Redis:
            options = admin.connection_pool.connection_kwargs
            return redis.Redis(host=options["host"], port=options["port"])

        theirs = Child(child).result()
        assert ours <= theirs  # the parent's were not closed by the child
        assert theirs - ours
        lock.release(lock.acquire("b"))


def addresses(admin: redis.Redis) -> set[str]:
    return {client["addr"] for client in admin.client_list()}


def sync_a_claim_stays_the_parents(client: redis.Redis, admin: redis.Redis) -> None:
    guard = IdempotencyGuard(client)
    with guard.run("job", lease=TTL, lock="a") as job:
        job.result = "the parent's"

        def child() -> None:
            assert job.claim.lost
            with pytest.raises(LeaseLost, match="forked"):
                job.check()
            with pytest.raises(IdempotencyNotOwned):
                guard.finish(job.claim, "the child's")
            with pytest.raises(IdempotencyNotOwned):
                guard.fail(job.claim)
            assert guard.status("job") == "pending"
            assert not guard.begin("job").started

        Child(child).result()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(SystemExit):
                raise SystemExit
            job.result = "the child's"
            raise SystemExit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert guard.status("job") == "pending"
        assert token_at(admin, "a") == job.token.value
        job.check()
    assert guard.get_result("job") == "the parent's"


def sync_a_plain_start_stays_the_parents(client: redis.Redis, admin: redis.Redis) -> None:
    guard = IdempotencyGuard(client)
    assert guard.try_begin("job", ttl=60)

    def child() -> None:
        assert not guard.try_begin("job", ttl=60)
        with pytest.raises(IdempotencyNotOwned):
            guard.mark_done("job", result="the child's")
        assert guard.try_begin("child's job", ttl=60)
        guard.mark_done("child's job", result="the child's")

    Child(child).result()
    guard.mark_done("job", result="the parent's")
    assert guard.get_result("job") == "the parent's"
    assert guard.get_result("child's job") == "the child's"


def sync_names_differ(client: redis.Redis, admin: redis.Redis) -> None:
    guard = IdempotencyGuard(client)
    chosen = IdempotencyGuard(client, owner_id="me")
    mine = {guard.owner_id, _policy.owner()} | {_policy.nonce().decode() for _ in range(100)}

    def child() -> set[str]:
        assert chosen.owner_id == "me"
        assert str(os.getpid()) in _policy.label("x")
        nested = Child(lambda: {guard.owner_id} | {_policy.nonce().decode() for _ in range(100)})
        theirs = nested.result()
        names = {guard.owner_id, _policy.owner()} | {_policy.nonce().decode() for _ in range(100)}
        assert not names & theirs
        return names | theirs

    first, second = Child(child), Child(child)
    others = [first.result(), second.result()]
    assert not mine & others[0]
    assert not mine & others[1]
    assert not others[0] & others[1]
    assert guard.owner_id in mine


def sync_many_forks_under_load(client: redis.Redis, admin: redis.Redis) -> None:
    beats = Beats()
    lock = DistributedLock(client, listeners=[beats])
    guard = IdempotencyGuard(client)
    over = threading.Event()

    def work(number: int) -> None:
        while not over.is_set():
            lock.release(lock.acquire(f"own:{number}", ttl=60))
            with lock.hold("shared", ttl=60, wait=60):
                guard.once(f"job:{number}:{time.monotonic_ns()}", int)

    def child(number: int) -> int:
        own = lock.acquire(f"child:{number}", ttl=60)
        with lock.hold("shared", ttl=60, wait=60) as handle:
            handle.check()
        assert guard.once(f"child:{number}", lambda: number) == number
        lock.release(own)
        return number

    with lock.hold("kept", ttl=6) as kept:
        workers = [threads.Running(lambda n=n: work(n)) for n in range(4)]
        try:
            threads.until(lambda: beats.count > 0)
            children = []
            for number in range(20):
                children.append(Child(lambda n=number: child(n)))
                time.sleep(0.005)
            assert [child.result(40) for child in children] == list(range(20))
        finally:
            over.set()
        for worker in workers:
            worker.result()
        before = beats.count
        threads.until(lambda: beats.count > before)
        kept.check()
    assert token_at(admin, "kept") == 0


def sync_a_fork_while_the_clients_own_locks_are_taken(
    client: redis.Redis, admin: redis.Redis
) -> None:
    # In the child nobody is left who would free them.
    lock = DistributedLock(client)
    lock.release(lock.acquire("a"))
    taken, over = threading.Event(), threading.Event()

    def occupy() -> None:
        pool = client.connection_pool
        with contextlib.ExitStack() as stack:
            for owner in (pool, getattr(pool, "_event_dispatcher", None)):
                for name in ("_lock", "_fork_lock"):
                    if hasattr(owner, name):
                        stack.enter_context(getattr(owner, name))
            taken.set()
            over.wait()

    occupied = threads.Running(occupy)
    taken.wait()
    child = Child(lambda: lock.acquire("b", ttl=60).token.value)
    try:
        assert child.result(15) == token_at(admin, "b")
    finally:
        over.set()
        occupied.result()


def sync_forked_workers_exclude_each_other(client: redis.Redis, admin: redis.Redis) -> None:
    lock = DistributedLock(client)
    lock.release(lock.acquire("counter"))
    admin.set("counter", 0)

    def count() -> None:
        for _ in range(15):
            with lock.hold("counter", ttl=60, wait=None) as handle:
                value = int(client.get("counter") or 0)  # type: ignore[arg-type]
                time.sleep(0.001)
                FenceGate(client).set_if_fresh(handle.token, "counter", value + 1)

    workers = [Child(count) for _ in range(4)]
    for worker in workers:
        worker.result(40)
    assert admin.get("counter") == b"60"


def sync_a_child_outlives_its_parents_lease(client: redis.Redis, admin: redis.Redis) -> None:
    """The child is no heartbeat: a parent that dies is taken over though its child lives on."""
    lock = DistributedLock(client)

    def parent() -> tuple[int, int]:
        lease = lock.hold("a", ttl=TTL)
        handle = lease.__enter__()
        grandchild = Child(lambda: handle.lost and time.sleep(30))
        return handle.token.value, grandchild.pid

    token, grandchild = Child(parent).result()
    try:
        successor = lock.acquire("a", ttl=60, wait=20)
        assert successor.token.value > token
        os.kill(grandchild, 0)
    finally:
        os.kill(grandchild, signal.SIGKILL)


# Cases of the asynchronous half


async def async_child_leaves_the_block(client: Any, admin: redis.Redis) -> None:
    beats = Beats()
    lock = AsyncLock(client, listeners=[beats])
    parent = os.getpid()
    async with lock.hold("a", ttl=TTL) as handle:
        await aio.until(lambda: beats.count > 0)
        for _ in range(2):
            pid = os.getpid()
            try:
                async with lock.hold("b", ttl=60):
                    pid = os.fork()
                    if pid == 0:
                        raise SystemExit(7)  # leaves the inner block in the child
            except SystemExit:
                assert os.getpid() != parent
                os._exit(7 if handle.lost else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        before = beats.count
        await aio.until(lambda: beats.count > before + 3)
        handle.check()
        assert token_at(admin, "a") == handle.token.value
    assert token_at(admin, "a") == token_at(admin, "b") == 0


async def async_child_uses_the_same_objects(client: Any, admin: redis.Redis) -> None:
    beats = Beats()
    lock = AsyncLock(client, listeners=[beats])
    guard = AsyncGuard(client)
    hold = lock.hold("a", ttl=TTL)
    handle = await hold.__aenter__()
    claim = await guard.begin("job", lease=TTL)
    await aio.until(lambda: beats.count > 0)

    async def child() -> int:
        is_lost_here(handle)
        assert claim.lost
        await hold.__aexit__(None, None, None)
        with pytest.raises(LockNotOwned):
            await lock.release(handle)
        with pytest.raises(IdempotencyNotOwned):
            await guard.finish(claim, None)
        before = beats.count
        async with lock.hold("b", ttl=TTL) as own:
            await aio.until(lambda: beats.count > before)
            own.check()
        assert await lock.try_acquire("a") is None
        assert await guard.once("child", lambda: 7) == 7
        return own.token.value

    for _ in range(2):
        # Held up on purpose: the loop runs on while the child uses what it inherited.
        forked = Child(lambda: asyncio.run(child()))
        assert await asyncio.to_thread(forked.result) > handle.token.value
    before = beats.count
    await aio.until(lambda: beats.count > before + 3)
    handle.check()
    await guard.finish(claim, "the parent's")
    assert await guard.get_result("job") == "the parent's"
    await hold.__aexit__(None, None, None)
    assert token_at(admin, "a") == 0


async def async_many_forks_under_load(client: Any, admin: redis.Redis) -> None:
    beats = Beats()
    lock = AsyncLock(client, listeners=[beats])
    over = False

    async def work(number: int) -> None:
        while not over:
            await lock.release(await lock.acquire(f"own:{number}", ttl=60))
            async with lock.hold("shared", ttl=60, wait=60):
                await asyncio.sleep(0)

    async def child(number: int) -> int:
        own = await lock.acquire(f"child:{number}", ttl=60)
        async with lock.hold("shared", ttl=60, wait=60) as handle:
            handle.check()
        await lock.release(own)
        return number

    async with lock.hold("kept", ttl=6) as kept:
        workers = [asyncio.create_task(work(number)) for number in range(10)]
        await asyncio.sleep(0.05)
        children = []
        for number in range(10):
            children.append(Child(lambda n=number: asyncio.run(child(n))))
            await asyncio.sleep(0.01)
        results = [await asyncio.to_thread(child.result, 40) for child in children]
        assert results == list(range(10))
        over = True
        await asyncio.gather(*workers)
        before = beats.count
        await aio.until(lambda: beats.count > before)
        kept.check()


async def async_thread_heartbeat_is_made_anew(client: Any, admin: redis.Redis) -> None:
    options = admin.connection_pool.connection_kwargs
    blocking = redis.Redis(host=options["host"], port=options["port"])
    beats = Beats()
    lock = AsyncLock(client, heartbeat=blocking, listeners=[beats])

    async def child() -> None:
        before = beats.count
        async with lock.hold("b", ttl=TTL) as own:
            await aio.until(lambda: beats.count > before)
            own.check()

    async with lock.hold("a", ttl=TTL) as handle:
        await aio.until(lambda: beats.count > 0)
        Child(lambda: asyncio.run(child())).result()  # the loop stands still: the thread does not
        handle.check()
        before = beats.count
        await aio.until(lambda: beats.count > before + 1)
    blocking.close()


def async_fork_between_two_loops(client: Any, admin: redis.Redis) -> None:
    # scenario 28
    lock = AsyncLock(client)

    async def visit(name: str) -> int:
        async with lock.hold(name, ttl=60) as handle:
            return handle.token.value

    async def keep(name: str) -> int:
        return (await lock.acquire(name, ttl=60)).token.value

    async def last(name: str) -> int:
        token = await visit(name)
        await aio.close(client)
        return token

    def child() -> list[int]:
        tokens = [asyncio.run(visit("a")) for _ in range(3)]
        return [*tokens, asyncio.run(last("a"))]

    first = asyncio.run(visit("a"))
    kept = asyncio.run(keep("kept"))
    for _ in range(3):
        tokens = [first, *Child(child).result()]
        assert tokens == sorted(set(tokens))
    assert asyncio.run(last("a")) > tokens[-1]
    assert token_at(admin, "kept") == kept


# Running them

CASES: dict[str, Callable[[Any, redis.Redis], Any]] = {
    name: case for name, case in list(globals().items()) if name.startswith(("sync_", "async_"))
}


def main(name: str, port: int) -> None:
    """Run one case in this process."""
    faulthandler.register(signal.SIGUSR1)
    # A renewal that a busy machine answers late is told, and is not what is tested here.
    if name.endswith("under_load"):
        logging.getLogger("fencekit").addFilter(lambda record: "renewal" not in record.msg)
    admin = redis.Redis(host="127.0.0.1", port=port)
    case = CASES[name]
    if name.startswith("sync_"):
        client = redis.Redis(host="127.0.0.1", port=port)
        case(client, admin)
        client.close()
    elif asyncio.iscoroutinefunction(case):

        async def run() -> None:
            client = redis.asyncio.Redis(host="127.0.0.1", port=port)
            await case(client, admin)
            await aio.close(client)

        asyncio.run(run())
    else:
        case(redis.asyncio.Redis(host="127.0.0.1", port=port), admin)
    admin.close()


@pytest.fixture(scope="module")
def server() -> Any:
    with RedisServer() as server:
        yield server


@pytest.mark.parametrize("name", CASES)
def test_fork(name: str, server: RedisServer) -> None:
    # I10
    with server.client() as admin:
        admin.flushall()
    program = f"from tests.test_fork import main; main({name!r}, {server.port})"
    # From Python 3.12 on a fork beside threads warns; here that is what is tested.
    warnings = ("-W", "error", "-W", "ignore:This process:DeprecationWarning")
    running = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", *warnings, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = running.communicate(timeout=90)
    except BaseException:
        os.killpg(running.pid, signal.SIGKILL)
        raise
    finally:
        running.wait(10)
    assert running.returncode == 0, output
    assert output == ""
