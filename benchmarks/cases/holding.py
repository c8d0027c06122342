"""Case 8: what it costs to keep ten thousand leases."""

from __future__ import annotations

from benchmarks.race import Settings
from benchmarks.results import Row
from benchmarks.workers import Worker, WorkerError

LEASES = 10_000


def _one_twin(settings: Settings, name: str, function: str) -> list[Row]:
    settings.flush()
    # Quick: short, but each lease is renewed twice in it.
    ttl, seconds = 30.0, 20.0 if settings.quick else 300.0
    order = {"url": settings.url, "n": LEASES, "ttl": ttl, "seconds": seconds}
    with Worker("main") as worker:
        try:
            worker.send(plain=f"holding:{function}", args=order)
            answer = worker.receive(600)
        except WorkerError as error:
            return [Row(name, error=str(error), own=True)]
    commands = answer["commands"]
    return [
        Row(name, 100 * answer["cpu"] / answer["wall"], "% of a core",
            f"{LEASES:,} leases of {ttl:g} s for {seconds:g} s", target=5.0, of="value", own=True),
        Row(name, LEASES - answer["held"] + answer["lost"], "leases lost",
            f"renewals that failed meanwhile: {answer['failed']}", target=0.0, of="value",
            own=True),
        Row(name, commands.get("evalsha", 0) / answer["wall"], "commands/s", "EVALSHA", own=True),
        Row(name, sum(commands.values()) / answer["wall"], "commands/s",
            "with those that the scripts run", own=True),
    ]  # fmt: skip


def heartbeat(settings: Settings) -> list[Row]:
    """Each twin in a process of its own, one after the other; a quick run has one of them."""
    rows = _one_twin(settings, "fencekit await", "coroutines")
    if settings.quick:
        return rows
    return rows + _one_twin(settings, "fencekit", "blocking")
