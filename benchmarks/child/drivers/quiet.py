"""The collector of Python is off while a clock runs: its pauses would fall on whoever is there."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Collect now, and not again before the end."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
