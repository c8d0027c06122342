"""Guarded functions as dependencies of a FastAPI application."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import Depends, FastAPI

from fencekit import AsyncGuard, IdempotencyGuard
from tests import aio, asgi, threads
from tests.site import Site

shipped: list[tuple[str, int, bool]] = []


@pytest.fixture(autouse=True)
def _ship_nothing_yet() -> None:
    shipped.clear()


async def ship(order: int, gift: bool = False) -> list[Any]:
    shipped.append(("ship", order, gift))
    return ["ship", order, gift]


def pack(order: int, gift: bool = False) -> list[Any]:
    shipped.append(("pack", order, gift))
    return ["pack", order, gift]


def application(guarded: Callable[..., Any]) -> FastAPI:
    """Answers with what the dependency returned."""
    app = FastAPI()
    dependency = Depends(guarded)

    @app.get("/orders/{order}")
    async def read(result: Any = dependency) -> Any:
        return {"result": result}

    return app


async def asked(app: FastAPI, name: str) -> None:
    """The dependency runs once for each order, and gets what the path says."""
    for _ in range(2):
        assert await asgi.get(app, "/orders/7") == (200, {"result": [name, 7, False]})
    assert await asgi.get(app, "/orders/8") == (200, {"result": [name, 8, False]})
    assert (await asgi.get(app, "/orders/none"))[0] == 422
    assert shipped == [(name, 7, False), (name, 8, False)]


# scenario 76
@pytest.mark.parametrize("function", [ship, pack], ids=["coroutine function", "function"])
def test_a_guarded_dependency_runs_once_for_each_request_that_differs(
    site: Site, function: Any
) -> None:
    async def main() -> None:
        client = aio.client_of(site)
        await asked(application(AsyncGuard(client).idempotent()(function)), function.__name__)
        await aio.close(client)

    asyncio.run(main())


# scenario 76
def test_a_guarded_dependency_that_blocks_has_a_thread_to_itself(site: Site) -> None:
    client = threads.client_of(site)
    guard = IdempotencyGuard(client)
    asyncio.run(asked(application(guard.idempotent()(pack)), "pack"))
    client.close()
