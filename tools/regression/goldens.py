"""Recorded curves. One file for each case, device, torch, NCCL and number of ranks, with the reason it was recorded for."""
from __future__ import annotations

import json
import pathlib
import re
from typing import Any

from .case import Case
from .checks import Lines
from .metrics import value_of
from .placeholders import folder_name
from .whole_files import write_whole

FORMAT = 1
# Where a run writes and reads, rather than what it computes.
PLACES = ("metrics.folder", "data.path", "checkpoint.folder", "checkpoint.load", "checkpoint.weights", "comm.timeout_seconds")


class GoldenError(Exception):
    """A golden that is missing, or not one for these settings."""


def golden_path(folder: pathlib.Path, case: Case, environment: dict[str, Any]) -> pathlib.Path:
    """Keyed by what may change a curve's last digits; processors of one architecture share a key, since the tolerance of a
    case covers their vector widths."""
    torch = str(environment["torch"]).split("+")[0]
    nccl = environment["nccl"] if environment["device"] == "cuda" else "none"
    key = f"{environment['device_name']}_torch-{torch}_nccl-{nccl}_ranks-{case.ranks}"
    return folder / folder_name(case.name) / (re.sub(r"[^A-Za-z0-9_.+-]+", "-", key) + ".json")


def compared_settings(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in PLACES}


def read_golden(path: pathlib.Path, case: Case, settings: dict[str, Any]) -> Lines:
    """The recorded lines. Raises GoldenError where there are none for this case and settings."""
    try:
        golden = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise GoldenError(f"no golden at {path}") from error
    except (OSError, ValueError) as error:
        raise GoldenError(f"golden {path} cannot be read: {error}") from error
    try:
        if golden["format"] != FORMAT:
            raise GoldenError(f"golden {path} has format {golden['format']!r}, expected {FORMAT}")
        recorded, steps, curves = golden["settings"], golden["steps"], golden["metrics"]
        now = compared_settings(settings)
        added = [name for name in now if name not in recorded]
        if added:
            raise GoldenError(f"golden {path} was recorded without {added[0]}, this case has {now[added[0]]!r}")
        for name, value in recorded.items():
            if now.get(name) != value:
                raise GoldenError(f"golden {path} was recorded with {name} {value!r}, this case has {now.get(name)!r}")
        missing = [metric for metric in case.golden or {} if metric not in curves]
        if missing:
            raise GoldenError(f"golden {path} has no {missing[0]}")
        if any(len(values) != len(steps) for values in curves.values()):
            raise GoldenError(f"golden {path} has curves of other lengths than its {len(steps)} steps")
        return [nested({"step": step, **{metric: curves[metric][i] for metric in curves}}) for i, step in enumerate(steps)]
    except (KeyError, TypeError, AttributeError) as error:
        raise GoldenError(f"golden {path} is damaged: {error!r}") from error


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Dotted names as objects within objects, as a program logs them."""
    line: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        target = line
        for parent in parents:
            target = target.setdefault(parent, {})
        target[last] = value
    return line


def record_golden(path: pathlib.Path, case: Case, lines: Lines, settings: dict[str, Any], environment: dict[str, Any],
                  reason: str) -> None:
    """Writes a golden, in place of a former one, whole or not at all."""
    golden = {
        "format": FORMAT,
        "case": case.name,
        "reason": reason,
        "recorded": environment["date"],
        "commit": environment["commit"],
        "dirty": environment["dirty"],
        "environment": {name: environment[name] for name in ("device_name", "torch", "nccl", "driver", "processor")},
        "settings": compared_settings(settings),
        "steps": [line["step"] for line in lines],
        "metrics": {metric: [value_of(line, metric) for line in lines] for metric in case.golden or {}},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(golden, indent=1) + "\n").encode())
