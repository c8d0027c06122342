"""Run pytest with the standard library replaced by gevent's cooperative one.

    python tests/gevent_runner.py tests/_sync

Blocking calls and threads then are greenlets of one thread, as in a gevent worker. The patch
has to come before anything else is imported: who imported the real socket or lock keeps it.
"""

import sys

from gevent import monkey

monkey.patch_all()

import pytest  # noqa: E402

# A test that hangs is ended by faulthandler, which watches from a thread of its own, outside
# gevent: the signal of pytest-timeout would be raised in whichever greenlet happens to run.
OPTIONS = [
    "-o",
    "timeout=0",
    "-o",
    "faulthandler_timeout=120",
    "-o",
    "faulthandler_exit_on_timeout=true",
    "-p",
    "no:xdist",
]

if __name__ == "__main__":
    sys.exit(pytest.main([*OPTIONS, *sys.argv[1:]]))
