"""A worker that `test_crashes.py` kills: ``python -m tests.sql.crash_worker URL STOP``.

Applies operations, a pair of writes each, says how far it is, and freezes when that is STOP.
"""

from __future__ import annotations

import os
import signal
import sys

from sqlalchemy import create_engine, insert, select, update
from sqlalchemy.exc import DBAPIError

from fencekit.sql import apply_once, operation
from tests.sql.site import JOBS

KEYS = 40


def main(url: str) -> None:
    engine = create_engine(url, pool_pre_ping=True)
    with engine.begin() as connection:
        numbers = set(range(KEYS)) - set(connection.scalars(select(JOBS.c.id)))
    for number in sorted(numbers):
        try:
            with engine.connect() as connection:
                if number % 2:
                    with operation(connection, f"op:{number}") as op:
                        if op.first:
                            apply(connection, number)
                            op.result = number
                else:
                    with connection.begin():
                        if apply_once(connection, f"op:{number}", result=number).first:
                            apply(connection, number)
        except DBAPIError as error:
            print("error", type(error).__name__, flush=True)
            raise SystemExit(3) from None
        say(f"done {number}")


def say(text: str) -> None:
    print(text, flush=True)
    if text == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGSTOP)


def apply(connection: object, number: int) -> None:
    """Two writes, so that a half of them would show."""
    connection.execute(insert(JOBS).values(id=number, state="half"))  # type: ignore[attr-defined]
    say(f"half {number}")
    again = update(JOBS).where(JOBS.c.id == number)
    connection.execute(again.values(state="whole", attempts=JOBS.c.attempts + 1))  # type: ignore[attr-defined]


if __name__ == "__main__":
    main(sys.argv[1])
