"""Names, tags and the Redis keys made of them: none ever meets another."""

from __future__ import annotations

import pickle
import sys
import unicodedata
from enum import Enum
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fencekit.keys import KeySpace, check_name, idempotency_key, key_slot, untag

UNICODE = st.characters(exclude_categories=["Cs"])
TRICKY = st.sampled_from([*"%{}: \t\n\x00\x7f\x85\xa0\u2028\u3000:aé😀"])
names = st.text(st.one_of(UNICODE, TRICKY), min_size=1, max_size=60).filter(str.strip)
prefixes = st.text(st.sampled_from([*"ab:%-é"]), min_size=1, max_size=8)

KINDS = {
    "lock": KeySpace.lock,
    "fence": KeySpace.fence,
    "job": KeySpace.job,
    "jobfence": KeySpace.job_fence,
    "free": KeySpace.free_channel,
    "done": KeySpace.done_channel,
    "op:n": lambda keys, name: keys.once(name, "n"),
}


class Kind(str, Enum):
    ORDER = "order"


# Tags


@given(names)
@example("%7B")
@example("%")
def test_a_tag_gives_its_name_back(name: str) -> None:
    tag = check_name(name)
    assert untag(tag) == untag(tag.decode()) == name


@given(names, names)
def test_two_names_never_have_one_tag(one: str, two: str) -> None:
    assert (check_name(one) == check_name(two)) == (one == two)


@given(names)
def test_a_tag_is_one_word_without_braces(name: str) -> None:
    tag = check_name(name).decode()
    assert not {"{", "}"} & set(tag)
    assert not any(char.isspace() or unicodedata.category(char) == "Cc" for char in tag)


def test_exactly_these_characters_are_encoded() -> None:
    for number in range(sys.maxunicode + 1):
        char = chr(number)
        if unicodedata.category(char) == "Cs":
            continue
        unsafe = char in "%{}" or char.isspace() or unicodedata.category(char) == "Cc"
        tag = "".join(f"%{byte:02X}" for byte in char.encode()) if unsafe else char
        assert check_name(f"a{char}") == f"a{tag}".encode()


@pytest.mark.parametrize("tag", [b"", b"%41", b"%7b", b"%", b"%2", b"a b", b"{a}", b"\xff", b"%FF"])
def test_what_is_no_tag_is_refused(tag: bytes) -> None:
    with pytest.raises(ValueError, match="not a tag"):
        untag(tag)


def test_a_name_may_be_of_a_str_enum() -> None:
    assert check_name(Kind.ORDER) == b"order"
    assert KeySpace(Kind.ORDER).prefix == "order"


def test_longest_name() -> None:
    assert check_name("a" * 1024) == b"a" * 1024
    assert untag(check_name("{" * 1024)) == "{" * 1024
    with pytest.raises(ValueError, match="1026 bytes"):
        check_name("é" * 513)


def test_longest_idempotency_key_is_a_name() -> None:
    check_name(idempotency_key({}, namespace="n" * 959))


# scenario 64
@pytest.mark.parametrize("name", ["", " ", "\n\t", "\u2003"])
def test_nothing_is_no_name(name: str) -> None:
    with pytest.raises(ValueError, match="resource is empty or blank"):
        check_name(name)


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(ValueError, match="lone surrogate"):
        check_name("a\ud800")


@pytest.mark.parametrize(
    ("name", "hint"),
    [(None, "NoneType"), (b"a", "decode"), (True, "bool"), (5, "str"), (["a"], "list")],
)
def test_a_name_is_a_str_and_the_error_says_what_to_pass(name: Any, hint: str) -> None:
    with pytest.raises(TypeError, match=f"key must be a str.*{hint}|{hint}"):
        check_name(name, "key")


# Keys


def test_keys_as_documented() -> None:
    keys = KeySpace()
    assert keys.lock("order:1") == b"fencekit:{order:1}:lock"
    assert keys.fence("order:1") == b"fencekit:{order:1}:fence"
    assert keys.job("order:1") == b"fencekit:{order:1}:job"
    assert keys.job_fence("order:1") == b"fencekit:{order:1}:jobfence"
    assert keys.free_channel("order:1") == b"fencekit:{order:1}:free"
    assert keys.done_channel("order:1") == b"fencekit:{order:1}:done"
    assert keys.once("order:1", "ab12") == b"fencekit:{order:1}:op:ab12"
    assert keys.tag("a b") == "{a%20b}"


# scenario 65
@given(
    st.lists(st.tuples(prefixes, names, st.sampled_from(sorted(KINDS))), unique=True, min_size=2)
)
def test_prefix_name_and_kind_never_clash(parts: list[tuple[str, str, str]]) -> None:
    built = {KINDS[kind](KeySpace(prefix), name) for prefix, name, kind in parts}
    assert len(built) == len(parts)


# scenario 65
def test_parts_that_imitate_each_other() -> None:
    keys = [
        KeySpace("a").lock("b"),
        KeySpace("a:b").lock("b"),
        KeySpace("a").lock("b:lock"),
        KeySpace("a").lock("b}:lock"),
        KeySpace("a").fence("b"),
        KeySpace("a").job("b"),
        KeySpace("a").job_fence("b"),
        KeySpace("a").once("b", "lock"),
        KeySpace("a").once("b", "x:lock"),
        b"order:1",
    ]
    assert len(set(keys)) == len(keys)


@given(prefixes, names, st.sampled_from(sorted(KINDS)))
def test_a_key_gives_its_name_back(prefix: str, name: str, kind: str) -> None:
    keys = KeySpace(prefix)
    key = KINDS[kind](keys, name)
    assert keys.name_of(key) == keys.name_of(key.decode()) == name


@pytest.mark.parametrize(
    "key",
    [
        "order:1",
        "shop:{a}",
        "shop:{a}:other",
        "shop:{a}:op:",
        "shop:{}:lock",
        "other:{a}:lock",
        "shop:x:{a}:lock",
        "shop:{a b}:lock",
    ],
)
def test_a_key_of_somebody_else_has_no_name(key: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        KeySpace("shop").name_of(key)


@pytest.mark.parametrize(
    "prefix", ["", " ", "a b", "a{", "}a", "a\n", "a\x00", "a" * 129, "é" * 65, "\ud800", "a\u2028"]
)
def test_unusable_prefix_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="prefix"):
        KeySpace(prefix)


@pytest.mark.parametrize("prefix", [None, b"a", 1, True])
def test_a_prefix_is_a_str(prefix: Any) -> None:
    with pytest.raises(TypeError, match="prefix must be a str"):
        KeySpace(prefix)


def test_key_space_travels() -> None:
    keys = pickle.loads(pickle.dumps(KeySpace("é:%")))
    assert repr(keys) == "KeySpace('é:%')"
    assert keys.prefix == "é:%"
    assert keys.lock("a") == "é:%:{a}:lock".encode()


@pytest.mark.parametrize("nonce", ["", " "])
def test_nonce_is_not_empty(nonce: str) -> None:
    with pytest.raises(ValueError, match="nonce"):
        KeySpace().once("a", nonce)


# Slots


@given(prefixes, names)
def test_all_keys_of_a_name_have_one_slot(prefix: str, name: str) -> None:
    keys = KeySpace(prefix)
    slots = {key_slot(build(keys, name)) for build in KINDS.values()}
    assert slots == {key_slot(check_name(name))}
    assert key_slot(f"mine:{keys.tag(name)}".encode()) in slots


@pytest.mark.parametrize(
    ("key", "slot"),
    [
        (b"123456789", 0x31C3),  # the check value of the Cluster specification
        (b"foo", 12182),
        (b"{foo}.bar", 12182),
        (b"x{foo}{bar}", 12182),
        (b"", 0),
    ],
)
def test_slot_follows_the_cluster_specification(key: bytes, slot: int) -> None:
    assert key_slot(key) == slot


@given(st.binary(max_size=30))
@example(b"{}a")
@example(b"{{a}}")
@example(b"a{b")
@example(b"}a{b}")
def test_slot_is_the_one_redis_py_computes(key: bytes) -> None:
    from redis.crc import key_slot as reference

    assert key_slot(key) == reference(key)
