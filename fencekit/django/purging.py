"""Forgetting what is old in the two tables, in batches that hold nobody up."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import Model
from django.db.models.functions import Now

from fencekit.django._databases import check_database
from fencekit.django.transactions import connection_of
from fencekit.fencing import check_purge


def purge_operations(older_than: timedelta, *, batch: int = 1000, using: str = "default") -> int:
    """Delete up to ``batch`` operations that are older, and return how many; repeat until 0.

    A forgotten key is applied again if it is delivered again: keep them for longer than your
    broker can redeliver. Rows that another purge is at are left to it. ``older_than`` is at most
    100 years, ``batch`` at most 10,000.

    Raises ``TypeError`` or ``ValueError`` for what cannot be meant, before anything is sent.

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
    Otherwise as `purge_operations`.

    >>> from datetime import timedelta
    >>> from fencekit.django import purge_fences
    >>> def nightly():
    ...     while purge_fences(timedelta(days=365)):
    ...         pass
    """
    from fencekit.django.models import Fence

    return _purge(Fence, older_than, batch, using)


def _purge(model: type[Model], older_than: timedelta, batch: int, using: str) -> int:
    check_purge(older_than, batch)
    vendor = connection_of(check_database(using)).vendor
    old = model._base_manager.using(using).filter(at__lt=Now() - older_than)
    first: Any = old.order_by("at").values_list("pk", flat=True)
    # The age is asked for in the DELETE as well: a row may have been written anew since the look.
    # Deleted as rows and not as objects, since with a receiver of pre_delete it would be by key.
    if vendor == "sqlite":  # one statement, one writer
        return int(old.filter(pk__in=first[:batch])._raw_delete(using))
    with transaction.atomic(using=using):
        keys = list(first.select_for_update(skip_locked=True)[:batch])
        return int(old.filter(pk__in=keys)._raw_delete(using)) if keys else 0
