"""An event loop in a thread of its own, driven from any other thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ._binary import ServerError

T = TypeVar("T")


class LoopThread:
    """Runs work in its loop and hands back the outcome; `stop` leaves no thread behind."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        return self._loop is not None

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        self.run(loop.shutdown_default_executor())
        self._loop = self._thread = None
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()

    def call(self, change: Callable[[], T]) -> T:
        """Call a function in the loop and return when it has returned."""

        async def once() -> T:
            return change()

        return self.run(once())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop, ten seconds at most."""
        if self._loop is None:
            work.close()
            raise ServerError("This proxy is not running: start() it first.")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)
