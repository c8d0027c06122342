"""Which job is this, and where in Redis does it live.

Rules this module obeys:

* Equal work gets equal keys and different work different ones, on every Python and in every
  process. A missed duplicate is a double charge; a false one is a job that never runs. What
  cannot be told apart for sure is refused.
* Nothing (None, blank text) never becomes a key: unrelated jobs would share it.
* Every Redis key is ``{prefix}:{<tag>}:<kind>``. The tag is the user's name, encoded so that
  two names never meet, and its literal braces put all keys of a name in one Cluster slot.
"""

from __future__ import annotations

import re
from binascii import crc_hqx
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from typing import Any
from urllib.parse import unquote_to_bytes

from fencekit._canonical import Encode, call_text, canonical_text, is_nothing
from fencekit._target import Target
from fencekit.errors import CanonicalizeError

__all__ = ["KeySpace", "call_key", "check_name", "idempotency_key", "key_slot", "untag"]

MAX_NAME = 1024
"""Longest name in UTF-8 bytes."""
MAX_PREFIX = 128
"""Longest prefix in UTF-8 bytes."""
_MAX_NAMESPACE = MAX_NAME - 65  # a key is a name: ":" and 64 digits must still fit

# Control characters (category Cc) and str.isspace(), written out: categories may change with
# the Unicode version of a Python, and a name must not move then.
_UNSAFE = re.compile("[%{}\x00-\x20\x7f-\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")


# Keys of jobs


def idempotency_key(payload: object, *, namespace: str, encode: Encode | None = None) -> str:
    """Return the same key for the same payload, in every process and on every Python.

    The key is *namespace*, a colon and the SHA-256 in hex of the payload's canonical text
    (docs/keys.md has the table): compact, sorted, ASCII JSON, extended by forms for dates,
    UUID, Decimal, Enum, bytes, sets, dataclasses and pydantic models. ``encode(value)`` is
    called for objects of any other type and returns what stands for them.

    Raises ``CanonicalizeError``, whose ``path`` names the place, for a value without a
    canonical form and for a payload that is None or blank text; ``TypeError`` or
    ``ValueError`` for a namespace that is not text, is empty, or has a colon or whitespace.

    >>> idempotency_key({"order": 7, "cents": 990}, namespace="charge")
    'charge:df08459f68739cf4fb093f9ee52885b51da0ca788870f93ca0fc989ead17be97'
    """
    _check_namespace(namespace)
    if is_nothing(payload):
        raise CanonicalizeError(
            "payload is None or blank, and unrelated jobs would share its key: check how it is "
            "selected from the input",
            path="payload",
        )
    return _digest(namespace, canonical_text(payload, root="payload", encode=encode))


def call_key(
    function: Callable[..., Any],
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    namespace: str | None = None,
    only: Iterable[str] | None = None,
    encode: Encode | None = None,
) -> str:
    """Return the same key for every way to write the same call.

    Arguments are bound as Python binds them and defaults filled in; the function counts with
    its module and qualified name. Behind a bound method only the class of ``self`` counts, so
    put what tells instances apart into the arguments. ``only`` restricts the key to these
    arguments (names inside ``**kwargs`` too); an empty one makes a single key for all calls.
    The namespace is the function's name unless given. ``encode`` is as in `idempotency_key`.

    Raises ``TypeError`` when the arguments do not fit the function; ``CanonicalizeError``,
    naming the argument, when one has no canonical form or all that ``only`` selects are None
    or blank; ``ValueError`` for a lambda or an unnamed closure, which share their name with
    others, unless a namespace tells them apart.

    >>> def charge(order, cents=100): ...
    >>> call_key(charge, (7,)) == call_key(charge, (), {"cents": 100, "order": 7})
    True
    >>> call_key(charge, ("7",)) == call_key(charge, (7,))
    False
    """
    target = Target(function, tuple(args), kwargs or {})
    if namespace is None:
        target.refuse_shared_name()
        namespace = re.sub(r"[^\w.<>-]+", "_", target.qualname)[:200]
    _check_namespace(namespace)
    arguments = target.bind()
    if only is not None:
        arguments = target.select(arguments, only)
    return _digest(namespace, call_text(target.name, target.owner, arguments, encode))


def _digest(namespace: str, text: str) -> str:
    return f"{str.__str__(namespace)}:{sha256(text.encode('ascii')).hexdigest()}"


def _check_namespace(namespace: str) -> None:
    _check_text(namespace, "namespace", _MAX_NAMESPACE)
    if ":" in namespace or any(map(str.isspace, namespace)):
        raise ValueError(f"namespace {namespace!r} has a ':' or whitespace; use '.' or '-'")


# Keys in Redis


def check_name(name: str, what: str = "resource") -> bytes:
    """Return the tag of a name: the name with unsafe characters percent-encoded.

    Two names never have the same tag, and `untag` gives the name back. Encoded are ``%``,
    braces, whitespace and control characters. *what* is how an error calls the name.

    Raises ``TypeError`` if it is not a str; ``ValueError`` if it is empty or blank, longer
    than 1024 bytes in UTF-8, or has a lone surrogate.

    >>> check_name("order:7")
    b'order:7'
    >>> check_name("{a} b")
    b'%7Ba%7D%20b'
    """
    tag = _tags.get(name) if type(name) is str else None
    if tag is None:
        tag = _encode(_check_text(name, what, MAX_NAME))
        if len(_tags) >= 1024:
            _tags.clear()
        if type(name) is str:
            _tags[name] = tag
    return tag


_tags: dict[str, bytes] = {}
"""Of the names in use: one call needs its name's tag several times."""


def untag(tag: bytes | str) -> str:
    """Return the name that `check_name` made this tag of.

    Raises ``ValueError`` for text that is no tag.

    >>> untag(b"%7Ba%7D%20b")
    '{a} b'
    """
    raw = tag.encode() if isinstance(tag, str) else bytes(tag)
    try:
        name = unquote_to_bytes(raw).decode()
        if check_name(name) == raw:  # "%41" would be a second tag of "A"
            return name
    except ValueError:
        pass
    raise ValueError(f"{tag!r} is not a tag that fencekit made")


def key_slot(key: bytes) -> int:
    """Return the Redis Cluster slot (0 to 16383) of a key.

    Keys of one script call must have one slot.

    >>> key_slot(b"fencekit:{order:7}:lock") == key_slot(b"order:7")
    True
    """
    start = key.find(b"{")
    end = key.find(b"}", start + 1)
    if start >= 0 and end > start + 1:
        key = key[start + 1 : end]
    return crc_hqx(key, 0) % 16384


class KeySpace:
    """Builds fencekit's Redis keys under one prefix; no two of them ever meet.

    Keys differ when prefix, name or kind differ, and all keys of a name share a Cluster slot.

    Raises ``TypeError`` or ``ValueError`` for a prefix that is not a str, is empty, longer
    than 128 bytes, or has braces, whitespace or control characters; the methods raise what
    `check_name` raises.

    >>> keys = KeySpace("shop")
    >>> keys.lock("order:7"), keys.fence("order:7")
    (b'shop:{order:7}:lock', b'shop:{order:7}:fence')
    >>> keys.tag("order:7") + ":my-data"
    '{order:7}:my-data'
    >>> keys.name_of(b"shop:{order:7}:lock")
    'order:7'
    """

    __slots__ = ("_head", "_prefix")

    def __init__(self, prefix: str = "fencekit") -> None:
        self._prefix = _check_text(prefix, "prefix", MAX_PREFIX)
        # The first brace of a key must open the tag, or a prefix could imitate a name.
        if _UNSAFE.search(self._prefix.replace("%", "")):
            raise ValueError(
                f"prefix {prefix!r} has a brace, whitespace or a control character; use ':' or '-'"
            )
        self._head = self._prefix.encode() + b":{"

    @property
    def prefix(self) -> str:
        """What every key starts with."""
        return self._prefix

    def __repr__(self) -> str:
        return f"KeySpace({self.prefix!r})"

    def lock(self, name: str) -> bytes:
        """The hash of a resource's lock."""
        return self._head + check_name(name) + b"}:lock"

    def fence(self, name: str) -> bytes:
        """The newest token of a resource."""
        return self._head + check_name(name) + b"}:fence"

    def job(self, name: str) -> bytes:
        """The hash of an idempotency key's job."""
        return self._head + check_name(name, "key") + b"}:job"

    def job_fence(self, name: str) -> bytes:
        """The newest token of a job; a lock of the same name has a fence of its own."""
        return self._head + check_name(name, "key") + b"}:jobfence"

    def free_channel(self, name: str) -> bytes:
        """The channel that hears when a resource becomes free."""
        return self._head + check_name(name) + b"}:free"

    def done_channel(self, name: str) -> bytes:
        """The channel that hears when a job ends."""
        return self._head + check_name(name, "key") + b"}:done"

    def once(self, name: str, nonce: str) -> bytes:
        """The mark of one operation, by which its repeat is recognised."""
        return self._head + check_name(name) + b"}:op:" + check_name(nonce, "nonce")

    def tag(self, name: str) -> str:
        """``{<tag>}``, to put a key of your own in the name's Cluster slot."""
        return "{" + check_name(name).decode() + "}"

    def name_of(self, key: bytes | str) -> str:
        """The name a key of this key space was made of; ``ValueError`` for any other key."""
        raw = key.encode() if isinstance(key, str) else bytes(key)
        tag, brace, kind = raw.removeprefix(self._head).partition(b"}:")
        if not raw.startswith(self._head) or not brace or not _KIND.fullmatch(kind):
            raise ValueError(f"{key!r} is not a key of {self!r}")
        return untag(tag)


_KIND = re.compile(rb"lock|fence|job|jobfence|free|done|op:.+")

_HINTS = {
    bytes: "decode it first",
    type(None): "pass the text that says what it is",
}


def _check_text(value: object, what: str, limit: int) -> str:
    """*value* as a plain str, or the error that says what to pass instead."""
    if not isinstance(value, str):
        hint = _HINTS.get(type(value), "pass text, such as str(...) of an id")
        raise TypeError(f"{what} must be a str, not {type(value).__name__}: {hint}")
    text = str.__str__(value)  # an Enum with a str mixed in formats as its name, not its value
    if not text.strip():
        raise ValueError(f"{what} is empty or blank, so unrelated work would share it")
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{what} {text!r} has a lone surrogate, which UTF-8 refuses") from None
    if size > limit:
        raise ValueError(f"{what} has {size} bytes in UTF-8, more than {limit}: use a digest of it")
    return text


def _encode(name: str) -> bytes:
    if _UNSAFE.search(name) is None:
        return name.encode()
    return _UNSAFE.sub(_percent, name).encode()


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode())
