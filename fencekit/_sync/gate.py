"""The fence gate: Redis writes that an older token cannot make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

from fencekit import _policy, _replies
from fencekit._sync.backend import Backends
from fencekit._commands import Recorder, encode
from fencekit.errors import FencedOutError
from fencekit.events import FencedOut, Listener, Listeners
from fencekit.keys import KeySpace, check_name, key_slot
from fencekit.records import FenceToken

Duration: TypeAlias = float | timedelta


class FenceGate:
    """A Redis write that carries an older token is refused, in the same step as the write.

    A resource's newest token is the newest one *granted or accepted*: older holders are refused
    from the moment of a new grant. Equal tokens pass, so one lease writes as often as it likes.
    Writes that do not come through a gate are not protected.

    ``client``, ``prefix``, ``timeout``, ``retention`` and ``listeners`` are those of ``DistributedLock``;
    the prefix has to be the same.

    >>> gate = FenceGate(client)
    >>> with lock.hold("order:8", ttl=5) as handle:
    ...     gate.set_if_fresh(handle.token, "order:8:status", "packed")
    >>> gate.set_if_fresh(FenceToken(1, "order:8"), "order:8:status", "late")
    Traceback (most recent call last):
    ...
    fencekit.errors.FencedOutError: token 1 for 'order:8' is older than ...
    """

    def __init__(
        self,
        client: Any,
        *,
        prefix: str = "fencekit",
        timeout: Duration = 10.0,
        retention: Duration = _policy.RETENTION,
        listeners: Iterable[Listener] = (),
    ) -> None:
        self._backends = Backends(client, prefix, type(self).__name__)
        self._timeout = _policy.seconds(timeout, "timeout")
        self._retention = _policy.seconds(retention, "retention")
        self._listeners = Listeners(listeners)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(prefix={self._backends.keys.prefix!r})"

    def set_if_fresh(
        self, token: FenceToken, key: str, value: Any, *, ttl: Duration | None = None
    ) -> None:
        """Set the Redis key, exactly as given, if the token is fresh; else change nothing.

        ``value`` is text, bytes or a number; ``ttl`` (seconds or timedelta) is the key's expiry. On
        a Cluster the key must lie in the slot of the token's resource: see ``key``.

        Raises ``FencedOutError`` with both tokens, ``ValueError`` for one of fencekit's own keys.

        >>> with lock.hold("order:9", ttl=5) as handle:
        ...     gate.set_if_fresh(handle.token, "order:9:status", "sent", ttl=60)
        """
        _check_token(token)
        if not isinstance(key, (str, bytes)):
            raise TypeError(f"key is text or bytes, not {type(key).__name__}")
        words = [b"SET", encode(key), encode(value)]
        if ttl is not None:
            words += [b"PX", b"%d" % _policy.milliseconds(_policy.seconds(ttl, "ttl"))]
        self._write(token, [words], [words[1]])

    def check(self, token: FenceToken) -> None:
        """Raise ``FencedOutError`` if a newer token is known.

        For information only: a newer one may come right after.

        >>> gate.check(FenceToken(7, "order:10"))
        """
        _check_token(token)
        newest = self._newest(token)
        if token.value < newest:
            raise self._refused(token, newest)

    def check_and_advance(self, token: FenceToken) -> None:
        """Accept the token and refuse older ones from now on, or raise ``FencedOutError``.

        >>> gate.check_and_advance(FenceToken(7, "order:11"))
        >>> gate.current_max("order:11")
        7
        """
        _check_token(token)
        self._write(token, [], [])

    def current_max(self, resource: str, *, kind: str = "lock") -> int:
        """The newest token known for the resource, 0 if none.

        ``kind="job"`` asks for the token of a job's claim, with the idempotency key as resource.

        >>> gate.current_max("order:12")
        0
        """
        check_name(resource)
        return self._newest(FenceToken(1, resource, kind))

    def pipeline(self, token: FenceToken) -> FencePipeline:
        """Any Redis commands, applied all together and only if the token is fresh.

        Has redis-py's command methods. What was noted is sent by ``execute()``, at the latest at
        the end of the block. The commands run in one step; as in MULTI/EXEC, one that fails does
        not undo the others, and its error is raised. Replies are bytes, ints, None and lists.

        >>> with lock.hold("order:13", ttl=5) as handle:
        ...     with gate.pipeline(handle.token) as pipe:
        ...         _ = pipe.hset("order:13:row", mapping={"status": "sent"})
        ...         _ = pipe.incr("order:13:writes")
        ...         pipe.execute()
        [1, 1]
        """
        _check_token(token)
        return FencePipeline(self, token)

    def key(self, resource: str, name: str) -> str:
        """A key of your own that lies in the resource's Cluster slot.

        >>> gate.key("order:14", "status")
        '{order:14}:status'
        """
        check_name(name, "name")
        return f"{self._backends.keys.tag(resource)}:{name}"

    def _newest(self, token: FenceToken) -> int:
        deadline = _policy.now() + self._timeout
        return self._backends.get().store.newest(token, deadline=deadline)

    def _write(
        self, token: FenceToken, commands: Sequence[Sequence[bytes]], targets: Sequence[bytes]
    ) -> list[Any]:
        backend = self._backends.get()
        for word in {word for words in commands for word in words[1:]}.difference(targets):
            self._check_own(word)
        for target in targets:
            self._check_target(token, target, backend.store.clustered)
        answer = backend.store.write(
            token, commands, targets,
            retention=self._retention, deadline=_policy.now() + self._timeout,
        )  # fmt: skip
        if isinstance(answer, _replies.Stale):
            raise self._refused(token, answer.newest)
        return answer.replies

    def _check_own(self, word: bytes) -> None:
        if _owned(self._backends.keys, word):
            raise ValueError(
                f"{word.decode(errors='replace')!r} is one of fencekit's own keys: choose another"
            )

    def _check_target(self, token: FenceToken, target: bytes, clustered: bool) -> None:
        if not target:
            raise ValueError("a key to write is not empty")
        self._check_own(target)
        keys = self._backends.keys
        fence = keys.fence(token.resource)
        if clustered and key_slot(target) != key_slot(fence):
            raise ValueError(
                f"on a Cluster {target.decode(errors='replace')!r} must lie in the slot of "
                f"{token.resource!r}: name it {self.key(token.resource, 'status')!r} or the like"
            )

    def _refused(self, token: FenceToken, newest: int) -> FencedOutError:
        self._listeners.tell(FencedOut(token.resource, token.value, newest))
        return FencedOutError(
            f"token {token.value} for {token.resource!r} is older than {newest}: somebody else "
            "holds it now and nothing was written; stop working on it",
            resource=token.resource,
            token=token.value,
            current=newest,
        )


class FencePipeline(Recorder):
    """Commands for ``FenceGate.pipeline``."""

    def __init__(self, gate: FenceGate, token: FenceToken) -> None:
        super().__init__()
        self._gate = gate
        self._token = token

    def __enter__(self) -> FencePipeline:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None and len(self):
            self.execute()

    def execute(self) -> list[Any]:
        """Send what was noted; the replies in order. ``FencedOutError``: nothing was applied.

        >>> with gate.pipeline(FenceToken(7, "order:15")) as pipe:
        ...     _ = pipe.set("order:15:status", "sent").get("order:15:status")
        ...     pipe.execute()
        [b'OK', b'sent']
        """
        commands, keys = self._take()
        replies = self._gate._write(self._token, commands, keys)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies


def _owned(keys: KeySpace, target: bytes) -> bool:
    try:
        keys.name_of(target)
    except ValueError:
        return False
    return True


def _check_token(token: object) -> None:
    if not isinstance(token, FenceToken):
        hint = ": pass its .token" if hasattr(token, "token") else ""
        raise TypeError(f"this needs a FenceToken, not {type(token).__name__}{hint}")
    check_name(token.resource)
