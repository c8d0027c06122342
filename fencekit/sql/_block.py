"""Context managers for both kinds of connections, which join a transaction or begin one.

Rules this module obeys:

* Whoever began a transaction ends it: a block that joined one only looks whether it is still there.
* A body that returns although its transaction is gone is told so. (Raw SQL that ends it, SQLAlchemy
  does not notice, and neither do we.)
* What a block began is ended, whatever goes wrong at its end.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Generic, TypeVar

from sqlalchemy.exc import PendingRollbackError

from fencekit.sql._running import AnyAsyncConnection, AnyConnection, is_async, run

C = TypeVar("C", bound=AnyConnection | AnyAsyncConnection)


@contextmanager
def unless_told(error: BaseException | None) -> Iterator[None]:
    """Let what fails while an error is under way be raised instead of it, where it says more.

    A cancellation goes on, and so does the error that ended the transaction.
    """
    try:
        yield
    except PendingRollbackError:
        if error is None:
            raise
    except Exception:
        if error is None or isinstance(error, Exception):
            raise


class Block(ABC, Generic[C]):
    """``with`` on a blocking connection or session, ``async with`` on one of asyncio's; once."""

    def __init__(self, connection: C) -> None:
        self._async = is_async(connection)
        self._connection = connection
        self._used = False
        self._begun: Any = None
        self._transaction: Any = None
        self._callers_savepoint: Any = None

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

    def _enter_blocking(self) -> None:
        if self._async:
            raise TypeError("this connection is asyncio's: use 'async with'")
        self._use()
        run(self._connection, self._start)

    async def _enter_asyncio(self) -> None:
        if not self._async:
            raise TypeError("this connection is a blocking one: use 'with'")
        self._use()
        await run(self._connection, self._start)

    def _use(self) -> None:
        if self._used:
            name = type(self).__name__
            raise RuntimeError(f"this {name} was entered before: make a new one for each 'with'")
        self._used = True

    def _start(self, given: Any) -> None:
        if given.in_transaction():
            self._callers_savepoint = given.get_nested_transaction()
        else:
            self._begun = given.begin()
            self._begun.__enter__()
        self._transaction = given.get_transaction()
        try:
            self._prepare(given)
        except BaseException:
            self._end(*sys.exc_info())
            raise

    def _finish(self, given: Any, kind: Any, error: Any, traceback: Any) -> None:
        try:
            intact = self._intact(given)
            with unless_told(error):
                self._complete(given, failed=kind is not None or not intact)
            if kind is None and not intact:
                raise RuntimeError(
                    "the transaction of this block was ended inside it, by a commit, a rollback or "
                    "a flush that failed, so what came after is not protected: roll that back, and "
                    "commit or roll back outside the block"
                )
        except BaseException:
            self._end(*sys.exc_info())
            raise
        self._end(kind, error, traceback)

    def _intact(self, given: Any) -> bool:
        """Whether the transaction of the beginning is open, with the savepoint it was in."""
        return self._goes_on(given) and (
            self._callers_savepoint is None or self._callers_savepoint.is_active
        )

    def _goes_on(self, given: Any) -> bool:
        """Whether the transaction of the beginning is open, whatever became of savepoints."""
        return given.get_transaction() is self._transaction and self._transaction.is_active

    def _end(self, kind: Any, error: Any, traceback: Any) -> None:
        """Commit the transaction, or roll it back after an error; nothing if it is not ours."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.__exit__(kind, error, traceback)

    @abstractmethod
    def _prepare(self, given: Any) -> None:
        """What is to be done once a transaction is open."""

    def _complete(self, given: Any, *, failed: bool) -> None:
        """What is to be done before the transaction ends; it may have ended if the body failed."""
