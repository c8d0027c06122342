"""fencekit: background work that is safe to deliver twice, to kill and to freeze.

* ``AsyncGuard`` / ``IdempotencyGuard``: a named job starts once and its result is remembered.
* ``AsyncLock`` / ``DistributedLock``: one live holder per resource, with a growing fencing token.
* ``AsyncFenceGate`` / ``FenceGate``: Redis writes that refuse an older token.

The classes with ``Async`` take a ``redis.asyncio`` client, the others a ``redis.Redis`` client.
"""

from fencekit._async.gate import AsyncFenceGate, AsyncFencePipeline
from fencekit._async.guard import AsyncGuard
from fencekit._async.lock import AsyncLock
from fencekit._codec import Codec, JsonCodec
from fencekit._sync.gate import FenceGate, FencePipeline
from fencekit._sync.guard import IdempotencyGuard
from fencekit._sync.lock import DistributedLock
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
)
from fencekit.keys import call_key, idempotency_key
from fencekit.records import (
    BeginOutcome,
    Claim,
    Durability,
    FenceToken,
    LeaseState,
    LockHandle,
    LockInfo,
)

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
    "__version__",
    "call_key",
    "idempotency_key",
]
