"""The gate's promises: older tokens write nothing; check and write are one step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Callable
from datetime import timedelta
from typing import Any

import pytest
import pytest
from redis.exceptions import ResponseError

from fencekit import FenceGate, IdempotencyGuard, DistributedLock, FencedOutError, FenceToken, ForeignValue
from fencekit.events import Event, FencedOut
from fencekit.keys import KeySpace
from fencekit.testing import ClusterServers, Proxy, RedisServer
from tests import threads as both
from tests.site import Site

pytestmark = pytest.mark.threads

ROW = "{a}:row"
"""A key of the user's in the slot of resource "a", so that a Cluster takes it too."""


@pytest.fixture
def nowhere() -> Iterator[FenceGate]:
    """A gate whose server does not exist: what it raises at once was raised before any command."""
    with Proxy("127.0.0.1", 1) as proxy:
        client = both.client_before(proxy)
        yield FenceGate(client)
        both.close(client)
        assert proxy.connections == 0


def contents(site: Site) -> dict[bytes, Any]:
    """Every key there is, with what is in it."""
    return {key: site.admin.dump(key) for key in site.all_keys()}


# Older tokens are refused


def test_a_paused_holder_writes_nothing_after_its_successor(
    lock: DistributedLock, gate: FenceGate, site: Site
) -> None:
    # scenario 79
    old = lock.acquire("a", ttl=5)
    gate.set_if_fresh(old.token, ROW, "v0")
    site.expire_lock("a")
    new = lock.acquire("a", ttl=5)
    gate.set_if_fresh(new.token, ROW, "v2")
    with pytest.raises(FencedOutError) as refused:
        gate.set_if_fresh(old.token, ROW, "v1")
    assert refused.value.resource == "a"
    assert refused.value.token == old.token.value
    assert refused.value.current == new.token.value
    assert str(old.token.value) in str(refused.value)
    assert str(new.token.value) in str(refused.value)
    assert site.admin.get(ROW) == b"v2"
    gate.set_if_fresh(new.token, ROW, "v3")
    assert site.admin.get(ROW) == b"v3"


def test_tokens_that_came_from_elsewhere_are_compared_as_numbers(
    gate: FenceGate, site: Site
) -> None:
    # scenario 79
    gate.set_if_fresh(FenceToken(9, "a"), ROW, "nine")
    gate.set_if_fresh(FenceToken(41, "a"), ROW, "v1")
    gate.set_if_fresh(FenceToken(42, "a"), ROW, "v2")
    with pytest.raises(FencedOutError):
        gate.set_if_fresh(FenceToken(41, "a"), ROW, "v1")
    gate.set_if_fresh(FenceToken(42, "a"), ROW, "v3")
    with pytest.raises(FencedOutError):
        gate.set_if_fresh(FenceToken(9, "a"), ROW, "nine")
    gate.set_if_fresh(FenceToken(100, "a"), ROW, "v4")
    assert site.admin.get(ROW) == b"v4"
    assert gate.current_max("a") == 100


def test_a_new_grant_fences_older_holders_before_its_first_write(
    lock: DistributedLock, gate: FenceGate, site: Site
) -> None:
    # I3
    old = lock.acquire("a", ttl=5)
    site.expire_lock("a")
    new = lock.acquire("a", ttl=5)
    assert gate.current_max("a") == new.token.value
    for refused in (
        lambda: gate.check(old.token),
        lambda: gate.check_and_advance(old.token),
        lambda: gate.set_if_fresh(old.token, ROW, "late"),
        lambda: gate.pipeline(old.token).set(ROW, "late").execute(),
    ):
        with pytest.raises(FencedOutError):
            refused()
    assert site.admin.exists(ROW) == 0


def test_a_holder_whose_lock_was_broken_writes_nothing(
    lock: DistributedLock, gate: FenceGate, site: Site
) -> None:
    # I3
    handle = lock.acquire("a", ttl=5)
    lock.break_lock("a", reason="its host is gone")
    with pytest.raises(FencedOutError):
        gate.set_if_fresh(handle.token, ROW, "late")
    assert site.admin.exists(ROW) == 0


def test_equal_tokens_pass_also_after_the_release(
    lock: DistributedLock, gate: FenceGate
) -> None:
    handle = lock.acquire("a", ttl=5)
    for value in range(3):
        gate.set_if_fresh(handle.token, ROW, value)
        gate.check(handle.token)
        gate.check_and_advance(handle.token)
    lock.release(handle)
    gate.set_if_fresh(handle.token, ROW, "after")
    assert gate.current_max("a") == handle.token.value


def test_a_refused_write_changes_nothing_at_all(
    lock: DistributedLock, gate: FenceGate, site: Site
) -> None:
    # I4
    old = lock.acquire("a", ttl=5)
    site.expire_lock("a")
    new = lock.acquire("a", ttl=5)
    gate.pipeline(new.token).set(ROW, "v2").rpush("{a}:list", 1, 2).execute()
    before = contents(site)
    with pytest.raises(FencedOutError):
        gate.set_if_fresh(old.token, ROW, "v1", ttl=1)
    with pytest.raises(FencedOutError):
        with gate.pipeline(old.token) as pipe:
            pipe.delete(ROW).lpop("{a}:list").incr("{a}:new")
    with pytest.raises(FencedOutError):
        gate.check_and_advance(old.token)
    assert contents(site) == before


def test_a_listener_hears_of_a_refused_write(
    gate: FenceGate, events: list[Event]
) -> None:
    gate.check_and_advance(FenceToken(42, "a"))
    assert events == []
    with pytest.raises(FencedOutError):
        gate.set_if_fresh(FenceToken(41, "a"), ROW, "v1")
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
def test_a_value_is_stored_as_redis_py_would(
    gate: FenceGate, site: Site, value: Any, stored: bytes
) -> None:
    gate.set_if_fresh(FenceToken(1, "a"), ROW, value)
    assert site.admin.get(ROW) == stored


def test_a_key_is_used_exactly_as_given(gate: FenceGate, site: Site) -> None:
    for key in ("{a}: b%20c\n", b"{a}\xff\x00"):
        gate.set_if_fresh(FenceToken(1, "a"), key, "v")  # type: ignore[arg-type]
        assert site.admin.get(key) == b"v"


def test_ttl_is_the_keys_expiry_and_without_it_there_is_none(
    gate: FenceGate, site: Site
) -> None:
    token = FenceToken(1, "a")
    gate.set_if_fresh(token, ROW, "v", ttl=60)
    assert 59_000 < site.admin.pttl(ROW) <= 60_000
    gate.set_if_fresh(token, ROW, "v", ttl=timedelta(hours=1))
    assert 3_599_000 < site.admin.pttl(ROW) <= 3_600_000
    gate.set_if_fresh(token, ROW, "v")
    assert site.admin.pttl(ROW) == -1
    gate.set_if_fresh(token, ROW, "v", ttl=0.0015)
    both.until(lambda: not site.admin.exists(ROW))


def test_any_type_at_the_written_key_is_replaced(gate: FenceGate, site: Site) -> None:
    site.admin.rpush(ROW, "a", "list")
    gate.set_if_fresh(FenceToken(1, "a"), ROW, "v")
    assert site.admin.get(ROW) == b"v"


# Reading and advancing


def test_current_max_is_zero_where_nothing_was_ever_fenced(
    gate: FenceGate, site: Site
) -> None:
    assert gate.current_max("a") == 0
    assert gate.current_max("a", kind="job") == 0
    assert site.all_keys() == []


def test_check_passes_a_token_newer_than_all_and_leaves_no_trace(
    gate: FenceGate, site: Site
) -> None:
    gate.check(FenceToken(7, "a"))
    assert site.all_keys() == []
    gate.check_and_advance(FenceToken(7, "a"))
    before = contents(site)
    gate.check(FenceToken(7, "a"))
    gate.check(FenceToken(8, "a"))
    with pytest.raises(FencedOutError) as refused:
        gate.check(FenceToken(6, "a"))
    assert (refused.value.token, refused.value.current) == (6, 7)
    assert contents(site) == before
    assert gate.current_max("a") == 7


def test_check_and_advance_refuses_older_tokens_from_then_on(
    lock: DistributedLock, gate: FenceGate, site: Site
) -> None:
    # I1
    handle = lock.acquire("a", ttl=5)
    ahead = FenceToken(handle.token.value + 3_600_000_000, "a")
    gate.check_and_advance(ahead)
    assert site.fence("a") == ahead.value
    with pytest.raises(FencedOutError):
        gate.set_if_fresh(handle.token, ROW, "late")
    lock.release(handle)
    later = lock.acquire("a", ttl=5)
    assert later.token.value == ahead.value + 1


def test_resources_do_not_share_a_fence(gate: FenceGate) -> None:
    gate.check_and_advance(FenceToken(42, "a"))
    gate.check_and_advance(FenceToken(41, "b"))
    assert gate.current_max("a") == 42
    assert gate.current_max("b") == 41


@pytest.mark.parametrize("name", ["{a}", "a b", "order:{7}", "}{", "{}", "ä%", "a\n"])
def test_every_resource_name_has_a_gate_and_a_slot_for_keys(
    lock: DistributedLock, gate: FenceGate, site: Site, name: str
) -> None:
    handle = lock.acquire(name, ttl=5)
    key = gate.key(name, "status")
    gate.set_if_fresh(handle.token, key, "v")
    assert site.admin.get(key) == b"v"
    assert gate.current_max(name) == handle.token.value


def test_tokens_beyond_32_bits_are_exact_to_the_last(
    gate: FenceGate, lock: DistributedLock, site: Site
) -> None:
    last = 2**53 - 2
    gate.check_and_advance(FenceToken(last - 9, "a"))
    for value in range(last - 8, last + 1):
        gate.set_if_fresh(FenceToken(value, "a"), ROW, value)
        assert site.fence("a") == value
        assert gate.current_max("a") == value
        with pytest.raises(FencedOutError) as refused:
            gate.check(FenceToken(value - 1, "a"))
        assert refused.value.current == value
    site.admin.set(site.keys.fence("b"), last - 2, px=60_000)
    assert (lock.acquire("b", ttl=5)).token.value == last - 1


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


def test_a_pipeline_takes_redis_pys_commands_and_answers_in_order(
    gate: FenceGate, site: Site
) -> None:
    with gate.pipeline(FenceToken(1, "a")) as pipe:
        for note, _ in COMMANDS:
            note(pipe)
        assert len(pipe) == len(COMMANDS)
        assert site.admin.exists("{a}:s") == 0
        replies = pipe.execute()
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
def test_a_noted_command_returns_the_pipeline_so_that_calls_chain(
    gate: FenceGate, note: Note, wanted: Any
) -> None:
    pipe = gate.pipeline(FenceToken(1, "a"))
    assert note(pipe) is pipe
    assert pipe.execute() == [wanted]


def test_the_end_of_the_block_executes_what_was_noted(
    gate: FenceGate, site: Site
) -> None:
    with gate.pipeline(FenceToken(1, "a")) as pipe:
        pipe.set(ROW, "v")
        pipe.incr("{a}:n")
        assert site.all_keys() == []
    assert (site.admin.get(ROW), site.admin.get("{a}:n")) == (b"v", b"1")


def test_a_block_that_raises_executes_nothing(gate: FenceGate, site: Site) -> None:
    def body() -> None:
        with gate.pipeline(FenceToken(1, "a")) as pipe:
            pipe.set(ROW, "v")
            raise KeyError(ROW)

    with pytest.raises(KeyError):
        body()
    assert site.all_keys() == []


def test_what_was_executed_is_not_executed_again_by_the_block(
    gate: FenceGate, site: Site
) -> None:
    with gate.pipeline(FenceToken(1, "a")) as pipe:
        assert pipe.incr("{a}:n").execute() == [1]
        assert pipe.incr("{a}:n").incr("{a}:n").execute() == [2, 3]
        pipe.incr("{a}:n")
    assert site.admin.get("{a}:n") == b"4"


def test_an_empty_pipeline_only_advances(gate: FenceGate, site: Site) -> None:
    with gate.pipeline(FenceToken(1, "a")):
        pass
    assert site.all_keys() == []
    assert gate.pipeline(FenceToken(5, "a")).execute() == []
    assert gate.current_max("a") == 5
    with pytest.raises(FencedOutError):
        gate.pipeline(FenceToken(4, "a")).execute()


def test_an_error_in_one_command_is_raised_and_the_others_are_applied(
    gate: FenceGate, site: Site
) -> None:
    site.admin.rpush("{a}:l", "x")
    pipe = gate.pipeline(FenceToken(1, "a"))
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        pipe.set(ROW, "v").incr("{a}:l").incr("{a}:n").execute()
    assert site.admin.get(ROW) == b"v"
    assert site.admin.get("{a}:n") == b"1"
    assert site.admin.lrange("{a}:l", 0, -1) == [b"x"]
    with pytest.raises(ResponseError):
        with gate.pipeline(FenceToken(1, "a")) as pipe:
            pipe.raw("NOSUCHCOMMAND", "{a}:n", keys=["{a}:n"]).incr("{a}:n")
    assert site.admin.get("{a}:n") == b"2"


def test_a_stale_pipeline_executes_not_even_its_first_command(
    gate: FenceGate, site: Site
) -> None:
    # I4
    gate.check_and_advance(FenceToken(42, "a"))
    before = contents(site)
    pipe = gate.pipeline(FenceToken(41, "a"))
    for note, _ in COMMANDS:
        note(pipe)
    with pytest.raises(FencedOutError):
        pipe.execute()
    assert contents(site) == before


def test_a_command_whose_keys_are_not_known_is_refused_with_the_way_out(
    gate: FenceGate, site: Site
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


def test_a_long_pipeline_is_one_step_and_a_longer_one_is_refused(
    gate: FenceGate, site: Site
) -> None:
    pipe = gate.pipeline(FenceToken(1, "a"))
    for _ in range(1700):
        pipe.incr("{a}:n")
    assert pipe.execute() == list(range(1, 1701))
    pipe.rpush("{a}:l", *range(6990))
    assert pipe.execute() == [6990]
    with pytest.raises(ValueError, match="split it"):
        pipe.rpush("{a}:l", *range(7000))
    assert len(pipe) == 0
    assert site.admin.llen("{a}:l") == 6990


def test_concurrent_pipelines_are_each_one_step(gate: FenceGate, site: Site) -> None:
    def move() -> Any:
        pipe = gate.pipeline(FenceToken(1, "a"))
        return pipe.incr("{a}:x").incr("{a}:y").incr("{a}:x").execute()

    results = both.together([move] * 20)
    assert sorted(results) == [[2 * n + 1, n + 1, 2 * n + 2] for n in range(20)]
    assert site.admin.get("{a}:x") == b"40"


# What may not be written


@pytest.mark.parametrize("kind", ["lock", "fence", "job", "jobfence", "op:1f", "free", "done"])
def test_fencekits_own_keys_are_refused_as_targets(
    gate: FenceGate, lock: DistributedLock, site: Site, kind: str
) -> None:
    # I12
    handle = lock.acquire("a", ttl=5)
    before = contents(site)
    for tag in ("a", "b c"):
        target = f"fencekit:{KeySpace().tag(tag)}:{kind}"
        with pytest.raises(ValueError, match="fencekit's own"):
            gate.set_if_fresh(handle.token, target, "v")
        for pipe in (
            gate.pipeline(handle.token).set(ROW, 1).delete(target),
            gate.pipeline(handle.token).rename(ROW, target),
            gate.pipeline(handle.token).raw("GET", target, keys=[target.encode()]),
        ):
            with pytest.raises(ValueError, match="fencekit's own"):
                pipe.execute()
    assert contents(site) == before


def test_keys_that_only_look_like_fencekits_are_the_users(
    gate: FenceGate, site: Site
) -> None:
    for key in ("fencekit:{a}:status", "other:{a}:lock", "{a}:lock", "x:fencekit:{a}:fence"):
        gate.set_if_fresh(FenceToken(1, "a"), key, "v")
        assert site.admin.get(key) == b"v"


def test_on_a_cluster_a_key_in_another_slot_is_refused_with_a_name_that_fits(
    fencekit_cluster: ClusterServers,
) -> None:
    # scenario 49
    fencekit_cluster.flush()
    client = both.client_before(fencekit_cluster)
    try:
        gate = FenceGate(client)
        token = FenceToken(1, "a")
        with pytest.raises(ValueError, match=r"\{a\}:status") as refused:
            gate.set_if_fresh(token, "b:status", "v")
        assert "b:status" in str(refused.value)
        with pytest.raises(ValueError, match=r"\{a\}:status"):
            gate.pipeline(token).set(gate.key("a", "x"), 1).set("c", 1).execute()
        assert gate.current_max("a") == 0
        gate.set_if_fresh(token, gate.key("a", "status"), "v")
        pipe = gate.pipeline(token)
        pipe.incr(gate.key("a", "n")).get(gate.key("a", "status")).incr("{a}n")
        assert pipe.execute() == [1, b"v", 1]
    finally:
        both.close(client)


def test_gate_key_names_a_key_in_the_resources_slot(nowhere: FenceGate) -> None:
    assert nowhere.key("order:7", "status") == "{order:7}:status"
    assert nowhere.key("{x} y", "a b") == "{%7Bx%7D%20y}:a b"
    for wrong in ("", " ", "x" * 1025):
        with pytest.raises(ValueError):
            nowhere.key(wrong, "status")
        with pytest.raises(ValueError):
            nowhere.key("a", wrong)


def test_bad_tokens_raise_before_a_command_is_sent(nowhere: FenceGate) -> None:
    class Handle:
        token = FenceToken(1, "a")

    for wrong in (None, 7, "7", b"7", 7.0, True, object(), Handle()):
        for call in (
            lambda token: nowhere.set_if_fresh(token, ROW, "v"),
            nowhere.check,
            nowhere.check_and_advance,
        ):
            with pytest.raises(TypeError, match="FenceToken"):
                call(wrong)
        with pytest.raises(TypeError, match="FenceToken"):
            nowhere.pipeline(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"pass its \.token"):
        nowhere.check(Handle())  # type: ignore[arg-type]
    for resource in (" ", "x" * 1025, "\ud800"):
        with pytest.raises(ValueError):
            nowhere.check(FenceToken(1, resource))
    for resource, kind in (("", "lock"), ("a", "guard"), ("a", "")):
        with pytest.raises(ValueError):
            nowhere.current_max(resource, kind=kind)
    with pytest.raises(TypeError):
        nowhere.current_max(7)  # type: ignore[arg-type]


def test_bad_keys_and_values_raise_before_a_command_is_sent(nowhere: FenceGate) -> None:
    token = FenceToken(1, "a")
    for key in (None, 7, True, ["k"]):
        with pytest.raises(TypeError):
            nowhere.set_if_fresh(token, key, "v")  # type: ignore[arg-type]
    for key in ("", b""):
        with pytest.raises(ValueError):
            nowhere.set_if_fresh(token, key, "v")  # type: ignore[arg-type]
    for value in (None, True, ["v"], {"v": 1}, object(), timedelta(1)):
        with pytest.raises(TypeError, match="encode it first"):
            nowhere.set_if_fresh(token, ROW, value)
        with pytest.raises(TypeError, match="encode it first"):
            nowhere.pipeline(token).raw("SET", ROW, value, keys=[ROW])
    for ttl in (0, -1, 0.0004, math.nan, math.inf, timedelta(0), timedelta(days=99_999)):
        with pytest.raises(ValueError, match="ttl"):
            nowhere.set_if_fresh(token, ROW, "v", ttl=ttl)
    for ttl in ("5", True, [5]):
        with pytest.raises(TypeError, match="ttl"):
            nowhere.set_if_fresh(token, ROW, "v", ttl=ttl)  # type: ignore[arg-type]


def test_bad_settings_raise_when_the_gate_is_made(client: Any) -> None:
    for name in ("timeout", "retention"):
        for value in (0, -1, math.nan):
            with pytest.raises(ValueError, match=name):
                FenceGate(client, **{name: value})
        with pytest.raises(TypeError, match=name):
            FenceGate(client, **{name: None})
    with pytest.raises(ValueError, match="prefix"):
        FenceGate(client, prefix="{x}")
    with pytest.raises(TypeError, match="listener"):
        FenceGate(client, listeners=[1])  # type: ignore[list-item]
    assert repr(FenceGate(client, prefix="shop")) == "FenceGate(prefix='shop')"


# Kinds of tokens


def test_lock_and_job_tokens_of_one_name_are_never_compared(
    lock: DistributedLock, guard: IdempotencyGuard, gate: FenceGate
) -> None:
    claim = guard.begin("a", lease=5)
    handle = lock.acquire("a", ttl=5)
    assert claim.token is not None
    assert (claim.token.kind, handle.token.kind) == ("job", "lock")
    assert handle.token.value > claim.token.value
    gate.set_if_fresh(claim.token, ROW, "job")
    gate.set_if_fresh(handle.token, ROW, "lock")
    gate.check_and_advance(FenceToken(handle.token.value + 10**9, "a"))
    gate.set_if_fresh(claim.token, ROW, "job")
    gate.check_and_advance(FenceToken(claim.token.value + 10**6, "a", "job"))
    with pytest.raises(FencedOutError):
        gate.set_if_fresh(claim.token, ROW, "late")
    assert gate.current_max("a") == handle.token.value + 10**9
    assert gate.current_max("a", kind="job") == claim.token.value + 10**6


def test_a_takeover_fences_the_older_claim_before_its_first_write(
    guard: IdempotencyGuard, gate: FenceGate, site: Site
) -> None:
    # I3
    old = guard.begin("a", lease=5)
    site.lapse("a")
    new = guard.begin("a", lease=5)
    assert old.token is not None
    assert new.token is not None
    assert gate.current_max("a", kind="job") == new.token.value
    with pytest.raises(FencedOutError) as refused:
        gate.set_if_fresh(old.token, ROW, "late")
    assert refused.value.current == new.token.value
    gate.set_if_fresh(new.token, ROW, "v")
    with pytest.raises(FencedOutError):
        gate.pipeline(old.token).set(ROW, "late").execute()
    assert site.admin.get(ROW) == b"v"
    guard.finish(new, None)
    with pytest.raises(FencedOutError):
        gate.check(old.token)
    gate.check(new.token)


def test_a_gated_write_keeps_an_older_claim_out_also_when_the_record_is_gone(
    guard: IdempotencyGuard, gate: FenceGate, site: Site
) -> None:
    # I1, I3
    old = guard.begin("a", lease=5)
    site.lapse("a")
    new = guard.begin("a", lease=5)
    assert old.token is not None
    assert new.token is not None
    gate.set_if_fresh(new.token, ROW, "v")
    guard.clear("a")
    with pytest.raises(FencedOutError):
        gate.set_if_fresh(old.token, ROW, "late")
    again = guard.begin("a", lease=5)
    assert again.token is not None
    assert again.token.value > new.token.value
    with pytest.raises(FencedOutError):
        gate.set_if_fresh(new.token, ROW, "late")


def test_a_job_that_never_uses_the_gate_costs_one_key(
    guard: IdempotencyGuard, gate: FenceGate, site: Site
) -> None:
    claim = guard.begin("a", lease=5)
    assert claim.token is not None
    gate.check(claim.token)
    assert site.all_keys() == [site.keys.job("a")]
    gate.set_if_fresh(claim.token, ROW, "v")
    assert site.keys.job_fence("a") in site.all_keys()
    assert site.keys.fence("a") not in site.all_keys()


def test_a_claim_with_a_lock_writes_under_the_resources_token(
    guard: IdempotencyGuard, lock: DistributedLock, gate: FenceGate, site: Site
) -> None:
    claim = guard.begin("job:1", lease=5, lock="a")
    assert claim.token is not None
    assert (claim.token.kind, claim.token.resource) == ("lock", "a")
    gate.set_if_fresh(claim.token, ROW, "v")
    site.expire_lock("a")
    handle = lock.acquire("a", ttl=5)
    with pytest.raises(FencedOutError):
        gate.set_if_fresh(claim.token, ROW, "late")
    gate.set_if_fresh(handle.token, ROW, "v2")


def test_tokens_survive_their_header_and_pass(lock: DistributedLock, gate: FenceGate) -> None:
    handle = lock.acquire("a", ttl=5)
    token = FenceToken.from_header(handle.token.to_header())
    gate.set_if_fresh(token, ROW, "v")


# What is on the server


def test_every_key_of_the_gate_has_an_expiry(gate: FenceGate, site: Site) -> None:
    # I8
    gate.set_if_fresh(FenceToken(7, "a"), ROW, "v", ttl=60)
    gate.check_and_advance(FenceToken(7, "b", "job"))
    keys = site.all_keys()
    assert site.keys.fence("a") in keys
    assert site.keys.job_fence("b") in keys
    ops = [key for key in keys if b":op:" in key]
    assert len(ops) == 1
    assert 0 < site.admin.pttl(ops[0]) <= 30_000
    assert all(site.admin.pttl(key) > 0 for key in keys)
    week = 7 * 86_400_000
    assert week - 60_000 < site.admin.pttl(site.keys.fence("a")) <= week


def test_a_write_lengthens_the_life_of_its_fence_and_never_shortens_it(
    client: Any, gate: FenceGate, site: Site
) -> None:
    token = FenceToken(7, "a")
    gate.check_and_advance(token)
    FenceGate(client, retention=1).set_if_fresh(token, ROW, "v")
    assert site.admin.pttl(site.keys.fence("a")) > 86_400_000
    site.admin.pexpire(site.keys.fence("a"), 5_000)
    gate.set_if_fresh(token, ROW, "v")
    assert site.admin.pttl(site.keys.fence("a")) > 86_400_000


def test_a_write_is_remembered_for_longer_than_it_may_be_repeated(
    client: Any, site: Site
) -> None:
    # I7
    patient = FenceGate(client, timeout=120)
    patient.set_if_fresh(FenceToken(7, "a"), ROW, "v")
    (op,) = [key for key in site.all_keys() if b":op:" in key]
    assert site.admin.pttl(op) > 120_000


def test_keys_of_names_that_are_not_used_any_more_go_and_tokens_still_grow(
    client: Any, site: Site
) -> None:
    # scenario 80, I1, I8
    lock = DistributedLock(client, retention=90)
    gate = FenceGate(client, retention=90)
    first = lock.acquire("name:0", ttl=60)
    gate.set_if_fresh(first.token, gate.key("name:0", "x"), 1, ttl=60)

    def visit(start: int) -> None:
        for number in range(start, start + 50):
            handle = lock.acquire(f"name:{number}", ttl=60)
            if number % 2:
                lock.release(handle)

    results = both.together([lambda n=n: visit(n) for n in range(1, 501, 50)])
    assert results == [None] * 10
    keys = site.all_keys()
    assert len(keys) == 501 + 251 + 2
    for key in keys:
        assert 0 < site.admin.pttl(key) <= 120_000
        site.admin.pexpire(key, 1)  # as if that time had passed
    both.until(lambda: site.all_keys() == [])
    again = lock.acquire("name:0", ttl=5)
    assert again.token.value > first.token.value
    with pytest.raises(FencedOutError):
        gate.check(first.token)


def test_a_flushed_server_grants_larger_tokens_and_fences_older_ones(
    lock: DistributedLock, gate: FenceGate, site: Site
) -> None:
    # scenario 80, I1
    old = lock.acquire("a", ttl=5)
    site.flush()
    assert gate.current_max("a") == 0
    new = lock.acquire("a", ttl=5)
    assert new.token.value > old.token.value
    with pytest.raises(FencedOutError):
        gate.set_if_fresh(old.token, ROW, "late")


def test_gates_of_two_prefixes_know_nothing_of_each_other(
    client: Any, gate: FenceGate
) -> None:
    # scenario 65
    other = FenceGate(client, prefix="other")
    gate.check_and_advance(FenceToken(42, "a"))
    assert other.current_max("a") == 0
    other.set_if_fresh(FenceToken(41, "a"), ROW, "v")


# Foreign values

GARBAGE = ["", "x", "0", "007", "-5", "1.5", "1e5", " 7", "7 ", "9007199254740991", "1" * 17]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_text_at_the_fence_that_is_no_token_is_an_error_and_stays(
    lock: DistributedLock, gate: FenceGate, site: Site, garbage: str
) -> None:
    # I12
    fence = site.keys.fence("a")
    site.admin.set(fence, garbage)
    refused_everywhere(lock, gate, fence)
    assert site.admin.get(fence) == garbage.encode()
    assert "owner" not in site.lock("a")
    assert not site.admin.exists(ROW)


@pytest.mark.parametrize("kind", ["list", "hash", "set", "zset", "stream"])
def test_another_type_at_the_fence_is_an_error_and_stays(
    lock: DistributedLock, gate: FenceGate, site: Site, kind: str
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
    refused_everywhere(lock, gate, fence)
    assert site.admin.dump(fence) == before
    assert "owner" not in site.lock("a")
    assert not site.admin.exists(ROW)


def refused_everywhere(lock: DistributedLock, gate: FenceGate, fence: bytes) -> None:
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
            call()
        assert found.value.key == fence.decode()
        assert fence.decode() in str(found.value)


def test_something_else_at_a_jobs_keys_is_an_error_and_stays(
    gate: FenceGate, site: Site
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
                call()
            assert found.value.key == key.decode()
        assert contents(site) == before
        site.admin.delete(key)


# Repeats


def test_a_write_whose_reply_was_lost_is_made_once(private_server: RedisServer) -> None:
    # I7
    with Proxy.before(private_server) as proxy:
        client = both.client_before(proxy)
        gate = FenceGate(client)
        gate.check_and_advance(FenceToken(7, "a"))
        proxy.swallow_matching(b"INCRBY", times=3)
        pipe = gate.pipeline(FenceToken(7, "a"))
        assert pipe.incr("n").rpush("l", "x").get("n").execute() == [1, 1, b"1"]
        proxy.swallow_matching(b"APPEND", times=1)
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            pipe.append("s", "x").incr("l").execute()
        both.close(client)
    with private_server.client() as admin:
        assert admin.get("n") == b"1"
        assert admin.get("s") == b"x"
        assert admin.llen("l") == 1


def test_a_refusal_whose_reply_was_lost_is_still_a_refusal(
    private_server: RedisServer,
) -> None:
    # I7
    with Proxy.before(private_server) as proxy:
        client = both.client_before(proxy)
        gate = FenceGate(client)
        gate.check_and_advance(FenceToken(7, "a"))
        proxy.swallow_matching(b"row", times=1)
        with pytest.raises(FencedOutError):
            gate.set_if_fresh(FenceToken(6, "a"), "row", "late")
        both.close(client)
    with private_server.client() as admin:
        assert admin.exists("row") == 0
