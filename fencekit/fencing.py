"""What every SQL integration checks before it sends anything: tokens, their order, stored names.

Rules this module obeys: no I/O, no database library; what is wrong is refused with the fact that
is.
"""

from __future__ import annotations

from collections.abc import Iterable

from fencekit.errors import FencedOutError
from fencekit.keys import check_name
from fencekit.records import FenceToken

__all__ = [
    "LONGEST",
    "as_text",
    "check_fingerprint",
    "check_sequence",
    "in_order",
    "refusal",
    "stored",
    "token_value",
]

LONGEST = 2048
"""Longest name of a resource or operation as a table holds it: PostgreSQL indexes little more."""


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


def as_text(data: bytes) -> str:
    """Return what a codec made of a result, as the text that a table holds.

    Raises ``ValueError`` for bytes that are not UTF-8 text.

    >>> as_text(b'{"receipt":1}')
    '{"receipt":1}'
    """
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
