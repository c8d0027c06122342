"""Fixtures of both halves of the suite."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from fencekit.testing import RedisServer
from tests.site import TOPOLOGY, Site

pytest_plugins: list[str] = []

# A busy machine is no finding: neither an example that took long nor slow drawing of one.
settings.register_profile("fencekit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fencekit")


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest) -> Any:
    """The servers of the whole run, as the environment chooses."""
    name = {"cluster": "fencekit_cluster", "sentinel": "fencekit_sentinel"}.get(
        TOPOLOGY, "fencekit_server"
    )
    return request.getfixturevalue(name)


@pytest.fixture
def site(servers: Any) -> Iterator[Site]:
    """The servers, emptied, and nothing under way from the test before."""
    for thread in threading.enumerate():
        if thread.name == "fencekit-undo":
            thread.join(5)
    site = Site(servers)
    yield site
    site.close()


@pytest.fixture
def private_server() -> Iterator[RedisServer]:
    """A standalone server of this test's own, to freeze, kill and restart."""
    with RedisServer(persistence="aof-always") as server:
        yield server
