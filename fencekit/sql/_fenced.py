"""Statements that have a fence, and what they mean. No I/O.

Rules this module obeys:

* What `execute_fenced` has to know is an attribute of the statement, which its methods carry on.
* A statement that was changed after it was made is recognised.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from sqlalchemy import ColumnElement, Delete, Update
from sqlalchemy.dialects import postgresql

from fencekit.sql._target import Target


@dataclass(eq=False, slots=True)
class Fenced:
    """What a fenced statement means, for whoever executes it."""

    verb: str
    target: Target
    token: int
    resource: str
    where: ColumnElement[bool]
    """The rows it means, fresh or not."""
    most: int | None = None
    """How many rows it can write at most, where that is known."""
    least: int = 1
    """How many rows it has to write."""
    key: dict[str, Any] | None = None
    """The one row it means, where it names one by a unique key. Found out when it is executed."""
    made: tuple[Any, ...] = ()
    """The parts of the statement, as it was made."""


# What a statement's methods replace; RETURNING and the options of its execution are the caller's.
_COMMON = ("_with_options", "_independent_ctes", "_prefixes", "_hints", "_return_defaults")


class FencedUpdate(Update):
    """An UPDATE that has a fence."""

    inherit_cache = True
    fenced: Fenced
    parts = attrgetter("_where_criteria", "_values", "_multi_values", *_COMMON)


class FencedDelete(Delete):
    """A DELETE that has a fence."""

    inherit_cache = True
    fenced: Fenced
    parts = attrgetter("_where_criteria", *_COMMON)


class FencedInsert(postgresql.Insert):  # SQLite compiles it as well
    """An INSERT that has a fence."""

    inherit_cache = postgresql.Insert.inherit_cache  # with ON CONFLICT not before SQLAlchemy 2.1
    fenced: Fenced
    parts = attrgetter("_values", "_multi_values", "_post_values_clause", *_COMMON)


Statement = FencedUpdate | FencedDelete | FencedInsert


def is_unchanged(statement: Statement) -> bool:
    """Whether it still writes what it was made to write: RETURNING and options do not count."""
    now = type(statement).parts(statement)
    return all(map(operator.is_, now, statement.fenced.made))
