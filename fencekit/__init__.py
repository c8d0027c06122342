"""fencekit: background work that is safe to deliver twice, to kill and to freeze.

* ``AsyncGuard`` / ``IdempotencyGuard``: a named job starts once and its result is remembered.
* ``AsyncLock`` / ``DistributedLock``: one live holder per resource, with a growing fencing token.
* ``AsyncFenceGate`` / ``FenceGate``: Redis writes that refuse an older token.
* ``fenced_update``, ``fencekit.sql``, ``fencekit.django``: SQL writes that refuse an older token.

The classes with ``Async`` take a ``redis.asyncio`` client, the others a ``redis.Redis`` client.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fencekit._version import __version__
from fencekit.errors import (
    CanonicalizeError,
    DurabilityNotReached,
    FencedOutError,
    FenceKitError,
    ForeignValue,
    IdempotencyAbandoned,
    IdempotencyAlreadyDone,
    IdempotencyConflict,
    IdempotencyFailed,
    IdempotencyInProgress,
    IdempotencyNotOwned,
    IdempotencyOutcomeUnknown,
    IdempotencyReentered,
    IdempotencyResultMissing,
    LeaseLost,
    LockNotAcquired,
    LockNotOwned,
    LockReentered,
    ResultTooLarge,
    RowCountUnknown,
    RowExists,
    RowMissing,
    UnexpectedRows,
)
from fencekit.records import (
    BeginOutcome,
    Claim,
    Durability,
    FenceToken,
    LeaseState,
    LockHandle,
    LockInfo,
)

if TYPE_CHECKING:
    from fencekit._async.gate import AsyncFenceGate, AsyncFencePipeline
    from fencekit._async.guard import AsyncGuard
    from fencekit._async.lock import AsyncLock
    from fencekit._codec import Codec, JsonCodec
    from fencekit._sync.gate import FenceGate, FencePipeline
    from fencekit._sync.guard import IdempotencyGuard
    from fencekit._sync.lock import DistributedLock
    from fencekit._updates import fenced_update
    from fencekit.keys import call_key, idempotency_key

# Each half is loaded when it is first used: a blocking worker needs no event loop, nor the reverse.
_LAZY = {
    "AsyncFenceGate": "fencekit._async.gate",
    "AsyncFencePipeline": "fencekit._async.gate",
    "AsyncGuard": "fencekit._async.guard",
    "AsyncLock": "fencekit._async.lock",
    "Codec": "fencekit._codec",
    "DistributedLock": "fencekit._sync.lock",
    "FenceGate": "fencekit._sync.gate",
    "FencePipeline": "fencekit._sync.gate",
    "IdempotencyGuard": "fencekit._sync.guard",
    "JsonCodec": "fencekit._codec",
    "call_key": "fencekit.keys",
    "fenced_update": "fencekit._updates",
    "idempotency_key": "fencekit.keys",
}

__all__ = [
    "AsyncFenceGate",
    "AsyncFencePipeline",
    "AsyncGuard",
    "AsyncLock",
    "BeginOutcome",
    "CanonicalizeError",
    "Claim",
    "Codec",
    "DistributedLock",
    "Durability",
    "DurabilityNotReached",
    "FenceGate",
    "FenceKitError",
    "FencePipeline",
    "FenceToken",
    "FencedOutError",
    "ForeignValue",
    "IdempotencyAbandoned",
    "IdempotencyAlreadyDone",
    "IdempotencyConflict",
    "IdempotencyFailed",
    "IdempotencyGuard",
    "IdempotencyInProgress",
    "IdempotencyNotOwned",
    "IdempotencyOutcomeUnknown",
    "IdempotencyReentered",
    "IdempotencyResultMissing",
    "JsonCodec",
    "LeaseLost",
    "LeaseState",
    "LockHandle",
    "LockInfo",
    "LockNotAcquired",
    "LockNotOwned",
    "LockReentered",
    "ResultTooLarge",
    "RowCountUnknown",
    "RowExists",
    "RowMissing",
    "UnexpectedRows",
    "__version__",
    "call_key",
    "fenced_update",
    "idempotency_key",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
