"""`fencekit.fenced_update`, which is SQLAlchemy's or Django's by what it is given."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, overload

from fencekit.records import FenceToken

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from sqlalchemy import Update


@overload
def fenced_update(
    target: QuerySet[Any],
    token: FenceToken | int,
    updates: Mapping[str, Any] | None = None,
    *,
    fence_field: str = ...,
    raise_on_stale: bool = ...,
) -> bool: ...


@overload
def fenced_update(
    target: Any,
    token: FenceToken | int,
    *,
    where: Any,
    values: Mapping[Any, Any],
    fence: Any = ...,
) -> Update: ...


def fenced_update(target: Any, token: FenceToken | int, *args: Any, **options: Any) -> Any:
    """Update rows that are not newer than the token: of a table, a mapped class or a queryset.

    With a Django queryset this is `fencekit.django.fenced_update`, which runs it; with anything
    else `fencekit.sql.fenced_update`, which returns a statement for `fencekit.sql.execute_fenced`.

    Raises what those raise, and ``ImportError`` if the library is not installed.

    >>> from sqlalchemy import Column, Integer, MetaData, Table
    >>> from fencekit import fenced_update
    >>> from fencekit.sql import fence_token
    >>> jobs = Table("jobs", MetaData(), Column("id", Integer, primary_key=True), fence_token())
    >>> statement = fenced_update(jobs, 41, where=jobs.c.id == 7, values={})
    """
    models = sys.modules.get("django.db.models")  # who has a queryset has imported it
    ours = "fencekit.django" if models and _is_djangos(target, models) else "fencekit.sql"
    return import_module(ours).fenced_update(target, token, *args, **options)


def _is_djangos(target: Any, models: Any) -> bool:
    """Whether it is a queryset, or what has querysets, so that Django's error says what to pass."""
    kinds = (models.QuerySet, models.manager.BaseManager, models.base.ModelBase)
    return isinstance(target, kinds)
