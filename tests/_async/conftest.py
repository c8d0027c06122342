"""Fixtures of this half. Written by hand; generate_sync.py makes the twin."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from fencekit import AsyncFenceGate, AsyncGuard, AsyncLock
from fencekit.events import Event
from tests import aio as both
from tests.site import Site


@pytest_asyncio.fixture
async def client(site: Site) -> AsyncIterator[Any]:
    """A client of this half's kind."""
    client = both.client_of(site)
    yield client
    await both.close(client)


@pytest.fixture
def events() -> list[Event]:
    """What the lock, guard and gate of this test told their listeners."""
    return []


@pytest.fixture
def lock(client: Any, events: list[Event]) -> AsyncLock:
    return AsyncLock(client, listeners=[events.append])


@pytest.fixture
def guard(client: Any, events: list[Event]) -> AsyncGuard:
    return AsyncGuard(client, listeners=[events.append])


@pytest.fixture
def gate(client: Any, events: list[Event]) -> AsyncFenceGate:
    return AsyncFenceGate(client, listeners=[events.append])
