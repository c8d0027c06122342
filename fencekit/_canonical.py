"""One text per value: what an idempotency key hashes.

Rules this module obeys:

* A value that JSON can carry has the text of ``json.dumps(value, sort_keys=True,
  separators=(",", ":"), ensure_ascii=True)``. Keys made of it are stored for days and shared
  by versions, so that text is a published format.
* Anything else extends the JSON grammar by one production, ``@form(...)``. No JSON text has
  an ``@`` outside a string, so a payload cannot imitate a form. A text that uses one also
  starts with ``PREFIX``, which makes room for another version of the forms.
* Equal values, equal texts; different values, different texts. What cannot keep that (NaN,
  unknown objects, two keys that JSON would merge) is refused, never guessed.
* The text depends on values only: not on hash seeds, insertion order, time zone data files or
  the Python version.
* An error tells the type and the place, never the value, which may be a secret.
"""

from __future__ import annotations

import dataclasses
import json.encoder
from collections import UserString
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag
from math import isfinite
from typing import Any, NoReturn
from uuid import UUID

from fencekit.errors import CanonicalizeError

PREFIX = "fencekit/1 "
MAX_DEPTH = 100
"""Nesting allowed; low enough that the stack of a deep web framework still has room for it."""

Encode = Callable[[Any], Any]

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
# Below this many bits an int has fewer digits than the lowest limit Python lets anyone set (640).
_BITS_ALWAYS_PRINTABLE = 2000

_quote: Callable[[str], str] = json.encoder.encode_basestring_ascii

# A place inside the payload: an index, a one-element tuple with a mapping's key, or ready text.
_Segment = int | tuple[Any] | str


def canonical_text(value: object, *, root: str, encode: Encode | None = None) -> str:
    """The canonical text of *value*; ``CanonicalizeError`` names the place, starting at *root*."""
    writer = _Writer(encode, root)
    text = writer.text(value)
    return PREFIX + text if writer.extended else text


def call_text(
    function: str, owner: str, arguments: Mapping[str, object], encode: Encode | None
) -> str:
    """The canonical text of a call; no payload has the same one."""
    parts = []
    for name in sorted(arguments):
        writer = _Writer(encode, name, lead="argument ", tail=f" of {function}")
        parts.append(f"{_quote(name)}:{writer.text(arguments[name])}")
    return f"{PREFIX}@call({_quote(function)},{_quote(owner)},{{{','.join(parts)}}})"


def is_nothing(value: object) -> bool:
    """Whether it is None or blank text, which unrelated work would share."""
    return value is None or (isinstance(value, str) and not value.strip())


def type_name(cls: type) -> str:
    """``module:qualname``, equal in the parent and in a child that multiprocessing spawned."""
    module = "__main__" if cls.__module__ == "__mp_main__" else cls.__module__
    return f"{module}:{cls.__qualname__}"


class _Writer:
    """Writes one value and remembers where it is, for the error."""

    __slots__ = ("_active", "_encode", "_lead", "_path", "_tail", "extended")

    def __init__(self, encode: Encode | None, root: str, lead: str = "", tail: str = "") -> None:
        self.extended = False
        self._encode = encode
        self._lead, self._tail = lead, tail
        self._path: list[_Segment] = [root]
        self._active: set[int] = set()

    def text(self, value: Any) -> str:
        # type(), not isinstance(): proxies and mocks lie about their class and then have none
        # of its content.
        cls = type(value)
        write = _EXACT.get(cls) or _method_for(cls)
        if write not in _CONTAINERS:
            return write(self, value)
        if id(value) in self._active:
            self.fail("contains itself")
        if len(self._active) >= MAX_DEPTH:
            self.fail(f"is nested more than {MAX_DEPTH} levels deep")
        self._active.add(id(value))
        text = write(self, value)
        self._active.remove(id(value))
        return text

    def fail(self, reason: str, cause: BaseException | None = None) -> NoReturn:
        path = "".join(map(_segment_text, self._path))
        message = f"{self._lead}{path}{self._tail} {reason}"
        raise CanonicalizeError(message, path=path) from cause

    def form(self, name: str, *arguments: str) -> str:
        self.extended = True
        return f"@{name}({','.join(arguments)})"

    # JSON values

    def null(self, _value: None) -> str:
        return "null"

    def bool_(self, value: bool) -> str:
        return "true" if value else "false"

    def int_(self, value: int) -> str:
        # int.__repr__ and its like, here and below: the plain value even of a subclass with a
        # __str__ of its own (mixed-in Enums), which is what json sends too.
        if value.bit_length() < _BITS_ALWAYS_PRINTABLE:
            return int.__repr__(value)
        try:
            return int.__repr__(value)
        except ValueError as error:
            self.fail("is an integer with more digits than Python converts to text", error)

    def float_(self, value: float) -> str:
        if not isfinite(value):
            self.fail("is NaN or infinite, which has no canonical form")
        return float.__repr__(value)

    def str_(self, value: str) -> str:
        return _quote(self.plain(value))

    def plain(self, value: str) -> str:
        text = str.__str__(value)
        # JSON writes two lone surrogates like the one character they resemble.
        if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
            self.fail("is a str with a lone surrogate, which no encoding can carry")
        return text

    def list_(self, value: Iterable[Any]) -> str:
        parts = []
        for index, item in enumerate(value):
            self._path.append(index)
            parts.append(self.text(item))
            self._path.pop()
        return f"[{','.join(parts)}]"

    def mapping(self, value: Mapping[Any, Any]) -> str:
        entries: dict[tuple[bool, str], str] = {}
        for key, item in value.items():
            self._path.append((key,))
            slot = self.key(key)
            if slot in entries:
                self.fail("has the same canonical key as another entry of its mapping")
            entries[slot] = self.text(item)
            self._path.pop()
        # Keys become text first and are sorted then: json.dumps sorts 9 before 10, but after a
        # trip through JSON they are "10" before "9".
        return self._braces(sorted(entries.items()))

    def key(self, key: Any) -> tuple[bool, str]:
        """(False, the key as JSON text carries it) or, for keys JSON refuses, (True, its text)."""
        cls = type(key)
        if issubclass(cls, str):
            return False, self.plain(key)
        text = self.text(key)
        if key is None or issubclass(cls, (int, float)):
            return False, text
        self.extended = True
        return True, text

    @staticmethod
    def _braces(entries: Iterable[tuple[tuple[bool, str], str]]) -> str:
        parts = [f"{key if extended else _quote(key)}:{text}" for (extended, key), text in entries]
        return "{" + ",".join(parts) + "}"

    # Forms

    def enum(self, value: Enum) -> str:
        cls = type_name(type(value))
        if isinstance(value, Flag):  # combined flags have no name before Python 3.11
            return self.form("flag", _quote(cls), self.text(value.value))
        return self.form("enum", _quote(cls), _quote(value.name))

    def datetime_(self, value: datetime) -> str:
        self._check_precision(value)
        if value.utcoffset() is None:
            return self.form("datetime", _quote(datetime.isoformat(value, "T", "microseconds")))
        # Counted, not converted: astimezone() overflows near the years 1 and 9999.
        return self.form("instant", _microseconds(datetime.__sub__(value, _EPOCH)))

    def date_(self, value: date) -> str:
        return self.form("date", _quote(date.isoformat(value)))

    def time_(self, value: time) -> str:
        offset = value.utcoffset()
        if offset is None:
            return self.form("time", _quote(time.isoformat(value, "microseconds")))
        clock = timedelta(0, value.second, value.microsecond, 0, value.minute, value.hour)
        return self.form("utctime", _microseconds(clock - offset))

    def timedelta_(self, value: timedelta) -> str:
        self._check_precision(value)
        return self.form("timedelta", _microseconds(value))

    def _check_precision(self, value: Any) -> None:
        # pandas: NaT is a datetime that differs from itself, and nanoseconds hide in subclasses.
        hidden = getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0)
        if value != value or hidden:  # noqa: PLR0124
            self.fail("is no time, or one finer than microseconds, and has no canonical form")

    def uuid(self, value: UUID) -> str:
        return self.form("uuid", _quote(f"{value.int:032x}"))

    def decimal(self, value: Decimal) -> str:
        sign, digits, exponent = Decimal.as_tuple(value)
        if not isinstance(exponent, int):
            self.fail("is a Decimal that is NaN or infinite, which has no canonical form")
        # Not Decimal.normalize(): that rounds to the context's precision.
        coefficient = "".join(map(str, digits))
        shortest = coefficient.rstrip("0")
        if not shortest:
            return self.form("decimal", "0")
        exponent += len(coefficient) - len(shortest)
        return self.form("decimal", f"{'-' if sign else ''}{shortest}E{exponent}")

    def bytes_(self, value: bytes | bytearray) -> str:
        return self.form("bytes", _quote(value.hex()))

    def set_(self, value: Iterable[Any]) -> str:
        parts = set()
        self._path.append("{...}")
        for item in value:
            text = self.text(item)
            if text in parts:
                self.fail("has the same canonical form as another element of its set")
            parts.add(text)
        self._path.pop()
        return self.form("set", *sorted(parts))

    def dataclass(self, value: Any) -> str:
        names = [field.name for field in dataclasses.fields(value)]
        return self._record("dataclass", value, names, getattr)

    def model(self, value: Any) -> str:
        """A pydantic 2 model. Read field by field: model_dump() forgets the nested classes."""
        extra: Mapping[str, Any] = getattr(value, "__pydantic_extra__", None) or {}
        state = {**extra, **value.__dict__}
        names = [*type(value).model_fields, *extra]
        return self._record("model", value, names, lambda _, name: state[name])

    def model_v1(self, value: Any) -> str:
        state, cls = value.__dict__, type(value)
        names = set(cls.__fields__)
        if getattr(cls.__config__, "extra", None) == "allow":
            names |= set(state)
        return self._record("model", value, names, lambda _, name: state[name])

    def _record(
        self, form: str, value: Any, names: Iterable[str], read: Callable[[Any, str], Any]
    ) -> str:
        entries = []
        for name in sorted(names):  # the order of declaration is no part of the value
            self._path.append(f".{name}")
            try:
                item = read(value, name)
            except (AttributeError, KeyError) as error:
                self.fail("is not set", error)
            entries.append(((False, name), self.text(item)))
            self._path.pop()
        return self.form(form, _quote(type_name(type(value))), self._braces(entries))

    def unknown(self, value: Any) -> str:
        name = type_name(type(value))
        if self._encode is None:
            self.fail(
                f"is a {name}, which has no canonical form: convert it, or pass encode= with a "
                "function that does"
            )
        try:
            replacement = self._encode(value)
        except (TypeError, ValueError) as error:
            self.fail(f"is a {name}, which encode= refused: {error}", error)
        if replacement is None or replacement is value:
            # One shared key for all objects of a type would skip real work.
            self.fail(f"is a {name}, which encode= left without a replacement")
        return self.form("object", _quote(name), self.text(replacement))


def _microseconds(delta: timedelta) -> str:
    return str((delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds)


def _segment_text(segment: _Segment) -> str:
    if isinstance(segment, str):
        return segment
    if isinstance(segment, int):
        return f"[{segment}]"
    (key,) = segment
    cls = type(key)
    if cls in (str, bool, float, type(None)) or (cls is int and abs(key) < 10**20):
        text = repr(key)
        return f"[{text}]" if len(text) <= 80 else f"[{text[:77]}...]"
    return f"[<{cls.__name__}>]"


_Method = Callable[[_Writer, Any], str]

_EXACT: dict[type, _Method] = {
    str: _Writer.str_,
    int: _Writer.int_,
    bool: _Writer.bool_,
    type(None): _Writer.null,
    float: _Writer.float_,
    dict: _Writer.mapping,
    list: _Writer.list_,
    tuple: _Writer.list_,
}

# In this order: json's own view of a class comes first (an Enum with a str mixed in is a
# str), and a datetime is a date.
_BY_BASE: tuple[tuple[tuple[type, ...], _Method], ...] = (
    ((str,), _Writer.str_),
    ((int,), _Writer.int_),
    ((float,), _Writer.float_),
    ((dict,), _Writer.mapping),
    ((list, tuple), _Writer.list_),
    ((Enum,), _Writer.enum),
    ((datetime,), _Writer.datetime_),
    ((date,), _Writer.date_),
    ((time,), _Writer.time_),
    ((timedelta,), _Writer.timedelta_),
    ((UUID,), _Writer.uuid),
    ((Decimal,), _Writer.decimal),
    ((bytes, bytearray), _Writer.bytes_),
    ((set, frozenset), _Writer.set_),
    # Sequences by name only: one is a view that may change, the other never ends.
    ((memoryview, UserString), _Writer.unknown),
    ((Mapping,), _Writer.mapping),
    ((Sequence,), _Writer.list_),
)

_CONTAINERS = frozenset(
    (
        _Writer.list_,
        _Writer.mapping,
        _Writer.set_,
        _Writer.dataclass,
        _Writer.model,
        _Writer.model_v1,
        _Writer.unknown,
    )
)


def _method_for(cls: type) -> _Method:
    for bases, method in _BY_BASE:
        if issubclass(cls, bases):
            return method
    if dataclasses.is_dataclass(cls):
        return _Writer.dataclass
    # By shape, so that pydantic is never imported.
    if hasattr(cls, "model_dump") and isinstance(getattr(cls, "model_fields", None), Mapping):
        return _Writer.model
    if hasattr(cls, "__config__") and isinstance(getattr(cls, "__fields__", None), Mapping):
        return _Writer.model_v1
    return _Writer.unknown
