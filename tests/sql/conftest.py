"""Fixtures of the tests on SQL databases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.sql.site import KINDS, Place


@pytest_asyncio.fixture(params=KINDS)
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    """An SQL database with empty tables, and one kind of connection to it after the other."""
    if "sqlite" in request.param:
        url = str(tmp_path / "test.db")
    else:
        url = request.getfixturevalue("fencekit_postgres").url
    place = Place(request.param, url)
    await place.prepare()
    yield place
    await place.close()
