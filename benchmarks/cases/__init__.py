"""The cases by number, in the order in which they run."""

from __future__ import annotations

from benchmarks.cases import (
    crowds,
    fairness,
    growth,
    handover,
    holding,
    memory,
    single,
    sql,
    threads,
)
from benchmarks.race import Case

CASES: dict[str, tuple[str, Case]] = {
    "1": ("acquire and release, uncontended", single.blocking_pair),
    "2": ("await: acquire and release, uncontended, one at a time", single.async_pair),
    "3": ("a whole protected job: begin with its lock, finish with a memo", single.job),
    "4": ("a write through the gate", single.write),
    "5": ("hand-over: from release to the next holder's return, one waiter", handover.latency),
    "6": ("await: 100 coroutines on distinct locks", crowds.throughput),
    "7": ("await: a crowd on distinct locks and on one", crowds.crowd),
    "8": ("heartbeat of 10,000 held leases", holding.heartbeat),
    "9": ("memory on the server", memory.server),
    "10": ("cost growth with keys and with waiters", growth.growth),
    "11": ("import", memory.importing),
    "12": ("throughput in 8 greenlets and in 8 threads", threads.throughput),
    "13": ("an UPDATE with a fence, beside the plain one and other ways", sql.updates),
    "fairness": ("one lock, five processes, holds of 1 ms", fairness.line),
}
