"""The `fencekit` command.

Rules of this package: it uses fencekit's public names only, `import fencekit` does not import it,
and a subcommand imports what is heavy when it runs, not when its options are declared.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fencekit import __version__

from . import demo

# A subcommand is a module or package with `declare(subparsers)`, which sets `run=` on its parser:
# a function from the parsed arguments to an exit status.
COMMANDS = (demo,)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status; without one, print the help.

    >>> main(["--version"])
    Traceback (most recent call last):
    ...
    SystemExit: 0
    """
    parser = argparse.ArgumentParser(
        prog="fencekit",
        description="Idempotency guards, fenced locks and fence gates for Python services.",
    )
    parser.add_argument("--version", action="version", version=f"fencekit {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        command.declare(subparsers)
    arguments = parser.parse_args(argv)
    if not hasattr(arguments, "run"):
        parser.print_help()
        return 0
    status: int = arguments.run(arguments)
    return status
