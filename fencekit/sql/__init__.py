"""SQL writes that refuse an older token, and effects applied once, through SQLAlchemy 2.

* `fenced_update`, `fenced_delete`, `fenced_insert`, `fenced_upsert`: statements for a table with a
  fence column, run by `execute_fenced`.
* `fenced_transaction`: a token for everything that a transaction does.
* `apply_once`, `operation`: an effect that commits once per key.
"""

from __future__ import annotations

from .columns import FencedMixin, fence_token
from .executing import Written, execute_fenced
from .operations import Applied, apply_once, operation
from .purging import purge_fences, purge_operations
from .statements import (
    fenced_delete,
    fenced_insert,
    fenced_update,
    fenced_update_many,
    fenced_upsert,
)
from .tables import fences_table, metadata, operations_table
from .transaction import fenced_transaction

__all__ = [
    "Applied",
    "FencedMixin",
    "Written",
    "apply_once",
    "execute_fenced",
    "fence_token",
    "fenced_delete",
    "fenced_insert",
    "fenced_transaction",
    "fenced_update",
    "fenced_update_many",
    "fenced_upsert",
    "fences_table",
    "metadata",
    "operation",
    "operations_table",
    "purge_fences",
    "purge_operations",
]
