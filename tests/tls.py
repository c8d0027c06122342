"""TLS before servers that speak none: the tests' clients connect to it, it connects to the server.

Chosen by FENCEKIT_TEST_TOPOLOGY=tls. A proxy of `fencekit.testing` stands behind it, so what it
cuts, holds and swallows is what the server said, and what it refuses is closed here.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import ssl
import tempfile
from functools import lru_cache
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import trustme

from fencekit.testing import proxy
from fencekit.testing._clients import Clients

_authority = trustme.CA()


@lru_cache
def _thread() -> Any:
    thread = proxy.LoopThread("tests-tls")
    thread.start()
    return thread


@lru_cache
def _trusted() -> str:
    file = tempfile.NamedTemporaryFile(suffix=".pem")  # noqa: SIM115 - as long as the process
    atexit.register(file.close)
    file.write(_authority.cert_pem.bytes())
    file.flush()
    # redis-py loads the system's hundred authorities for each connection, which costs 30 ms.
    os.environ.update(SSL_CERT_FILE=file.name, SSL_CERT_DIR=os.devnull)
    return file.name


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(65536):
        writer.write(piece)
        await writer.drain()


async def _serve(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    ends = [writer]
    with contextlib.suppress(OSError, asyncio.CancelledError):
        from_server, to_server = await asyncio.open_connection("127.0.0.1", port)
        ends.append(to_server)
        ways = [
            asyncio.ensure_future(_pass(reader, to_server)),
            asyncio.ensure_future(_pass(from_server, writer)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
    for end in ends:
        end.transport.abort()


@lru_cache
def _before(port: int) -> int:
    """The port that speaks TLS before a port of this machine."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _authority.issue_cert("127.0.0.1").configure_cert(context)

    async def listen() -> int:
        server = await asyncio.start_server(
            lambda reader, writer: _serve(port, reader, writer), "127.0.0.1", 0, ssl=context
        )
        bound: int = server.sockets[0].getsockname()[1]
        return bound

    opened: int = _thread().run(listen())
    return opened


class Secured(Clients):
    """Makes clients that come by TLS to a server or proxy."""

    def __init__(self, url: str, port: int) -> None:
        parts = urlsplit(url)
        place = f"{parts.netloc.rpartition(':')[0]}:{_before(port)}"
        query = f"ssl_ca_certs={quote(_trusted())}"
        self._url = urlunsplit(("rediss", place, parts.path, query, ""))

    @property
    def url(self) -> str:
        return self._url
