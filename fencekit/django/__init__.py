"""The refusal of older tokens for Django: querysets, transactions, effects applied once.

Add ``"fencekit.django"`` to ``INSTALLED_APPS`` for the tables of `fenced_transaction` and
`apply_once`; `fenced_update` needs a field in your model and nothing else.
"""

from __future__ import annotations

from .purging import purge_fences, purge_operations
from .queries import afenced_update, fenced_update
from .transactions import Applied, OperationBlock, apply_once, fenced_transaction, operation

__all__ = [
    "Applied",
    "OperationBlock",
    "afenced_update",
    "apply_once",
    "fenced_transaction",
    "fenced_update",
    "operation",
    "purge_fences",
    "purge_operations",
]
