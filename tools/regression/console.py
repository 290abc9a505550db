"""What the runner prints: a line a case when it is done, and the summary."""
from __future__ import annotations

import collections
import contextlib
import io
import os
import sys
from typing import Mapping, TextIO

from .case import FAILED, FLAKY, LEFT_OUT, PASSED, Result
from .texts import STATUS_WORDS, duration, printable

_COUNTED = {PASSED: "passed", FAILED: "failed", FLAKY: "flaky", LEFT_OUT: "left out"}
_COLOURS = {PASSED: "32", FAILED: "31", FLAKY: "33", LEFT_OUT: "36"}


class Console:
    """Prints to `stream`, in colour only on a terminal without NO_COLOR. A case is written in one piece, so that the
    lines of runners that share a terminal or a log stay together."""

    def __init__(self, stream: TextIO | None = None, environment: Mapping[str, str] = os.environ):
        self.stream = stream or sys.stdout or io.StringIO()
        self.coloured = (
            self.stream.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
        )

    def begin(self, list_name: str, cases: int, device: str) -> None:
        """Before anything takes time."""
        self._write([f"{cases} cases of {list_name} on {device}"])

    def recorded(self, result: Result) -> None:
        """Where the golden of a case went, if one was recorded."""
        self._write([f"{_one_line(result.case.name)}: {line}" for line in result.confirmed if line.startswith("recorded ")])

    def case_done(self, result: Result) -> None:
        """One line; below that of a case that failed, or did so at first, all that is needed to go after it."""
        name = _one_line(result.case.name)
        if result.status == LEFT_OUT:
            self._write([f"{self._word(LEFT_OUT)} {name}: {_one_line('; '.join(result.reasons))}"])
            return
        lines = [f"{self._word(result.status)} {name} {duration(result.seconds)}"]
        if result.status != PASSED:
            for reason in result.reasons:
                lines += _indented(reason, 2)
            lines += _last_lines(result)
            if result.command:
                lines += _indented(f"repeat: {result.command}", 2)
        self._write(lines)

    def summary(self, results: list[Result], report: str = "") -> None:
        """Counts, then the names of those that did not simply pass, and where the report is."""
        by_status = collections.defaultdict(list)
        for result in results:
            by_status[result.status].append(result)
        counts = ", ".join(f"{len(by_status[status])} {word}" for status, word in _COUNTED.items())
        total = duration(sum(result.seconds for result in results))
        cases = "1 case" if len(results) == 1 else f"{len(results)} cases"
        lines = ["", f"{cases}: {counts}; {total}"]
        if len(by_status[LEFT_OUT]) == len(results):
            lines.append("nothing ran")
        for status in (FAILED, FLAKY, LEFT_OUT):
            for result in by_status[status]:
                reasons = result.reasons if status == LEFT_OUT else result.reasons[:1]
                lines.append(f"  {self._word(status)} {_one_line(result.case.name)}: {_one_line('; '.join(reasons))}")
        if report:
            lines.append(f"report: {report}")
        self._write(lines)

    def _word(self, status: str) -> str:
        word = STATUS_WORDS[status]
        return f"\x1b[{_COLOURS[status]}m{word}\x1b[0m" if self.coloured else word

    def _write(self, lines: list[str]) -> None:
        text = "".join(f"{line}\n" for line in lines)
        encoding = self.stream.encoding or "utf-8"
        # A terminal of the C locale cannot take every name or log, and who read this may have gone; neither is a reason to
        # stop before the reports.
        with contextlib.suppress(OSError, ValueError):
            self.stream.write(text.encode(encoding, "replace").decode(encoding))
            self.stream.flush()


def _last_lines(result: Result) -> list[str]:
    if not result.log_tail:
        return []
    run = result.telling_run
    whose = f" of rank {run.failing_rank}" if run and run.failing_rank is not None else ""
    where = f" ({run.telling_log})" if run and run.telling_log else ""
    lines = _indented(f"last lines{whose}{where}:", 2)
    for line in result.log_tail:
        lines += _indented(line, 4)
    return lines


def _indented(text: str, spaces: int) -> list[str]:
    return [(" " * spaces + line).rstrip() for line in printable(text).rstrip("\n").split("\n")]


def _one_line(text: str) -> str:
    return " ".join(printable(text).split())
