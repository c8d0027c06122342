"""``python -m benchmarks``: starts a server, runs the cases, shows and writes what they found."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import charts, facts, report
from benchmarks.cases import CASES
from benchmarks.environments import HERE
from benchmarks.race import Settings
from benchmarks.results import Result, Row, result_of
from fencekit.testing import RedisServer

ROUNDS, QUICK_ROUNDS = 25, 7


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure fencekit beside its peers."
    )
    parser.add_argument("--quick", action="store_true", help="two to three minutes")
    parser.add_argument(
        "--case", action="append", choices=list(CASES), default=[], help="only this one; may repeat"
    )
    parser.add_argument("--rounds", type=int, default=0, help="chunks of each contender")
    parser.add_argument("--out", type=Path, default=HERE / "out", help="folder of what is written")
    parser.add_argument("--no-peers", action="store_true", help="make no environments")
    parser.add_argument(
        "--markdown", action="store_true", help="only show the results of the last run, as tables"
    )
    arguments = parser.parse_args()
    if arguments.rounds < 0:
        parser.error("--rounds is a positive number")
    return arguments


def _run(arguments: argparse.Namespace) -> int:
    results: list[Result] = []
    with RedisServer() as server, server.client() as client:
        settings = Settings(
            server.url,
            client,
            arguments.quick,
            arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS),
            not arguments.no_peers,
        )
        for number in arguments.case or CASES:
            title, case = CASES[number]
            result = Result(number, title)
            started = time.monotonic()
            try:
                result.rows = case(settings)
            except Exception as error:  # one case that breaks costs itself, not the others
                result.rows = [Row("this case", error=f"{type(error).__name__}: {error}", own=True)]
            result.seconds = time.monotonic() - started
            results.append(result)
            report.show(result)
        known = facts.facts(server, settings.peers)
    arguments.out.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        "facts": {**known, "quick": settings.quick, "rounds": settings.rounds},
        "cases": [result.plain() for result in results],
    }
    path = arguments.out / "results.json"
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
    tables = arguments.out / "results.md"
    tables.write_text(report.markdown(content["facts"], results), "utf-8")
    written = [path, tables, *charts.draw(results, arguments.out)]
    print("Written: " + ", ".join(file.name for file in written) + f" in {arguments.out}")
    missed = [row for result in results for row in result.rows if row.met is False]
    broken = [row for result in results for row in result.rows if row.error and row.own]
    print(f"Targets missed: {len(missed)}. Errors of fencekit: {len(broken)}.")
    return 1 if broken else 0


def main() -> int:
    """Run the program; the exit status says whether fencekit worked, not how fast."""
    arguments = _arguments()
    if arguments.markdown:
        content = json.loads((arguments.out / "results.json").read_text("utf-8"))
        results = [result_of(plain) for plain in content["cases"]]
        print(report.markdown(content["facts"], results), end="")
        return 0
    return _run(arguments)


def _terminated(*_: object) -> None:
    # As with Ctrl-C, what was started ends first.
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
