"""Case 13: an UPDATE with a fence beside the plain one and other ways to be safe, on PostgreSQL."""

from __future__ import annotations

from sqlalchemy import create_engine, text

from benchmarks.race import Entry, Race, Settings
from benchmarks.results import Row
from fencekit.sql import metadata
from fencekit.testing import PostgresServer

ROWS, QUICK_ROWS = 10_000_000, 100_000
MAKE = """
CREATE UNLOGGED TABLE benchmark_jobs (
    id BIGINT PRIMARY KEY, state TEXT, version INTEGER, fence_token BIGINT NOT NULL DEFAULT 0
)"""
FILL = "INSERT INTO benchmark_jobs SELECT n, 'new', 1, 0 FROM generate_series(1, :rows) n"
NAMES = {
    "plain": "UPDATE",
    "by_hand": "with AND fence_token <=",
    "fenced": "fenced_update",
    "told": "execute_fenced",
    "transaction": "fenced_transaction",
    "row_lock": "SELECT FOR UPDATE",
    "advisory_lock": "advisory lock",
    "version": "version_id_col",
}


def updates(settings: Settings) -> list[Row]:
    """Transactions of one UPDATE each, in a table of ten million rows."""
    rows = QUICK_ROWS if settings.quick else ROWS
    with PostgresServer() as server:
        engine = create_engine(server.url.replace("postgresql", "postgresql+psycopg", 1))
        with engine.begin() as connection:
            connection.execute(text(MAKE))
            connection.execute(text(FILL), {"rows": rows})
            metadata.create_all(connection)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("VACUUM ANALYZE benchmark_jobs"))
        engine.dispose()
        options = {"database": server.url, "rows": rows}
        entries = []
        for contender, operations in (
            ("SQL", tuple(NAMES)),
            ("SQL await", ("plain", "by_hand", "fenced", "told", "transaction")),
        ):
            driver = "asyncpg" if "await" in contender else "psycopg"
            for op in operations:
                limit = f"UPDATE, {driver}"
                target = {"fenced": 1.05}.get(op)
                entries.append(
                    Entry(
                        contender,
                        {"op": op, "n": 300, "budget": 0.3},
                        {} if op == "plain" else {limit: target},
                        label=f"{NAMES[op]}, {driver}",
                        options=options,
                        shared=True,
                    )
                )
        found = Race(settings, entries).rows()
    for row in found:
        row.what = f"{rows:,} rows"
    return found
