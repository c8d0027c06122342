"""The demo's run as one page of HTML: nothing is loaded from elsewhere, no script runs."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from .chart import ALARM, CROSS, Chart
from .timeline import Run, Verdict, stale_writes
from .words import INTRO, TITLE, Line, Mark, Narrator

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #fff; --lane: #f1f3f7; --ink: #1c2330; --soft: #5b6576;
  --rule: #dde1e8; --a: #2f6fdf; --b: #0c7d6f; --on: #fff; --red: #c81e2c; --good: #13733f;
  --hatch: #8a93a5;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12151b; --card: #1a1f28; --lane: #222834; --ink: #e8ebf1; --soft: #a2abbb;
    --rule: #343c4b; --a: #7fb0ff; --b: #4fd1b9; --on: #10141b; --red: #ff7b80; --good: #6fd79b;
    --hatch: #77819a;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 56px; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 8px; }
h2 { font-size: 1.15rem; margin: 32px 0 8px; }
p { margin: 0 0 8px; max-width: 75ch; }
.soft { color: var(--soft); }
.verdict { border-left: 6px solid var(--good); background: var(--card); border-radius: 8px;
  padding: 14px 18px; margin: 20px 0; }
.verdict.failed, .verdict.unsafe { border-color: var(--red); }
.verdict strong { display: block; font-size: 1.1rem; color: var(--good); }
.verdict.failed strong, .verdict.unsafe strong { color: var(--red); }
.verdict p:last-child { margin: 0; }
.card { background: var(--card); border-radius: 12px; padding: 16px; overflow-x: auto; }
.card > svg { display: block; width: 100%; min-width: 820px; height: auto; }
svg text { font-size: 13px; fill: var(--ink); }
svg .name { font-size: 16px; font-weight: 650; }
svg .small { font-size: 12px; fill: var(--soft); }
svg .strong { font-weight: 600; }
svg .end { text-anchor: end; }
svg .middle { text-anchor: middle; }
svg .on { fill: var(--on); font-weight: 600; }
svg .halo { stroke: var(--lane); stroke-width: 4px; paint-order: stroke; stroke-linejoin: round; }
svg text.red { fill: var(--red); font-weight: 650; }
svg .lane { fill: var(--lane); }
svg .row, svg .tick { stroke: var(--rule); }
svg .tick { stroke-dasharray: 2 4; }
svg .A { --own: var(--a); }
svg .B { --own: var(--b); }
svg .bar, svg .dot { fill: var(--own); }
svg .dot, svg .alarm { stroke: var(--lane); stroke-width: 2; }
svg .ring { fill: var(--lane); stroke: var(--own); stroke-width: 3; }
svg .ghost { fill: none; stroke: var(--own); stroke-width: 1.5; stroke-dasharray: 5 4; }
svg .pause { fill: url(#hatch); }
svg .hatch { stroke: var(--hatch); stroke-width: 3; stroke-opacity: .42; }
svg .cross { stroke: var(--red); stroke-width: 4; stroke-linecap: round; fill: none; }
svg .alarm { fill: var(--red); }
svg .bang { stroke: var(--on); stroke-width: 2.2; stroke-linecap: round; }
svg .takeover { fill: none; stroke: var(--ink); stroke-width: 2; }
svg .arrow { fill: var(--ink); }
.legend { display: flex; flex-wrap: wrap; gap: 6px 22px; list-style: none; padding: 0;
  margin: 14px 0 0; font-size: .88rem; color: var(--soft); }
.legend li { display: flex; align-items: center; gap: 8px; }
.legend svg { width: 26px; height: 20px; flex: none; }
table { border-collapse: collapse; width: 100%; font-size: .94rem; }
th, td { text-align: left; vertical-align: top; padding: 7px 12px 7px 0;
  border-bottom: 1px solid var(--rule); }
th { color: var(--soft); font-weight: 600; }
td:first-child, th:first-child { text-align: right; padding-right: 16px; white-space: nowrap;
  font-variant-numeric: tabular-nums; color: var(--soft); }
td.A, td.B { font-weight: 700; }
td.A { color: var(--a); }
td.B { color: var(--b); }
tr.refused td:last-child, tr.bad td:last-child { color: var(--red); font-weight: 600; }
tr:last-child td { border-bottom: 0; }
"""

# What the symbol column of the table says, also to those who hear it.
SYMBOLS: dict[Mark, str] = {"": "", "ok": "✔", "refused": "✘", "bad": "!", "pause": "‖"}
NAMES: dict[Mark, str] = {
    "": "",
    "ok": "accepted",
    "refused": "refused",
    "bad": "accepted, and should not be",
    "pause": "pause",
}


def render(run: Run, verdict: Verdict) -> str:
    """The whole page."""
    narrator = Narrator(safe=run.safe, lease=run.lease)
    lines = [narrator.line(event) for event in run.events]
    kind = "failed" if not verdict.ok else "" if run.safe else "unsafe"
    sentences = "".join(f"<p>{escape(line)}</p>" for line in verdict.lines)
    title = escape(TITLE[run.safe])
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>fencekit demo: {title}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p>{escape(INTRO[run.safe])}</p>
<div class="verdict {kind}"><strong>{escape(verdict.headline)}</strong>{sentences}</div>
<div class="card">
{Chart(run, lines).svg()}
<ul class="legend">
{"".join(_legend(run))}
</ul>
</div>
<h2>What happened</h2>
<div class="card">
<table>
<thead><tr><th scope="col">Seconds</th><th scope="col">Worker</th>\
<th scope="col"><span aria-hidden="true"></span></th><th scope="col">What happened</th></tr></thead>
<tbody>
{"".join(map(_row, lines))}
</tbody>
</table>
</div>
<p class="soft" style="margin-top:20px">Server: {escape(run.server)}. \
Written by <code>fencekit demo</code>.</p>
</main>
</body>
</html>
"""


def _row(line: Line) -> str:
    who = escape(line.who)
    return (
        f'<tr class="{line.mark}"><td>{line.at:.2f}</td><td class="{who}">{who}</td>'
        f'<td title="{NAMES[line.mark]}">{SYMBOLS[line.mark]}</td>'
        f"<td>{escape(line.text)}</td></tr>\n"
    )


def _legend(run: Run) -> Iterator[str]:
    lease = "lease" if run.safe else "lock"
    yield _entry('<rect class="bar A" x="0" y="5" width="26" height="10" rx="3"/>', f"{lease} held")
    yield _entry(
        '<rect class="ghost A" x="1" y="5" width="24" height="10" rx="3"/>',
        f"{lease} run out, holder unaware",
    )
    yield _entry('<rect class="pause" x="0" y="0" width="26" height="20"/>', "process frozen")
    yield _entry('<circle class="dot A" cx="13" cy="10" r="7"/>', "write accepted")
    if any(event.facts["accepted"] for event in stale_writes(run.events)):
        yield _entry(f'<g transform="translate(13 10)">{ALARM}</g>', "stale write accepted")
    if run.safe:
        yield _entry(
            f'<g transform="translate(13 10)">{CROSS}</g>', "stale write or finish refused"
        )
        yield _entry('<path class="dot B" d="M6 3h14v14h-14z"/>', "job finished, result stored")
        yield _entry('<path class="dot B" d="M13 1l9 9l-9 9l-9 -9z"/>', "result from memory")
    else:
        yield _entry('<path class="dot B" d="M6 3h14v14h-14z"/>', "job finished")


def _entry(shape: str, words: str) -> str:
    return f'<li><svg viewBox="0 0 26 20" aria-hidden="true">{shape}</svg>{escape(words)}</li>\n'
