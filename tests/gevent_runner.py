"""Run pytest with the standard library replaced by gevent's cooperative one.

    python tests/gevent_runner.py tests/_sync

Blocking calls and threads then are greenlets of one thread, as in a gevent worker. The patch
has to come before anything else is imported: who imported the real socket or lock keeps it.
"""

# ruff: noqa: E402
from gevent import monkey

monkey.patch_all()

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from gevent.threadpool import ThreadPool

# A test that hangs is ended by faulthandler, which watches from a thread of its own, outside
# gevent: the signal of pytest-timeout would be raised in whichever greenlet happens to run.
OPTIONS = [
    "--override-ini=timeout=0",
    "--override-ini=faulthandler_timeout=120",
    "--override-ini=faulthandler_exit_on_timeout=true",
    "-pno:xdist",
]


class NativeThread:
    """As much of `threading.Thread` as the proxy needs, but a real one.

    The proxy is the network, not a part of what is tested. As a greenlet, its event loop would
    be a running loop of the one thread that the tests are in, where blocking calls are refused.
    """

    def __init__(self, *, target: Callable[[], object], name: str, daemon: bool) -> None:
        self._target = target
        self._pool = ThreadPool(1)

    def start(self) -> None:
        self._done = self._pool.spawn(self._target)

    def join(self, timeout: float | None = None) -> None:
        self._done.get(timeout=timeout)
        self._pool.kill()


def pytest_configure() -> None:
    # Not earlier: pytest wants to be the first to import what has plugins of its own.
    from fencekit.testing import _loop

    _loop.threading = SimpleNamespace(Thread=NativeThread)


if __name__ == "__main__":
    sys.exit(pytest.main([*OPTIONS, *sys.argv[1:]], plugins=[sys.modules[__name__]]))
