"""Workers and the database killed in the middle: an effect is there once or not at all."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, select

from fencekit.sql import metadata
from fencekit.testing import PostgresServer
from tests.sql.crash_worker import KEYS
from tests.sql.site import JOBS

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = metadata.tables["fencekit_operations"]


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    with PostgresServer(durable=True) as server:
        yield server


class Worker:
    """A process that applies what is not applied yet, until it is killed or done."""

    def __init__(self, url: str, stop: str = "") -> None:
        self.stop = stop
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.sql.crash_worker", url, stop],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.said: list[str] = []

    def frozen(self) -> bool:
        """Wait until it has frozen itself; False if it ended before."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.strip())
            if self.said[-1] == self.stop:
                return True
        return False

    def end(self, number: int = signal.SIGKILL) -> int:
        """Send the signal, read the rest of what it says, and see it end."""
        assert self.process.stdout is not None
        self.process.send_signal(number)
        self.said += self.process.stdout.read().split("\n")
        self.process.stdout.close()
        return self.process.wait(20)

    @property
    def done(self) -> set[int]:
        return {int(line.split()[1]) for line in self.said if line.startswith("done")}


def check(url: str, done: set[int]) -> set[int]:
    """Whatever a worker said was done is there, once; and nothing is there by half."""
    engine = create_engine(url)
    with engine.connect() as connection:
        rows = connection.execute(select(JOBS)).all()
        keys = set(connection.scalars(select(OPERATIONS.c.key)))
    engine.dispose()
    applied = {row.id for row in rows}
    assert all((row.state, row.attempts) == ("whole", 1) for row in rows)
    assert keys == {f"op:{number}" for number in applied}
    assert done <= applied
    return applied


@pytest.mark.parametrize("victim", ["worker", "server"])
def test_an_effect_is_there_once_or_not_at_all(server: PostgresServer, victim: str) -> None:
    # S6
    url = server.url.replace("postgresql", "postgresql+psycopg", 1)
    engine = create_engine(url)
    for tables in (JOBS.metadata, metadata):
        tables.create_all(engine)
    engine.dispose()
    done: set[int] = set()
    # In the middle of a transaction and right after a commit, with either verb.
    for stop in ("half 3", "half 6", "half 7", "done 10", "done 13"):
        worker = Worker(url, stop)
        assert worker.frozen()
        if victim == "server":
            server.kill()
            server.restart()
            status = worker.end(signal.SIGCONT)
            assert status == (3 if stop.startswith("half") else 0)
        else:
            worker.end()
        done |= worker.done
        applied = check(url, done)
        assert (int(stop.split()[1]) in applied) is stop.startswith("done")
        if len(applied) == KEYS:
            break
    workers = [Worker(url), Worker(url)]  # at the same time
    assert [worker.end(signal.SIGCONT) for worker in workers] == [0, 0]
    assert check(url, done) == set(range(KEYS))
