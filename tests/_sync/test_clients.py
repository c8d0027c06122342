"""Any client that redis-py can make works, and what Redis or the network says is raised as it is.

Every test has a server of its own: it is frozen, filled, killed and locked up here.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import pytest
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from fencekit import (
    FenceGate,
    IdempotencyGuard,
    DistributedLock,
    FencedOutError,
    FenceToken,
    LeaseLost,
    LockHandle,
    LockNotAcquired,
)
from fencekit._seam import threads as seam
from fencekit.testing import ClusterServers, Proxy, RedisServer, SentinelServers, find_server
from tests import threads as both

pytestmark = pytest.mark.threads

SOON = 0.6
"""A timeout for calls that are meant to fail, in seconds."""


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A server of this test's own."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def client(server: RedisServer) -> Iterator[Any]:
    client = both.client_before(server)
    yield client
    both.close(client)


@pytest.fixture
def admin(server: RedisServer) -> Iterator[Any]:
    """A blocking client, for arranging things."""
    with server.client() as admin:
        yield admin


def everything_works(client: Any) -> None:
    """Every verb that speaks to Redis, a wait with a wake-up, and a fenced write."""
    lock, guard, gate = DistributedLock(client), IdempotencyGuard(client), FenceGate(client)
    row = gate.key("a", "row")
    with lock.hold("a", ttl=30) as handle:
        waiting = both.Running(lambda: lock.acquire("a", ttl=30, wait=20))
        gate.set_if_fresh(handle.token, row, "v", ttl=60)
        assert gate.pipeline(handle.token).get(row).incr(f"{row}:n").execute() == [b"v", 1]
        with pytest.raises(LockNotAcquired):
            lock.acquire("a")
        info = lock.inspect("a")
        assert info is not None
        assert info.token == handle.token.value
    later = waiting.result()
    assert later.token > handle.token
    lock.extend(later, ttl=60)
    lock.release(later)
    assert gate.current_max("a") == later.token.value
    claim = guard.begin("job", lease=30, lock="a")
    guard.finish(claim, {"name": "ü"})
    assert guard.once("job", dict) == {"name": "ü"}
    assert guard.try_begin("plain", ttl=60)
    guard.mark_done("plain", result=b"x".decode())
    assert guard.get_result("plain") == "x"
    guard.clear("plain")
    lock.break_lock("a", reason="over")


VERBS: dict[str, Callable[[DistributedLock, IdempotencyGuard, FenceGate, LockHandle], Any]] = {
    "acquire": lambda lock, guard, gate, held: lock.acquire("a"),
    "try_acquire": lambda lock, guard, gate, held: lock.try_acquire("a"),
    "acquire with a wait": lambda lock, guard, gate, held: lock.acquire("a", wait=0.05),
    "hold": lambda lock, guard, gate, held: held_open(lock),
    "extend": lambda lock, guard, gate, held: lock.extend(held),
    "release": lambda lock, guard, gate, held: lock.release(held),
    "inspect": lambda lock, guard, gate, held: lock.inspect("a"),
    "break_lock": lambda lock, guard, gate, held: lock.break_lock("a", reason="why"),
    "try_begin": lambda lock, guard, gate, held: guard.try_begin("k"),
    "begin": lambda lock, guard, gate, held: guard.begin("k"),
    "begin with a lock": lambda lock, guard, gate, held: guard.begin("k", lock="a"),
    "mark_done": lambda lock, guard, gate, held: guard.mark_done("k"),
    "once": lambda lock, guard, gate, held: guard.once("k", must_not_run),
    "status": lambda lock, guard, gate, held: guard.status("k"),
    "get_result": lambda lock, guard, gate, held: guard.get_result("k"),
    "clear": lambda lock, guard, gate, held: guard.clear("k"),
    "resolve": lambda lock, guard, gate, held: guard.resolve("k"),
    "check": lambda lock, guard, gate, held: gate.check(held.token),
    "current_max": lambda lock, guard, gate, held: gate.current_max("a"),
    "set_if_fresh": lambda lock, guard, gate, held: gate.set_if_fresh(held.token, "row", "v"),
    "check_and_advance": lambda lock, guard, gate, held: gate.check_and_advance(held.token),
}


def held_open(lock: DistributedLock) -> None:
    with lock.hold("a"):
        must_not_run()


def must_not_run() -> None:
    raise AssertionError("the body ran without its lock or claim")


def works_again(client: Any) -> None:
    """Also, what was left behind by calls that failed is done when this returns."""
    assert DistributedLock(client, timeout=20).inspect("nobody's") is None


def raised_by(verb: str, client: Any, timeout: float = SOON) -> Exception:
    """What the verb raises with this client."""
    lock = DistributedLock(client, timeout=timeout)
    guard = IdempotencyGuard(client, timeout=timeout)
    gate = FenceGate(client, timeout=timeout)
    held = LockHandle("h", "me", FenceToken(7, "h"), timedelta(seconds=30))
    with pytest.raises((RedisError, OSError)) as raised:
        VERBS[verb](lock, guard, gate, held)
    return raised.value


# Kinds of clients


MAKERS: dict[str, Callable[[RedisServer], Any]] = {
    "plain": lambda server: both.Redis(port=server.port),
    "unix socket": lambda server: both.Redis(unix_socket_path=server.unix_socket),
    "RESP2": lambda server: both.Redis(port=server.port, protocol=2),
    "RESP3": lambda server: both.Redis(port=server.port, protocol=3),
    "decoded": lambda server: both.Redis(
        port=server.port, decode_responses=True, encoding="latin-1"
    ),
    "decoded RESP3": lambda server: both.Redis(port=server.port, decode_responses=True, protocol=3),
    "one connection": lambda server: both.Redis(port=server.port, single_connection_client=True),
    "pool of one": lambda server: both.Redis(
        connection_pool=both.ConnectionPool(port=server.port, max_connections=1)
    ),
    "pool of two that blocks": lambda server: both.Redis(
        connection_pool=both.BlockingConnectionPool(port=server.port, max_connections=2, timeout=20)
    ),
    "another database": lambda server: both.Redis(port=server.port, db=3),
    "no repeats": lambda server: both.Redis(port=server.port, retry=None),
    "no read timeout": lambda server: both.Redis(port=server.port, socket_timeout=None),
    "short read timeout": lambda server: both.Redis(port=server.port, socket_timeout=0.5),
    "long timeouts": lambda server: both.Redis(
        port=server.port, socket_timeout=60, socket_connect_timeout=60
    ),
    "keepalive and health checks": lambda server: both.Redis(
        port=server.port, socket_keepalive=True, health_check_interval=1
    ),
    "a name": lambda server: both.Redis(port=server.port, client_name="billing"),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_every_verb_works_with_every_kind_of_client(kind: str) -> None:
    # scenario 50
    with RedisServer(unix_socket=True) as server:
        client = MAKERS[kind](server)
        try:
            everything_works(client)
            assert client.ping()
        finally:
            both.close(client)
            client.connection_pool.disconnect()  # which a pool of one's own needs


def test_every_verb_works_on_a_cluster(fencekit_cluster: ClusterServers) -> None:
    # scenario 49
    fencekit_cluster.flush()
    for options in ({}, {"decode_responses": True}, {"protocol": 2}):
        client = both.client_before(fencekit_cluster, **options)
        try:
            everything_works(client)
        finally:
            both.close(client)
        fencekit_cluster.flush()


def test_every_verb_works_with_a_password_and_a_user(server: RedisServer, admin: Any) -> None:
    rights = ["+@all", "-@admin", "-@dangerous", "~fencekit:*", "~{a}:*", "&fencekit:*"]
    new = ("ACL", "SETUSER", "billing", "resetchannels", "on", ">secret")
    admin.execute_command(*new, *rights)
    admin.config_set("requirepass", "open")
    for options in ({"username": "billing", "password": "secret"}, {"password": "open"}):
        client = both.client_before(server, **options)
        everything_works(client)
        both.close(client)
        admin.flushall()


def test_a_decoded_client_stays_decoded_for_its_owner(server: RedisServer) -> None:
    # scenario 50
    client = both.client_before(server, decode_responses=True)
    gate = FenceGate(client)
    client.set("row", "v")
    assert gate.pipeline(FenceToken(1, "a")).get("row").execute() == [b"v"]
    assert client.get("row") == "v"
    both.close(client)


def test_a_closed_client_works_again(server: RedisServer, client: Any) -> None:
    lock = DistributedLock(client)
    for _ in range(3):
        handle = lock.acquire("a", ttl=30)
        both.close(client)
        lock.release(handle)
        both.close(client)
    with lock.hold("a", ttl=30):
        both.close(client)
    assert lock.inspect("a") is None


def test_a_client_closed_under_its_heartbeat_costs_no_lease(client: Any) -> None:
    lock = DistributedLock(client)
    with lock.hold("a", ttl=0.9) as handle:
        for _ in range(4):
            both.close(client)
            seam.sleep(0.3)
        handle.check()


def test_two_clients_of_one_server_are_two_parties(server: RedisServer, client: Any) -> None:
    other = both.client_before(server, protocol=2)
    with DistributedLock(client).hold("a", ttl=30):
        assert DistributedLock(other).try_acquire("a") is None
        waiting = both.Running(lambda: DistributedLock(other).acquire("a", ttl=30, wait=20))
        both.until(lambda: not waiting.done)
    DistributedLock(other).release(waiting.result())
    both.close(other)


# Redis is not there


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_takes_a_server_that_is_not_there_for_an_answer(verb: str) -> None:
    # scenario 35
    client = both.client_without_server()
    error = raised_by(verb, client, timeout=0.1)
    assert isinstance(error, (RedisConnectionError, RedisTimeoutError)), repr(error)
    both.close(client)


def test_a_refused_connection_is_raised_as_that() -> None:
    # scenario 35
    client = both.client_without_server()
    assert isinstance(raised_by("acquire", client, timeout=1), RedisConnectionError)
    both.close(client)


def test_a_server_that_does_not_answer_is_given_up_at_the_timeout(
    server: RedisServer,
) -> None:
    # scenario 35
    client = both.Redis(port=server.port)  # which connects again and again, five seconds each
    assert client.ping()
    verbs = ("acquire", "hold", "begin", "once", "check", "set_if_fresh")
    server.freeze()
    try:
        calls = [both.Running(lambda v=verb: raised_by(v, client, timeout=0.5)) for verb in verbs]
        for call in calls:
            error = call.result(5)
            assert isinstance(error, RedisTimeoutError), repr(error)
    finally:
        server.resume()
    works_again(client)
    both.close(client)


def test_a_call_is_tried_again_until_its_deadline(server: RedisServer) -> None:
    with Proxy.before(server) as proxy:
        client = both.plain_client_before(proxy)
        lock = DistributedLock(client, timeout=20)
        proxy.swallow_matching(b"EVALSHA", times=5)
        handle = lock.acquire("a", ttl=30)
        assert proxy.connections >= 6
        lock.release(handle)
        both.close(client)


def test_a_server_that_comes_back_within_the_timeout_is_waited_for(
    private_server: RedisServer,
) -> None:
    client = both.client_before(private_server)
    lock, guard = DistributedLock(client, timeout=20), IdempotencyGuard(client, timeout=20)
    with lock.hold("kept", ttl=20) as kept:
        private_server.kill()
        calls = [
            both.Running(lambda: lock.acquire("a", ttl=30)),
            both.Running(lambda: guard.once("job", dict)),
            both.Running(lambda: lock.acquire("b", ttl=30, wait=20)),
        ]
        seam.sleep(0.2)
        assert not any(call.done for call in calls)
        private_server.restart()
        granted, result, _ = [call.result() for call in calls]
        assert result == {}
        assert granted.token.value > kept.token.value
        kept.check()
    assert lock.inspect("kept") is None
    assert lock.inspect("a") is not None
    both.close(client)


def test_a_restart_that_loses_everything_ends_the_lease_and_tokens_grow(
    server: RedisServer, client: Any
) -> None:
    # I1
    lock, gate = DistributedLock(client, timeout=20), FenceGate(client, timeout=20)
    handles: list[LockHandle] = []

    def body() -> None:
        with lock.hold("a", ttl=0.9) as handle:
            handles.append(handle)
            server.kill()
            server.restart()
            while not handle.lost:
                seam.sleep(0.01)

    with pytest.raises(LeaseLost):
        body()
    later = lock.acquire("a", ttl=30)
    assert later.token > handles[0].token
    with pytest.raises(FencedOutError):
        gate.check(handles[0].token)


def test_a_frozen_server_that_goes_on_grants_once(server: RedisServer, client: Any) -> None:
    # I7
    lock = DistributedLock(client, timeout=20)
    lock.inspect("a")
    server.freeze()
    calls = [both.Running(lambda: lock.acquire("a", ttl=30)) for _ in range(3)]
    seam.sleep(0.2)
    assert not any(call.done for call in calls)
    server.resume()
    outcomes: list[Any] = []
    for call in calls:
        try:
            outcomes.append(call.result())
        except LockNotAcquired as error:
            outcomes.append(error)
    assert sum(isinstance(outcome, LockHandle) for outcome in outcomes) == 1


def test_scripts_that_were_flushed_are_sent_again(
    server: RedisServer, client: Any, admin: Any
) -> None:
    for _ in range(3):
        admin.script_flush()
        everything_works(client)
        admin.flushall()


def test_connections_that_the_server_closed_are_replaced(
    server: RedisServer, client: Any, admin: Any
) -> None:
    lock = DistributedLock(client)
    with lock.hold("a", ttl=0.9) as handle:
        for _ in range(5):
            admin.client_kill_filter(_type="normal", skipme=True)
            lock.release(lock.acquire("b", ttl=30))
            seam.sleep(0.15)
        handle.check()


# The server is there and says no


def test_a_wrong_password_is_raised_at_once(server: RedisServer, admin: Any) -> None:
    admin.config_set("requirepass", "secret")
    with Proxy.before(server) as proxy:
        for options in ({"password": "wrong"}, {}, {"username": "nobody", "password": "x"}):
            client = both.plain_client_before(proxy, **options)
            for verb in ("acquire", "begin", "check"):
                error = raised_by(verb, client, timeout=600)
                assert isinstance(error, (AuthenticationError, ResponseError)), repr(error)
                assert not isinstance(error, RedisTimeoutError)
            both.close(client)
        assert proxy.connections < 30


def test_a_missing_permission_is_raised_at_once(server: RedisServer, admin: Any) -> None:
    for rights in (["+@all", "-evalsha", "~*"], ["+@all", "~other:*"], ["+@all", "-hset", "~*"]):
        admin.execute_command("ACL", "SETUSER", "poor", "reset", "on", ">x", "&*", *rights)
        with Proxy.before(server) as proxy:
            client = both.plain_client_before(proxy, username="poor", password="x")
            error = raised_by("acquire", client, timeout=600)
            assert isinstance(error, NoPermissionError), repr(error)
            both.close(client)
            assert proxy.connections <= 4
    assert admin.keys("*:lock") == []


def test_out_of_memory_is_raised_as_that_and_passes(
    server: RedisServer, client: Any, admin: Any
) -> None:
    gate = FenceGate(client, timeout=SOON)
    held = DistributedLock(client).acquire("held", ttl=30)
    gate.pipeline(held.token).rpush("queue", "job 1", "job 2").execute()
    admin.config_set("maxmemory-policy", "noeviction")
    admin.config_set("maxmemory", 1)
    for verb in ("acquire", "hold"):
        error = raised_by(verb, client)
        assert re.search("OOM|maxmemory", str(error)), repr(error)
    with pytest.raises(RedisError, match=r"OOM|maxmemory"):
        gate.set_if_fresh(held.token, "row", "v")
    with pytest.raises(RedisError, match=r"OOM|maxmemory"):
        gate.pipeline(held.token).lpop("queue").set("row", "v").execute()
    patient = DistributedLock(client, timeout=20)
    patient.extend(held, ttl=30)
    call = both.Running(lambda: patient.acquire("a", ttl=30))
    seam.sleep(0.2)
    assert not call.done
    admin.config_set("maxmemory", 0)
    patient.release(call.result())
    patient.release(held)
    assert admin.exists("row") == 0  # I4
    assert admin.llen("queue") == 2


def test_out_of_memory_does_not_keep_a_lock_from_being_renewed_and_released(
    server: RedisServer, client: Any, admin: Any
) -> None:
    lock = DistributedLock(client)
    with lock.hold("a", ttl=0.9) as handle:
        admin.config_set("maxmemory-policy", "noeviction")
        admin.config_set("maxmemory", 1)
        seam.sleep(1.2)
        handle.check()
    assert admin.exists("fencekit:{a}:lock") == 0


def test_a_replica_is_raised_as_read_only_and_passes_when_it_is_promoted(
    server: RedisServer,
) -> None:
    with RedisServer(replica_of=server) as replica, replica.client() as admin:
        both.until(lambda: admin.info("replication")["master_link_status"] == "up")
        client = both.client_before(replica)
        for verb in ("acquire", "begin"):
            assert isinstance(raised_by(verb, client), ReadOnlyError)
        assert DistributedLock(client).inspect("a") is None
        lock = DistributedLock(client, timeout=20)
        call = both.Running(lambda: lock.acquire("a", ttl=30))
        seam.sleep(0.1)
        assert not call.done
        admin.replicaof("NO", "ONE")
        lock.release(call.result())
        both.close(client)


def test_a_busy_script_is_raised_as_that_and_passes_when_it_ends(
    server: RedisServer, client: Any, admin: Any
) -> None:
    lock = DistributedLock(client, timeout=20)
    lock.inspect("a")
    admin.config_set("lua-time-limit", 10)
    killed = loops(server)
    both.until(lambda: is_busy(admin))
    for verb in ("acquire", "check"):
        error = raised_by(verb, client)
        assert "busy" in str(error).lower(), repr(error)
    call = both.Running(lambda: lock.acquire("a", ttl=30))
    seam.sleep(0.1)
    assert not call.done
    admin.script_kill()
    lock.release(call.result())
    killed.join(10)


def loops(server: RedisServer) -> threading.Thread:
    """Somebody's script that does not end by itself."""

    def run() -> None:
        with server.client(socket_timeout=60) as other, suppress(RedisError):
            other.eval("while true do end", 0)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def is_busy(admin: Any) -> bool:
    try:
        admin.ping()
    except ResponseError:
        return True
    return False


def test_a_server_that_is_loading_is_raised_as_that_and_waited_for() -> None:
    slow, size = ["key-load-delay 5000"], 200_000
    if find_server().version >= (7, 0):  # before, it looks up from its work every two megabytes
        slow, size = [*slow, "loading-process-events-interval-bytes 1024"], 2_000
    with RedisServer(persistence="rdb", config=slow) as server:
        client = both.client_before(server)
        lock = DistributedLock(client, timeout=20)
        handle = lock.acquire("a", ttl=600)
        with server.client() as admin:
            for number in range(400):
                admin.set(f"k{number}", os.urandom(size))
        restarting = threading.Thread(target=server.restart)
        restarting.start()
        try:
            both.until(lambda: is_loading(server))
            error = raised_by("inspect", client, timeout=0.5)
            assert "load" in str(error).lower(), repr(error)
            assert lock.try_acquire("a") is None
        finally:
            restarting.join()
        lock.release(handle)
        both.close(client)


def is_loading(server: RedisServer) -> bool:
    try:
        with server.client(retry=None) as admin:
            return bool(admin.info("persistence")["loading"])
    except RedisError:
        return False


def test_no_answer_of_the_network_or_the_server_looks_busy_or_lost(
    server: RedisServer, client: Any
) -> None:
    # scenario 56
    lock = DistributedLock(client, timeout=SOON)
    handle = lock.acquire("a", ttl=30)
    server.kill()
    for call in (
        lambda: lock.try_acquire("a"),
        lambda: lock.extend(handle),
        lambda: lock.release(handle),
    ):
        with pytest.raises(RedisConnectionError):
            call()
    handle.check()  # not lost: nobody said so, and its time has not passed
    server.restart()
    works_again(client)


def test_a_failover_is_waited_for_and_older_tokens_stay_refused() -> None:
    # I1
    with SentinelServers() as group:
        client = both.master_client_of(group)
        lock, gate = DistributedLock(client, timeout=30), FenceGate(client, timeout=30)
        before = lock.acquire("a", ttl=600)
        failing = threading.Thread(target=group.failover)
        failing.start()
        both.until(lambda: not group.servers[0].alive)
        during = lock.acquire("b", ttl=600)
        failing.join()
        lock.break_lock("a", reason="failed over")
        after = lock.acquire("a", ttl=600)
        assert after.token > before.token
        with pytest.raises(FencedOutError):
            gate.check(before.token)
        lock.release(during)
        both.close(client)
