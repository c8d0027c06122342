"""The proxy: each thing that it does to a connection, seen from the client and from the server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from fencekit.testing import ExternalRedis, Proxy, RedisServer, ServerError
from fencekit.testing._process import free_port

ONCE = Retry(NoBackoff(), 0)
LOST = (redis.ConnectionError, redis.TimeoutError)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(password="p@ss") as started:
        yield started


@pytest.fixture
def direct(server: RedisServer) -> Iterator[redis.Redis]:
    """A client that does not go through the proxy."""
    with server.client() as client:
        client.flushall()
        yield client


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[Proxy]:
    with Proxy.before(server, record=True) as started:
        yield started


@pytest.fixture
def client(proxy: Proxy, direct: redis.Redis) -> Iterator[redis.Redis]:
    """A client through the proxy, connected, that tries once and waits 0.4 s at most."""
    with proxy.client(socket_timeout=0.4, retry=ONCE) as connected:
        connected.ping()
        yield connected


def proxy_threads() -> set[threading.Thread]:
    """(Workers of the tests before may still come to their end.)"""
    return {thread for thread in threading.enumerate() if thread.name == "fencekit-testing-proxy"}


def until(true: Callable[[], object], timeout: float = 10) -> None:
    end = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


@pytest.fixture
def patient(proxy: Proxy, direct: redis.Redis) -> Iterator[redis.Redis]:
    """As `client`, but one that waits for long."""
    with proxy.client(socket_timeout=30, retry=ONCE) as connected:
        connected.ping()
        yield connected


# -- life ----------------------------------------------------------------------------------------


def test_it_passes_and_ends_without_a_trace(server: RedisServer) -> None:
    before = proxy_threads()
    proxy = Proxy.before(server)
    with pytest.raises(ServerError, match="no port yet"):
        _ = proxy.port
    with pytest.raises(ServerError, match="not running"):
        proxy.cut()
    with proxy as same, proxy.client() as client:
        assert same is proxy
        assert proxy.start() is proxy
        assert client.set("k", "v")
        assert client.get("k") == b"v"
        assert repr(proxy) == f"<Proxy 127.0.0.1:{proxy.port} before 127.0.0.1:{server.port}>"
        assert proxy.requests == []  # it does not record unless it is told to
    proxy.stop()
    assert proxy_threads() == before
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", proxy.port), 1)
    with proxy, proxy.client() as client:  # it may be used again
        assert client.ping()


def test_the_url_keeps_credentials_and_database() -> None:
    proxy = Proxy.before(ExternalRedis("redis://me:s3cret@localhost:7000/3?protocol=2"))
    with proxy:
        assert proxy.url == f"redis://me:s3cret@127.0.0.1:{proxy.port}/3?protocol=2"
        assert "s3cret" not in repr(proxy)
    with Proxy("127.0.0.1", 7000) as plain:
        assert plain.url == f"redis://127.0.0.1:{plain.port}/0"


def test_no_server_behind_it_closes_the_connection(client: redis.Redis) -> None:
    for host in ("127.0.0.1", "localhost"):
        with (
            Proxy(host, free_port()) as proxy,
            proxy.client(retry=ONCE) as lonely,
            pytest.raises(redis.ConnectionError),
        ):
            lonely.ping()


def test_a_start_that_fails_leaves_no_thread(server: RedisServer) -> None:
    before = proxy_threads()
    proxy = Proxy.before(server)
    proxy._port = server.port
    with pytest.raises(OSError):
        proxy.start()
    assert proxy_threads() == before


def test_a_lot_of_bytes_pass_whole(patient: redis.Redis) -> None:
    big = bytes(range(256)) * 30_000
    patient.set("big", big)
    assert patient.get("big") == big


def test_a_server_that_ends_ends_the_connections() -> None:
    with RedisServer() as own, Proxy.before(own) as proxy, proxy.client(retry=ONCE) as client:
        client.ping()
        own.kill()
        with pytest.raises(redis.ConnectionError):
            client.ping()
        until(lambda: proxy.open_connections == 0)
        own.restart()
        assert client.ping()


def test_it_serves_an_async_test(proxy: Proxy, direct: redis.Redis) -> None:
    async def main() -> None:
        client = proxy.async_client(retry=None)
        proxy.swallow_matching(b"INCR", times=1)
        with pytest.raises(redis.ConnectionError):
            await client.incr("n")
        assert await client.get("n") == b"1"
        await client.aclose()

    asyncio.run(main())


# -- counts --------------------------------------------------------------------------------------


def test_round_trips_bytes_and_connections_are_counted(proxy: Proxy, client: redis.Redis) -> None:
    assert proxy.connections == proxy.open_connections == 1
    assert b"PING" in proxy.requests[-1]
    proxy.forget()
    assert proxy.round_trips() == proxy.request_bytes == proxy.reply_bytes == 0
    client.set("a", 1)
    client.get("a")
    set_, get = (
        b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\n1\r\n",
        b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n",
    )
    assert proxy.requests == [set_, get]
    assert proxy.round_trips() == 2
    assert proxy.request_bytes == len(set_ + get)
    assert proxy.reply_bytes == len(b"+OK\r\n$1\r\n1\r\n")
    with client.pipeline(transaction=False) as pipeline:
        pipeline.incr("a").incr("a").execute()
    assert proxy.round_trips() == 3
    assert proxy.requests[-1].count(b"INCR") == 2
    assert proxy.connections == 0  # counted before `forget`, and still open
    client.connection_pool.disconnect()
    until(lambda: proxy.open_connections == 0)


# -- delays, cuts, partitions --------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["request", "reply", "both"])
def test_a_delay_is_added_to_the_direction(
    proxy: Proxy, patient: redis.Redis, direct: redis.Redis, direction: str
) -> None:
    proxy.delay(0.3, direction)  # type: ignore[arg-type]
    begun = time.monotonic()
    worker = threading.Thread(target=patient.incr, args=("n",))
    worker.start()
    until(lambda: direct.get("n") == b"1")
    done = time.monotonic() - begun
    worker.join()
    took = time.monotonic() - begun
    assert took >= (0.6 if direction == "both" else 0.3)
    assert (done >= 0.3) == (direction != "reply")
    proxy.delay(0)
    begun = time.monotonic()
    patient.ping()
    assert time.monotonic() - begun < 0.3


def test_delayed_bytes_keep_their_order(proxy: Proxy, client: redis.Redis) -> None:
    proxy.delay(0.05)
    with client.pipeline(transaction=False) as pipeline:
        for i in range(100):
            pipeline.rpush("l", i)
        pipeline.execute()
    proxy.delay(0)
    assert client.lrange("l", 0, -1) == [str(i).encode() for i in range(100)]


def test_cut_closes_what_is_open_and_lets_new_ones_come(proxy: Proxy, client: redis.Redis) -> None:
    errors: list[Exception] = []

    def wait() -> None:
        with proxy.client(retry=ONCE) as waiting:
            try:
                waiting.blpop(["nothing"], timeout=4)
            except redis.ConnectionError as error:
                errors.append(error)

    worker = threading.Thread(target=wait)
    worker.start()
    until(lambda: any(b"BLPOP" in request for request in proxy.requests))
    assert proxy.open_connections == 2
    proxy.cut()
    assert proxy.open_connections == 0
    worker.join(3)
    assert len(errors) == 1
    assert client.ping()
    assert proxy.connections == 3


def test_refuse_leaves_present_connections_alone(proxy: Proxy, client: redis.Redis) -> None:
    port = proxy.port
    proxy.refuse()
    proxy.refuse()
    assert client.ping()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 2)
    proxy.accept()
    proxy.accept()
    assert proxy.port == port
    with proxy.client() as other:
        assert other.ping()


def test_a_stall_holds_everything_and_flow_lets_it_go_late(
    proxy: Proxy, client: redis.Redis, direct: redis.Redis
) -> None:
    proxy.stall()
    with pytest.raises(redis.TimeoutError):
        client.incr("n")
    with pytest.raises(LOST), proxy.client(socket_timeout=0.1, retry=ONCE) as other:
        other.ping()  # new connections come in, and hang
    assert direct.get("n") is None
    proxy.flow()
    until(lambda: direct.get("n") == b"1")
    assert client.incr("n") == 2


def test_a_stall_is_seen_by_a_waiting_client(proxy: Proxy, patient: redis.Redis) -> None:
    results: list[object] = []
    proxy.stall()
    worker = threading.Thread(target=lambda: results.append(patient.incr("n")))
    worker.start()
    worker.join(0.1)
    assert worker.is_alive()
    proxy.flow()
    worker.join(5)
    assert results == [1]


# -- lost replies --------------------------------------------------------------------------------


def test_a_swallowed_reply_is_of_work_that_was_done(
    proxy: Proxy, client: redis.Redis, direct: redis.Redis
) -> None:
    proxy.swallow_replies()
    with pytest.raises(redis.ConnectionError):
        client.incr("n")
    assert direct.get("n") == b"1"
    assert client.incr("n") == 2


def test_a_swallowed_reply_may_leave_silence(
    proxy: Proxy, client: redis.Redis, direct: redis.Redis
) -> None:
    proxy.swallow_replies(then="stall")
    with pytest.raises(redis.TimeoutError):
        client.incr("n")
    assert direct.get("n") == b"1"
    assert client.incr("n") == 2  # on a connection of its own


def test_each_of_n_replies_takes_its_connection(
    proxy: Proxy, client: redis.Redis, direct: redis.Redis
) -> None:
    with proxy.client(retry=ONCE) as second:
        second.ping()
        proxy.swallow_replies(2)
        for either in (client, second):
            with pytest.raises(redis.ConnectionError):
                either.incr("n")
    assert direct.get("n") == b"2"
    assert client.incr("n") == 3


def test_swallow_matching_hits_what_it_names_until_reset(
    proxy: Proxy, client: redis.Redis, direct: redis.Redis
) -> None:
    proxy.swallow_matching(b"INCR")
    assert client.set("k", "v")
    for expected in (b"1", b"2"):
        with pytest.raises(redis.ConnectionError):
            client.incr("n")
        assert direct.get("n") == expected
    assert client.get("k") == b"v"
    proxy.reset()
    assert client.incr("n") == 3


def test_swallow_matching_may_be_limited_and_silent(
    proxy: Proxy, client: redis.Redis, direct: redis.Redis
) -> None:
    proxy.swallow_matching(b"INCR", then="stall", times=1)
    with pytest.raises(redis.TimeoutError):
        client.incr("n")
    assert client.incr("n") == 2
    assert proxy.open_connections == 2  # the client is gone, the server does not know
    proxy.flow()
    until(lambda: proxy.open_connections == 1)


def test_the_reply_is_lost_also_when_the_client_does_not_wait(
    proxy: Proxy, client: redis.Redis, direct: redis.Redis
) -> None:
    proxy.delay(0.3, "reply")
    proxy.swallow_matching(b"INCR")
    with pytest.raises(redis.ConnectionError):  # the loss is not delayed
        client.incr("n")
    assert direct.get("n") == b"1"


def test_a_needle_in_two_pieces_is_found_once(
    proxy: Proxy, direct: redis.Redis, client: redis.Redis
) -> None:
    def raw() -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", proxy.port), 2)
        connection.settimeout(2)
        connection.sendall(b"AUTH p@ss\r\n")
        assert connection.recv(100) == b"+OK\r\n"
        return connection

    proxy.swallow_matching(b"needle", times=2)
    with raw() as connection:
        connection.sendall(b"SET a nee")
        until(lambda: proxy.requests[-1].endswith(b"nee"))
        connection.sendall(b"dle\r\n")
        assert lost(connection)
    assert direct.get("a") == b"needle"
    with raw() as connection:
        connection.sendall(b"SET b needle\r\n")
        assert lost(connection)
    with raw() as connection:
        connection.sendall(b"SET c needle\r\n")
        assert connection.recv(100) == b"+OK\r\n"
        connection.sendall(b"GET c\r\n")
        assert b"needle" in connection.recv(100)


def lost(connection: socket.socket) -> bool:
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


# -- held requests -------------------------------------------------------------------------------


def test_stall_matching_holds_one_connection_and_no_other(
    proxy: Proxy, client: redis.Redis, direct: redis.Redis
) -> None:
    proxy.stall_matching(b"INCR")
    with pytest.raises(redis.TimeoutError):
        client.incr("n")
    assert client.set("k", "v")
    assert direct.get("n") is None
    proxy.flow()  # the client gave up, but its write still comes: late
    until(lambda: direct.get("n") == b"1")
    assert client.incr("n") == 2  # `flow` ended the rule


def test_a_held_request_is_dropped_by_cut(
    proxy: Proxy, client: redis.Redis, direct: redis.Redis
) -> None:
    proxy.stall_matching(b"INCR", times=1)
    with pytest.raises(redis.TimeoutError):
        client.incr("n")
    proxy.cut()
    proxy.flow()
    assert client.incr("n") == 1
    assert direct.get("n") == b"1"


def test_reset_passes_everything_again(proxy: Proxy, client: redis.Redis) -> None:
    proxy.delay(5)
    proxy.stall()
    proxy.refuse()
    proxy.swallow_replies(3)
    proxy.swallow_matching(b"SET")
    proxy.stall_matching(b"SET")
    proxy.reset()
    begun = time.monotonic()
    assert client.set("k", "v")
    with proxy.client() as other:
        assert other.get("k") == b"v"
    assert time.monotonic() - begun < 2


def test_wrong_orders_are_refused(proxy: Proxy) -> None:
    for wrong in (
        lambda: proxy.delay(1, "up"),  # type: ignore[arg-type]
        lambda: proxy.swallow_replies(then="no"),  # type: ignore[arg-type]
        lambda: proxy.swallow_matching(b"x", then="no"),  # type: ignore[arg-type]
        lambda: proxy.swallow_matching(b""),
        lambda: proxy.stall_matching(b"x" * 5000),
    ):
        with pytest.raises(ValueError):
            wrong()


def test_a_connection_that_is_cut_while_it_comes_is_closed(server: RedisServer) -> None:
    with Proxy.before(server) as proxy:
        for _ in range(30):  # no wait in between: some are cut before they reach the server
            with socket.create_connection(("127.0.0.1", proxy.port), 2) as connection:
                proxy.cut()
                connection.settimeout(2)
                with contextlib.suppress(OSError):
                    connection.sendall(b"PING\r\n")
        until(lambda: proxy.open_connections == 0)
