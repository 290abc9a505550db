"""Compares what runs logged. Each check returns a Verdict: sentences on what is wrong, and on what was found right."""
from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from .case import Bound, Curve
from .metrics import value_of

Lines = list[dict[str, Any]]


@dataclasses.dataclass
class Verdict:
    failures: list[str] = dataclasses.field(default_factory=list)
    confirmed: list[str] = dataclasses.field(default_factory=list)

    def add(self, other: "Verdict") -> None:
        self.failures += other.failures
        self.confirmed += other.confirmed


def relative_difference(a: float, b: float) -> float:
    """|a - b| by the larger of the two; 0 for equal numbers. Both are finite."""
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))


def check_steps(lines: Lines, first: int, last: int, ranks: int) -> Verdict:
    """Every step was logged once, by so many ranks together, with a finite loss and gradient norm."""
    wanted = list(range(first, last + 1))
    steps = [line["step"] for line in lines]
    if steps != wanted:
        missing = [step for step in wanted if step not in steps]
        extra = [step for step in steps if step not in wanted]
        return Verdict(failures=[
            f"steps {first} to {last} were expected in the metrics, got {len(steps)} lines; missing {missing[:8]}, "
            f"not expected {extra[:8]}"
        ])
    for line in lines:
        for metric in ("loss", "grad_norm"):
            if value_of(line, metric) is None:
                return Verdict(failures=[f"{metric} at step {line['step']} is {line.get(metric)!r}, expected a finite number"])
        if line.get("ranks") != ranks:
            return Verdict(failures=[f"{line.get('ranks')!r} ranks trained together at step {line['step']}, expected {ranks}"])
    return Verdict(confirmed=[f"steps {first} to {last} were logged, loss {lines[0]['loss']:.6g} to {lines[-1]['loss']:.6g}"])


def compare(lines: Lines, other: Lines, label: str, tolerances: dict[str, float]) -> Verdict:
    """The metrics of each step of `lines` against those of the same step of `other`, which has to have them all."""
    verdict = Verdict()
    by_step = {line["step"]: line for line in other}
    missing = [line["step"] for line in lines if line["step"] not in by_step]
    if missing or not lines:
        return Verdict(failures=[f"{label} lacks steps {missing[:8]} of {len(lines)}, expected all of them"])
    for metric, tolerance in tolerances.items():
        verdict.add(compare_metric(lines, by_step, label, metric, tolerance))
    return verdict


def compare_metric(lines: Lines, by_step: dict[int, dict[str, Any]], label: str, metric: str, tolerance: float) -> Verdict:
    allowed = "bitwise" if tolerance == 0 else f"{tolerance:g} allowed"
    first, largest = None, (0.0, lines[0]["step"])
    for line in lines:
        step = line["step"]
        here, there = value_of(line, metric), value_of(by_step[step], metric)
        if here is None or there is None:
            who = "this case" if here is None else label
            return Verdict(failures=[f"{metric} is not a number in {who} at step {step}, expected one to compare"])
        difference = relative_difference(here, there)
        largest = max(largest, (difference, step), key=lambda entry: entry[0])
        if first is None and difference > tolerance:
            first = f"{metric} at step {step} is {here!r}, {label} has {there!r}, relative difference {difference:.3g}, {allowed}"
    if first is not None:
        return Verdict(failures=[f"{first}; largest {largest[0]:.3g} at step {largest[1]}"])
    steps = f"steps {lines[0]['step']} to {lines[-1]['step']}"
    if largest[0] == 0:
        return Verdict(confirmed=[f"{metric} of {steps} is bitwise that of {label}"])
    return Verdict(confirmed=[f"{metric} of {steps} differs from {label} by at most {largest[0]:.3g}, {allowed}"])


def check_bound(lines: Lines, bound: Bound) -> Verdict:
    counted = [line for line in lines if line["step"] >= bound.from_step]
    if not counted:
        return Verdict(failures=[f"{bound.metric} has a bound from step {bound.from_step} on, expected such steps"])
    values = []
    for line in counted:
        value = value_of(line, bound.metric)
        if value is None:
            return Verdict(failures=[f"{bound.metric} is not a number at step {line['step']}, expected one within its bounds"])
        for limit, broken in ((bound.at_least, lambda v, l: v < l), (bound.at_most, lambda v, l: v > l)):
            if limit is not None and broken(value, limit):
                return Verdict(failures=[f"{bound.metric} at step {line['step']} is {value!r}, expected {describe_bound(bound)}"])
        values.append(value)
    found = f"{min(values)!r}" if min(values) == max(values) else f"{min(values)!r} to {max(values)!r}"
    return Verdict(confirmed=[f"{bound.metric} is {found}, {describe_bound(bound)}"])


def describe_bound(bound: Bound) -> str:
    if bound.at_least is not None and bound.at_least == bound.at_most:
        return f"exactly {bound.at_least:.15g}"
    parts = []
    if bound.at_least is not None:
        parts.append(f"at least {bound.at_least:.15g}")
    if bound.at_most is not None:
        parts.append(f"at most {bound.at_most:.15g}")
    return " and ".join(parts)


def tokens_per_second(lines: Lines) -> float | None:
    """The median step's, without the first, which warms up. None where it was not logged."""
    values = [value_of(line, "tokens_per_second") for line in (lines[1:] or lines)]
    return statistics.median(values) if values and None not in values else None


def check_throughput(pairs: list[tuple[float, float]], label: str, at_least: float) -> Verdict:
    """`pairs`: tokens a second of the case and of the other one, run in turn."""
    ratios = [mine / other for mine, other in pairs]
    ratio = statistics.median(ratios)
    found = (f"tokens a second are {ratio:.3f} of those of {label} ({min(ratios):.3f} to {max(ratios):.3f} in {len(pairs)} "
             f"pairs, {statistics.median(mine for mine, _ in pairs):.0f} against "
             f"{statistics.median(other for _, other in pairs):.0f})")
    if ratio < at_least:
        return Verdict(failures=[f"{found}, expected at least {at_least:g}"])
    return Verdict(confirmed=[f"{found}, at least {at_least:g}"])


def curve(label: str, metric: str, lines: Lines) -> Curve:
    points = [(line["step"], value_of(line, metric)) for line in lines]
    points = [(step, value) for step, value in points if value is not None]
    return Curve(label, metric, [step for step, _ in points], [float(value) for _, value in points])
