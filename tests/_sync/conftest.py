"""Fixtures of this half. Written by hand; generate_sync.py makes the twin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import pytest

from fencekit import FenceGate, IdempotencyGuard, DistributedLock
from fencekit.events import Event
from tests import threads as both
from tests.site import Site


@pytest.fixture
def client(site: Site) -> Iterator[Any]:
    """A client of this half's kind."""
    client = both.client_of(site)
    yield client
    both.close(client)


@pytest.fixture
def events() -> list[Event]:
    """What the lock, guard and gate of this test told their listeners."""
    return []


@pytest.fixture
def lock(client: Any, events: list[Event]) -> DistributedLock:
    return DistributedLock(client, listeners=[events.append])


@pytest.fixture
def guard(client: Any, events: list[Event]) -> IdempotencyGuard:
    return IdempotencyGuard(client, listeners=[events.append])


@pytest.fixture
def gate(client: Any, events: list[Event]) -> FenceGate:
    return FenceGate(client, listeners=[events.append])
