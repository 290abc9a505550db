"""report.json: what the other reports show, and what later runs compare themselves with."""
from __future__ import annotations

import collections
import dataclasses
import json
import math
import os
import pathlib
from typing import Any

from ..case import FAILED, FLAKY, LEFT_OUT, PASSED, Result, Run
from ..history import FORMAT

STATUSES = (PASSED, FAILED, FLAKY, LEFT_OUT)


def make_document(
    folder: pathlib.Path, list_name: str, results: list[Result], environment: dict[str, Any], command: str
) -> dict[str, Any]:
    """Objects, arrays, texts, numbers, truth values and null only. Paths below `folder` are relative to it."""
    counted = collections.Counter(result.status for result in results)
    return _plain(
        {
            "format": FORMAT,
            "list": list_name,
            "command": command,
            "environment": environment,
            "counts": {status: counted[status] for status in STATUSES},
            "seconds": sum(result.seconds for result in results),
            "cases": [_case(folder, result) for result in results],
        }
    )


def to_json(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()


def _case(folder: pathlib.Path, result: Result) -> dict[str, Any]:
    run = result.telling_run
    return {
        "name": result.case.name,
        "status": result.status,
        "reasons": result.reasons,
        "confirmed": result.confirmed,
        "seconds": result.seconds,
        "figures": result.figures,
        "command": result.command,
        "failing_rank": run.failing_rank if run else None,
        "log_tail": result.log_tail,
        "curves": [dataclasses.asdict(curve) for curve in result.curves],
        "runs": [_run(folder, run) for run in result.runs],
        "definition": dataclasses.asdict(result.case),
    }


def _run(folder: pathlib.Path, run: Run) -> dict[str, Any]:
    return {
        "folder": _relative(run.folder, folder),
        "command": run.command,
        "exit_codes": run.exit_codes,
        "seconds": run.seconds,
        "timed_out": run.timed_out,
        "failing_rank": run.failing_rank,
        "problem": run.problem,
        "logs": {rank: _relative(log, folder) for rank, log in sorted(run.logs.items())},
        "telling_log": _relative(run.telling_log, folder) if run.telling_log else None,
        "leftovers": run.leftovers,
    }


def _relative(path: pathlib.Path, folder: pathlib.Path) -> str:
    path, folder = os.path.abspath(path), os.path.abspath(folder)
    return os.path.relpath(path, folder) if os.path.commonpath((path, folder)) == folder else path


def _plain(value: Any) -> Any:
    """As JSON has it. Numbers that are not finite become the texts "NaN", "Infinity" and "-Infinity", which no parser
    refuses; bytes that were no UTF-8 become U+FFFD."""
    if isinstance(value, dict):
        return {_text(str(name)): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return _text(str(value))


def _text(value: str) -> str:
    return "".join("\ufffd" if "\ud800" <= one <= "\udfff" else one for one in value)
