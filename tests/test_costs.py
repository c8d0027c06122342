"""What a call costs, in counts that do not jitter: a regression of speed shows here first.

Times are for benchmarks/. Here are the commands that the server runs, the bytes that are sent, the
memory that the hot path takes for a moment, and what stays in Redis.
"""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio

from fencekit import AsyncLock, DistributedLock, FenceGate, IdempotencyGuard, idempotency_key
from fencekit._scripts import SCRIPTS
from fencekit.testing import Proxy, RedisServer
from tests import aio

LONG = 600
"""A lease that needs no renewal while a test runs."""


@pytest.fixture
def admin(private_server: RedisServer) -> Iterator[redis.Redis]:
    """What the server tells; it knows the scripts already."""
    with private_server.client() as admin:
        for script in SCRIPTS.values():
            admin.script_load(script.source)
        yield admin


class Pieces:
    """Lock, guard and gate on one client."""

    def __init__(self, port: int) -> None:
        self.client = redis.Redis(port=port)
        self.lock = DistributedLock(self.client)
        self.guard = IdempotencyGuard(self.client)
        self.gate = FenceGate(self.client)
        self.handle: Any = None
        self.claim: Any = None

    def acquire(self) -> None:
        self.handle = self.lock.acquire("a", ttl=LONG)

    def refused(self) -> None:
        assert self.lock.try_acquire("a", ttl=LONG) is None

    def extend(self) -> None:
        self.lock.extend(self.handle, ttl=LONG)

    def write(self) -> None:
        self.gate.set_if_fresh(self.handle.token, "a:status", "running")

    def release(self) -> None:
        self.lock.release(self.handle)

    def begin(self) -> None:
        self.claim = self.guard.begin("job", lease=LONG, lock="a")

    def finish(self) -> None:
        self.guard.finish(self.claim, "paid")

    def remembered(self) -> None:
        assert self.guard.get_result("job") == "paid"


STEPS: list[tuple[Callable[[Pieces], None], str, int]] = [
    # What the server runs, without the script itself, and how many bytes it is sent at most.
    (Pieces.acquire, "exists get hmget hset pexpire set time", 330),
    (Pieces.refused, "get hmget pttl", 330),
    (Pieces.extend, "get hmget pexpire pexpire pttl", 290),
    (Pieces.write, "get get pexpire pttl set set set", 290),
    (Pieces.release, "del hmget publish", 220),
    (Pieces.begin, "exists exists get get hmget hmget hset hset pexpire pexpire set time", 440),
    (Pieces.finish, "del hdel hmget hmget hset pexpire publish publish time", 330),
    (Pieces.remembered, "hmget", 130),
]


def ran(admin: redis.Redis) -> dict[str, int]:
    """How often each command has been run, by clients and by scripts."""
    told = admin.info("commandstats")
    counts = {name.removeprefix("cmdstat_"): value["calls"] for name, value in told.items()}
    counts.pop("info", None)
    return counts


def test_no_verb_costs_the_server_more_commands_or_bytes(
    private_server: RedisServer, admin: redis.Redis
) -> None:
    with Proxy.before(private_server) as proxy:
        pieces = Pieces(proxy.port)
        pieces.gate.current_max("a")  # connects
        seen = []
        for step, _, most in STEPS:
            before = ran(admin)
            proxy.forget()
            step(pieces)
            after = ran(admin)
            names = {name: after[name] - before.get(name, 0) for name in after}
            assert names.pop("evalsha") == 1
            seen.append(" ".join(name for name in sorted(names) for _ in range(names[name])))
            assert proxy.request_bytes <= most, step.__name__
        pieces.client.close()
    assert seen == [commands for _, commands, _ in STEPS]


def bytes_for_a_moment(work: Callable[[], Any]) -> int:
    """The most memory that one of many calls holds beyond what was there before it."""
    most = []
    for _ in range(20):
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        work()
        most.append(tracemalloc.get_traced_memory()[1] - before)
    return sorted(most)[len(most) // 2]


# What other tests of this process left running allocates too, elsewhere.
OURS = [tracemalloc.Filter(True, f"*/{package}/*") for package in ("fencekit", "redis", "asyncio")]


def bytes_kept() -> int:
    """The memory that lines of ours and of what we call have taken and not given back."""
    gc.collect()
    traces = tracemalloc.take_snapshot().filter_traces(OURS).traces
    return sum(trace.size for trace in traces)


def test_a_lock_taken_and_given_back_takes_little_memory_and_leaves_none(
    admin: redis.Redis,
) -> None:
    client = redis.Redis(port=admin.connection_pool.connection_kwargs["port"])
    lock = DistributedLock(client)
    names = [f"a:{number}" for number in range(200)]

    def once(name: str = "a") -> None:
        lock.release(lock.acquire(name, ttl=LONG))

    for name in [*names, *names]:
        once(name)
    gc.collect()
    tracemalloc.start()
    try:
        for name in names:
            once(name)
        # redis-py takes a large buffer for each answer.
        assert bytes_for_a_moment(once) < bytes_for_a_moment(client.ping) + 6_000
        # What is kept for each lock is kept in every round; what else grows, in one of them.
        kept = []
        for _ in range(5):
            before = bytes_kept()
            for name in names:
                once(name)
            kept.append(bytes_kept() - before)
        assert min(kept) < len(names)
    finally:
        tracemalloc.stop()
        client.close()


@pytest.mark.asyncio
async def test_a_coroutine_that_takes_a_lock_takes_little_memory_and_leaves_none(
    admin: redis.Redis,
) -> None:
    client = redis.asyncio.Redis(port=admin.connection_pool.connection_kwargs["port"])
    lock = AsyncLock(client)

    async def once(name: str) -> None:
        await lock.release(await lock.acquire(name, ttl=LONG))

    async def all_at_once() -> None:
        await asyncio.gather(*(once(f"a:{number}") for number in range(200)))

    await all_at_once()
    await all_at_once()
    gc.collect()
    tracemalloc.start()
    try:
        await all_at_once()
        most, kept = [], []
        for _ in range(5):
            before = bytes_kept()
            there = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            await all_at_once()
            most.append(tracemalloc.get_traced_memory()[1] - there)
            kept.append(bytes_kept() - before)
        assert max(most) < 200 * 10_000
        assert min(kept) < 200
    finally:
        tracemalloc.stop()
        await aio.close(client)


def test_a_finished_job_is_one_small_key_and_a_released_lock_leaves_only_its_fence(
    admin: redis.Redis,
) -> None:
    client = redis.Redis(port=admin.connection_pool.connection_kwargs["port"])
    guard, lock = IdempotencyGuard(client, retention=30), DistributedLock(client, retention=30)
    sizes = []
    for number in range(5):
        key = idempotency_key({"order": number}, namespace="pay")
        guard.finish(guard.begin(key, lease=LONG), "x" * 18)  # 20 bytes as JSON
        (name,) = admin.keys()
        sizes.append(admin.memory_usage(name))
        guard.clear(key)
    # libc's allocator hands out 16 or 32 bytes more in one case of a hundred: the least is ours.
    assert min(sizes) <= 220
    handle = lock.acquire("order:7", ttl=10)
    lock.release(handle)
    (name,) = admin.keys()
    assert 0 < admin.pttl(name) <= 30_000  # then nothing is left
    client.close()
