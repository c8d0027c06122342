"""Forgetting what is old in the two tables, in batches that hold nobody up."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import Model
from django.db.models.functions import Now

from fencekit.django.transactions import connection_of


def purge_operations(older_than: timedelta, *, batch: int = 1000, using: str = "default") -> int:
    """Delete up to ``batch`` operations that are older, and return how many; repeat until 0.

    A forgotten key is applied again if it is delivered again: keep them for longer than your
    broker can redeliver. Rows that another purge is at are left to it.

    >>> from datetime import timedelta
    >>> from fencekit.django import purge_operations
    >>> def nightly():
    ...     while purge_operations(timedelta(days=30)):
    ...         pass
    """
    from fencekit.django.models import Operation

    return _purge(Operation, older_than, batch, using)


def purge_fences(older_than: timedelta, *, batch: int = 1000, using: str = "default") -> int:
    """Delete up to ``batch`` fences that nobody wrote under for so long; repeat until 0.

    A forgotten fence lets an old token pass: keep them for much longer than a worker can be frozen.

    >>> from datetime import timedelta
    >>> from fencekit.django import purge_fences
    >>> def nightly():
    ...     while purge_fences(timedelta(days=365)):
    ...         pass
    """
    from fencekit.django.models import Fence

    return _purge(Fence, older_than, batch, using)


def _purge(model: type[Model], older_than: timedelta, batch: int, using: str) -> int:
    if not isinstance(older_than, timedelta):
        raise TypeError(f"older_than is a timedelta, not {type(older_than).__name__}")
    if older_than < timedelta(0):
        raise ValueError(f"older_than is not negative, as {older_than} is")
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise ValueError(f"batch is a number of rows, 1 or more, not {batch!r}")
    old = model._base_manager.using(using).filter(at__lt=Now() - older_than)
    first: Any = old.order_by("at").values_list("pk", flat=True)
    # The age is asked for in the DELETE as well: a row may have been written anew since the look.
    # Deleted as rows and not as objects, since with a receiver of pre_delete it would be by key.
    number: int
    if connection_of(using).vendor == "sqlite":  # one statement, one writer
        number = old.filter(pk__in=first[:batch])._raw_delete(using)
        return number
    with transaction.atomic(using=using):
        keys = list(first.select_for_update(skip_locked=True)[:batch])
        number = old.filter(pk__in=keys)._raw_delete(using) if keys else 0
    return number
