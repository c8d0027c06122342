"""``python -m benchmarks.profiled``: where the time of one operation goes, by pyinstrument."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from benchmarks.child.contenders import fencekit_async, fencekit_blocking
from benchmarks.child.drivers import timing
from fencekit.testing import RedisServer


def main() -> int:
    """Profile one operation of one twin, many times over."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profiled", description=__doc__)
    parser.add_argument("op", choices=["pair", "job", "write", "crowd"])
    parser.add_argument("--await", action="store_true", dest="coroutines", help="the async twin")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--interval", type=float, default=0.0005, help="seconds between samples")
    arguments = parser.parse_args()
    try:
        pyinstrument: Any = importlib.import_module("pyinstrument")
    except ImportError:
        print("pyinstrument is not installed: it is in the dependency group `bench`.")
        return 1
    crowd = arguments.op == "crowd"
    kind: Any = (
        fencekit_async.Async if arguments.coroutines or crowd else fencekit_blocking.Blocking
    )
    with RedisServer() as server:
        bench = kind(server.url)
        profiler = pyinstrument.Profiler(interval=arguments.interval, async_mode="disabled")
        with profiler:
            if crowd:
                timing.gather(bench, 200, 100)
            else:
                fresh = arguments.op == "job"
                timing.loop(bench, arguments.op, 10**6, arguments.seconds, fresh)
        print(profiler.output_text(color=sys.stdout.isatty(), show_all=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
