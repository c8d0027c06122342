"""What every SQL integration does without a database: checks, refusals, an operation's facts.

Rules this module obeys: no I/O, no database library; what is wrong is refused with the fact that
is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

from fencekit._codec import Codec, JsonCodec
from fencekit.errors import FencedOutError, IdempotencyConflict
from fencekit.keys import check_name
from fencekit.records import FenceToken

__all__ = [
    "LONGEST",
    "TRIES",
    "Applied",
    "OperationBlock",
    "OperationRequest",
    "as_text",
    "check_codec",
    "check_fingerprint",
    "check_purge",
    "check_sequence",
    "hidden_row",
    "in_order",
    "operation_request",
    "refusal",
    "stored",
    "token_value",
]

LONGEST = 2048
"""Longest name of a resource or operation as a table holds it: PostgreSQL indexes little more."""

TRIES = 5
"""Claims of a key that somebody purges between our looks."""

MOST_PURGED = 10_000
"""Rows of a batch. They stay locked until its transaction ends."""

_LONG_AGO = timedelta(days=36525)  # 100 years: every database can subtract them from now


def token_value(token: object) -> int:
    """Return the number of a `FenceToken`, or of a plain int that could be one's.

    Raises ``TypeError`` or ``ValueError`` for anything else.

    >>> token_value(FenceToken(41, "order:7")), token_value(41)
    (41, 41)
    """
    if isinstance(token, FenceToken):
        return token.value
    if isinstance(token, bool) or not isinstance(token, int):
        hint = ": pass its .token" if hasattr(token, "token") else ""
        raise TypeError(f"token is a FenceToken or an int, not {type(token).__name__}{hint}")
    return FenceToken(token, "any").value


def in_order(given: FenceToken | Iterable[FenceToken]) -> list[FenceToken]:
    """Return one token or several in the order in which everybody takes their rows.

    Raises ``ValueError`` if there is none, or two that differ for one resource; ``TypeError`` for
    what is no token.

    >>> [token.resource for token in in_order([FenceToken(2, "b"), FenceToken(1, "a")])]
    ['a', 'b']
    """
    known: dict[tuple[str, str], FenceToken] = {}
    several = isinstance(given, Iterable) and not isinstance(given, (str, bytes))
    for token in given if several else (given,):  # type: ignore[union-attr]
        if not isinstance(token, FenceToken):
            hint = ": pass its .token" if hasattr(token, "token") else ""
            raise TypeError(f"token is a FenceToken, not {type(token).__name__}{hint}")
        if known.setdefault((token.kind, token.resource), token) != token:
            raise ValueError(f"two different tokens of {token.resource!r}: which one is yours?")
    if not known:
        raise ValueError("there is no token: a transaction without one is not fenced")
    return [known[name] for name in sorted(known)]


def check_sequence(sequence: object) -> int | None:
    """Return a position in the writes of one holder, from 1 on; None is no position.

    Raises ``TypeError`` or ``ValueError`` for what is none.

    >>> check_sequence(1)
    1
    """
    if sequence is None:
        return None
    if isinstance(sequence, bool) or not isinstance(sequence, int):
        raise TypeError(f"sequence is an int, not {type(sequence).__name__}")
    if not 1 <= sequence < 2**63:
        raise ValueError(f"sequence is between 1 and 2**63 - 1, not {sequence}")
    return sequence


def stored(name: str, what: str = "resource") -> str:
    """Return a name as tables hold it: the tag of `fencekit.keys.check_name`.

    Raises what that raises, and ``ValueError`` for a tag of more than 2048 characters.

    >>> stored("order 7")
    'order%207'
    """
    tag = check_name(name, what).decode()
    if len(tag.encode()) > LONGEST:
        raise ValueError(f"{what} has more than {LONGEST} bytes when encoded: use a digest of it")
    return tag


def check_fingerprint(fingerprint: object) -> str | None:
    """Return a fingerprint that any database can store; None is none.

    Raises ``TypeError`` for what is not text, ``ValueError`` for a NUL or a lone surrogate.

    >>> check_fingerprint("sha256:41")
    'sha256:41'
    """
    if fingerprint is None:
        return None
    if not isinstance(fingerprint, str):
        raise TypeError(f"fingerprint is text, not {type(fingerprint).__name__}")
    try:
        fingerprint.encode()
    except UnicodeEncodeError:
        raise ValueError("fingerprint has a lone surrogate, which no database takes") from None
    if "\0" in fingerprint:
        raise ValueError("fingerprint has a NUL character, which not every database takes")
    return fingerprint


def check_codec(codec: object) -> Codec:
    """Return a codec; `JsonCodec` for None.

    Raises ``TypeError`` for what does not have ``encode`` and ``decode``, and for a class.

    >>> type(check_codec(None)).__name__
    'JsonCodec'
    """
    if codec is None:
        return JsonCodec()
    if isinstance(codec, type):
        raise TypeError(f"codec is an object, not a class: pass {codec.__name__}()")
    for verb in ("encode", "decode"):
        if not callable(getattr(codec, verb, None)):
            raise TypeError(f"codec has encode and decode, unlike {type(codec).__name__}")
    return cast(Codec, codec)


def as_text(data: bytes) -> str:
    """Return what a codec made of a result, as the text that a table holds.

    Raises ``TypeError`` for what is not bytes, ``ValueError`` for bytes that are not UTF-8 text.

    >>> as_text(b'{"receipt":1}')
    '{"receipt":1}'
    """
    if not isinstance(data, bytes):
        raise TypeError(f"a codec encodes to bytes, not {type(data).__name__}")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ValueError("a result is stored as text: use a codec that makes UTF-8 text") from None
    if "\0" in text:
        raise ValueError("a result is stored as text without NUL characters: use another codec")
    return text


def refusal(
    token: FenceToken, sequence: int | None, table: str, current: int, at: int
) -> FencedOutError:
    """Return the error for a resource whose row carries ``current``, with ``at`` as sequence.

    >>> refusal(FenceToken(41, "a"), None, "fencekit_fences", 42, 0).current
    42
    """
    if current > token.value or sequence is None:
        what = f"token {token.value} of {token.resource!r} is older than {current}"
    else:
        mine = f"write {sequence} under token {token.value} of {token.resource!r}"
        what = f"{mine} comes after write {at}"
    return FencedOutError(
        f"{what}, which {table} carries: roll back and stop",
        resource=token.resource,
        token=token.value,
        current=current,
        table=table,
    )


def hidden_row(what: str, table: str) -> RuntimeError:
    """Return the error for a row that the database neither takes nor shows.

    >>> hidden_row("the fence of 'a'", "fencekit_fences").args[0][:42]
    "the fence of 'a' can be neither inserted i"
    """
    return RuntimeError(
        f"{what} can be neither inserted into {table} nor read from it: look for a trigger, a rule "
        "or row level security on that table"
    )


@dataclass(frozen=True)
class Applied:
    """What became of an operation.

    >>> Applied(first=True, result={"receipt": 1}).first
    True
    """

    first: bool
    """Whether this call is the one that applies it."""
    result: Any
    """The remembered result; the given one if `first`."""


@dataclass(frozen=True)
class OperationRequest:
    """An operation, checked before anything is sent: `operation_request` makes it.

    >>> operation_request("charge 7").stored_key
    'charge%207'
    """

    key: str
    """The caller's own, which errors name."""
    stored_key: str
    """What the table holds."""
    tokens: tuple[FenceToken, ...]
    """In the order in which their rows are taken; none if there is no fence to take."""
    fingerprint: str | None
    codec: Codec

    @property
    def token(self) -> int | None:
        """The number that is written beside the key; None without a token."""
        return self.tokens[0].value if self.tokens else None

    def encoded(self, result: Any) -> str | None:
        """Return a result as the table holds it; None for None."""
        return None if result is None else as_text(self.codec.encode(result))

    def claim(
        self,
        insert: Callable[[], bool],
        look: Callable[[], Sequence[Any] | None],
        table: str,
    ) -> Applied:
        """Return what became of the operation: ``first`` if ``insert`` wrote its row just now.

        ``look`` gives the fingerprint and the result of the row that is there, or None.

        Raises ``IdempotencyConflict`` for a row with another fingerprint, ``RuntimeError`` for one
        that can be neither written nor read.
        """
        for _ in range(TRIES):
            if insert():
                return Applied(True, None)
            row = look()
            if row is not None:  # else it was purged in between
                return self._known(*row)
        raise hidden_row(f"operation {self.key!r}", table)

    def _known(self, fingerprint: str | None, result: str | None) -> Applied:
        if self.fingerprint is not None and fingerprint not in (None, self.fingerprint):
            raise IdempotencyConflict(
                f"operation {self.key!r} is known with another fingerprint: the same key was used "
                "for different input",
                key=self.key,
                fingerprint=self.fingerprint,
                known=fingerprint,
            )
        return Applied(False, None if result is None else self.codec.decode(result.encode()))


def operation_request(
    key: str,
    token: FenceToken | Iterable[FenceToken] | None = None,
    fingerprint: str | None = None,
    codec: Codec | None = None,
) -> OperationRequest:
    """Return an operation that can be sent.

    Raises ``TypeError`` or ``ValueError`` for what no database would take, or nobody can mean.

    >>> operation_request("charge:7", FenceToken(41, "order:7")).token
    41
    """
    return OperationRequest(
        key=key,
        stored_key=stored(key, "key"),
        tokens=() if token is None else tuple(in_order(token)),
        fingerprint=check_fingerprint(fingerprint),
        codec=check_codec(codec),
    )


class OperationBlock:
    """What a block says of its operation: whether to apply the effect, and its result.

    >>> block = OperationBlock(operation_request("charge:7"), Applied(True, None))
    >>> if block.first:
    ...     block.result = {"receipt": 1}
    >>> block.result
    {'receipt': 1}
    """

    def __init__(self, request: OperationRequest, outcome: Applied | None = None) -> None:
        self._request = request
        self._outcome = outcome
        """None until the block is entered."""

    def _entered(self) -> Applied:
        if self._outcome is None:
            raise RuntimeError(
                f"operation {self._request.key!r} has not been asked for yet: enter the block "
                "first, with operation(...)"
            )
        return self._outcome

    @property
    def first(self) -> bool:
        """Whether this block is the one that applies the effect."""
        return self._entered().first

    @property
    def result(self) -> Any:
        """The remembered result. Set it where ``first``; elsewhere it stands."""
        return self._entered().result

    @result.setter
    def result(self, value: Any) -> None:
        if not self._entered().first:
            raise RuntimeError(
                f"operation {self._request.key!r} was applied before, so its result stands: set it "
                "only where first is true"
            )
        self._outcome = Applied(True, value)


def check_purge(older_than: object, batch: object) -> None:
    """Refuse an age that is not between 0 and 100 years, and a batch not between 1 and 10,000 rows.

    Raises ``TypeError`` or ``ValueError``.

    >>> from datetime import timedelta
    >>> check_purge(timedelta(days=30), 1000)
    """
    if not isinstance(older_than, timedelta):
        raise TypeError(f"older_than is a timedelta, not {type(older_than).__name__}")
    if not timedelta(0) <= older_than <= _LONG_AGO:
        raise ValueError(f"older_than is between 0 and 100 years, not {older_than}")
    if isinstance(batch, bool) or not isinstance(batch, int):
        raise TypeError(f"batch is a number of rows, not {type(batch).__name__}")
    if not 1 <= batch <= MOST_PURGED:
        raise ValueError(
            f"batch is between 1 and {MOST_PURGED} rows, not {batch}: commit and repeat until 0"
        )
