"""The pytest fixtures, in a pytest run of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from fencekit.testing import RedisServer

ROOT = Path(__file__).parent.parent


def run(tmp_path: Path, code: str, *options: str, **variables: str) -> str:
    """Run one test file with nothing but our plugin, and return what pytest printed."""
    (tmp_path / "test_it.py").write_text(textwrap.dedent(code))
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    environment = {k: v for k, v in os.environ.items() if k != "FENCEKIT_REDIS_URL"}
    path = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": path} | variables
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "fencekit.testing.plugin", *options],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.stdout + done.stderr


def test_the_fixtures_give_what_they_say(tmp_path: Path) -> None:
    code = """
        import asyncio
        import pytest
        import redis
        from fencekit.testing import ClusterServers, Proxy, RedisServer, SentinelServers

        prefixes = set()

        @pytest.mark.parametrize("n", [1, 2])
        def test_each_test_finds_an_empty_server(fencekit_client, fencekit_prefix, n):
            assert fencekit_client.dbsize() == 0
            fencekit_client.set("k", n)
            assert fencekit_prefix not in prefixes
            prefixes.add(fencekit_prefix)

        def test_killing_it_is_allowed(fencekit_server, fencekit_url):
            assert isinstance(fencekit_server, RedisServer)
            assert fencekit_url == fencekit_server.url
            fencekit_server.kill()

        def test_it_is_back_and_may_be_frozen(fencekit_server, fencekit_client):
            assert fencekit_client.ping()
            fencekit_server.freeze()

        def test_it_is_back_again(fencekit_client):
            assert fencekit_client.ping()

        def test_async(fencekit_server, fencekit_url):
            async def main():
                client = fencekit_server.async_client()
                assert await client.ping()
                await client.aclose()
            asyncio.run(main())

        def test_proxy(fencekit_proxy, fencekit_client):
            assert isinstance(fencekit_proxy, Proxy)
            fencekit_proxy.swallow_matching(b"INCR")
            with fencekit_proxy.client(retry=None) as client:
                with pytest.raises(redis.ConnectionError):
                    client.incr("n")
            assert fencekit_client.get("n") == b"1"
            assert any(b"INCR" in request for request in fencekit_proxy.requests)

        def test_cluster(fencekit_cluster):
            assert isinstance(fencekit_cluster, ClusterServers)
            with fencekit_cluster.client() as client:
                assert client.set("k", "v")

        def test_sentinel(fencekit_sentinel):
            assert isinstance(fencekit_sentinel, SentinelServers)
            with fencekit_sentinel.master_client() as client:
                assert client.set("k", "v")
    """
    assert "9 passed" in run(tmp_path, code)


def test_an_external_server_is_kept_as_it_is(tmp_path: Path) -> None:
    code = """
        import pytest
        from fencekit.testing import ExternalServer

        def test_it(fencekit_server, fencekit_url, fencekit_client, fencekit_prefix):
            assert fencekit_server.external
            assert fencekit_client.get("theirs") == b"1"
            fencekit_client.set(fencekit_prefix + "mine", 1)
            fencekit_client.set("not below the prefix", 1)
            with pytest.raises(ExternalServer):
                fencekit_server.kill()

        def test_proxy(fencekit_proxy):
            with fencekit_proxy.client() as client:
                assert client.get("theirs") == b"1"
    """
    with RedisServer(password="x") as server, server.client() as client:
        client.set("theirs", 1)
        assert "2 passed" in run(tmp_path, code, FENCEKIT_REDIS_URL=server.url)
        assert set(client.keys()) == {b"theirs", b"not below the prefix"}


def test_postgres_is_a_private_one(tmp_path: Path) -> None:
    code = """
        import psycopg
        from fencekit.testing import PostgresServer

        def test_it(fencekit_postgres):
            assert isinstance(fencekit_postgres, PostgresServer)
            with psycopg.connect(fencekit_postgres.url) as connection:
                assert connection.execute("SELECT 1").fetchone() == (1,)
    """
    assert "1 passed" in run(tmp_path, code, FENCEKIT_PG_URL="")


def test_an_external_postgres_is_left_alone(tmp_path: Path) -> None:
    code = """
        import pytest
        from fencekit.testing import ExternalServer

        def test_it(fencekit_postgres):
            assert fencekit_postgres.external
            assert fencekit_postgres.url == "postgresql://db.example/app"
            with pytest.raises(ExternalServer):
                fencekit_postgres.kill()
    """
    url = "postgresql://db.example/app"
    assert "1 passed" in run(tmp_path, code, FENCEKIT_PG_URL=url, FENCEKIT_PG_BIN="/nonexistent")


def test_nothing_starts_unless_it_is_asked_for(tmp_path: Path) -> None:
    code = """
        def test_it():
            pass
    """
    # A server that cannot start would be an error, if anything looked for one.
    nowhere = {"FENCEKIT_REDIS_SERVER": "/nonexistent", "FENCEKIT_PG_BIN": "/nonexistent"}
    assert "1 passed" in run(tmp_path, code, **nowhere)


def test_without_a_server_the_error_says_what_to_do(tmp_path: Path) -> None:
    code = """
        def test_it(fencekit_url):
            pass
    """
    output = run(tmp_path, code, FENCEKIT_REDIS_SERVER="/nonexistent")
    assert "1 error" in output
    assert "FENCEKIT_REDIS_SERVER names an unusable server" in output


def test_importing_the_plugin_is_cheap() -> None:
    code = (
        "import sys, fencekit, pytest; base = set(sys.modules)\n"
        "import fencekit.testing.plugin; print('redis' in set(sys.modules) - base)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"
