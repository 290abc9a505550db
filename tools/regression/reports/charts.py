"""Where the lines, ticks and legends of curves come to lie. Units are those of the SVG; the template draws them."""
from __future__ import annotations

import dataclasses
import math
from typing import Any

WIDTH = 640
PLOT_HEIGHT = 200
TOP = 10
RIGHT = 16
# Below the plot: tick labels and the axis title.
AXIS_HEIGHT = 40
LEGEND_ROW = 18
# Of a letter of the labels, at most.
LETTER = 7
# Differences of values further apart than this overflow, and logarithms of spans below its inverse are of no use.
LARGEST = 1e150

# Told apart by all who see colour differently (Okabe and Ito), on white; report.html.j2 has others on black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#a8518a", "#8a6d00", "#555555")
# Thick and whole below, thin and broken above: of curves that coincide, each is seen.
DASHES = ("none", "7 4", "2 4", "10 3 2 3", "14 6", "1 7")
THICKNESS = (4.5, 2.0, 2.0, 2.0, 2.0, 2.0)


@dataclasses.dataclass(frozen=True)
class Tick:
    position: float
    label: str


@dataclasses.dataclass(frozen=True)
class Series:
    label: str
    # Index into COLOURS.
    colour: int
    dash: str
    thickness: float
    # `x,y x,y ...` of each run of finite values of two steps or more.
    lines: list[str]
    # Finite values whose neighbours are not.
    dots: list[tuple[str, str]]
    legend_y: float


@dataclasses.dataclass(frozen=True)
class Chart:
    metric: str
    # What is not in the picture, and why.
    remarks: list[str]
    left: float = 0
    height: float = 0
    x_ticks: tuple[Tick, ...] = ()
    y_ticks: tuple[Tick, ...] = ()
    series: tuple[Series, ...] = ()


def draw_charts(curves: list[dict[str, Any]]) -> list[Chart]:
    """A chart a metric, in the order in which the metrics come; the curves are those of report.json."""
    by_metric: dict[str, list[dict[str, Any]]] = {}
    for curve in curves:
        by_metric.setdefault(curve["metric"], []).append(curve)
    return [_draw(metric, curves) for metric, curves in by_metric.items()]


def _draw(metric: str, curves: list[dict[str, Any]]) -> Chart:
    points = [list(zip(curve["steps"], curve["values"], strict=True)) for curve in curves]
    remarks = [remark for curve, own in zip(curves, points) if (remark := _remark(curve["label"], own))]
    drawn = [(step, value) for own in points for step, value in own if _drawable(value)]
    if not drawn:
        return Chart(metric, remarks)

    y_ticks = _value_ticks(min(value for _, value in drawn), max(value for _, value in drawn))
    low, high = y_ticks[0][0], y_ticks[-1][0]
    x_ticks = _step_ticks(min(step for step, _ in drawn), max(step for step, _ in drawn))
    first, last = min(step for step, _ in drawn), max(step for step, _ in drawn)
    left = 14 + LETTER * max(len(label) for _, label in y_ticks)

    def x_of(step: int) -> float:
        # A single step lies in the middle.
        return left + (WIDTH - RIGHT - left) * ((step - first) / (last - first) if last > first else 0.5)

    def y_of(value: float) -> float:
        return TOP + PLOT_HEIGHT * (1 - (value - low) / (high - low))

    series = []
    for index, (curve, own) in enumerate(zip(curves, points)):
        lines, dots = [], []
        for piece in _pieces(own):
            places = [(f"{x_of(step):.1f}", f"{y_of(value):.1f}") for step, value in piece]
            if len(places) == 1:
                dots.append(places[0])
            else:
                lines.append(" ".join(f"{x},{y}" for x, y in places))
        dash = (index + index // len(COLOURS)) % len(DASHES)
        series.append(
            Series(
                curve["label"],
                index % len(COLOURS),
                DASHES[dash],
                THICKNESS[dash],
                lines,
                dots,
                TOP + PLOT_HEIGHT + AXIS_HEIGHT + LEGEND_ROW * (index + 0.5),
            )
        )
    return Chart(
        metric,
        remarks,
        left,
        TOP + PLOT_HEIGHT + AXIS_HEIGHT + LEGEND_ROW * len(series),
        tuple(Tick(round(x_of(step), 1), str(step)) for step in x_ticks),
        tuple(Tick(round(y_of(value), 1), label) for value, label in y_ticks),
        tuple(series),
    )


def _drawable(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < LARGEST


def _pieces(points: list[tuple[int, Any]]) -> list[list[tuple[int, float]]]:
    """The runs of values that can be drawn."""
    pieces: list[list[tuple[int, float]]] = [[]]
    for step, value in points:
        if _drawable(value):
            pieces[-1].append((step, value))
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _remark(label: str, points: list[tuple[int, Any]]) -> str:
    missing = [(step, value) for step, value in points if not _drawable(value)]
    if not points:
        return f"{label} has no values"
    if not missing:
        return ""
    step, value = missing[0]
    return f"{label}: {len(missing)} of {len(points)} values cannot be drawn, the first is {value} at step {step}"


def _nice_step(span: float, intervals: int) -> float:
    """1, 2 or 5 times a power of ten, so that at most `intervals` cover `span`."""
    rough = span / intervals
    magnitude = 10.0 ** math.floor(math.log10(rough))
    # The last bits of the quotient must not make the next larger step.
    return next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough * (1 - 1e-9))


def _step_ticks(first: int, last: int) -> list[int]:
    step = max(1, round(_nice_step(last - first, 8))) if last > first else 1
    return list(range(math.ceil(first / step) * step, last + 1, step))


def _value_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Values from at or below `low` to at or above `high`, with labels that tell them apart."""
    largest = max(abs(low), abs(high))
    if high - low < max(1e-13 * largest, 1 / LARGEST):
        margin = 0.05 * largest if largest > 1 / LARGEST else 1.0
        low, high = low - margin, high + margin
    step = _nice_step(high - low, 5)
    bottom, top = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
    values = [count * step for count in range(bottom, top + 1)]
    return [(value, _label(value, step, max(abs(values[0]), abs(values[-1])))) for value in values]


def _label(value: float, step: float, largest: float) -> str:
    place = math.floor(math.log10(step) + 1e-9)
    if largest >= 1e6 or largest < 1e-3:
        if value == 0:
            return "0"
        digits = max(0, math.floor(math.log10(abs(value)) + 1e-9) - place)
        mantissa, exponent = f"{value:.{digits}e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.{max(0, -place)}f}"
