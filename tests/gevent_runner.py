"""Run pytest with the standard library replaced by gevent's cooperative one.

    python tests/gevent_runner.py 3 tests/_sync

The number is that of processes; each runs its share of the tests. (pytest-xdist talks to its
workers in ways that the patch would change.) Blocking calls and threads then are greenlets of
one thread, as in a gevent worker. The patch has to come before anything else is imported: who
imported the real socket or lock keeps it.
"""

# ruff: noqa: E402
from gevent import monkey

monkey.patch_all()

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from typing import Any

import gevent
import pytest
import uvloop

SHARE = "FENCEKIT_TEST_SHARE"
# A test that hangs is ended by faulthandler, which watches from a thread of its own, outside
# gevent: the signal of pytest-timeout would be raised in whichever greenlet happens to run.
OPTIONS = [
    "--override-ini=timeout=0",
    "--override-ini=faulthandler_timeout=120",
    "--override-ini=faulthandler_exit_on_timeout=true",
    "-pno:xdist",
    "-mnot native_threads",
]


class NativeLoop:
    """`fencekit.testing`'s event loop in a thread, for its proxy, out of gevent's reach.

    The proxy is the network, not a part of what is tested. As a greenlet, its loop would be the
    running loop of the one thread that the tests are in, and blocking calls are refused where a
    loop runs. So the thread is a real one, the loop brings its own sockets, and the two sides
    share no lock: the tests look again and again whether the loop is done.
    """

    def __init__(self, name: str) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def running(self) -> bool:
        return self._loop is not None

    def start(self) -> None:
        self._loop = uvloop.new_event_loop()
        monkey.get_original("_thread", "start_new_thread")(self._loop.run_forever, ())
        self.call(lambda: None)

    def stop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
            _until(lambda: not loop.is_running())
            loop.close()

    def call(self, change: Callable[[], Any]) -> Any:
        async def once() -> Any:
            return change()

        return self.run(once())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        loop = self._loop
        if loop is None:
            work.close()
            raise RuntimeError("start the proxy first")
        done: list[asyncio.Task[Any]] = []
        loop.call_soon_threadsafe(lambda: loop.create_task(work).add_done_callback(done.append))
        _until(lambda: done)
        return done[0].result()


def _until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the proxy did not answer within ten seconds")
        gevent.sleep(0.001)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    share, shares = map(int, os.environ[SHARE].split("/"))
    mine = {item.nodeid for item in sorted(items, key=lambda item: item.nodeid)[share::shares]}
    items[:] = [item for item in items if item.nodeid in mine]


def pytest_configure() -> None:
    # Not earlier: pytest wants to be the first to import what has plugins of its own.
    from fencekit.testing import proxy

    proxy.LoopThread = NativeLoop  # type: ignore[assignment, misc]


def in_shares(shares: int, arguments: list[str]) -> int:
    """Run all shares at once; what each says is printed when it has ended."""
    with contextlib.ExitStack() as stack:
        running = []
        for share in range(shares):
            said = stack.enter_context(tempfile.TemporaryFile("w+"))
            process = subprocess.Popen(
                [sys.executable, __file__, *arguments],
                env={**os.environ, SHARE: f"{share}/{shares}"},
                stdout=said,
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            running.append((process, said))
        for process, said in running:
            process.wait()
            said.seek(0)
            print(said.read(), flush=True)
    codes = {process.returncode for process, _ in running}
    codes -= {pytest.ExitCode.NO_TESTS_COLLECTED} if len(codes) > 1 else set()
    return int(codes != {pytest.ExitCode.OK})


if __name__ == "__main__":
    if SHARE not in os.environ:
        sys.exit(in_shares(int(sys.argv[1]), sys.argv[2:]))
    sys.exit(pytest.main([*OPTIONS, *sys.argv[1:]], plugins=[sys.modules[__name__]]))
