"""The demo's events in words that need no knowledge of fencekit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .timeline import Event, Ledger
from .worker import JOB

Mark = Literal["", "ok", "refused", "bad", "pause"]

TITLE = {
    True: "Two workers, one job, and one of them freezes",
    False: "The same without tokens: two workers, one job, an ordinary lock",
}
INTRO = {
    True: f'The job is "{JOB}". It sets the order\'s status in Redis and in a SQLite row. '
    "The queue delivers it twice: to worker A and to worker B.",
    False: f'The job is "{JOB}". It sets the order\'s status in Redis and in a SQLite row. '
    "The lock is SET NX PX, as often written by hand; no write carries a token.",
}


@dataclass(frozen=True)
class Line:
    """One line of the timeline."""

    at: float
    who: str
    mark: Mark
    text: str


class Narrator:
    """Turns events into lines, in order; remembers which token is which."""

    def __init__(self, *, safe: bool, lease: float) -> None:
        self._safe = safe
        self._lease = lease
        self._tokens: list[int] = []
        self._ledger = Ledger()

    def line(self, event: Event) -> Line:
        """The line for one event."""
        holder, values = self._ledger.holder, dict(self._ledger.values)
        stale = self._ledger.stale(event)
        if event.what == "write":
            mark, text = self._write(event, stale, values, holder)
        else:
            tell: Callable[[Event], tuple[Mark, str]] = getattr(
                self, "_" + event.what.replace(" ", "_")
            )
            mark, text = tell(event)
        return Line(event.at, event.who, mark, text)

    def token(self, value: int | None) -> str:
        """A token by its rank: #1 for the first one granted."""
        return f"#{self._tokens.index(value) + 1}" if value in self._tokens else f"{value}"

    def _begun(self, event: Event) -> tuple[Mark, str]:
        token = event.facts.get("token")
        if token is None:
            return self._locked()
        self._tokens.append(token)
        name = f"token {self.token(token)} = {token}"
        if len(self._tokens) == 1:
            return "", (
                f"begins the job and gets {name}. Its lease is {self._lease:g} s, "
                "renewed in the background while it lives."
            )
        return "", f"takes the job over, attempt {event.facts['attempts']}: {name}, a larger one."

    def _locked(self) -> tuple[Mark, str]:
        self._tokens.append(-1)
        if len(self._tokens) == 1:
            return "", f"takes the lock for {self._lease:g} s and begins the job."
        if len(self._tokens) == 2:
            return "", "takes the free lock and begins the job. So far, all is correct."
        return "bad", "begins the job AGAIN: nothing remembers that it is done."

    def _busy(self, event: Event) -> tuple[Mark, str]:
        left = event.facts.get("left")
        lasts = "" if left is None else f" for up to {left:.1f} s more"
        return "", f"asks for the same job and is told to wait: A has it{lasts}."

    def _write(
        self, event: Event, stale: bool, values: dict[str, str], holder: str
    ) -> tuple[Mark, str]:
        facts = event.facts
        store, value = facts["store"], facts["value"]
        if facts["accepted"] and stale:
            lost = values.get(store)
            return "bad", f'writes "{value}" to {store}: ACCEPTED. {holder}\'s "{lost}" is lost.'
        if facts["accepted"]:
            by = "" if facts["token"] is None else f" with token {self.token(facts['token'])}"
            return "ok", f'writes "{value}" to {store}{by}: accepted.'
        return "refused", (
            f'tries to write "{value}" to {store}: REFUSED. Its token {self.token(facts["token"])} '
            f"is older than {self.token(facts['newest'])}; nothing changed."
        )

    def _frozen(self, event: Event) -> tuple[Mark, str]:
        return "pause", (
            "is frozen (SIGSTOP), as by a long pause of its machine: "
            + ("no work, no renewals." if self._safe else "no work.")
        )

    def _lapsed(self, event: Event) -> tuple[Mark, str]:
        lease = "lease" if self._safe else "lock"
        return "pause", f"has lost its {lease}: it ran out on the server. A cannot know yet."

    def _resumed(self, event: Event) -> tuple[Mark, str]:
        return "pause", "is continued (SIGCONT), as if no time had passed."

    def _finished(self, event: Event) -> tuple[Mark, str]:
        result = event.facts.get("result")
        if result is None:
            if event.facts["freed"]:
                return "", "finishes and gives the lock back."
            return "", "finishes, and does not notice that the lock was no longer its own."
        return (
            "ok",
            f"finishes: the result {json.dumps(result)} is remembered, the lease given back.",
        )

    def _not_finished(self, event: Event) -> tuple[Mark, str]:
        result = json.dumps(event.facts["result"])
        return "refused", f"tries to finish: REFUSED. It is handed the result there is: {result}."

    def _redelivered(self, event: Event) -> tuple[Mark, str]:
        return "", "gets the same job once more: the queue delivers it again."

    def _replayed(self, event: Event) -> tuple[Mark, str]:
        result = json.dumps(event.facts["result"])
        return "ok", f"does not run it: the remembered result {result} comes back."
