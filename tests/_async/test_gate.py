"""The gate's promises: older tokens write nothing; check and write are one step."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import pytest
import pytest_asyncio
from redis.exceptions import ResponseError

from fencekit import AsyncFenceGate, AsyncGuard, AsyncLock, FencedOutError, FenceToken, ForeignValue
from fencekit.events import Event, FencedOut
from fencekit.keys import KeySpace
from fencekit.testing import ClusterServers, Proxy, RedisServer
from tests import aio as both
from tests.site import Site

pytestmark = pytest.mark.asyncio

ROW = "{a}:row"
"""A key of the user's in the slot of resource "a", so that a Cluster takes it too."""


@pytest_asyncio.fixture
async def nowhere() -> AsyncIterator[AsyncFenceGate]:
    """A gate whose server does not exist: what it raises at once was raised before any command."""
    with Proxy("127.0.0.1", 1) as proxy:
        client = both.client_before(proxy)
        yield AsyncFenceGate(client)
        await both.close(client)
        assert proxy.connections == 0


def contents(site: Site) -> dict[bytes, Any]:
    """Every key there is, with what is in it."""
    return {key: site.admin.dump(key) for key in site.all_keys()}


# Older tokens are refused


async def test_a_paused_holder_writes_nothing_after_its_successor(
    lock: AsyncLock, gate: AsyncFenceGate, site: Site
) -> None:
    # scenario 79
    old = await lock.acquire("a", ttl=5)
    await gate.set_if_fresh(old.token, ROW, "v0")
    site.expire_lock("a")
    new = await lock.acquire("a", ttl=5)
    await gate.set_if_fresh(new.token, ROW, "v2")
    with pytest.raises(FencedOutError) as refused:
        await gate.set_if_fresh(old.token, ROW, "v1")
    assert refused.value.resource == "a"
    assert refused.value.token == old.token.value
    assert refused.value.current == new.token.value
    assert str(old.token.value) in str(refused.value)
    assert str(new.token.value) in str(refused.value)
    assert site.admin.get(ROW) == b"v2"
    await gate.set_if_fresh(new.token, ROW, "v3")
    assert site.admin.get(ROW) == b"v3"


async def test_tokens_that_came_from_elsewhere_are_compared_as_numbers(
    gate: AsyncFenceGate, site: Site
) -> None:
    # scenario 79
    await gate.set_if_fresh(FenceToken(9, "a"), ROW, "nine")
    await gate.set_if_fresh(FenceToken(41, "a"), ROW, "v1")
    await gate.set_if_fresh(FenceToken(42, "a"), ROW, "v2")
    with pytest.raises(FencedOutError):
        await gate.set_if_fresh(FenceToken(41, "a"), ROW, "v1")
    await gate.set_if_fresh(FenceToken(42, "a"), ROW, "v3")
    with pytest.raises(FencedOutError):
        await gate.set_if_fresh(FenceToken(9, "a"), ROW, "nine")
    await gate.set_if_fresh(FenceToken(100, "a"), ROW, "v4")
    assert site.admin.get(ROW) == b"v4"
    assert await gate.current_max("a") == 100


async def test_a_new_grant_fences_older_holders_before_its_first_write(
    lock: AsyncLock, gate: AsyncFenceGate, site: Site
) -> None:
    # I3
    old = await lock.acquire("a", ttl=5)
    site.expire_lock("a")
    new = await lock.acquire("a", ttl=5)
    assert await gate.current_max("a") == new.token.value
    for refused in (
        lambda: gate.check(old.token),
        lambda: gate.check_and_advance(old.token),
        lambda: gate.set_if_fresh(old.token, ROW, "late"),
        lambda: gate.pipeline(old.token).set(ROW, "late").execute(),
    ):
        with pytest.raises(FencedOutError):
            await refused()
    assert site.admin.exists(ROW) == 0


async def test_a_holder_whose_lock_was_broken_writes_nothing(
    lock: AsyncLock, gate: AsyncFenceGate, site: Site
) -> None:
    # I3
    handle = await lock.acquire("a", ttl=5)
    await lock.break_lock("a", reason="its host is gone")
    with pytest.raises(FencedOutError):
        await gate.set_if_fresh(handle.token, ROW, "late")
    assert site.admin.exists(ROW) == 0


async def test_equal_tokens_pass_also_after_the_release(
    lock: AsyncLock, gate: AsyncFenceGate
) -> None:
    handle = await lock.acquire("a", ttl=5)
    for value in range(3):
        await gate.set_if_fresh(handle.token, ROW, value)
        await gate.check(handle.token)
        await gate.check_and_advance(handle.token)
    await lock.release(handle)
    await gate.set_if_fresh(handle.token, ROW, "after")
    assert await gate.current_max("a") == handle.token.value


async def test_a_refused_write_changes_nothing_at_all(
    lock: AsyncLock, gate: AsyncFenceGate, site: Site
) -> None:
    # I4
    old = await lock.acquire("a", ttl=5)
    site.expire_lock("a")
    new = await lock.acquire("a", ttl=5)
    await gate.pipeline(new.token).set(ROW, "v2").rpush("{a}:list", 1, 2).execute()
    before = contents(site)
    with pytest.raises(FencedOutError):
        await gate.set_if_fresh(old.token, ROW, "v1", ttl=1)
    with pytest.raises(FencedOutError):
        async with gate.pipeline(old.token) as pipe:
            pipe.delete(ROW).lpop("{a}:list").incr("{a}:new")
    with pytest.raises(FencedOutError):
        await gate.check_and_advance(old.token)
    assert contents(site) == before


async def test_a_listener_hears_of_a_refused_write(
    gate: AsyncFenceGate, events: list[Event]
) -> None:
    await gate.check_and_advance(FenceToken(42, "a"))
    assert events == []
    with pytest.raises(FencedOutError):
        await gate.set_if_fresh(FenceToken(41, "a"), ROW, "v1")
    assert events == [FencedOut("a", 41, 42)]


# Single writes


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ("text", b"text"),
        ("ünïcode", "ünïcode".encode()),
        (b"\x00\xff\r\n", b"\x00\xff\r\n"),
        (bytearray(b"array"), b"array"),
        (memoryview(b"view"), b"view"),
        (7, b"7"),
        (-(2**63), b"-9223372036854775808"),
        (2**62 + 1, b"4611686018427387905"),
        (0.5, b"0.5"),
        ("", b""),
    ],
)
async def test_a_value_is_stored_as_redis_py_would(
    gate: AsyncFenceGate, site: Site, value: Any, stored: bytes
) -> None:
    await gate.set_if_fresh(FenceToken(1, "a"), ROW, value)
    assert site.admin.get(ROW) == stored


async def test_a_key_is_used_exactly_as_given(gate: AsyncFenceGate, site: Site) -> None:
    for key in ("{a}: b%20c\n", b"{a}\xff\x00"):
        await gate.set_if_fresh(FenceToken(1, "a"), key, "v")  # type: ignore[arg-type]
        assert site.admin.get(key) == b"v"


async def test_ttl_is_the_keys_expiry_and_without_it_there_is_none(
    gate: AsyncFenceGate, site: Site
) -> None:
    token = FenceToken(1, "a")
    await gate.set_if_fresh(token, ROW, "v", ttl=60)
    assert 59_000 < site.admin.pttl(ROW) <= 60_000
    await gate.set_if_fresh(token, ROW, "v", ttl=timedelta(hours=1))
    assert 3_599_000 < site.admin.pttl(ROW) <= 3_600_000
    await gate.set_if_fresh(token, ROW, "v")
    assert site.admin.pttl(ROW) == -1
    await gate.set_if_fresh(token, ROW, "v", ttl=0.0015)
    await both.until(lambda: not site.admin.exists(ROW))


async def test_any_type_at_the_written_key_is_replaced(gate: AsyncFenceGate, site: Site) -> None:
    site.admin.rpush(ROW, "a", "list")
    await gate.set_if_fresh(FenceToken(1, "a"), ROW, "v")
    assert site.admin.get(ROW) == b"v"


# Reading and advancing


async def test_current_max_is_zero_where_nothing_was_ever_fenced(
    gate: AsyncFenceGate, site: Site
) -> None:
    assert await gate.current_max("a") == 0
    assert await gate.current_max("a", kind="job") == 0
    assert site.all_keys() == []


async def test_check_passes_a_token_newer_than_all_and_leaves_no_trace(
    gate: AsyncFenceGate, site: Site
) -> None:
    await gate.check(FenceToken(7, "a"))
    assert site.all_keys() == []
    await gate.check_and_advance(FenceToken(7, "a"))
    before = contents(site)
    await gate.check(FenceToken(7, "a"))
    await gate.check(FenceToken(8, "a"))
    with pytest.raises(FencedOutError) as refused:
        await gate.check(FenceToken(6, "a"))
    assert (refused.value.token, refused.value.current) == (6, 7)
    assert contents(site) == before
    assert await gate.current_max("a") == 7


async def test_check_and_advance_refuses_older_tokens_from_then_on(
    lock: AsyncLock, gate: AsyncFenceGate, site: Site
) -> None:
    # I1
    handle = await lock.acquire("a", ttl=5)
    ahead = FenceToken(handle.token.value + 3_600_000_000, "a")
    await gate.check_and_advance(ahead)
    assert site.fence("a") == ahead.value
    with pytest.raises(FencedOutError):
        await gate.set_if_fresh(handle.token, ROW, "late")
    await lock.release(handle)
    later = await lock.acquire("a", ttl=5)
    assert later.token.value == ahead.value + 1


async def test_resources_do_not_share_a_fence(gate: AsyncFenceGate) -> None:
    await gate.check_and_advance(FenceToken(42, "a"))
    await gate.check_and_advance(FenceToken(41, "b"))
    assert await gate.current_max("a") == 42
    assert await gate.current_max("b") == 41


@pytest.mark.parametrize("name", ["{a}", "a b", "order:{7}", "}{", "{}", "ä%", "a\n"])
async def test_every_resource_name_has_a_gate_and_a_slot_for_keys(
    lock: AsyncLock, gate: AsyncFenceGate, site: Site, name: str
) -> None:
    handle = await lock.acquire(name, ttl=5)
    key = gate.key(name, "status")
    await gate.set_if_fresh(handle.token, key, "v")
    assert site.admin.get(key) == b"v"
    assert await gate.current_max(name) == handle.token.value


async def test_tokens_beyond_32_bits_are_exact_to_the_last(
    gate: AsyncFenceGate, lock: AsyncLock, site: Site
) -> None:
    last = 2**53 - 2
    await gate.check_and_advance(FenceToken(last - 9, "a"))
    for value in range(last - 8, last + 1):
        await gate.set_if_fresh(FenceToken(value, "a"), ROW, value)
        assert site.fence("a") == value
        assert await gate.current_max("a") == value
        with pytest.raises(FencedOutError) as refused:
            await gate.check(FenceToken(value - 1, "a"))
        assert refused.value.current == value
    site.admin.set(site.keys.fence("b"), last - 2, px=60_000)
    assert (await lock.acquire("b", ttl=5)).token.value == last - 1


# Pipelines

Note = Callable[[Any], Any]
COMMANDS: list[tuple[Note, Any]] = [
    (lambda pipe: pipe.set("{a}:s", "v", ex=60), b"OK"),
    (lambda pipe: pipe.get("{a}:s"), b"v"),
    (lambda pipe: pipe.set("{a}:s", "w", nx=True), None),
    (lambda pipe: pipe.append("{a}:s", "w"), 2),
    (lambda pipe: pipe.getrange("{a}:s", 1, -1), b"w"),
    (lambda pipe: pipe.expire("{a}:s", 30), 1),
    (lambda pipe: pipe.persist("{a}:s"), 1),
    (lambda pipe: pipe.ttl("{a}:s"), -1),
    (lambda pipe: pipe.type("{a}:s"), b"string"),
    (lambda pipe: pipe.incr("{a}:n"), 1),
    (lambda pipe: pipe.incrby("{a}:n", 41), 42),
    (lambda pipe: pipe.decr("{a}:n", 2), 40),
    (lambda pipe: pipe.incrbyfloat("{a}:n", 0.5), b"40.5"),
    (lambda pipe: pipe.hset("{a}:h", mapping={"f": 1, "g": "x"}), 2),
    (lambda pipe: pipe.hincrby("{a}:h", "f", 2), 3),
    (lambda pipe: pipe.hmget("{a}:h", ["f", "missing"]), [b"3", None]),
    (lambda pipe: pipe.hdel("{a}:h", "g"), 1),
    (lambda pipe: pipe.hgetall("{a}:h"), [b"f", b"3"]),
    (lambda pipe: pipe.rpush("{a}:l", "x", b"y", 3), 3),
    (lambda pipe: pipe.lrange("{a}:l", 0, -1), [b"x", b"y", b"3"]),
    (lambda pipe: pipe.lpop("{a}:l"), b"x"),
    (lambda pipe: pipe.lmove("{a}:l", "{a}:m", "LEFT", "RIGHT"), b"y"),
    (lambda pipe: pipe.ltrim("{a}:l", 1, 0), b"OK"),
    (lambda pipe: pipe.lpop("{a}:l"), None),
    (lambda pipe: pipe.sadd("{a}:set", "x", "y"), 2),
    (lambda pipe: pipe.smove("{a}:set", "{a}:set2", "x"), 1),
    (lambda pipe: pipe.sinterstore("{a}:set3", ["{a}:set", "{a}:set2"]), 0),
    (lambda pipe: pipe.smembers("{a}:set"), [b"y"]),
    (lambda pipe: pipe.zadd("{a}:z", {"x": 1.5, "y": 2}), 2),
    (lambda pipe: pipe.zincrby("{a}:z", 1, "x"), b"2.5"),
    (lambda pipe: pipe.zrange("{a}:z", 0, -1, withscores=True), [b"y", b"2", b"x", b"2.5"]),
    (lambda pipe: pipe.zrem("{a}:z", "x"), 1),
    (lambda pipe: pipe.xadd("{a}:x", {"f": "v"}, id="1-1"), b"1-1"),
    (lambda pipe: pipe.xlen("{a}:x"), 1),
    (lambda pipe: pipe.xrange("{a}:x"), [[b"1-1", [b"f", b"v"]]]),
    (lambda pipe: pipe.setbit("{a}:b", 7, 1), 0),
    (lambda pipe: pipe.bitfield("{a}:b").incrby("u8", 0, 1).execute(), [2]),
    (lambda pipe: pipe.pfadd("{a}:hll", "x"), 1),
    (lambda pipe: pipe.geoadd("{a}:geo", (13.4, 52.5, "berlin")), 1),
    (lambda pipe: pipe.mset({"{a}:p": 1, "{a}:q": 2}), b"OK"),
    (lambda pipe: pipe.mget("{a}:p", "{a}:q", "{a}:none"), [b"1", b"2", None]),
    (lambda pipe: pipe.rename("{a}:p", "{a}:r"), b"OK"),
    (lambda pipe: pipe.copy("{a}:r", "{a}:c"), 1),
    (lambda pipe: pipe.exists("{a}:r", "{a}:c", "{a}:p"), 2),
    (lambda pipe: pipe.delete("{a}:r", "{a}:c"), 2),
    (lambda pipe: pipe.unlink("{a}:q"), 1),
    (lambda pipe: pipe.publish("{a}:news", "hello"), 0),
    (lambda pipe: pipe.raw("OBJECT", "ENCODING", "{a}:n", keys=["{a}:n"]), b"embstr"),
    (lambda pipe: pipe.raw(b"SETRANGE", "{a}:raw", 0, b"\x00", keys=[b"{a}:raw"]), 1),
    (lambda pipe: pipe.raw("ECHO", "no key at all", keys=[]), b"no key at all"),
]


async def test_a_pipeline_takes_redis_pys_commands_and_answers_in_order(
    gate: AsyncFenceGate, site: Site
) -> None:
    async with gate.pipeline(FenceToken(1, "a")) as pipe:
        for note, _ in COMMANDS:
            note(pipe)
        assert len(pipe) == len(COMMANDS)
        assert site.admin.exists("{a}:s") == 0
        replies = await pipe.execute()
        assert len(pipe) == 0
    assert len(replies) == len(COMMANDS)
    wrong = [
        (index, reply, wanted)
        for index, (reply, (_, wanted)) in enumerate(zip(replies, COMMANDS, strict=True))
        if reply != wanted
    ]
    assert wrong == []
    assert site.admin.hgetall("{a}:h") == {b"f": b"3"}
    assert site.admin.get("{a}:raw") == b"\x00"


@pytest.mark.parametrize(("note", "wanted"), COMMANDS[:1] + COMMANDS[9:10] + COMMANDS[18:19])
async def test_a_noted_command_returns_the_pipeline_so_that_calls_chain(
    gate: AsyncFenceGate, note: Note, wanted: Any
) -> None:
    pipe = gate.pipeline(FenceToken(1, "a"))
    assert note(pipe) is pipe
    assert await pipe.execute() == [wanted]


async def test_the_end_of_the_block_executes_what_was_noted(
    gate: AsyncFenceGate, site: Site
) -> None:
    async with gate.pipeline(FenceToken(1, "a")) as pipe:
        pipe.set(ROW, "v")
        pipe.incr("{a}:n")
        assert site.all_keys() == []
    assert (site.admin.get(ROW), site.admin.get("{a}:n")) == (b"v", b"1")


async def test_a_block_that_raises_executes_nothing(gate: AsyncFenceGate, site: Site) -> None:
    async def body() -> None:
        async with gate.pipeline(FenceToken(1, "a")) as pipe:
            pipe.set(ROW, "v")
            raise KeyError(ROW)

    with pytest.raises(KeyError):
        await body()
    assert site.all_keys() == []


async def test_what_was_executed_is_not_executed_again_by_the_block(
    gate: AsyncFenceGate, site: Site
) -> None:
    async with gate.pipeline(FenceToken(1, "a")) as pipe:
        assert await pipe.incr("{a}:n").execute() == [1]
        assert await pipe.incr("{a}:n").incr("{a}:n").execute() == [2, 3]
        pipe.incr("{a}:n")
    assert site.admin.get("{a}:n") == b"4"


async def test_an_empty_pipeline_only_advances(gate: AsyncFenceGate, site: Site) -> None:
    async with gate.pipeline(FenceToken(1, "a")):
        pass
    assert site.all_keys() == []
    assert await gate.pipeline(FenceToken(5, "a")).execute() == []
    assert await gate.current_max("a") == 5
    with pytest.raises(FencedOutError):
        await gate.pipeline(FenceToken(4, "a")).execute()


async def test_an_error_in_one_command_is_raised_and_the_others_are_applied(
    gate: AsyncFenceGate, site: Site
) -> None:
    site.admin.rpush("{a}:l", "x")
    pipe = gate.pipeline(FenceToken(1, "a"))
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await pipe.set(ROW, "v").incr("{a}:l").incr("{a}:n").execute()
    assert site.admin.get(ROW) == b"v"
    assert site.admin.get("{a}:n") == b"1"
    assert site.admin.lrange("{a}:l", 0, -1) == [b"x"]
    with pytest.raises(ResponseError):
        async with gate.pipeline(FenceToken(1, "a")) as pipe:
            pipe.raw("NOSUCHCOMMAND", "{a}:n", keys=["{a}:n"]).incr("{a}:n")
    assert site.admin.get("{a}:n") == b"2"


async def test_a_stale_pipeline_executes_not_even_its_first_command(
    gate: AsyncFenceGate, site: Site
) -> None:
    # I4
    await gate.check_and_advance(FenceToken(42, "a"))
    before = contents(site)
    pipe = gate.pipeline(FenceToken(41, "a"))
    for note, _ in COMMANDS:
        note(pipe)
    with pytest.raises(FencedOutError):
        await pipe.execute()
    assert contents(site) == before


async def test_a_command_whose_keys_are_not_known_is_refused_with_the_way_out(
    gate: AsyncFenceGate, site: Site
) -> None:
    pipe = gate.pipeline(FenceToken(1, "a"))
    refused: list[Callable[[], Any]] = [
        lambda: pipe.eval("return redis.call('DEL', 'x')", 0),
        lambda: pipe.sort("{a}:l", store="elsewhere"),
        lambda: pipe.zunionstore("{a}:z", ["{a}:y"]),
        lambda: pipe.xgroup_create("{a}:x", "g"),
        lambda: pipe.execute_command("NEWCOMMAND", ROW),
        lambda: pipe.blpop("{a}:l", 1),
        pipe.flushall,
        pipe.scan,
    ]
    for note in refused:
        with pytest.raises(ValueError, match=r"raw\(|names no key"):
            note()
    assert len(pipe) == 0
    with pytest.raises(ValueError, match="at least its name"):
        pipe.raw(keys=[])
    with pytest.raises(TypeError):
        pipe.raw("GET", ROW)
    assert site.all_keys() == []


async def test_a_long_pipeline_is_one_step_and_a_longer_one_is_refused(
    gate: AsyncFenceGate, site: Site
) -> None:
    pipe = gate.pipeline(FenceToken(1, "a"))
    for _ in range(1700):
        pipe.incr("{a}:n")
    assert await pipe.execute() == list(range(1, 1701))
    pipe.rpush("{a}:l", *range(6990))
    assert await pipe.execute() == [6990]
    with pytest.raises(ValueError, match="split it"):
        pipe.rpush("{a}:l", *range(7000))
    assert len(pipe) == 0
    assert site.admin.llen("{a}:l") == 6990


async def test_concurrent_pipelines_are_each_one_step(gate: AsyncFenceGate, site: Site) -> None:
    async def move() -> Any:
        pipe = gate.pipeline(FenceToken(1, "a"))
        return await pipe.incr("{a}:x").incr("{a}:y").incr("{a}:x").execute()

    results = await both.together([move] * 20)
    assert sorted(results) == [[2 * n + 1, n + 1, 2 * n + 2] for n in range(20)]
    assert site.admin.get("{a}:x") == b"40"


# What may not be written


@pytest.mark.parametrize("kind", ["lock", "fence", "job", "jobfence", "op:1f", "free", "done"])
async def test_fencekits_own_keys_are_refused_as_targets(
    gate: AsyncFenceGate, lock: AsyncLock, site: Site, kind: str
) -> None:
    # I12
    handle = await lock.acquire("a", ttl=5)
    before = contents(site)
    for tag in ("a", "b c"):
        target = f"fencekit:{KeySpace().tag(tag)}:{kind}"
        with pytest.raises(ValueError, match="fencekit's own"):
            await gate.set_if_fresh(handle.token, target, "v")
        for pipe in (
            gate.pipeline(handle.token).set(ROW, 1).delete(target),
            gate.pipeline(handle.token).rename(ROW, target),
            gate.pipeline(handle.token).raw("GET", target, keys=[target.encode()]),
        ):
            with pytest.raises(ValueError, match="fencekit's own"):
                await pipe.execute()
    assert contents(site) == before


async def test_keys_that_only_look_like_fencekits_are_the_users(
    gate: AsyncFenceGate, site: Site
) -> None:
    for key in ("fencekit:{a}:status", "other:{a}:lock", "{a}:lock", "x:fencekit:{a}:fence"):
        await gate.set_if_fresh(FenceToken(1, "a"), key, "v")
        assert site.admin.get(key) == b"v"


async def test_on_a_cluster_a_key_in_another_slot_is_refused_with_a_name_that_fits(
    fencekit_cluster: ClusterServers,
) -> None:
    # scenario 49
    fencekit_cluster.flush()
    client = both.client_before(fencekit_cluster)
    try:
        gate = AsyncFenceGate(client)
        token = FenceToken(1, "a")
        with pytest.raises(ValueError, match=r"\{a\}:status") as refused:
            await gate.set_if_fresh(token, "b:status", "v")
        assert "b:status" in str(refused.value)
        with pytest.raises(ValueError, match=r"\{a\}:status"):
            await gate.pipeline(token).set(gate.key("a", "x"), 1).set("c", 1).execute()
        assert await gate.current_max("a") == 0
        await gate.set_if_fresh(token, gate.key("a", "status"), "v")
        pipe = gate.pipeline(token)
        pipe.incr(gate.key("a", "n")).get(gate.key("a", "status")).incr("{a}n")
        assert await pipe.execute() == [1, b"v", 1]
    finally:
        await both.close(client)


async def test_gate_key_names_a_key_in_the_resources_slot(nowhere: AsyncFenceGate) -> None:
    assert nowhere.key("order:7", "status") == "{order:7}:status"
    assert nowhere.key("{x} y", "a b") == "{%7Bx%7D%20y}:a b"
    for wrong in ("", " ", "x" * 1025):
        with pytest.raises(ValueError):
            nowhere.key(wrong, "status")
        with pytest.raises(ValueError):
            nowhere.key("a", wrong)


async def test_bad_tokens_raise_before_a_command_is_sent(nowhere: AsyncFenceGate) -> None:
    class Handle:
        token = FenceToken(1, "a")

    for wrong in (None, 7, "7", b"7", 7.0, True, object(), Handle()):
        for call in (
            lambda token: nowhere.set_if_fresh(token, ROW, "v"),
            nowhere.check,
            nowhere.check_and_advance,
        ):
            with pytest.raises(TypeError, match="FenceToken"):
                await call(wrong)
        with pytest.raises(TypeError, match="FenceToken"):
            nowhere.pipeline(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"pass its \.token"):
        await nowhere.check(Handle())  # type: ignore[arg-type]
    for resource in (" ", "x" * 1025, "\ud800"):
        with pytest.raises(ValueError):
            await nowhere.check(FenceToken(1, resource))
    for resource, kind in (("", "lock"), ("a", "guard"), ("a", "")):
        with pytest.raises(ValueError):
            await nowhere.current_max(resource, kind=kind)
    with pytest.raises(TypeError):
        await nowhere.current_max(7)  # type: ignore[arg-type]


async def test_bad_keys_and_values_raise_before_a_command_is_sent(nowhere: AsyncFenceGate) -> None:
    token = FenceToken(1, "a")
    for key in (None, 7, True, ["k"]):
        with pytest.raises(TypeError):
            await nowhere.set_if_fresh(token, key, "v")  # type: ignore[arg-type]
    for key in ("", b""):
        with pytest.raises(ValueError):
            await nowhere.set_if_fresh(token, key, "v")  # type: ignore[arg-type]
    for value in (None, True, ["v"], {"v": 1}, object(), timedelta(1)):
        with pytest.raises(TypeError, match="encode it first"):
            await nowhere.set_if_fresh(token, ROW, value)
        with pytest.raises(TypeError, match="encode it first"):
            nowhere.pipeline(token).raw("SET", ROW, value, keys=[ROW])
    for ttl in (0, -1, 0.0004, math.nan, math.inf, timedelta(0), timedelta(days=99_999)):
        with pytest.raises(ValueError, match="ttl"):
            await nowhere.set_if_fresh(token, ROW, "v", ttl=ttl)
    for ttl in ("5", True, [5]):
        with pytest.raises(TypeError, match="ttl"):
            await nowhere.set_if_fresh(token, ROW, "v", ttl=ttl)  # type: ignore[arg-type]


async def test_bad_settings_raise_when_the_gate_is_made(client: Any) -> None:
    for name in ("timeout", "retention"):
        for value in (0, -1, math.nan):
            with pytest.raises(ValueError, match=name):
                AsyncFenceGate(client, **{name: value})
        with pytest.raises(TypeError, match=name):
            AsyncFenceGate(client, **{name: None})
    with pytest.raises(ValueError, match="prefix"):
        AsyncFenceGate(client, prefix="{x}")
    with pytest.raises(TypeError, match="listener"):
        AsyncFenceGate(client, listeners=[1])  # type: ignore[list-item]
    assert repr(AsyncFenceGate(client, prefix="shop")) == "AsyncFenceGate(prefix='shop')"


# Kinds of tokens


async def test_lock_and_job_tokens_of_one_name_are_never_compared(
    lock: AsyncLock, guard: AsyncGuard, gate: AsyncFenceGate
) -> None:
    claim = await guard.begin("a", lease=5)
    handle = await lock.acquire("a", ttl=5)
    assert claim.token is not None
    assert (claim.token.kind, handle.token.kind) == ("job", "lock")
    assert handle.token.value > claim.token.value
    await gate.set_if_fresh(claim.token, ROW, "job")
    await gate.set_if_fresh(handle.token, ROW, "lock")
    await gate.check_and_advance(FenceToken(handle.token.value + 10**9, "a"))
    await gate.set_if_fresh(claim.token, ROW, "job")
    await gate.check_and_advance(FenceToken(claim.token.value + 10**6, "a", "job"))
    with pytest.raises(FencedOutError):
        await gate.set_if_fresh(claim.token, ROW, "late")
    assert await gate.current_max("a") == handle.token.value + 10**9
    assert await gate.current_max("a", kind="job") == claim.token.value + 10**6


async def test_a_takeover_fences_the_older_claim_before_its_first_write(
    guard: AsyncGuard, gate: AsyncFenceGate, site: Site
) -> None:
    # I3
    old = await guard.begin("a", lease=5)
    site.lapse("a")
    new = await guard.begin("a", lease=5)
    assert old.token is not None
    assert new.token is not None
    assert await gate.current_max("a", kind="job") == new.token.value
    with pytest.raises(FencedOutError) as refused:
        await gate.set_if_fresh(old.token, ROW, "late")
    assert refused.value.current == new.token.value
    await gate.set_if_fresh(new.token, ROW, "v")
    with pytest.raises(FencedOutError):
        await gate.pipeline(old.token).set(ROW, "late").execute()
    assert site.admin.get(ROW) == b"v"
    await guard.finish(new, None)
    with pytest.raises(FencedOutError):
        await gate.check(old.token)
    await gate.check(new.token)


async def test_a_gated_write_keeps_an_older_claim_out_also_when_the_record_is_gone(
    guard: AsyncGuard, gate: AsyncFenceGate, site: Site
) -> None:
    # I1, I3
    old = await guard.begin("a", lease=5)
    site.lapse("a")
    new = await guard.begin("a", lease=5)
    assert old.token is not None
    assert new.token is not None
    await gate.set_if_fresh(new.token, ROW, "v")
    await guard.clear("a")
    with pytest.raises(FencedOutError):
        await gate.set_if_fresh(old.token, ROW, "late")
    again = await guard.begin("a", lease=5)
    assert again.token is not None
    assert again.token.value > new.token.value
    with pytest.raises(FencedOutError):
        await gate.set_if_fresh(new.token, ROW, "late")


async def test_a_job_that_never_uses_the_gate_costs_one_key(
    guard: AsyncGuard, gate: AsyncFenceGate, site: Site
) -> None:
    claim = await guard.begin("a", lease=5)
    assert claim.token is not None
    await gate.check(claim.token)
    assert site.all_keys() == [site.keys.job("a")]
    await gate.set_if_fresh(claim.token, ROW, "v")
    assert site.keys.job_fence("a") in site.all_keys()
    assert site.keys.fence("a") not in site.all_keys()


async def test_a_claim_with_a_lock_writes_under_the_resources_token(
    guard: AsyncGuard, lock: AsyncLock, gate: AsyncFenceGate, site: Site
) -> None:
    claim = await guard.begin("job:1", lease=5, lock="a")
    assert claim.token is not None
    assert (claim.token.kind, claim.token.resource) == ("lock", "a")
    await gate.set_if_fresh(claim.token, ROW, "v")
    site.expire_lock("a")
    handle = await lock.acquire("a", ttl=5)
    with pytest.raises(FencedOutError):
        await gate.set_if_fresh(claim.token, ROW, "late")
    await gate.set_if_fresh(handle.token, ROW, "v2")


async def test_tokens_survive_their_header_and_pass(lock: AsyncLock, gate: AsyncFenceGate) -> None:
    handle = await lock.acquire("a", ttl=5)
    token = FenceToken.from_header(handle.token.to_header())
    await gate.set_if_fresh(token, ROW, "v")


# What is on the server


async def test_every_key_of_the_gate_has_an_expiry(gate: AsyncFenceGate, site: Site) -> None:
    # I8
    await gate.set_if_fresh(FenceToken(7, "a"), ROW, "v", ttl=60)
    await gate.check_and_advance(FenceToken(7, "b", "job"))
    keys = site.all_keys()
    assert site.keys.fence("a") in keys
    assert site.keys.job_fence("b") in keys
    ops = [key for key in keys if b":op:" in key]
    assert len(ops) == 1
    assert 0 < site.admin.pttl(ops[0]) <= 30_000
    assert all(site.admin.pttl(key) > 0 for key in keys)
    week = 7 * 86_400_000
    assert week - 60_000 < site.admin.pttl(site.keys.fence("a")) <= week


async def test_a_write_lengthens_the_life_of_its_fence_and_never_shortens_it(
    client: Any, gate: AsyncFenceGate, site: Site
) -> None:
    token = FenceToken(7, "a")
    await gate.check_and_advance(token)
    await AsyncFenceGate(client, retention=1).set_if_fresh(token, ROW, "v")
    assert site.admin.pttl(site.keys.fence("a")) > 86_400_000
    site.admin.pexpire(site.keys.fence("a"), 5_000)
    await gate.set_if_fresh(token, ROW, "v")
    assert site.admin.pttl(site.keys.fence("a")) > 86_400_000


async def test_a_write_is_remembered_for_longer_than_it_may_be_repeated(
    client: Any, site: Site
) -> None:
    # I7
    patient = AsyncFenceGate(client, timeout=120)
    await patient.set_if_fresh(FenceToken(7, "a"), ROW, "v")
    (op,) = [key for key in site.all_keys() if b":op:" in key]
    assert site.admin.pttl(op) > 120_000


async def test_keys_of_names_that_are_not_used_any_more_go_and_tokens_still_grow(
    client: Any, site: Site
) -> None:
    # scenario 80, I1, I8
    lock = AsyncLock(client, retention=90)
    gate = AsyncFenceGate(client, retention=90)
    first = await lock.acquire("name:0", ttl=60)
    await gate.set_if_fresh(first.token, gate.key("name:0", "x"), 1, ttl=60)

    async def visit(start: int) -> None:
        for number in range(start, start + 50):
            handle = await lock.acquire(f"name:{number}", ttl=60)
            if number % 2:
                await lock.release(handle)

    results = await both.together([lambda n=n: visit(n) for n in range(1, 501, 50)])
    assert results == [None] * 10
    keys = site.all_keys()
    assert len(keys) == 501 + 251 + 2
    for key in keys:
        assert 0 < site.admin.pttl(key) <= 120_000
        site.admin.pexpire(key, 1)  # as if that time had passed
    await both.until(lambda: site.all_keys() == [])
    again = await lock.acquire("name:0", ttl=5)
    assert again.token.value > first.token.value
    with pytest.raises(FencedOutError):
        await gate.check(first.token)


async def test_a_flushed_server_grants_larger_tokens_and_fences_older_ones(
    lock: AsyncLock, gate: AsyncFenceGate, site: Site
) -> None:
    # scenario 80, I1
    old = await lock.acquire("a", ttl=5)
    site.flush()
    assert await gate.current_max("a") == 0
    new = await lock.acquire("a", ttl=5)
    assert new.token.value > old.token.value
    with pytest.raises(FencedOutError):
        await gate.set_if_fresh(old.token, ROW, "late")


async def test_gates_of_two_prefixes_know_nothing_of_each_other(
    client: Any, gate: AsyncFenceGate
) -> None:
    # scenario 65
    other = AsyncFenceGate(client, prefix="other")
    await gate.check_and_advance(FenceToken(42, "a"))
    assert await other.current_max("a") == 0
    await other.set_if_fresh(FenceToken(41, "a"), ROW, "v")


# Foreign values

GARBAGE = ["", "x", "0", "007", "-5", "1.5", "1e5", " 7", "7 ", "9007199254740991", "1" * 17]


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_text_at_the_fence_that_is_no_token_is_an_error_and_stays(
    lock: AsyncLock, gate: AsyncFenceGate, site: Site, garbage: str
) -> None:
    # I12
    fence = site.keys.fence("a")
    site.admin.set(fence, garbage)
    await refused_everywhere(lock, gate, fence)
    assert site.admin.get(fence) == garbage.encode()
    assert "owner" not in site.lock("a")
    assert not site.admin.exists(ROW)


@pytest.mark.parametrize("kind", ["list", "hash", "set", "zset", "stream"])
async def test_another_type_at_the_fence_is_an_error_and_stays(
    lock: AsyncLock, gate: AsyncFenceGate, site: Site, kind: str
) -> None:
    # I12
    fence = site.keys.fence("a")
    put = {
        "list": lambda: site.admin.rpush(fence, "x"),
        "hash": lambda: site.admin.hset(fence, "owner", "x"),
        "set": lambda: site.admin.sadd(fence, "x"),
        "zset": lambda: site.admin.zadd(fence, {"x": 1}),
        "stream": lambda: site.admin.xadd(fence, {"x": 1}),
    }
    put[kind]()
    before = site.admin.dump(fence)
    await refused_everywhere(lock, gate, fence)
    assert site.admin.dump(fence) == before
    assert "owner" not in site.lock("a")
    assert not site.admin.exists(ROW)


async def refused_everywhere(lock: AsyncLock, gate: AsyncFenceGate, fence: bytes) -> None:
    """Every verb that meets this fence names it in a ForeignValue."""
    token = FenceToken(2**52, "a")
    calls: list[Callable[[], Any]] = [
        lambda: lock.acquire("a", ttl=5),
        lambda: lock.try_acquire("a", ttl=5),
        lambda: lock.inspect("a"),
        lambda: lock.break_lock("a", reason="garbage"),
        lambda: gate.check(token),
        lambda: gate.check_and_advance(token),
        lambda: gate.current_max("a"),
        lambda: gate.set_if_fresh(token, ROW, "v"),
        lambda: gate.pipeline(token).set(ROW, "v").execute(),
    ]
    for call in calls:
        with pytest.raises(ForeignValue) as found:
            await call()
        assert found.value.key == fence.decode()
        assert fence.decode() in str(found.value)


async def test_something_else_at_a_jobs_keys_is_an_error_and_stays(
    gate: AsyncFenceGate, site: Site
) -> None:
    # I12
    token = FenceToken(7, "a", "job")
    for key in (site.keys.job("a"), site.keys.job_fence("a")):
        site.admin.rpush(key, "x")
        before = contents(site)
        for call in (
            lambda: gate.check(token),
            lambda: gate.current_max("a", kind="job"),
            lambda: gate.check_and_advance(token),
            lambda: gate.set_if_fresh(token, ROW, "v"),
        ):
            with pytest.raises(ForeignValue) as found:
                await call()
            assert found.value.key == key.decode()
        assert contents(site) == before
        site.admin.delete(key)


# Repeats


async def test_a_write_whose_reply_was_lost_is_made_once(private_server: RedisServer) -> None:
    # I7
    with Proxy.before(private_server) as proxy:
        client = both.client_before(proxy)
        gate = AsyncFenceGate(client)
        await gate.check_and_advance(FenceToken(7, "a"))
        proxy.swallow_matching(b"INCRBY", times=3)
        pipe = gate.pipeline(FenceToken(7, "a"))
        assert await pipe.incr("n").rpush("l", "x").get("n").execute() == [1, 1, b"1"]
        proxy.swallow_matching(b"APPEND", times=1)
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            await pipe.append("s", "x").incr("l").execute()
        await both.close(client)
    with private_server.client() as admin:
        assert admin.get("n") == b"1"
        assert admin.get("s") == b"x"
        assert admin.llen("l") == 1


async def test_a_refusal_whose_reply_was_lost_is_still_a_refusal(
    private_server: RedisServer,
) -> None:
    # I7
    with Proxy.before(private_server) as proxy:
        client = both.client_before(proxy)
        gate = AsyncFenceGate(client)
        await gate.check_and_advance(FenceToken(7, "a"))
        proxy.swallow_matching(b"row", times=1)
        with pytest.raises(FencedOutError):
            await gate.set_if_fresh(FenceToken(6, "a"), "row", "late")
        await both.close(client)
    with private_server.client() as admin:
        assert admin.exists("row") == 0
