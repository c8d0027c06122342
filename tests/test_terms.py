"""On which terms a job is begun, and failures as data."""

from __future__ import annotations

import json
import math
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fencekit import LockNotAcquired
from fencekit._terms import (
    MISSING,
    MOST_TEXT,
    describe,
    failure,
    leased,
    plain,
    policy,
    revive,
    shown,
)

PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=20)
)
JSON = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


class Declined(Exception):
    """A failure of the application's own."""


class Verbose(Exception):
    """One that is not made of its arguments."""

    def __init__(self, code: int, *, hint: str = "") -> None:
        super().__init__(f"code {code}")
        self.hint = hint


class Picky(Exception):
    """One that can only be made with a keyword."""

    def __init__(self, *, code: int) -> None:
        super().__init__(code)


class Endless(Exception):
    """One that cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


# Failures


@given(st.lists(PLAIN, max_size=4))
@example([])
@example(["\ud800"])
@example([math.inf, -0.0, 2**70])
def test_a_failure_comes_back_as_it_was(args: list[Any]) -> None:
    for kind in (Declined, ValueError, KeyError):
        error = kind(*args)
        revived = revive(failure(describe(error)), (OSError, kind))
        assert type(revived) is kind
        assert revived.args == error.args
        assert str(revived) == str(error)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "gone"),
        OSError("odd"),
        StopIteration(5),
        LockNotAcquired("'a' is held", resource="a"),
        ArithmeticError(True, None),
    ],
    ids=repr,
)
def test_failures_of_other_kinds_come_back_too(error: Exception) -> None:
    revived = revive(failure(describe(error)), (type(error),))
    assert type(revived) is type(error)
    assert str(revived) == str(error)


def test_a_failure_made_of_objects_comes_back_with_its_message() -> None:
    what = failure(describe(Declined({"card": "1234"})))
    assert what["message"] == "{'card': '1234'}"
    assert "args" not in what
    revived = revive(what, (Declined,))
    assert revived is not None
    assert revived.args == ("{'card': '1234'}",)


@pytest.mark.parametrize(
    "error", [Verbose(5), Picky(code=5), UnicodeDecodeError("a", b"", 0, 0, "b")]
)
def test_a_failure_that_would_come_back_as_another_stays_data(error: Exception) -> None:
    what = failure(describe(error))
    assert revive(what, (type(error),)) is None
    assert what["type"].endswith(type(error).__name__)
    assert what["message"] == str(error)


def test_only_the_very_type_that_was_named_is_revived() -> None:
    what = failure(describe(FileNotFoundError(2, "gone")))
    assert revive(what, ()) is None
    assert revive(what, (OSError, ValueError)) is None
    assert revive({"type": "os.system", "args": ["true"]}, (ValueError,)) is None


def test_a_failure_is_remembered_within_bounds() -> None:
    for error in (ValueError("x" * 10**6), ValueError("x" * 10**6, "y"), ValueError(["x" * 10**6])):
        kept = describe(error)
        assert len(kept) < 3 * MOST_TEXT
        revived = revive(failure(kept), (ValueError,))
        assert revived is None or str(revived)[:MOST_TEXT] == str(error)[:MOST_TEXT]


def test_a_failure_that_cannot_be_shown_is_still_remembered() -> None:
    for error in (Endless(), ValueError(10**10_000)):
        what = failure(describe(error))
        assert what["type"].endswith(type(error).__name__)
        assert "cannot be shown" in what["message"]
        assert "cannot be shown" in shown(error)
    assert revive(failure(describe(Endless())), (Endless,)) is None
    assert shown(ValueError("no")) == "ValueError('no')"
    assert shown(None) == "None"


def test_no_error_is_a_failure_without_a_name() -> None:
    assert failure(describe(None)) == {"type": "", "message": ""}
    assert revive(failure(describe(None)), (ValueError,)) is None


@given(st.one_of(st.none(), st.binary(), JSON.map(lambda value: json.dumps(value).encode())))
@example(b"[" * 10_000)
@example(b"5")
@example(b"\xff")
def test_whatever_is_remembered_a_failure_is_a_mapping(kept: bytes | None) -> None:
    assert isinstance(failure(kept), dict)


@given(st.dictionaries(st.sampled_from(["type", "message", "args", "other"]), JSON))
@example({"type": "builtins.ValueError", "args": 5})
@example({"type": "builtins.ValueError", "args": {"a": 1}})
@example({"type": "builtins.ValueError", "message": 5})
@example({"type": "builtins.KeyboardInterrupt"})
def test_reviving_garbage_gives_a_named_type_or_nothing(what: dict[str, Any]) -> None:
    for kept in (what, {**what, "type": "builtins.ValueError"}):
        revived = revive(kept, (ValueError, Verbose, Picky))
        assert revived is None or type(revived) is ValueError


# Terms


def test_terms_are_seconds_and_defaults() -> None:
    terms = plain("a", timedelta(minutes=1))
    assert (terms.key, terms.ttl, terms.lease) == ("a", 60.0, None)
    terms = leased("a", 60, timedelta(seconds=5), None, None, None, "reclaim")
    assert (terms.ttl, terms.lease, terms.lock, terms.blocks) == (60.0, 5.0, None, False)
    assert (terms.fingerprint, terms.max_attempts, terms.max_hold) == ("", 0, None)
    terms = leased("a", 60, 5, "r", "f", 3, "block", timedelta(hours=1))
    assert (terms.lock, terms.fingerprint, terms.max_attempts) == ("r", "f", 3)
    assert (terms.blocks, terms.max_hold) == (True, 3600.0)


def test_a_policy_names_exception_types() -> None:
    assert policy((), None).wait == math.inf
    assert policy([ValueError, Declined], 5).remember == (ValueError, Declined)
    assert policy(ValueError, timedelta(seconds=1)).remember == (ValueError,)
    assert policy((), timedelta(seconds=1)).wait == 1.0
    for wrong in (5, "ValueError", (5,), (int,), (BaseException,), (KeyboardInterrupt,), None):
        with pytest.raises(TypeError, match="exception types"):
            policy(wrong, None)


def test_missing_is_no_result() -> None:
    assert repr(MISSING) == "MISSING"
    assert MISSING is not None
