"""Records Redis commands for a fenced pipeline: their words, and which of them are keys. No I/O.

Rules this module obeys: every key that a script touches is declared, so a command whose keys are
not known here is refused, with the way out in the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from redis.commands import CoreCommands

if TYPE_CHECKING:
    from typing_extensions import Self

MOST_WORDS = 7000
"""Words in one pipeline: what Lua can unpack, with some room."""

_FIRST = frozenset(
    """
    APPEND BITCOUNT BITFIELD DECR DECRBY EXPIRE EXPIREAT GEOADD GEODIST GEOHASH GEOPOS GET
    GETBIT GETDEL GETEX GETRANGE GETSET HDEL HEXISTS HEXPIRE HGET HGETALL HGETDEL HGETEX HINCRBY
    HINCRBYFLOAT HKEYS HLEN HMGET HMSET HPERSIST HPEXPIRE HPTTL HSET HSETEX HSETNX HSTRLEN HTTL
    HVALS INCR INCRBY INCRBYFLOAT LINDEX LINSERT LLEN LPOP LPOS LPUSH LPUSHX LRANGE LREM LSET
    LTRIM PERSIST PEXPIRE PEXPIREAT PFADD PSETEX PTTL RESTORE RPOP RPUSH RPUSHX SADD SCARD SET
    SETBIT SETEX SETNX SETRANGE SISMEMBER SMEMBERS SMISMEMBER SPOP SRANDMEMBER SREM STRLEN TTL
    TYPE XACK XADD XAUTOCLAIM XCLAIM XDEL XLEN XRANGE XREVRANGE XTRIM ZADD ZCARD ZCOUNT ZINCRBY
    ZLEXCOUNT ZMSCORE ZPOPMAX ZPOPMIN ZRANGE ZRANGEBYLEX ZRANGEBYSCORE ZRANK ZREM ZREMRANGEBYLEX
    ZREMRANGEBYRANK ZREMRANGEBYSCORE ZREVRANGE ZREVRANK ZSCORE
    """.split()
)
_ALL = frozenset(
    """
    DEL EXISTS MGET PFCOUNT PFMERGE SDIFF SDIFFSTORE SINTER SINTERSTORE SUNION SUNIONSTORE TOUCH
    UNLINK
    """.split()
)
_PAIRS = frozenset("MSET MSETNX".split())
_TWO = frozenset("COPY LMOVE RENAME RENAMENX RPOPLPUSH SMOVE ZRANGESTORE".split())
_NONE = frozenset("PUBLISH".split())


def encode(value: Any) -> bytes:
    """One word as bytes; a TypeError for what Redis has no form for."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return b"%d" % value  # an enumeration's member too, as its number
    if isinstance(value, float):
        return float.__repr__(value).encode()
    raise TypeError(
        f"Redis takes text, bytes and numbers, not {type(value).__name__}: encode it first"
    )


def _keys_of(words: Sequence[bytes]) -> list[bytes]:
    name = words[0].decode().upper()
    if name in _NONE:
        return []
    if name in _FIRST:
        return [words[1]]
    if name in _TWO:
        return list(words[1:3])
    if name in _ALL:
        return list(words[1:])
    if name in _PAIRS:
        return list(words[1::2])
    raise ValueError(
        f"{name} is not known to the fenced pipeline: use raw({name!r}, ..., keys=[...]) and "
        "name the keys it touches"
    )


if TYPE_CHECKING:

    class _Commands:
        """Every method of redis-py's for a command; here each returns the pipeline."""

        def __getattr__(self, name: str) -> Callable[..., Self]: ...
else:
    _Commands = CoreCommands


class Recorder(_Commands):
    """Has redis-py's methods for commands; each call is noted and returns the recorder."""

    _event_dispatcher: Any = None  # redis-py's mixin asks for one

    def __init__(self) -> None:
        self._noted: list[tuple[bytes, ...]] = []
        self._touched: dict[bytes, None] = {}
        self._words = 0

    def __len__(self) -> int:
        return len(self._noted)

    def __bool__(self) -> bool:
        return True

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Note a command whose keys are known by its name."""
        del options
        name = str(args[0]).split()  # redis-py writes 'OBJECT ENCODING' as one word
        words = tuple(encode(word) for word in (*name, *args[1:]))
        if len(words) < 2:
            raise ValueError(f"{args[0]} names no key")
        return self._note(words, _keys_of(words))

    def raw(self, *words: Any, keys: Iterable[Any]) -> Any:
        """Note any command, with the keys that it touches."""
        if not words:
            raise ValueError("a command has at least its name")
        return self._note(tuple(map(encode, words)), list(map(encode, keys)))

    def _note(self, words: tuple[bytes, ...], keys: Iterable[bytes]) -> Recorder:
        if self._words + len(words) + 1 > MOST_WORDS:
            raise ValueError(f"a fenced pipeline has at most {MOST_WORDS} words: split it")
        self._words += len(words) + 1
        self._noted.append(words)
        self._touched.update(dict.fromkeys(keys))
        return self

    def _take(self) -> tuple[list[tuple[bytes, ...]], list[bytes]]:
        """What was noted and the keys it touches; forgotten here."""
        noted, touched = self._noted, list(self._touched)
        self._noted, self._touched, self._words = [], {}, 0
        return noted, touched
