"""Results as JSON and back."""

from __future__ import annotations

import enum
import json
import math
from collections import OrderedDict, namedtuple
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fencekit import CanonicalizeError, JsonCodec

codec = JsonCodec()

# "$" opens the marks that the codec itself writes.
KEYS = st.one_of(st.text(), st.sampled_from(["$", "$bytes", "$pairs", "$$", ""]))
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
    st.binary(),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=20,
)


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types throughout: 1 is not True, nor 1.0, nor -0.0 the same as 0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, float):
        return one.hex() == other.hex()
    return bool(one == other)


@given(VALUES)
@example({"$bytes": "AA=="})
@example({"$bytes": 5})
@example({"$pairs": [["a", 1]]})
@example({"$pairs": {"$pairs": b""}})
@example([{"$x": None}, {"$x": None, "y": b"\x00\xff"}])
@example("\ud800 alone")
@example("\udce4 from a file name")
@example([-0.0, 1e308, 5e-324, 2**64, -(10**300)])
def test_what_comes_back_is_what_went_in(value: Any) -> None:
    encoded = codec.encode(value)
    assert encoded.isascii()
    assert same(codec.decode(encoded), value)
    assert codec.encode(codec.decode(encoded)) == encoded


@given(VALUES)
def test_a_memo_is_compact_json(value: Any) -> None:
    encoded = codec.encode(value)
    assert json.dumps(json.loads(encoded), separators=(",", ":")).encode() == encoded


Point = namedtuple("Point", "x y")


class Level(enum.IntEnum):
    HIGH = 3


class Colour(str, enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ((1, (2, 3)), [1, [2, 3]]),
        (Point(1, b"y"), [1, b"y"]),
        (bytearray(b"raw"), b"raw"),
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (Level.HIGH, 3),
        (Colour.RED, "red"),
        ({"level": Level.HIGH, Colour.RED: (Colour.RED,)}, {"level": 3, "red": ["red"]}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_kinds_of_plain_data_come_back_as_plain_data(value: Any, plain: Any) -> None:
    assert same(codec.decode(codec.encode(value)), plain)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=repr)
def test_numbers_that_json_has_not_are_refused(value: float) -> None:
    for wrapped in (value, [value], {"a": {"b": (value,)}}):
        with pytest.raises(CanonicalizeError, match="result"):
            codec.encode(wrapped)


@pytest.mark.parametrize("key", [1, None, True, 1.5, b"a", (1, 2)], ids=repr)
def test_keys_that_would_come_back_as_text_are_refused(key: Any) -> None:
    with pytest.raises(CanonicalizeError, match="key of type") as refused:
        codec.encode({"a": [{key: 1}]})
    assert refused.value.path == "result['a'][0]"


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, 1j, lambda: 1, memoryview(b""), range(3), int],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_data_is_refused_where_it_is(value: Any) -> None:
    with pytest.raises(CanonicalizeError, match="cannot be remembered as JSON") as refused:
        codec.encode([0, {"a": value}])
    assert refused.value.path == "result[1]['a']"


def test_texts_that_json_would_change_are_refused() -> None:
    # Two surrogates that make a pair come back as the one character that they stand for.
    for value in ("\ud83d\ude00", ["x\ud83d\ude00y"], {"\ud83d\ude00": 1}):
        with pytest.raises(CanonicalizeError, match="surrogate"):
            codec.encode(value)
    assert codec.decode(codec.encode("\U0001f600")) == "\U0001f600"


def test_numbers_too_long_to_write_are_refused() -> None:
    with pytest.raises(CanonicalizeError):
        codec.encode(10**10_000)


def test_nesting_too_deep_to_write_is_refused_and_what_was_written_can_be_read() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(CanonicalizeError):
        codec.encode(endless)
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep, {"a": deep}] if len(repr(deep)) < 500 else [deep]
    assert codec.decode(codec.encode(deep)) == deep


@given(st.binary())
@example(b"[" * 100_000)
@example(b'{"$bytes": 5}')
@example(b'{"$bytes": "*"}')
@example(b'{"$pairs": 5}')
@example(b'{"$pairs": [1]}')
def test_a_damaged_memo_is_an_ordinary_error_or_plain_data(data: bytes) -> None:
    with suppress(ValueError, TypeError, RecursionError):
        codec.encode(codec.decode(data))
