"""The fence column of a table: declared, mixed in, or added to a table that is in use."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, text
from sqlalchemy.orm import Mapped, mapped_column

from fencekit.sql._target import FENCE


def fence_token(name: str = FENCE, *, nullable: bool = False) -> Column[int]:
    """Return a fence column: BIGINT NOT NULL DEFAULT 0, so that any token is newer than none.

    With ``nullable`` for a table whose column can hold NULL, which then is "never fenced": only of
    a column that is declared so do the statements write such rows.

    Raises ``TypeError`` or ``ValueError`` for a name or a flag that is none.

    >>> from sqlalchemy import Column, Integer, MetaData, Table
    >>> from fencekit.sql import fence_token
    >>> jobs = Table("jobs", MetaData(), Column("id", Integer, primary_key=True), fence_token())
    >>> jobs.c.fence_token.nullable
    False
    """
    check_name(name)
    if not isinstance(nullable, bool):
        raise TypeError(f"nullable is a bool, not {type(nullable).__name__}")
    return Column(name, BigInteger, nullable=nullable, default=0, server_default=text("0"))


def check_name(name: object, what: str = "name") -> None:
    """Refuse what cannot be the name of a column, table or schema."""
    if not isinstance(name, str):
        raise TypeError(f"{what} is text, not {type(name).__name__}")
    if not name:
        raise ValueError(f"{what} is empty")


class FencedMixin:
    """Gives a mapped class the fence column ``fence_token``, NOT NULL.

    For another name, or a column that can hold NULL, declare it in the class instead:
    ``fence = fence_token("fence", nullable=True)``.

    >>> from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
    >>> from fencekit.sql import FencedMixin
    >>> class Base(DeclarativeBase): ...
    >>> class Job(FencedMixin, Base):
    ...     __tablename__ = "jobs"
    ...     id: Mapped[int] = mapped_column(primary_key=True)
    >>> Job.__table__.c.fence_token.type
    BigInteger()
    """

    fence_token: Mapped[int] = mapped_column(
        FENCE, BigInteger, nullable=False, default=0, server_default=text("0")
    )
