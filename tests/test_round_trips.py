"""What the verbs cost: round trips, and connections under load."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio

from fencekit import (
    AsyncFenceGate,
    AsyncGuard,
    AsyncLock,
    DistributedLock,
    FenceGate,
    IdempotencyGuard,
    LockNotAcquired,
)
from fencekit._scripts import SCRIPTS
from fencekit.events import Event, Renewed
from fencekit.testing import Proxy, RedisServer
from tests import aio, threads

LONG = 600
"""A lease that needs no renewal while a test runs."""


class Kit:
    """Lock, guard and gate of one half on one client, and what their calls returned."""

    def __init__(self, half: str, client: Any) -> None:
        asynchronous = half == "async"
        self.lock: Any = (AsyncLock if asynchronous else DistributedLock)(client)
        self.guard: Any = (AsyncGuard if asynchronous else IdempotencyGuard)(client)
        self.gate: Any = (AsyncFenceGate if asynchronous else FenceGate)(client)
        self.handle: Any = None
        self.claim: Any = None


Step = Callable[[Kit], Any]


def keep(name: str, call: Step) -> Step:
    """A step whose result the later ones use."""

    async def kept(kit: Kit, pending: Any) -> None:
        setattr(kit, name, await pending)

    def step(kit: Kit) -> Any:
        value = call(kit)
        return kept(kit, value) if inspect.isawaitable(value) else setattr(kit, name, value)

    return step


STEPS: list[tuple[str, int, Step]] = [
    ("acquire", 1, keep("handle", lambda kit: kit.lock.acquire("a", ttl=LONG))),
    ("acquire that is refused", 1, lambda kit: kit.lock.try_acquire("a", ttl=LONG)),
    ("extend", 1, lambda kit: kit.lock.extend(kit.handle, ttl=LONG)),
    ("gate write", 1, lambda kit: kit.gate.set_if_fresh(kit.handle.token, "k", "v")),
    ("gate pipeline", 1, lambda kit: write_much(kit).execute()),
    ("gate check", 1, lambda kit: kit.gate.check(kit.handle.token)),
    ("current_max", 1, lambda kit: kit.gate.current_max("a")),
    ("inspect", 1, lambda kit: kit.lock.inspect("a")),
    ("handle.check", 0, lambda kit: kit.handle.check()),
    ("release", 1, lambda kit: kit.lock.release(kit.handle)),
    ("try_begin", 1, lambda kit: kit.guard.try_begin("plain")),
    ("mark_done", 1, lambda kit: kit.guard.mark_done("plain", result=1)),
    ("begin", 1, keep("claim", lambda kit: kit.guard.begin("job", lease=LONG))),
    ("fail", 1, lambda kit: kit.guard.fail(kit.claim)),
    (
        "begin with a lock",
        1,
        keep("claim", lambda kit: kit.guard.begin("job", lease=LONG, lock="a")),
    ),
    ("claim.check", 0, lambda kit: kit.claim.check()),
    ("finish with a lock", 1, lambda kit: kit.guard.finish(kit.claim, {"paid": 990})),
    ("begin of a finished job", 1, lambda kit: kit.guard.begin("job")),
    ("get_result", 1, lambda kit: kit.guard.get_result("job")),
    ("status", 1, lambda kit: kit.guard.status("job")),
    ("once, remembered", 1, lambda kit: kit.guard.once("job", dict)),
    ("once, run", 2, lambda kit: kit.guard.once("other", dict)),
    ("clear", 1, lambda kit: kit.guard.clear("job")),
]


def write_much(kit: Kit) -> Any:
    pipe = kit.gate.pipeline(kit.handle.token)
    for number in range(200):
        pipe.hset("row", str(number), "v" * 100)
    return pipe


@pytest.fixture
def proxy(private_server: RedisServer) -> Iterator[Proxy]:
    with Proxy.before(private_server, record=True) as proxy:
        yield proxy


def load_everything(server: RedisServer) -> None:
    """As on a server that knows the scripts from before."""
    with server.client() as admin:
        for script in SCRIPTS.values():
            admin.script_load(script.source)


def counted(half: str, proxy: Proxy) -> list[tuple[str, int]]:
    """How many round trips each step took; the first connection has been made before."""
    counts: list[tuple[str, int]] = []

    def forget() -> None:
        proxy.forget()

    def note(name: str) -> None:
        counts.append((name, proxy.round_trips()))

    def blocking() -> None:
        client = threads.client_before(proxy)
        kit = Kit(half, client)
        kit.gate.current_max("a")
        for name, _, step in STEPS:
            forget()
            step(kit)
            note(name)
        client.close()

    async def asynchronous() -> None:
        client = aio.client_before(proxy)
        kit = Kit(half, client)
        await kit.gate.current_max("a")
        for name, _, step in STEPS:
            forget()
            value = step(kit)
            if inspect.isawaitable(value):
                await value
            note(name)
        await aio.close(client)

    if half == "async":
        asyncio.run(asynchronous())
    else:
        blocking()
    return counts


@pytest.mark.parametrize("half", ["async", "sync"])
def test_each_verb_takes_as_many_round_trips_as_promised(
    half: str, proxy: Proxy, private_server: RedisServer
) -> None:
    load_everything(private_server)
    assert counted(half, proxy) == [(name, count) for name, count, _ in STEPS]


@pytest.mark.parametrize("half", ["async", "sync"])
def test_scripts_travel_by_digest_and_are_loaded_once_when_missing(
    half: str, proxy: Proxy, private_server: RedisServer
) -> None:
    def commands() -> list[bytes]:
        sent = b"".join(proxy.requests).upper()
        return re.findall(rb"\r\n(EVAL|EVALSHA|SCRIPT)\r\n", sent)

    def blocking() -> None:
        client = threads.client_before(proxy)
        lock = DistributedLock(client)
        for _ in range(2):
            for number in range(3):
                lock.acquire(f"{len(loads)}:{number}", ttl=LONG)
            loads.append(commands().count(b"SCRIPT"))
            flush()
        client.close()

    async def asynchronous() -> None:
        client = aio.client_before(proxy)
        lock = AsyncLock(client)
        for _ in range(2):
            names = [f"{len(loads)}:{number}" for number in range(3)]
            await asyncio.gather(*(lock.acquire(name, ttl=LONG) for name in names))
            await lock.acquire(f"{len(loads)}:3", ttl=LONG)
            loads.append(commands().count(b"SCRIPT"))
            flush()
        await aio.close(client)

    def flush() -> None:
        with private_server.client() as admin:
            admin.script_flush()

    loads: list[int] = []
    if half == "async":
        asyncio.run(asynchronous())
    else:
        blocking()
    assert loads == [1, 2]
    assert commands().count(b"EVAL") == 0
    assert commands().count(b"EVALSHA") >= 6


def test_calls_that_are_pending_together_travel_as_one(
    proxy: Proxy, private_server: RedisServer
) -> None:
    load_everything(private_server)

    async def main() -> None:
        client = aio.client_before(proxy)
        lock = AsyncLock(client)
        await lock.inspect("a")
        proxy.forget()
        handles = await asyncio.gather(*(lock.acquire(f"r{n}", ttl=LONG) for n in range(200)))
        assert len({handle.token.value for handle in handles}) > 1
        assert proxy.round_trips() <= 3
        proxy.forget()
        await asyncio.gather(*map(lock.release, handles))
        assert proxy.round_trips() <= 3
        await aio.close(client)

    asyncio.run(main())


def test_a_batch_of_leases_is_renewed_in_one_round_trip(
    proxy: Proxy, private_server: RedisServer
) -> None:
    # scenario 43
    load_everything(private_server)
    renewed: set[str] = set()

    def listen(event: Event) -> None:
        if isinstance(event, Renewed):
            renewed.add(event.subject)

    async def visit(lock: AsyncLock, number: int) -> None:
        async with lock.hold(f"r{number}", ttl=6):
            await aio.until(lambda: len(renewed) == 100)

    async def main() -> None:
        client = aio.client_before(proxy)
        lock = AsyncLock(client, listeners=[listen])
        await asyncio.gather(*(visit(lock, number) for number in range(100)))
        await aio.close(client)

    asyncio.run(main())
    digest = SCRIPTS["renew"].digest.encode()
    assert 1 <= b"".join(proxy.requests).count(digest) <= 3


# Connections, with redis-py's defaults


class Watch(threading.Thread):
    """Counts the connections that others have to a server, again and again."""

    def __init__(self, server: RedisServer) -> None:
        super().__init__(daemon=True)
        self._admin = server.client()
        self._admin.ping()
        self._before = int(self._admin.info("stats")["total_connections_received"])
        self._over = threading.Event()
        self.most = 0

    def run(self) -> None:
        while not self._over.is_set():
            self.most = max(self.most, len(self._admin.client_list()) - 1)
            time.sleep(0.002)

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self.join()
        self.made = int(self._admin.info("stats")["total_connections_received"]) - self._before
        self._admin.close()


def test_300_coroutines_on_300_locks_need_three_connections_at_most(
    private_server: RedisServer,
) -> None:
    async def visit(lock: AsyncLock, number: int) -> int:
        async with lock.hold(f"r{number}", ttl=9) as handle:
            await asyncio.sleep(3.2)  # long enough for a renewal
            handle.check()
        return handle.token.value

    async def main() -> list[int]:
        client = redis.asyncio.Redis(host=private_server.host, port=private_server.port)
        lock = AsyncLock(client)
        try:
            return await asyncio.gather(*(visit(lock, number) for number in range(300)))
        finally:
            await aio.close(client)

    with Watch(private_server) as watch:
        assert len(asyncio.run(main())) == 300
    assert watch.most <= 3
    assert watch.made <= 3


def test_300_coroutines_contending_for_one_lock_need_three_connections_at_most(
    private_server: RedisServer,
) -> None:
    # scenario 54
    inside = 0
    tokens: list[int] = []

    async def visit(lock: AsyncLock) -> None:
        nonlocal inside
        async with lock.hold("a", ttl=10, wait=60) as handle:
            inside += 1
            assert inside == 1
            tokens.append(handle.token.value)
            await asyncio.sleep(0)
            inside -= 1

    async def main() -> None:
        client = redis.asyncio.Redis(host=private_server.host, port=private_server.port)
        lock = AsyncLock(client)
        try:
            await asyncio.gather(*(visit(lock) for _ in range(300)))
        finally:
            await aio.close(client)

    with Watch(private_server) as watch:
        asyncio.run(main())
    assert len(tokens) == 300
    assert tokens == sorted(set(tokens))
    assert watch.most <= 3
    assert watch.made <= 3


def test_300_coroutines_that_do_not_wait_are_refused_without_an_error_of_redis_py(
    private_server: RedisServer,
) -> None:
    async def main() -> list[Any]:
        client = redis.asyncio.Redis(host=private_server.host, port=private_server.port)
        lock = AsyncLock(client)
        try:
            return await asyncio.gather(
                *(lock.acquire("a", ttl=10) for _ in range(300)), return_exceptions=True
            )
        finally:
            await aio.close(client)

    with Watch(private_server) as watch:
        results = asyncio.run(main())
    assert sum(isinstance(result, LockNotAcquired) for result in results) == 299
    assert watch.made <= 1


def test_locks_guards_and_gates_of_one_client_share_its_connections(
    private_server: RedisServer,
) -> None:
    async def main() -> None:
        client = redis.asyncio.Redis(host=private_server.host, port=private_server.port)
        kits = [Kit("async", client) for _ in range(20)]
        async with kits[0].lock.hold("a", ttl=1) as handle:
            waiters = [
                asyncio.create_task(kit.lock.acquire("a", ttl=1, wait=20)) for kit in kits[1:6]
            ]
            claims = [await kit.guard.begin(f"job:{n}", lease=1) for n, kit in enumerate(kits)]
            await asyncio.gather(*(kit.gate.check(handle.token) for kit in kits))
            await asyncio.sleep(0.5)  # long enough for a renewal
            for waiter in waiters:
                waiter.cancel()
            await asyncio.gather(*waiters, return_exceptions=True)
            for kit, claim in zip(kits, claims, strict=True):
                await kit.guard.finish(claim, None)
        await aio.close(client)

    with Watch(private_server) as watch:
        asyncio.run(main())
    assert watch.most <= 3


def test_50_threads_on_their_own_locks_and_on_one_are_served(private_server: RedisServer) -> None:
    client = redis.Redis(host=private_server.host, port=private_server.port)
    lock = DistributedLock(client)
    inside = itertools.count()
    tokens: list[int] = []

    def visit(number: int) -> None:
        with lock.hold(f"r{number}", ttl=10), lock.hold("a", ttl=10, wait=60) as handle:
            before = next(inside)
            tokens.append(handle.token.value)
            time.sleep(0.001)
            assert next(inside) == before + 1

    with Watch(private_server) as watch:
        results = threads.together([lambda n=n: visit(n) for n in range(50)])
        client.close()
    assert results == [None] * 50
    assert tokens == sorted(set(tokens))
    # One for each thread's call, perhaps another to try first; the heartbeat; the subscription.
    assert watch.most <= 102


def test_50_threads_share_a_pool_of_ten_that_blocks(private_server: RedisServer) -> None:
    pool = redis.BlockingConnectionPool(
        host=private_server.host, port=private_server.port, max_connections=10, timeout=20
    )
    lock = DistributedLock(redis.Redis(connection_pool=pool))

    def visit(number: int) -> None:
        for _ in range(3):
            with lock.hold(f"r{number}", ttl=10):
                pass

    with Watch(private_server) as watch:
        results = threads.together([lambda n=n: visit(n) for n in range(50)])
        pool.disconnect()
    assert results == [None] * 50
    assert watch.most <= 60
