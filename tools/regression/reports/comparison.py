"""What a run's cases are beside those of former reports."""
from __future__ import annotations

import dataclasses
import math
from typing import Any

from ..case import LEFT_OUT


@dataclasses.dataclass(frozen=True)
class Change:
    name: str
    # None: it has none, now or before.
    now: float | None
    before: float | None

    @property
    def text(self) -> str:
        """`+2.5 %`, or the difference where there is no ratio."""
        if self.now is None or self.before is None:
            return "gone" if self.now is None else "new"
        if self.now == self.before:
            return "same"
        difference = self.now - self.before
        if not math.isfinite(difference):
            return "not finite"
        ratio = 100 * difference / abs(self.before) if self.before != 0 else math.inf
        # A last bit is a change, too.
        return f"{ratio:+.1f} %" if 0.05 <= abs(ratio) < 1e6 else f"{difference:+.3g}"


@dataclasses.dataclass(frozen=True)
class Past:
    """A case in the former reports."""

    # Its status in each, oldest first; None where it was not in the report.
    statuses: list[str | None]
    # No former report has it, although there are some.
    is_new: bool
    # The last report in which it ran; None where there is none.
    report: dict[str, Any] | None
    seconds: Change | None
    figures: list[Change]


def look_back(case: dict[str, Any], history: list[dict[str, Any]]) -> Past:
    """`case` as in report.json, `history` as of read_history."""
    found = [(report, _case_of(report, case["name"])) for report in history]
    former = next(((report, one) for report, one in found if one and one["status"] != LEFT_OUT), None)
    report, before = former or (None, None)
    compared = before is not None and case["status"] != LEFT_OUT
    return Past(
        [one["status"] if one else None for _, one in reversed(found)],
        bool(history) and all(one is None for _, one in found),
        report,
        Change("seconds", case["seconds"], before["seconds"]) if compared else None,
        _figure_changes(case["figures"], before["figures"]) if compared else [],
    )


def gone_cases(document: dict[str, Any], history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cases of the previous report that this one does not have."""
    names = {case["name"] for case in document["cases"]}
    return [case for case in history[0]["cases"] if case["name"] not in names] if history else []


def _figure_changes(now: dict[str, Any], before: dict[str, Any]) -> list[Change]:
    names = list(dict.fromkeys([*now, *before]))
    changes = [Change(name, _number(now.get(name)), _number(before.get(name))) for name in names]
    return [change for change in changes if change.now is not None or change.before is not None]


def _number(value: Any) -> float | None:
    """A figure as report.json has it; None where there is none."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _case_of(report: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((case for case in report["cases"] if case["name"] == name), None)
