"""report.html: one file without scripts and without anything from elsewhere.

Where a server forbids style sheets within pages (Jenkins does unless told otherwise) it is plain, but complete: the
charts do not depend on them.
"""
from __future__ import annotations

import functools
import pathlib
import urllib.parse
from typing import Any

import jinja2
import markupsafe

from ..case import FAILED, FLAKY, LEFT_OUT, PASSED
from ..texts import STATUS_WORDS, duration, printable
from . import charts
from .comparison import gone_cases, look_back
from .junit import flat

# What a reader looks for first.
ORDER = (FAILED, FLAKY, LEFT_OUT, PASSED)
SYMBOLS = {PASSED: "✓", FAILED: "✗", FLAKY: "≈", LEFT_OUT: "○", None: "·"}
# Unlike in every report.
_OWN = ("date",)


def to_page(document: dict[str, Any], history: list[dict[str, Any]]) -> bytes:
    """`document` is that of report.json, `history` that of read_history."""
    cases = sorted(document["cases"], key=lambda case: ORDER.index(case["status"]))
    return (
        _template()
        .render(
            document=document,
            verdict=_verdict(document["counts"]),
            environment=_environment_rows(document, history),
            cases=[(case, look_back(case, history), charts.draw_charts(case["curves"])) for case in cases],
            gone=gone_cases(document, history),
            history=history,
            order=ORDER,
            words=STATUS_WORDS,
            symbols=SYMBOLS,
            charts=charts,
        )
        .encode()
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"duration": duration, "figure": _figure, "link": urllib.parse.quote}
    return environment.get_template("report.html.j2")


def _verdict(counts: dict[str, int]) -> tuple[str, str]:
    """A status and a sentence."""
    ran = counts[PASSED] + counts[FAILED] + counts[FLAKY]
    if ran == 0:
        return LEFT_OUT, "Nothing ran"
    if counts[FAILED]:
        return FAILED, f"Failed: {counts[FAILED]} of the {ran} that ran"
    if counts[FLAKY]:
        return FLAKY, f"Flaky: {counts[FLAKY]} of the {ran} that ran; none failed for good"
    return PASSED, f"Passed: {ran} of the {ran} that ran"


def _environment_rows(document: dict[str, Any], history: list[dict[str, Any]]) -> list[tuple[str, str, str | None]]:
    """Name, value, and the value of the previous report where that was another."""
    now = dict(flat(document["environment"]))
    before = dict(flat(history[0]["environment"])) if history else now
    rows = []
    for name in dict.fromkeys([*now, *before]):
        value, former = now.get(name, "none"), before.get(name, "none")
        rows.append((name, value, None if name in _OWN or former == value else former))
    return rows


def _shown(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, markupsafe.Markup):
        return printable(value)
    return value


def _figure(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
