"""sqlite3 as a driver that counts badly. Everything else of it is real."""

from __future__ import annotations

import sqlite3
from typing import Any

from sqlalchemy import Engine, create_engine


class Silent(sqlite3.Cursor):
    """Does not count."""

    told = -1

    @property
    def rowcount(self) -> int:
        return self.told


class Double(Silent):
    """Counts wrong."""

    told = 2


def engine_of(cursor: type[sqlite3.Cursor] = sqlite3.Cursor) -> Engine:
    """An engine for a database in memory, with that kind of cursor."""

    class Driver(sqlite3.Connection):
        def cursor(self, _: Any = None) -> Any:
            return super().cursor(cursor)

    return create_engine("sqlite://", connect_args={"factory": Driver})
