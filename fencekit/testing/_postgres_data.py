"""Data folders for private PostgreSQL servers: one `initdb` for each binary, and copies of it.

Rules of this module:

1. What is made once is kept for this process alone, and removed when it exits. A forked child makes
   its own.
2. As root, everything that the server touches belongs to the user `nobody`, the programs included
   if it could not reach them where they are.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

from ._account import Account, account_for_root, as_account, folder_for, give
from ._binary import ServerError
from ._postgres_binary import PROGRAMS, PostgresBinaries


@dataclass(frozen=True)
class Template:
    """Programs that the account can run, and a data folder that no server has used."""

    top: Path
    programs: Path
    account: Account | None

    def copy_to(self, target: Path) -> None:
        """Make a data folder."""
        shutil.copytree(self.top / "data", target, symlinks=True)
        give(target, self.account)


def template(binaries: PostgresBinaries) -> Template:
    """This process's template for these binaries; the first one takes a second or two."""
    return _templates.get(binaries)


def environment() -> dict[str, str]:
    """Ours, without what PostgreSQL's programs would take as settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return {**kept, "LC_ALL": "C"}


class _Templates:
    def __init__(self) -> None:
        self.forget()
        atexit.register(self.remove)  # now, so that it runs after the hooks that stop servers
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[PostgresBinaries, Template] = {}

    def get(self, binaries: PostgresBinaries) -> Template:
        with self._lock:
            if binaries not in self._made:
                self._made[binaries] = _make(binaries)
            return self._made[binaries]

    def remove(self) -> None:
        for made in self._made.values():
            shutil.rmtree(made.top, ignore_errors=True)
        self.forget()


_templates = _Templates()


def _make(binaries: PostgresBinaries) -> Template:
    account = account_for_root()
    top = folder_for(account)
    try:
        programs = Path(binaries.folder)
        if not _can_run(programs, account):
            programs = _copy_programs(programs, top / "programs", account)
        (top / "data").mkdir(0o700)
        give(top / "data", account)
        _initdb(programs, top / "data", account)
    except BaseException as error:
        shutil.rmtree(top, ignore_errors=True)
        if isinstance(error, (OSError, subprocess.SubprocessError)):
            raise ServerError(f"{binaries} cannot be set up: {error}") from error
        raise
    return Template(top, programs, account)


def _can_run(programs: Path, account: Account | None) -> bool:
    if account is None:
        return True
    try:
        return all(not _run([programs / name, "-V"], account).returncode for name in PROGRAMS)
    except PermissionError:
        return False


def _copy_programs(programs: Path, target: Path, account: Account | None) -> Path:
    """Copy programs, and what they look for by its place relative to theirs.

    That is their own libraries and files, and the libraries that a wheel keeps beside its package.
    """
    prefix = programs.parent
    package = prefix.parent
    wanted = [prefix / name for name in (programs.name, "lib", "lib64", "share")]
    wanted += [package / ".dylibs", package.parent / f"{package.name}.libs"]
    for source in wanted:
        if source.is_dir():
            shutil.copytree(source, target / source.relative_to(package.parent), symlinks=True)
    give(target, account)
    return target / programs.relative_to(package.parent)


def _initdb(programs: Path, data: Path, account: Account | None) -> None:
    options = ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"]
    done = _run([programs / "initdb", "-D", data, *options], account)
    if done.returncode != 0:
        said = done.stdout.decode(errors="replace")[-4000:]
        raise ServerError(f"{programs / 'initdb'} failed. It said:\n{said}")


def _run(command: list[str | Path], account: Account | None) -> subprocess.CompletedProcess[bytes]:
    done: subprocess.CompletedProcess[bytes] = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",  # the account may not be able to enter ours
        env=environment(),
        timeout=120,
        check=False,
        **as_account(account),
    )
    return done
