"""Write the sync twins of the async sources, or check them.

    python generate_sync.py            write every twin
    python generate_sync.py --check    print what differs; exit 1 if anything does

Rules this script obeys:

* Line N of a twin is line N of its source: a rule sees one line and never adds or drops one.
* Rules apply in the order of the table, each to what the ones before it left.
* A rule that changes nothing anywhere, an async word left in a twin, any byte of difference,
  a missing file and an extra file are errors.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent
TWINS = (("fencekit/_async", "fencekit/_sync"), ("tests/_async", "tests/_sync"))
FIX = "python generate_sync.py"


class Rule(NamedTuple):
    """One rewriting of a line: a regular expression and what takes its place."""

    pattern: str
    twin: str


RULES = (
    # The sentence that tells a reader which of the two may be edited.
    Rule(
        r"The asynchronous half, written by hand; the blocking half is generated from it\.",
        "The blocking half, generated from the asynchronous one by generate_sync.py: do not edit.",
    ),
    # Where the two halves differ for real: the seam and the test tools.
    Rule(r"\baio(_\w+)?\b", r"threads\1"),
    Rule(r"\b_async\b", "_sync"),
    Rule(r"\bpytest\.mark\.asyncio\b", "pytest.mark.threads"),
    Rule(r"\bpytest_asyncio\b", "pytest"),
    # Names: first the ones with a name of their own, then every other AsyncX.
    Rule(r"\bAsyncLock\b", "DistributedLock"),
    Rule(r"\bAsyncGuard\b", "IdempotencyGuard"),
    Rule(r"Async(?=[A-Z])", ""),
    Rule(r"\b__a(enter|exit|iter|next)__\b", r"__\1__"),
    # The keywords.
    Rule(r"\basync (def|with|for)\b", r"\1"),
    Rule(r"\bawait ", ""),
)

LEFTOVER = re.compile(
    r"\b(?:async|await)\b|asyncio|anyio|Async|Awaitable|Coroutine|__a(?:enter|exit)"
)


class Twins:
    """What the generated files should hold, and what went wrong on the way."""

    def __init__(self, root: Path, rules: Sequence[Rule]) -> None:
        self.root = root
        self.texts: dict[Path, str] = {}
        self.problems: list[str] = []
        self._rules = [(re.compile(rule.pattern), rule.twin) for rule in rules]
        self._uses = [0] * len(rules)
        for source, target in TWINS:
            self._generate(root / source, root / target)
        for rule, uses in zip(rules, self._uses, strict=True):
            if not uses:
                self.problems.append(f"unused rule: {rule.pattern!r} -> {rule.twin!r}")

    def _generate(self, source: Path, target: Path) -> None:
        paths = sorted(source.rglob("*.py"))
        if not paths:
            self.problems.append(f"no sources in {source.relative_to(self.root)}")
        for path in paths:
            twin = target / path.relative_to(source)
            lines = path.read_bytes().decode().split("\n")
            self.texts[twin] = "\n".join(
                self._line(line, f"{twin.relative_to(self.root)}:{number}")
                for number, line in enumerate(lines, 1)
            )

    def _line(self, line: str, place: str) -> str:
        for index, (pattern, twin) in enumerate(self._rules):
            line, uses = pattern.subn(twin, line)
            self._uses[index] += uses
        if "\n" in line:
            self.problems.append(f"{place}: a rule changed the line count: {line!r}")
        elif left := LEFTOVER.search(line):
            self.problems.append(f"{place}: {left[0]!r} left over: {line.strip()}")
        return line

    def extra(self) -> list[Path]:
        """Files in the generated directories that have no source."""
        found = (path for _, target in TWINS for path in (self.root / target).rglob("*"))
        return sorted(
            path
            for path in found
            if path.is_file() and path not in self.texts and "__pycache__" not in path.parts
        )

    def differences(self) -> Iterator[str]:
        """One text for every file that is not, to the byte, what it should be."""
        for path, text in self.texts.items():
            name = path.relative_to(self.root).as_posix()
            if not path.is_file():
                yield f"missing file: {name}"
            elif (held := path.read_bytes()) != text.encode():
                diff = _diff(held.decode(errors="replace"), text, name)
                yield f"different file: {name}\n{diff}"
        for path in self.extra():
            yield f"extra file: {path.relative_to(self.root).as_posix()}"

    def write(self) -> None:
        """Make the generated directories hold the twins and nothing else."""
        for path in self.extra():
            path.unlink()
        for path, text in self.texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_file() or path.read_bytes() != text.encode():
                path.write_bytes(text.encode())


def _diff(found: str, wanted: str, name: str) -> str:
    # Only "\n" ends a line here, so that a stray "\r" or a lost last newline shows.
    before, after = (text.replace("\r", "\\r").split("\n") for text in (found, wanted))
    return "\n".join(difflib.unified_diff(before, after, name, f"{name} (generated)", lineterm=""))


def main(
    argv: Sequence[str] | None = None, *, root: Path = ROOT, rules: Sequence[Rule] = RULES
) -> int:
    """Write the twins, or check them; 0 when all is well."""
    parser = argparse.ArgumentParser(description="Write or check the generated sync twins.")
    parser.add_argument("--check", action="store_true", help="write nothing, report differences")
    check = parser.parse_args(argv).check
    twins = Twins(root, rules)
    if not check:
        # Written in spite of a problem: it is easier to see in the twin.
        twins.write()
    differences = list(twins.differences())
    for problem in [*twins.problems, *differences]:
        print(problem, file=sys.stderr)
    if differences:
        print(f"The twins are not what their sources make. To fix: {FIX}", file=sys.stderr)
    return 1 if twins.problems or differences else 0


if __name__ == "__main__":
    sys.exit(main())
