"""Interleaving: in each round every contender runs one chunk, and each round gives one ratio.

A machine that slows down for a second slows down all of a round, so ratios within a round compare
where times of different minutes do not. The order is another one in each round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import redis

from benchmarks.environments import CONTENDERS, ENVIRONMENTS
from benchmarks.results import Row, quartiles
from benchmarks.workers import Worker, WorkerError


@dataclass
class Settings:
    """One run of the program."""

    url: str
    client: redis.Redis
    quick: bool
    rounds: int
    peers: bool

    def wants(self, contender: str) -> bool:
        """Whether it takes part in this run."""
        return self.peers or not CONTENDERS[contender].peer

    def flush(self) -> None:
        """Leave nothing of the case before; scripts stay loaded."""
        self.client.flushall()


@dataclass
class Entry:
    """A contender, what it is asked in each round, and the limits it is held against."""

    contender: str
    arguments: dict[str, Any]
    against: dict[str, float | None] = field(default_factory=dict)
    call: str = "timing:loop"
    label: str = ""
    flags: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    shared: bool = False
    """In one process with the others of its contender: two processes differ by some per cent."""

    @property
    def name(self) -> str:
        return self.label or self.contender


@contextmanager
def opened(
    entries: Sequence[Entry], url: str, errors: dict[str, str]
) -> Iterator[dict[str, Worker]]:
    """A worker for each entry; those that cannot be had are named in ``errors``."""
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        shared: dict[str, str] = {}  # the first entry of each contender
        for entry in entries:
            first = shared.setdefault(entry.contender, entry.name) if entry.shared else entry.name
            if first != entry.name:
                continue
            environment = CONTENDERS[entry.contender].environment
            try:
                ENVIRONMENTS[environment].make()
                worker = stack.enter_context(Worker(environment, *entry.flags))
                worker.open(entry.contender, **{"url": url, **entry.options})
                workers[entry.name] = worker
            except (RuntimeError, WorkerError) as error:
                errors[entry.name] = str(error)
        for name, worker in list(workers.items()):
            try:
                worker.receive()
            except WorkerError as error:
                errors[name] = str(error)
                del workers[name]
        for entry in entries:
            first = shared[entry.contender] if entry.shared else entry.name
            if first in errors:
                errors[entry.name] = errors[first]
            else:
                workers[entry.name] = workers[first]
        yield workers


class Race:
    """Seconds per operation of each entry in each round, or its error."""

    def __init__(self, settings: Settings, entries: Sequence[Entry]) -> None:
        self.entries = [entry for entry in entries if settings.wants(entry.contender)]
        self.samples: dict[str, list[float]] = {entry.name: [] for entry in self.entries}
        self.errors: dict[str, str] = {}
        with opened(self.entries, settings.url, self.errors) as workers:
            for number in range(settings.rounds):
                shift = number % len(self.entries)
                for entry in self.entries[shift:] + self.entries[:shift]:
                    if entry.name not in self.errors:
                        self._chunk(entry, workers[entry.name])

    def _chunk(self, entry: Entry, worker: Worker) -> None:
        try:
            self.samples[entry.name].append(worker.ask(entry.call, **entry.arguments))
        except WorkerError as error:
            self.errors[entry.name] = str(error)

    def ratios(self, name: str, limit: str) -> list[float]:
        """One for each round that has both."""
        pairs = zip(self.samples[name], self.samples.get(limit, []), strict=False)
        return [one / other for one, other in pairs]

    def rows(self, scale: float = 1e6, unit: str = "µs") -> list[Row]:
        """A row for each entry and limit."""
        rows: list[Row] = []
        for entry in self.entries:
            own = CONTENDERS[entry.contender].own
            if entry.name in self.errors:
                rows.append(Row(entry.name, error=self.errors[entry.name], own=own))
                continue
            median = statistics.median(self.samples[entry.name]) * scale
            for limit, target in (entry.against or {"": None}).items():
                row = Row(entry.name, median, unit, limit=limit, target=target, own=own)
                if ratios := self.ratios(entry.name, limit):
                    row.ratio = statistics.median(ratios)
                    row.low, row.high = quartiles(ratios)
                rows.append(row)
        return rows

    def beside(self, name: str, others: Sequence[str], target: float) -> Row | None:
        """The entry beside the fastest of the others."""
        there = [other for other in others if self.samples.get(other)]
        if not there or not self.samples.get(name):
            return None
        best = min(there, key=lambda other: statistics.median(self.samples[other]))
        ratios = self.ratios(name, best)
        low, high = quartiles(ratios)
        median = statistics.median(self.samples[name]) * 1e6
        return Row(
            name, median, limit=f"fastest peer: {best}", ratio=statistics.median(ratios),
            low=low, high=high, target=target, own=True,
        )  # fmt: skip


Case = Callable[[Settings], list[Row]]
