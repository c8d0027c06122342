"""What happened in the demo, and whether it went as it must. No I/O.

Rules this module obeys:

* A write is stale when its worker is not the one who began the job last. The judge goes by that
  order, not by the tokens whose use it judges.
* What the workers reported is compared with what the stores hold at the end.
* A run in which nobody tried a stale write proves nothing, and fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

STORES = ("Redis", "SQLite")


@dataclass(frozen=True)
class Event:
    """One thing that happened: `at` seconds after the start, to worker `who` ("" for nobody)."""

    at: float
    who: str
    what: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A whole run: its events, what each store held at the end, and where it took place."""

    safe: bool
    lease: float
    events: tuple[Event, ...]
    stored: dict[str, str | None]
    pids: dict[str, int]
    server: str


@dataclass(frozen=True)
class Verdict:
    """Whether the run went as it must (`ok`), in a headline and some sentences."""

    ok: bool
    headline: str
    lines: tuple[str, ...]


class Ledger:
    """Follows the events: who holds the job, and what the stores should hold."""

    def __init__(self) -> None:
        self.holder = ""
        self.token: int | None = None
        self.values: dict[str, str] = {}
        self.own: dict[str, str] = {}
        """What each store should hold: the last write of the holder."""

    def stale(self, event: Event) -> bool:
        """Take note of an event; True for a write of somebody who was overtaken."""
        if event.what == "begun":
            self.holder = event.who
            self.token = event.facts.get("token")
        if event.what != "write":
            return False
        stale = event.who != self.holder
        store, value = event.facts["store"], event.facts["value"]
        if event.facts["accepted"]:
            self.values[store] = value
        if not stale:
            self.own[store] = value
        return stale


def stale_writes(events: Sequence[Event]) -> list[Event]:
    """The writes that workers tried after another one had taken the job over."""
    ledger = Ledger()
    return [event for event in events if ledger.stale(event)]


def judge(run: Run) -> Verdict:
    """The verdict on a run."""
    return _judge_safe(run) if run.safe else _judge_unsafe(run)


def _judge_safe(run: Run) -> Verdict:
    tried = stale_writes(run.events)
    wrong = list(_wrong(run, tried))
    if wrong:
        return Verdict(False, "FAILED: this is not what fencekit promises.", tuple(wrong))
    value = run.stored["Redis"]
    return Verdict(
        True,
        f"OK: {len(tried)} stale writes were tried, none was accepted.",
        (
            f'Redis and the SQLite row both say "{value}", as the worker that took over left them.',
            "The lease decided who may take over; the token decided who may write.",
            "See the same job without tokens: fencekit demo --unsafe",
        ),
    )


def _wrong(run: Run, tried: Sequence[Event]) -> Iterator[str]:
    for event in tried:
        if event.facts["accepted"]:
            yield (
                f'A stale write was accepted: {event.who} wrote "{event.facts["value"]}" to '
                f"{event.facts['store']} after it had been overtaken."
            )
    for store in STORES:
        if not any(event.facts["store"] == store for event in tried):
            yield f"No stale write to {store} was tried, so nothing was shown."
    due = _due(run)
    for store in STORES:
        if run.stored.get(store) != due.get(store):
            yield (
                f"{store} holds {run.stored.get(store)!r}, not {due.get(store)!r}: "
                "a write that should not count did."
            )
    yield from _wrong_claims(run)


def _due(run: Run) -> dict[str, str]:
    ledger = Ledger()
    for event in run.events:
        ledger.stale(event)
    return ledger.own


def _wrong_claims(run: Run) -> Iterator[str]:
    begun = [event for event in run.events if event.what == "begun"]
    if len(begun) != 2:
        yield f"The job was started {len(begun)} times, not twice."
    tokens = [event.facts["token"] for event in begun]
    if sorted(set(tokens)) != tokens:
        yield f"The tokens did not grow: {tokens}."
    finished = [event.facts["result"] for event in run.events if event.what == "finished"]
    replayed = [event.facts["result"] for event in run.events if event.what == "replayed"]
    if len(finished) != 1:
        yield f"The job was completed {len(finished)} times, not once."
    if replayed != finished:
        yield f"The redelivery was answered with {replayed}, not with the result {finished}."


def _judge_unsafe(run: Run) -> Verdict:
    tried = stale_writes(_until_redelivery(run.events))
    last = {event.facts["store"]: event.facts["value"] for event in tried}
    due = _due(run)
    lost = [store for store in STORES if run.stored.get(store) != due.get(store)]
    if lost != list(STORES) or run.stored != last:
        return Verdict(
            False,
            "The overwrite did not happen, so this run shows nothing.",
            (f"The stores hold {run.stored}; the stale writes were {last}.",),
        )
    return Verdict(
        True,
        f"As predicted: {len(tried)} stale writes were tried, and every one was accepted.",
        (
            f'Redis and the SQLite row say "{last["Redis"]}", though the order was '
            f'"{due["Redis"]}": the next step would ship it a second time.',
            "A lock alone cannot prevent this: it was granted correctly; the writes did not ask.",
            "See the same job with tokens: fencekit demo",
        ),
    )


def _until_redelivery(events: Sequence[Event]) -> list[Event]:
    """Without the redelivery, which in a run without memory starts the job anew."""
    for number, event in enumerate(events):
        if event.what == "redelivered":
            return list(events[:number])
    return list(events)
