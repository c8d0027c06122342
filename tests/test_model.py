from __future__ import annotations
import pytest, os
from collections.abc import Iterator
from hypothesis import settings, HealthCheck, Phase
from hypothesis.stateful import run_state_machine_as_test
from fencekit.testing import RedisServer
from tests.model_machine import Arena, AsyncHalf, Half, model_of

@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server

@pytest.fixture(scope="module", params=[Half, AsyncHalf], ids=["sync", "async"])
def arena(server, request):
    arena = Arena(server, request.param())
    yield arena
    arena.close()

SHORT = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck))
LONG = settings(SHORT, max_examples=2000, stateful_step_count=60, derandomize=False)
S = LONG if os.environ.get("HYPOTHESIS_PROFILE") == "long" else SHORT

@pytest.mark.timeout(1800)
def test_model(arena):
    run_state_machine_as_test(model_of(arena), settings=S)
