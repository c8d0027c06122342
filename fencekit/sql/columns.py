"""The fence column of a table: declared, mixed in, or added to a table that is in use."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, text
from sqlalchemy.orm import Mapped, mapped_column

from fencekit.sql._target import FENCE


def fence_token(name: str = FENCE) -> Column[int]:
    """Return a fence column: BIGINT NOT NULL DEFAULT 0, so that any token is newer than none.

    >>> from sqlalchemy import Column, Integer, MetaData, Table
    >>> from fencekit.sql import fence_token
    >>> jobs = Table("jobs", MetaData(), Column("id", Integer, primary_key=True), fence_token())
    >>> jobs.c.fence_token.nullable
    False
    """
    return Column(name, BigInteger, nullable=False, default=0, server_default=text("0"))


class FencedMixin:
    """Gives a mapped class the fence column ``fence_token``; for another name, declare it yourself.

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
