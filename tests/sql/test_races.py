"""Two sessions and every order of their steps: no stale value ever commits. On PostgreSQL."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, delete, select, text, update
from sqlalchemy.exc import DBAPIError

from fencekit import FencedOutError, FenceToken
from fencekit.errors import RowExists, RowMissing
from fencekit.sql import (
    execute_fenced,
    fenced_delete,
    fenced_insert,
    fenced_transaction,
    fenced_update,
    fenced_upsert,
    metadata,
)
from tests.sql.site import ALL, JOBS

LEVELS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
OLD, NEW = FenceToken(5, "a"), FenceToken(6, "a")
FENCES = metadata.tables["fencekit_fences"]
ROUNDS = 100


@pytest.fixture(scope="module")
def engine(fencekit_postgres: Any) -> Iterator[Engine]:
    url = fencekit_postgres.url.replace("postgresql", "postgresql+psycopg", 1)
    engine = create_engine(url)
    for tables in ALL:
        tables.create_all(engine)
    yield engine
    engine.dispose()


class Session:
    """A connection whose steps run in a thread of its own, since some of them block."""

    def __init__(self, engine: Engine, level: str) -> None:
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.connection = engine.connect().execution_options(isolation_level=level)
        self.pid = self.connection.scalar(text("SELECT pg_backend_pid()"))
        self.connection.rollback()
        self.failed: BaseException | None = None
        self.committed = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            step, future = self._work.get()
            if step is None:
                return
            try:
                if self.failed is None:
                    step(self)
            except (FencedOutError, RowExists, RowMissing, DBAPIError) as error:
                self.failed = error
                self.connection.rollback()
            except BaseException as error:
                future.set_exception(error)
                continue
            future.set_result(None)

    def start(self, step: Callable[[Session], None]) -> Future[None]:
        future: Future[None] = Future()
        self._work.put((step, future))
        return future

    def close(self) -> None:
        self._work.put((None, None))
        self._thread.join(20)
        self.connection.close()


def waits(watcher: Connection, session: Session) -> bool:
    found = watcher.scalar(
        text("SELECT wait_event_type FROM pg_stat_activity WHERE pid = :pid"), {"pid": session.pid}
    )
    return bool(found == "Lock")


def by_column(session: Session, token: FenceToken, value: str) -> None:
    statement = fenced_update(JOBS, token, where=JOBS.c.id == 1, values={"state": value})
    execute_fenced(session.connection, statement)


def by_upsert(session: Session, token: FenceToken, value: str) -> None:
    execute_fenced(session.connection, fenced_upsert(JOBS, token, values={"id": 1, "state": value}))


def by_fence_row(session: Session, token: FenceToken, value: str) -> None:
    with fenced_transaction(session.connection, token):
        session.connection.execute(update(JOBS).where(JOBS.c.id == 1).values(state=value))


def by_many(session: Session, token: FenceToken, value: str) -> None:
    statement = fenced_update(JOBS, token, where=JOBS.c.id < 5, values={"state": value})
    execute_fenced(session.connection, statement)


WAYS = (by_column, by_upsert, by_fence_row, by_many)


def begin(session: Session) -> None:
    session.connection.begin()
    session.connection.execute(select(JOBS))  # takes the snapshot, where there is one


def end(how: str) -> Callable[[Session], None]:
    def step(session: Session) -> None:
        getattr(session.connection, how)()
        session.committed = how == "commit"

    return step


def orders() -> Iterator[tuple[int, ...]]:
    """All ways to merge the three steps of one with those of the other."""
    for mine in itertools.combinations(range(6), 3):
        yield tuple(0 if place in mine else 1 for place in range(6))


def play(engine: Engine, level: str, order: tuple[int, ...], steps: Any) -> list[Session]:
    """Run the steps in that order; one that blocks is left until the other has gone on."""
    sessions = [Session(engine, level), Session(engine, level)]
    todo = [list(steps[0]), list(steps[1])]
    open_: list[Future[None] | None] = [None, None]
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as watcher:
        try:
            deadline = time.monotonic() + 60
            for number in itertools.chain(order, itertools.cycle((0, 1))):
                if todo == [[], []] and open_ == [None, None]:
                    break
                assert time.monotonic() < deadline, (order, todo, open_)
                running = open_[number]
                if running is not None:
                    if not settled(watcher, sessions[number], running):
                        continue
                    open_[number] = None
                if todo[number]:
                    open_[number] = running = sessions[number].start(todo[number].pop(0))
                    if settled(watcher, sessions[number], running):
                        open_[number] = None
        finally:
            for session in sessions:
                session.close()
    return sessions


def settled(watcher: Connection, session: Session, running: Future[None]) -> bool:
    """Wait until the step has ended, or is one that waits for the other session."""
    while True:
        try:
            running.result(0.002)
        except NotYet:
            if not running.done() and waits(watcher, session):
                return False
        else:
            return True


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("way", WAYS)
def test_no_stale_value_commits_in_any_order_of_two_sessions(
    engine: Engine, level: str, way: Any
) -> None:
    # S1, S3, S5
    refused = 0
    for order in orders():
        for ends in itertools.product(("commit", "rollback"), repeat=2):
            with engine.begin() as connection:
                connection.execute(delete(JOBS))
                connection.execute(delete(FENCES))
                connection.execute(JOBS.insert().values(id=1, state="first"))
            steps = [
                [begin, lambda s: way(s, OLD, "old"), end(ends[0])],
                [begin, lambda s: way(s, NEW, "new"), end(ends[1])],
            ]
            old, new = play(engine, level, order, steps)
            with engine.connect() as connection:
                row = connection.execute(select(JOBS)).one()
                held = connection.scalar(select(FENCES.c.token))
            where = (order, ends, old.failed, new.failed)
            expected = "new" if new.committed else "old" if old.committed else "first"
            assert row.state == expected, where
            newest = {"new": 6, "old": 5, "first": 0}[expected]
            assert (held or 0 if way is by_fence_row else row.fence_token) == newest, where
            if new.failed is not None:  # never fenced: at most in the way, at a strict level
                assert isinstance(new.failed, DBAPIError), where
                assert level != "READ COMMITTED", where
            refused += isinstance(old.failed, FencedOutError)
            if level == "READ COMMITTED":
                assert old.failed is None or isinstance(old.failed, FencedOutError), where
    assert refused


@pytest.mark.parametrize("level", LEVELS)
def test_a_row_that_is_deleted_meanwhile_is_missing_and_not_stale(
    engine: Engine, level: str
) -> None:
    # S2
    seen = set()
    for order in orders():
        with engine.begin() as connection:
            connection.execute(delete(JOBS))
            connection.execute(JOBS.insert().values(id=1, state="first"))
        steps = [
            [begin, lambda s: by_column(s, OLD, "old"), end("commit")],
            [
                begin,
                lambda s: execute_fenced(
                    s.connection, fenced_delete(JOBS, NEW, where=JOBS.c.id == 1)
                ),
                end("commit"),
            ],
        ]
        old, new = play(engine, level, order, steps)
        assert new.committed or level != "READ COMMITTED"
        if new.committed:
            seen.add(type(old.failed))
    allowed = {type(None), RowMissing}
    if level == "READ COMMITTED":
        assert seen == allowed
    else:
        assert allowed <= seen
        assert FencedOutError not in seen


@pytest.mark.parametrize("level", LEVELS)
def test_of_two_writers_with_one_version_exactly_one_wins(engine: Engine, level: str) -> None:
    # scenario 85: each read the row, and writes with a token of its own; the newer one stands
    for round_ in range(ROUNDS):
        with engine.begin() as connection:
            connection.execute(delete(JOBS))
            connection.execute(JOBS.insert().values(id=1, state="first"))
        barrier = threading.Barrier(2)
        outcomes: dict[str, BaseException | None] = {}

        def writer(
            name: str, token: FenceToken, barrier: Any = barrier, outcomes: Any = outcomes
        ) -> None:
            options = {"isolation_level": level}
            try:
                with engine.connect().execution_options(**options) as own, own.begin():
                    own.execute(select(JOBS)).one()
                    barrier.wait(20)
                    statement = fenced_update(
                        JOBS, token, where=JOBS.c.id == 1, values={"state": name}
                    )
                    execute_fenced(own, statement)
                outcomes[name] = None
            except (FencedOutError, DBAPIError) as error:
                outcomes[name] = error

        threads = [
            threading.Thread(target=writer, args=("old", OLD)),
            threading.Thread(target=writer, args=("new", NEW)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        with engine.connect() as connection:
            state = connection.scalar(select(JOBS.c.state))
        if level == "READ COMMITTED":
            assert outcomes["new"] is None, round_
        assert None in outcomes.values()
        assert state == ("new" if outcomes["new"] is None else "old"), round_


@pytest.mark.parametrize("level", LEVELS)
def test_a_stale_insert_of_several_rows_is_stale_whichever_of_them_is_newer(
    engine: Engine, level: str
) -> None:
    # S2: one row is there, and older; the other is being inserted by a newer holder
    with engine.begin() as connection:
        connection.execute(delete(JOBS))
        connection.execute(JOBS.insert().values(id=1, fence_token=4))
    rows = [{"id": 1}, {"id": 2}]
    steps = [
        [
            lambda s: s.connection.begin(),
            lambda s: execute_fenced(s.connection, fenced_insert(JOBS, OLD, values=rows)),
            end("commit"),
        ],
        [
            lambda s: s.connection.begin(),
            lambda s: execute_fenced(s.connection, fenced_insert(JOBS, NEW, values=rows[1])),
            end("commit"),
        ],
    ]
    old, new = play(engine, level, (1, 1, 0, 0, 1, 0), steps)
    assert new.committed
    if level == "READ COMMITTED":
        assert isinstance(old.failed, FencedOutError)
    else:
        assert isinstance(old.failed, (FencedOutError, DBAPIError))
