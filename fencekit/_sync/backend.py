"""What the locks, guards and gates of one client share: links, heartbeat and waiting room.

Rules this module obeys: a backend belongs to one client, one event loop and one process; it is made
when first needed and forgotten when nothing uses it, so nothing is inherited over a fork.
"""

from __future__ import annotations

import weakref
from typing import Any

from fencekit import _policy
from fencekit._sync.heartbeat import Heartbeat
from fencekit._sync.store import RedisStore
from fencekit._sync.waiting import WaitingRoom
from fencekit._lease import Lease
from fencekit._seam import threads as seam
from fencekit.keys import KeySpace

_backends: weakref.WeakValueDictionary[tuple[Any, ...], Backend] = weakref.WeakValueDictionary()

# Backends of a forking parent. They are not touched, nor dropped: closing their connections here
# could reach into an event loop's selector that both processes share.
_inherited: list[Backend] = []


class Backend:
    """One client's store, heartbeat and waiting room."""

    def __init__(self, client: Any, keys: KeySpace) -> None:
        self.pid = _policy.pid()
        self._client = client
        link = seam.Link(client)
        self.store = RedisStore(link, keys)
        self.heartbeat = Heartbeat(link, self.store)
        self.room = WaitingRoom(link)
        # Their workers keep this alive: who comes while they run shares them.
        self.heartbeat.owner = self.room.owner = self
        self._held: weakref.WeakValueDictionary[bytes, Lease] = weakref.WeakValueDictionary()

    def keep_in_mind(self, lease: Lease) -> None:
        """Remember who holds this here, to notice a holder that waits for itself."""
        for subject in lease.subjects:
            self._held[subject.key] = lease

    def waits_for_itself(self, key: bytes) -> bool:
        """Whether the task or thread that asks holds this already."""
        lease = self._held.get(key)
        return lease is not None and lease.alive and lease.task is seam.current_task()


class Backends:
    """Finds the backend of a client for whoever asks now: this loop, this process."""

    def __init__(self, client: Any, prefix: str, user: str) -> None:
        seam.check_client(client, user)
        self.keys = KeySpace(prefix)
        self._client = client
        self._prefix = prefix
        self._found: tuple[tuple[int, int, int], Backend] | None = None

    def get(self) -> Backend:
        """The backend to use now."""
        identity = seam.identity(self._client)
        found = self._found
        if found is not None and found[0] == identity:
            return found[1]
        seam.check_adopted(self._client)
        name = (*identity, self._prefix)
        with _policy.mutex():
            backend = _backends.get(name)
            if backend is None:
                backend = _backends[name] = Backend(self._client, self.keys)
        if found is not None and found[1].pid != backend.pid:
            _inherited.append(found[1])
        self._found = (identity, backend)
        return backend

    @property
    def client(self) -> Any:
        """The client that was given."""
        return self._client
