"""`fencekit demo`: a worker freezes, another takes over, and the stale writes are refused.

It shows the whole point in a few seconds, with real processes, on a private server of its own or,
with ``--url``, on yours. The worker to read is in `worker`; the order of events in `story`.
"""

from __future__ import annotations

import argparse
import math
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import _SubParsersAction

ABOUT = """\
Two worker processes get the same job. The first is frozen in the middle of it (SIGSTOP), its
lease runs out, the second takes over with a larger token and finishes. Then the first is
continued, and tries to write to Redis and to a SQLite row: both refuse its older token.
A redelivery of the job returns the remembered result."""

STATUSES = """\
exit status: 0 it went as described, 1 it did not (a stale write was accepted; with --unsafe: the
overwrite did not happen), 2 wrong usage or no server. Colours: NO_COLOR is respected."""


def declare(subparsers: _SubParsersAction[Any]) -> None:
    """Add the subcommand and its options."""
    parser = subparsers.add_parser(
        "demo",
        help="watch a frozen worker's stale writes being refused (a few seconds)",
        description=ABOUT,
        epilog=STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--url",
        type=_url,
        help="run on your own Redis or Valkey (redis://, rediss:// or unix://) instead of a "
        "private one; its keys have a random prefix and are removed afterwards",
    )
    parser.add_argument(
        "--unsafe",
        action="store_true",
        help="the same without tokens, with an ordinary lock (SET NX PX): see the overwrite",
    )
    parser.add_argument(
        "--html", metavar="FILE", help="also write the timeline as one page with a chart"
    )
    parser.add_argument(
        "--plain", action="store_true", help="plain text also on a terminal (the default in a pipe)"
    )
    parser.add_argument(
        "--lease",
        type=_lease,
        default=1.0,
        metavar="SECONDS",
        help="how long a lease is, 0.8 to 60 (default: 1)",
    )
    parser.set_defaults(run=_run)


def _url(text: str) -> str:
    if not re.match(r"(rediss?|unix)://\S+$", text):
        # argparse would print the text itself, password and all.
        raise argparse.ArgumentTypeError("a URL starts with redis://, rediss:// or unix://")
    return text


def _lease(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.8 <= seconds <= 60:
        raise argparse.ArgumentTypeError(f"seconds from 0.8 to 60, not {text!r}")
    return seconds


def _run(arguments: argparse.Namespace) -> int:
    from .show import show

    return show(
        url=arguments.url,
        safe=not arguments.unsafe,
        page=arguments.html,
        plain=arguments.plain,
        lease=arguments.lease,
    )
