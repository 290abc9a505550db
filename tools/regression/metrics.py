"""Reads what a training program logged, one JSON object a step."""
from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import yaml


class MetricsError(Exception):
    """A file that a program left is not what it should be."""


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, steps rising. Raises MetricsError, naming the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MetricsError(f"[metrics] {path} cannot be read: {error}") from error
    lines: list[dict[str, Any]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise MetricsError(f"[metrics] {path}:{number}: {error}, expected one JSON object a line") from error
        step = values.get("step") if isinstance(values, dict) else None
        if not isinstance(step, int) or isinstance(step, bool) or (lines and step <= lines[-1]["step"]):
            raise MetricsError(f"[metrics] {path}:{number}: step {step!r}, expected an integer above the one before")
        lines.append(values)
    return lines


def value_of(line: dict[str, Any], metric: str) -> float | int | None:
    """A metric by its name, dots leading into objects. None where it is missing or no finite number."""
    value: Any = line
    for part in metric.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond all floating-point numbers
        return None


def same_setting(text: str, resolved: Any) -> bool:
    """Whether a value, as `--set` takes it, is the one that a program resolved."""
    try:
        asked = yaml.safe_load(text)
    except yaml.YAMLError:
        asked = text
    if asked == resolved and type(asked) is type(resolved):
        return True
    if isinstance(asked, bool) or isinstance(resolved, bool):
        return False
    try:
        return float(text) == float(resolved)
    except (TypeError, ValueError, OverflowError):
        return text == str(resolved)


def read_settings(path: pathlib.Path) -> dict[str, Any]:
    """A resolved config.yaml as `section.key` -> value. Raises MetricsError."""
    try:
        sections = yaml.safe_load(path.read_text(encoding="utf-8"))
        return {f"{section}.{key}": value for section, keys in sections.items() for key, value in (keys or {}).items()}
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError) as error:
        raise MetricsError(f"[metrics] {path} cannot be read: {error}, expected sections of keys") from error
