"""The folders of runs under --out, and the reports in them that a new one is compared with."""
from __future__ import annotations

import datetime
import json
import math
import os
import pathlib
import re
import sys
from typing import Any

from .case import FAILED, FLAKY, LEFT_OUT, PASSED

# Of report.json. A report of another format is left out of the history.
FORMAT = 1
REPORT = "report.json"
LATEST = "latest"

# `20260131T020304Z-4711`, or with another number where that was taken.
_RUN_FOLDER = re.compile(r"(\d{8}T\d{6}Z)-(\d+)(?:-(\d+))?")


def new_run_folder(out_folder: pathlib.Path) -> pathlib.Path:
    """Makes `<UTC time>-<process>` in `out_folder`, which no other runner has or gets: not one of another machine on a
    shared file system either."""
    out_folder = pathlib.Path(out_folder)
    out_folder.mkdir(parents=True, exist_ok=True)
    time = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    name = f"{time}-{os.getpid()}"
    number = 1
    while True:
        folder = out_folder / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def point_latest(out_folder: pathlib.Path, run_folder: pathlib.Path) -> None:
    """Makes the symbolic link `latest` lead to `run_folder`: at every moment it leads to a whole folder. Where there
    cannot be one, that is said and the run goes on: the reports are written."""
    out_folder = pathlib.Path(out_folder)
    link = out_folder / f".{LATEST}-{pathlib.Path(run_folder).name}"
    try:
        link.symlink_to(os.path.relpath(run_folder, out_folder), target_is_directory=True)
        os.replace(link, out_folder / LATEST)
    except OSError as error:
        link.unlink(missing_ok=True)
        _note(f"{out_folder / LATEST} does not lead to this run: {error.strerror}")


def read_history(out_folder: pathlib.Path, list_name: str, limit: int = 10) -> list[dict[str, Any]]:
    """Former reports of the same list, newest first, each with its folder's name as `folder`.

    Run folders without a report (a run that goes on, or was killed) and reports of other lists are passed over. What
    is no report of this format is left out with a note on stderr.
    """
    reports = []
    for folder in sorted(_run_folders(pathlib.Path(out_folder)), key=_age, reverse=True):
        if len(reports) == limit:
            break
        try:
            report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
            problem = _problem(report)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        except (ValueError, RecursionError):
            problem = "is no whole JSON document"
        if problem:
            _note(f"{folder / REPORT} is left out of the history: it {problem}")
        elif report["list"] == list_name:
            reports.append({**report, "folder": folder.name})
    return reports


def _run_folders(out_folder: pathlib.Path) -> list[pathlib.Path]:
    try:
        entries = list(out_folder.iterdir())
    except FileNotFoundError:
        return []
    folders = []
    for entry in entries:
        if entry.is_symlink():
            continue
        if _RUN_FOLDER.fullmatch(entry.name):
            folders.append(entry)
        elif (entry / REPORT).exists():
            _note(f"{entry / REPORT} is left out of the history: its folder is not named as a run's")
    return folders


def _age(folder: pathlib.Path) -> tuple[str, int, int]:
    time, process, number = _RUN_FOLDER.fullmatch(folder.name).groups()
    return time, int(process), int(number or 1)


def _problem(report: Any) -> str:
    """Why a report cannot be compared with, or ""."""
    if not isinstance(report, dict) or "format" not in report:
        return "is not one of tools/regress"
    if report["format"] != FORMAT:
        return f"has format {report['format']!r}, expected {FORMAT}"
    environment = report.get("environment")
    if not isinstance(report.get("list"), str) or not isinstance(environment, dict):
        return "has no list or no environment"
    if not isinstance(environment.get("date"), str):
        return "has no date"
    if not isinstance(report.get("cases"), list) or not all(_is_case(case) for case in report["cases"]):
        return "has cases without a name, a status, seconds or figures"
    return ""


def _is_case(case: Any) -> bool:
    return (
        isinstance(case, dict)
        and isinstance(case.get("name"), str)
        and case.get("status") in (PASSED, FAILED, FLAKY, LEFT_OUT)
        and isinstance(case.get("seconds"), (int, float))
        and 0 <= case["seconds"] < math.inf
        and isinstance(case.get("figures"), dict)
    )


def _note(text: str) -> None:
    print(f"[history] {text}", file=sys.stderr)
