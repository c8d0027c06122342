"""Context managers for both kinds of connections, which join a transaction or begin one.

Rules this module obeys:

* Whoever began a transaction ends it: a block that joined one only looks whether it is still there.
* What was promised for the block holds until its end, or its end raises.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, Generic, TypeVar

from fencekit.sql._running import AnyAsyncConnection, AnyConnection, is_async, run

C = TypeVar("C", bound=AnyConnection | AnyAsyncConnection)


class Block(ABC, Generic[C]):
    """``with`` on a blocking connection or session, ``async with`` on one of asyncio's."""

    def __init__(self, connection: C) -> None:
        self._async = is_async(connection)
        self._connection = connection
        self._begun: Any = None
        self._joined: tuple[Any, Any] | None = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        run(self._connection, lambda given: self._finish(given, kind, error, traceback))

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await run(self._connection, lambda given: self._finish(given, kind, error, traceback))

    def _blocking(self) -> None:
        if self._async:
            raise TypeError("this connection is asyncio's: use 'async with'")
        run(self._connection, self._start)

    async def _waiting(self) -> None:
        if not self._async:
            raise TypeError("this connection is a blocking one: use 'with'")
        await run(self._connection, self._start)

    def _start(self, given: Any) -> None:
        if given.in_transaction():
            self._joined = transactions(given)
        else:
            self._begun = given.begin()
            self._begun.__enter__()
        try:
            self._enter(given)
        except BaseException:
            self._end(*sys.exc_info())
            raise

    def _finish(self, given: Any, kind: Any, error: Any, traceback: Any) -> None:
        if kind is None and self._joined is not None and transactions(given) != self._joined:
            raise RuntimeError(
                "the transaction that this block joined was ended inside it, so what came after is "
                "not protected: commit or roll back outside the block"
            )
        try:
            self._leave(given, failed=kind is not None)
        except BaseException:
            self._end(*sys.exc_info())
            raise
        self._end(kind, error, traceback)

    def _end(self, kind: Any, error: Any, traceback: Any) -> None:
        """Commit the transaction, or roll it back after an error; nothing if it is not ours."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.__exit__(kind, error, traceback)

    @abstractmethod
    def _enter(self, given: Any) -> None:
        """What is to be done once a transaction is open."""

    def _leave(self, given: Any, *, failed: bool) -> None:
        """What is to be done before the transaction ends."""


def transactions(given: Any) -> tuple[Any, Any]:
    """The transaction that is open, and the savepoint in it."""
    return given.get_transaction(), given.get_nested_transaction()
