"""Runs measurements for the program that started it: a JSON line in, a JSON line out.

``{"call": "timing:loop", "args": {...}}`` calls that function of ``drivers`` with the contender as
its first argument. ``open`` chooses the contender; ``plain`` calls a function that wants none.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any


def _find(where: str) -> Any:
    module, name = where.split(":")
    return getattr(importlib.import_module(module), name)


class Worker:
    """One contender, and what is asked about it."""

    def __init__(self) -> None:
        self.bench: Any = None

    def answer(self, order: dict[str, Any]) -> Any:
        arguments = order.get("args", {})
        if "open" in order:
            self.bench = _find(f"contenders.{order['open']}")(**arguments)
            return None
        if "plain" in order:
            return _find(f"drivers.{order['plain']}")(**arguments)
        return _find(f"drivers.{order['call']}")(self.bench, **arguments)


def _say(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__


def main() -> None:
    if "--gevent" in sys.argv:
        monkey: Any = importlib.import_module("gevent.monkey")
        monkey.patch_all()
    # A library that prints would spoil the answers: it prints to the error stream.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        try:
            found = {"value": worker.answer(json.loads(line))}
        except Exception as error:
            found = {"error": _say(error)}
        answers.write(json.dumps(found) + "\n")
        answers.flush()
    # Threads of a library, or clients that wait, are no reason to stay.
    os._exit(0)


if __name__ == "__main__":
    main()
