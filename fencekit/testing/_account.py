"""The user that a server runs as, where it refuses to run as root.

Rules of this module:

1. Only root changes the user; anybody else's servers are their own.
2. What such a server must reach is given to it; no permission of an existing folder is changed.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._binary import ServerError


@dataclass(frozen=True)
class Account:
    """A user and the one group that its processes have."""

    uid: int
    gid: int


def account_for_root() -> Account | None:
    """The user `nobody` if this process is root, else None: no change of the user."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return None
    import pwd

    try:
        found = pwd.getpwnam("nobody")
    except KeyError:
        raise ServerError(
            "This server does not run as root, and there is no user `nobody` to run it as."
        ) from None
    return Account(found.pw_uid, found.pw_gid)


def as_account(account: Account | None) -> dict[str, Any]:
    """What `subprocess` takes to start a process as that user."""
    if account is None:
        return {}
    return {"user": account.uid, "group": account.gid, "extra_groups": []}


def give(path: Path, account: Account | None) -> None:
    """Make that user the owner of `path` and of everything in it."""
    if account is None:
        return
    for each in _walk(path):
        os.chown(each, account.uid, account.gid, follow_symlinks=False)


def _walk(top: Path) -> Iterator[str]:
    yield str(top)
    for folder, folders, files in os.walk(top):
        for name in (*folders, *files):
            yield os.path.join(folder, name)


def folder_for(account: Account | None) -> Path:
    """A new folder of ours that the user can pass through, and only we can list or change."""
    folder = Path(tempfile.mkdtemp(prefix="fencekit-"))
    if account is None:
        return folder
    if not can_pass(folder.parent, account):
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="fencekit-", dir="/tmp"))
    folder.chmod(0o711)
    return folder


def can_pass(folder: Path, account: Account) -> bool:
    """Whether the user can reach what is in `folder`, by the plain permissions."""
    folder = folder.resolve()
    return all(_may_execute(place.stat(), account) for place in (folder, *folder.parents))


def _may_execute(status: os.stat_result, account: Account) -> bool:
    if status.st_uid == account.uid:
        return bool(status.st_mode & stat.S_IXUSR)
    if status.st_gid == account.gid:
        return bool(status.st_mode & stat.S_IXGRP)
    return bool(status.st_mode & stat.S_IXOTH)
