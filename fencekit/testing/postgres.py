"""One private PostgreSQL server, started for a test and gone after it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

from ._account import account_for_root, folder_for
from ._postgres_binary import PostgresBinaries, find_postgres
from ._postgres_data import environment, template
from ._postgres_process import PostgresProcess, drop_shared_memory, is_ready, serves
from ._process import HOST, OwnProcess, spawn
from ._server import PrivateServer


class PostgresServer(PrivateServer):
    """A real PostgreSQL server of your own: `start` it, hurt it, and `stop` leaves nothing of it.

    A commit outlives `kill`, because the system keeps what a killed process wrote. With `durable`
    it is on disk before the reply (`fsync`), as it must be to outlive the machine's crash, and
    takes as long as it does on a server that is in earnest. `settings` are those of
    ``postgresql.conf``.

    The user is ``postgres``, a superuser, and there is no password: whoever can connect to
    127.0.0.1 can use the server. Started by root, it runs as the user ``nobody``.

    Raises `ServerNotFound` if there is no binary, `ServerError` if the server does not come up.

    >>> import psycopg
    >>> from fencekit.testing import PostgresServer
    >>> with PostgresServer(settings={"log_statement": "all"}) as server:
    ...     with psycopg.connect(server.url) as connection:
    ...         _ = connection.execute("CREATE TABLE t AS SELECT 7 AS n")
    ...     server.kill()
    ...     _ = server.restart()
    ...     with psycopg.connect(server.url) as connection:
    ...         connection.execute("SELECT n FROM t").fetchone()
    (7,)
    """

    _clean_end = signal.SIGINT  # "fast": SIGTERM would wait for clients to leave

    def __init__(
        self,
        *,
        binaries: PostgresBinaries | None = None,
        port: int | None = None,
        settings: Mapping[str, str] | None = None,
        durable: bool = False,
    ) -> None:
        self.binaries = binaries or find_postgres()
        super().__init__(str(self.binaries), port)
        self.settings: Mapping[str, str] = {"fsync": "on" if durable else "off", **(settings or {})}

    @property
    def version(self) -> tuple[int, ...]:
        """The server's version."""
        return self.binaries.version

    @property
    def url(self) -> str:
        """The URL for clients, as libpq and most drivers understand it."""
        return f"postgresql://postgres@{self.host}:{self.port}/postgres"

    # -- inside ----------------------------------------------------------------------------------

    def _new_folder(self) -> Path:
        return folder_for(account_for_root())

    def _fill(self, private: Path) -> None:
        template(self.binaries).copy_to(private / "data")

    def _clear(self, private: Path) -> None:
        drop_shared_memory(private / "data")

    def _spawn(self, private: Path, fresh: bool) -> OwnProcess:
        made = template(self.binaries)
        settings = {
            "listen_addresses": HOST,
            "port": str(self.port),
            "unix_socket_directories": "",  # a path may be too long for one, and the port is enough
            "dynamic_shared_memory_type": "mmap",  # files in the data folder, gone with it
            "shared_buffers": "16MB",
            **self.settings,
        }
        argv = [str(made.programs / "postgres"), "-D", str(private / "data")]
        for name, value in settings.items():
            argv += ["-c", f"{name}={value}"]
        popen = spawn(
            argv, Path("/"), private / "log", environment=environment(), account=made.account
        )
        return PostgresProcess(popen)

    def _ready(self, pid: int, timeout: float, begun: int) -> bool:
        return is_ready(self._folder / "data", pid) and serves(self.port, timeout)
