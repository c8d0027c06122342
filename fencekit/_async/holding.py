"""A block under a lease: renewed while it runs, cancelled when it is lost, given back at its end.

Rules this module obeys: leaving never replaces the body's own exception or cancellation, and is
bounded in time; a lease that is known to be lost is not given back.
"""

from __future__ import annotations

from typing import Any

from fencekit._lease import Lease
from fencekit._seam import aio as seam
from fencekit.errors import FenceKitError, LeaseLost
from fencekit.events import ReleaseFailed, logger
from fencekit.records import LeaseState

LEAVE_SECONDS = 5.0
"""The longest that leaving a block waits for its release."""


class Guarded:
    """The lease of one block."""

    def __init__(self, lease: Lease, heartbeat: Any) -> None:
        self._lease = lease
        self._heartbeat = heartbeat
        lease.task = seam.current_task()
        self._scope = seam.Scope()
        self._scope.__enter__()
        lease.on_loss(self._scope.cancel)
        heartbeat.add(lease)

    def close(self, exc: tuple[Any, Any, Any]) -> bool:
        """End the block; true if it was cut short for the loss of its lease."""
        if self._lease.inherited:  # the scope is a parent's too, and so is its event loop
            return False
        try:
            return self._scope.__exit__(*exc)
        except (
            RuntimeError
        ):  # left in another task than entered: the lease is given back all the same
            return False

    async def leave(
        self, give_back: Any, *, though_late: bool = False, within: float = LEAVE_SECONDS
    ) -> LeaseLost | None:
        """Stop renewing and give back; how the lease was lost, if it was.

        `though_late` tries also when only the own clock has given the lease up. Takes no longer
        than `within` seconds, nor than the lease.
        """
        lease = self._lease
        if lease.inherited:  # before the heartbeat: a parent's thread may have held its mutex
            return None
        self._heartbeat.remove(lease)
        if lease.state is LeaseState.RELEASED:
            return None
        try:
            if not (though_late and lease.lapsed):
                lease.check()
            await seam.protected(give_back, min(within, lease.ttl))
        except LeaseLost as loss:
            return loss
        except FenceKitError as error:  # certain: what is there is not ours
            lease.lose(str(error))
            return LeaseLost(str(error), resource=lease.name, token=lease.token, reason=str(error))
        except Exception as error:
            logger.warning(
                "%r (token %d) could not be given back (%s); its lease ends within %.3f s",
                lease.name, lease.token, error, lease.ttl,
            )  # fmt: skip
            lease.tell(ReleaseFailed(lease.name, lease.token, str(error)))
        finally:
            self._heartbeat.remove(lease)
        return None


class ThreadBeats:
    """Renews by a thread, with a blocking client of its own."""

    def __init__(self, client: Any, prefix: str) -> None:
        from fencekit._sync.backend import Backends as BlockingBackends

        self._backends = BlockingBackends(client, prefix, "heartbeat=")

    def get(self) -> Any:
        """The heartbeat of this process."""
        return self._backends.get().heartbeat
