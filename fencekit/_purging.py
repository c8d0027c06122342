"""What both purges check before they send anything; imports no database library."""

from __future__ import annotations

from datetime import timedelta

LONG_AGO = timedelta(days=36525)
"""100 years: every database can subtract them from now."""
MOST = 10_000
"""Rows of a batch. They stay locked until its transaction ends."""


def check_purge(older_than: object, batch: object) -> None:
    """Refuse an age that is not between 0 and 100 years, and a batch not between 1 and 10,000 rows.

    Raises ``TypeError`` or ``ValueError``.

    >>> from datetime import timedelta
    >>> check_purge(timedelta(days=30), 1000)
    """
    if not isinstance(older_than, timedelta):
        raise TypeError(f"older_than is a timedelta, not {type(older_than).__name__}")
    if not timedelta(0) <= older_than <= LONG_AGO:
        raise ValueError(f"older_than is between 0 and 100 years, not {older_than}")
    if isinstance(batch, bool) or not isinstance(batch, int):
        raise TypeError(f"batch is a number of rows, not {type(batch).__name__}")
    if not 1 <= batch <= MOST:
        raise ValueError(
            f"batch is between 1 and {MOST} rows, not {batch}: commit and repeat until 0"
        )
