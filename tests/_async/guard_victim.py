"""A worker for tests to kill: it begins a job, says so, and is in its body until it is killed."""

from __future__ import annotations

import sys
from typing import Any

from fencekit import AsyncGuard
from fencekit._seam import aio as seam
from tests import aio as both


async def work(url: str, key: str, lease: str, on_lapse: Any) -> None:
    async def body() -> None:
        print("begun", flush=True)
        await seam.sleep(60)

    guard = AsyncGuard(both.client_at(url), label="victim")
    await guard.once(key, body, ttl=4 * 3600, lease=float(lease), on_lapse=on_lapse)


if __name__ == "__main__":
    both.main(work, *sys.argv[1:])
