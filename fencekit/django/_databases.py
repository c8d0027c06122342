"""Which database is meant, checked before anything is sent."""

from __future__ import annotations

from django.db import connections


def check_database(name: object, what: str = "using") -> str:
    """Return the name of a configured database.

    Raises ``TypeError`` for what is no name, ``ValueError`` for one that ``DATABASES`` does not
    have.

    >>> from fencekit.django._databases import check_database
    >>> def nightly(using):
    ...     check_database(using)
    """
    if not isinstance(name, str):
        raise TypeError(f"{what} is the name of a database, not {type(name).__name__}")
    known = list(connections)
    if name not in known:
        raise ValueError(f"{what} is {name!r}, which is none of DATABASES: {', '.join(known)}")
    return name
