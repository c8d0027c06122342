"""The order of events in the demo. Each line here is a line of the timeline."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from typing import Any

from fencekit import DistributedLock

from .crew import WorkerFailed, WorkerProcess
from .timeline import Event
from .worker import ORDER, Setup

BEAT = 0.25  # seconds between two steps, for whoever watches

CREATE = """
    CREATE TABLE orders (id INTEGER PRIMARY KEY, status TEXT, fence INTEGER NOT NULL DEFAULT 0);
    INSERT INTO orders (id, status) VALUES (7, 'paid');
"""


def prepare(database: str) -> None:
    """The order that the job is about."""
    rows = sqlite3.connect(database)
    rows.executescript(CREATE)
    rows.close()


class Story:
    """Leads two ready workers through the demo, telling each event as it happens."""

    def __init__(
        self,
        client: Any,
        setup: Setup,
        first: WorkerProcess,
        second: WorkerProcess,
        tell: Callable[[Event], None],
    ) -> None:
        self.client = client
        self.setup = setup
        self.first, self.second = first, second
        self.events: list[Event] = []
        self._tell = tell
        self._lock = DistributedLock(client, prefix=setup.prefix)
        self._start = time.time()

    def play(self) -> None:
        """The whole story."""
        first, second = self.first, self.second
        self.ask(first, "begin")
        self.ask(first, "write packing")
        self.pause()
        first.freeze()
        self.tell(first, "frozen")
        self.pause()
        early = self.ask(second, "begin")  # while the lease lasts: it is told to wait
        self.until_lapsed()
        self.tell(first, "lapsed")
        if early[-1].what != "begun":  # a machine so slow that the lease had run out already
            self.pause()
            self.take_over()
        self.ask(second, "write shipped")
        self.pause(2)
        self.ask(second, "finish")
        self.pause()
        self.tell(first, "resumed")
        first.resume()
        self.pause()
        self.ask(first, "write packed")
        self.pause()
        self.ask(first, "finish")
        self.pause()
        self.tell(second, "redelivered")
        self.ask(second, "begin")

    def ask(self, worker: WorkerProcess, command: str) -> list[Event]:
        """Have a worker do one step."""
        return [self._note(worker, report) for report in worker.ask(command)]

    def tell(self, worker: WorkerProcess, what: str) -> None:
        """What the parent did or saw."""
        self._note(worker, {"at": time.time(), "what": what})

    def pause(self, beats: int = 1) -> None:
        """Let a moment pass."""
        time.sleep(beats * BEAT)

    def until_lapsed(self) -> None:
        """Wait until the server has let the first worker's lease go."""
        until = time.monotonic() + self.setup.lease + 10
        while self._holder() == self.first.name:
            if time.monotonic() > until:
                raise WorkerFailed("the frozen worker's lease did not run out")
            time.sleep(0.01)

    def take_over(self) -> None:
        """The second worker asks until it gets the job."""
        until = time.monotonic() + 10
        while time.monotonic() < until:
            if any(event.what == "begun" for event in self.ask(self.second, "begin")):
                return
            self.pause()
        raise WorkerFailed("the second worker was not given the job after the lease had run out")

    def stored(self) -> dict[str, str | None]:
        """What the stores hold, read by nobody's report."""
        value = self.client.get(self.setup.status_key)
        rows = sqlite3.connect(self.setup.database)
        (status,) = rows.execute("SELECT status FROM orders WHERE id = 7").fetchone()
        rows.close()
        return {"Redis": _text(value), "SQLite": status}

    def _holder(self) -> str:
        """Whose the lease or lock is now, "" for nobody's: as the server says."""
        if not self.setup.safe:
            return _text(self.client.get(self.setup.lock_key)) or ""
        info = self._lock.inspect(ORDER)
        return "" if info is None else info.holder.split()[-1]  # "host/pid/worker A"

    def _note(self, worker: WorkerProcess, report: dict[str, Any]) -> Event:
        facts = {name: value for name, value in report.items() if name not in ("at", "what")}
        event = Event(max(0.0, report["at"] - self._start), worker.name, report["what"], facts)
        self.events.append(event)
        self._tell(event)
        return event


def _text(value: bytes | str | None) -> str | None:
    """A reply as text, whatever the URL says about decoding."""
    return value.decode() if isinstance(value, bytes) else value
