"""Random steps of lock, guard and gate against a plain model, on both halves; it is seen to fail.

tests/model_reference.py says what is promised, tests/model_machine.py makes the steps. The short
profile takes the same steps every time; HYPOTHESIS_PROFILE=long tries many others.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from fencekit import _policy, _scripts, keys
from fencekit._scripts import Script
from fencekit.testing import RedisServer
from tests.model_machine import Arena, AsyncHalf, Half, model_of
from tests.model_reference import Violation

SHORT = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
LONG = settings(SHORT, max_examples=5000, stateful_step_count=80, derandomize=False)
CHOSEN = LONG if os.environ.get("HYPOTHESIS_PROFILE") == "long" else SHORT
# It ends with the first example that fails, so many are allowed and few are needed.
HUNT = settings(SHORT, max_examples=2000, phases=[Phase.generate])


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A server of this module's own: the steps flush it."""
    with RedisServer() as server:
        yield server


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Leases are lost here by the thousand."""
    caplog.set_level(logging.CRITICAL, logger="fencekit")


@pytest.fixture(params=[Half, AsyncHalf], ids=["sync", "async"])
def arena(request: pytest.FixtureRequest, server: RedisServer) -> Iterator[Arena]:
    """The server as one half sees it."""
    arena = Arena(server, request.param())
    yield arena
    arena.close()


@pytest.mark.timeout(3600)
def test_every_step_keeps_every_promise(arena: Arena) -> None:
    run_state_machine_as_test(model_of(arena), settings=CHOSEN)


def faulty(script: Script, old: str, new: str) -> Script:
    """The script with one place changed."""
    assert script.source.count(old) == 1, f"{script.name} has {old!r} not once"
    broken = copy.copy(script)
    broken.source = script.source.replace(old, new)
    broken.digest = hashlib.sha1(broken.source.encode(), usedforsecurity=False).hexdigest()
    broken._digest = broken.digest.encode()
    broken.load = _scripts.command(b"SCRIPT", b"LOAD", broken.source.encode())
    return broken


def caught(arena: Arena) -> str:
    """The promise that the model sees broken."""
    with pytest.raises(Violation) as seen:
        run_state_machine_as_test(model_of(arena), settings=HUNT)
    return seen.value.invariant


FAULTS = {
    "tokens do not grow": (
        "acquire", "math.max(fence + 1, moment)", "math.max(fence, moment)", "I1",
    ),
    "tokens do not start from the clock": (
        "acquire", "math.max(fence + 1, moment)", "fence + 1", "I1",
    ),
    "a held lock is granted": (
        "acquire", "if lock.owner then\n  return {0", "if false then\n  return {0", "I2",
    ),
    "a repeat is refused": ("acquire", "lock.nonce == ARGV[3]", "false", "I7"),
    "a grant does not raise the fence": (
        "acquire",
        "redis.call('SET', fence_key, digits(token), 'PX', "
        "digits(math.max(tonumber(retention), life)))",
        "", "I3",
    ),
    "a grant has no expiry": (
        "acquire", "redis.call('PEXPIRE', lock_key, digits(life))", "", "I8",
    ),
    "a foreign fence is overwritten": (
        "acquire", "if not token then\n    return nil, foreign(index)",
        "if not token then\n    return 0", "I12",
    ),
    "an older handle of the same owner releases": (
        "release", "lock.owner == ARGV[1] and lock.text == ARGV[2]", "lock.owner == ARGV[1]", "I2",
    ),
    "an attempt that was given up is not remembered": (
        "release", "if spent > 0", "if false", "I10",
    ),
    "breaking does not raise the fence": (
        "break", "redis.call('SET', KEYS[2], raised, 'PX', ARGV[2])", "", "I3",
    ),
    "a claim that lives is taken over": ("begin", "takable = left <= 0", "takable = true", "I5"),
    "a job is completed without asking whose it is": (
        "settle", "job[1] == 'p' and job[3] == ARGV[1] and (ARGV[2] == '' or job[2] == ARGV[2])",
        "job[1] == 'p'", "I5",
    ),
    "a completion goes by the owner alone": (
        "settle", "(ARGV[2] == '' or job[2] == ARGV[2])", "true", "I5",
    ),
    "a memo is changed": (
        "begin", "{'done', attempts, result}", "{'done', attempts, result and result .. ' '}", "I6",
    ),
    "the gate lets older tokens through": ("gate", "token < newest", "false", "I3"),
    "the gate runs a repeat": ("gate", "if stored and", "if false and", "I7"),
    "a refused write leaves something": (
        "gate", "return {0, digits(newest)}",
        "if KEYS[4] then redis.call('SET', KEYS[4], '1') end return {0, digits(newest)}", "I4",
    ),
    "the gate forgets which token of a job it accepted": (
        "gate", "if token > fence then", "if token > newest or fence == 0 then", "I3",
    ),
}  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize("arena", [Half], ids=["sync"], indirect=True)
@pytest.mark.parametrize("fault", FAULTS)
def test_model_sees_a_fault_in_a_script(
    arena: Arena, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, old, new, invariant = FAULTS[fault]
    monkeypatch.setitem(_scripts.SCRIPTS, name, faulty(_scripts.SCRIPTS[name], old, new))
    assert caught(arena) == invariant


@pytest.mark.parametrize("arena", [Half], ids=["sync"], indirect=True)
def test_model_sees_two_names_that_meet(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_tags", {})  # for these names only
    monkeypatch.setattr(keys, "_encode", lambda name: name.strip("{}").encode())
    assert caught(arena) == "I11"


def test_model_sees_a_holder_that_believes_too_long(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_policy, "DRIFT", -0.5)
    assert caught(arena) == "I9"
