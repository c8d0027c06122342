"""The two tables of fencekit's own: the fences of resources, and operations that were applied."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    Index,
    MetaData,
    Table,
    Text,
    func,
    text,
)

metadata = MetaData()
"""Holds the two tables under their default names: ``metadata.create_all(engine)``."""


def fences_table(metadata: MetaData, name: str = "fencekit_fences", **options: Any) -> Table:
    """Return the table of fences: for each resource the newest token that a transaction carried.

    ``options`` go to ``sqlalchemy.Table``, such as ``schema``.

    >>> from sqlalchemy import MetaData
    >>> fences_table(MetaData(), "my_fences").name
    'my_fences'
    """
    return Table(
        name,
        metadata,
        Column("kind", Text, primary_key=True),
        Column("resource", Text, primary_key=True),
        Column("token", BigInteger, nullable=False),
        Column("sequence", BigInteger, nullable=False, server_default=text("0")),
        Column("at", DateTime(timezone=True), nullable=False, server_default=func.now()),
        Index(f"{name}_at", "at"),
        **options,
    )


def operations_table(
    metadata: MetaData, name: str = "fencekit_operations", **options: Any
) -> Table:
    """Return the table of operations: for each key that its effect was applied, and its result.

    ``options`` go to ``sqlalchemy.Table``, such as ``schema``.

    >>> from sqlalchemy import MetaData
    >>> operations_table(MetaData(), "my_operations").name
    'my_operations'
    """
    return Table(
        name,
        metadata,
        Column("key", Text, primary_key=True),
        Column("token", BigInteger),
        Column("fingerprint", Text),
        Column("result", Text),
        Column("at", DateTime(timezone=True), nullable=False, server_default=func.now()),
        Index(f"{name}_at", "at"),
        **options,
    )


FENCES = fences_table(metadata)
OPERATIONS = operations_table(metadata)
