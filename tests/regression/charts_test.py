"""The charts of report.html: where their lines, ticks and legends lie."""

import math
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))

from regression.case import FAILED, Curve
from regression.reports import charts
from reports_support import ReportsTest, result


class ChartsTest(ReportsTest):
    def drawn(self, *curves):
        self.write(result("a", FAILED, curves=list(curves)))
        return self.page()

    def test_overlaid_curves(self):
        page = self.drawn(Curve("a", "loss", [1, 2, 3], [0.0, 10.0, 5.0]), Curve("golden", "loss", [1, 3], [10.0, 0.0]))
        self.assertEqual(len(page.all("svg")), 1)
        # Labels of two letters: the plot reaches from 14 + 2 * 7 to 640 - 16, and from 210 up to 10.
        self.assertEqual(
            [one["points"] for one in page.all("polyline")],
            ["28.0,210.0 326.0,10.0 624.0,110.0", "28.0,10.0 624.0,210.0"],
        )
        groups = [one for one in page.all("g") if "class" in one]
        self.assertEqual([one["class"] for one in groups], ["c0", "c1"])
        self.assertEqual([one["color"] for one in groups], ["#0072b2", "#d55e00"])
        self.assertEqual(
            [one["stroke-dasharray"] for one in page.all("g") if "stroke-dasharray" in one], ["none", "7 4"]
        )
        self.assertEqual(page.all("svg")[0]["aria-label"], "loss by step of a, golden")
        texts = "".join(page.texts).split("loss", 1)[1].split()
        self.assertEqual(texts[:12], ["0", "2", "4", "6", "8", "10", "1", "2", "3", "step", "a", "golden"])

    def test_one_chart_a_metric(self):
        page = self.drawn(*(Curve("a", metric, [1, 2], [1.0, 2.0]) for metric in ("loss", "grad_norm", "loss")))
        self.assertEqual(
            [one["aria-label"] for one in page.all("svg")], ["loss by step of a, a", "grad_norm by step of a"]
        )

    def test_one_point(self):
        page = self.drawn(Curve("a", "loss", [7], [2.0]))
        # Values of 1.9 to 2.1 with labels of four letters: 2.0 and step 7 lie in the middle.
        (dot,) = page.all("circle")
        self.assertEqual((dot["cx"], dot["cy"]), ("333.0", "110.0"))
        self.assertEqual(page.all("polyline"), [])

    def test_values_that_are_not_finite_leave_gaps(self):
        values = [1.0, 2.0, math.nan, 1.0, -math.inf, 2.0, 1.0]
        page = self.drawn(Curve("a", "loss", list(range(1, 8)), values))
        self.assertEqual([len(one["points"].split()) for one in page.all("polyline")], [2, 2])
        self.assertEqual(len(page.all("circle")), 1)
        self.assertIn("a: 2 of 7 values cannot be drawn, the first is NaN at step 3", page.text)
        self.assertNotIn("nan", self.html().lower().replace("is nan at", ""))

    def test_nothing_to_draw(self):
        page = self.drawn(Curve("a", "loss", [], []), Curve("b", "loss", [1, 2], [math.nan, 1e200]))
        self.assertEqual(page.all("svg"), [])
        self.assertIn("a has no values", page.text)
        self.assertIn("b: 2 of 2 values cannot be drawn, the first is NaN at step 1", page.text)

    def test_values_without_steps_are_a_fault(self):
        with self.assertRaises(ValueError):
            charts.draw_charts([{"label": "a", "metric": "loss", "steps": [1], "values": []}])

    def test_curves_are_told_apart(self):
        curves = [{"label": str(n), "metric": "m", "steps": [1], "values": [1.0]} for n in range(36)]
        (chart,) = charts.draw_charts(curves)
        self.assertEqual(len({(one.colour, one.dash) for one in chart.series}), 36)

    def test_ticks(self):
        for low, high, labels in (
            (0, 10, ["0", "2", "4", "6", "8", "10"]),
            (0.31, 0.9, ["0.2", "0.4", "0.6", "0.8", "1.0"]),
            (-1.2, 3.7, ["-2", "-1", "0", "1", "2", "3", "4"]),
            (2.3, 2.3, ["2.15", "2.20", "2.25", "2.30", "2.35", "2.40", "2.45"]),
            (0, 0, ["-1.0", "-0.5", "0.0", "0.5", "1.0"]),
            (1.5e9, 1.5e9 + 2e4, ["1.500000e9", "1.500005e9", "1.500010e9", "1.500015e9", "1.500020e9"]),
            (1e-5, 3e-5, ["1.0e-5", "1.5e-5", "2.0e-5", "2.5e-5", "3.0e-5"]),
            (0, 1e-5, ["0", "2e-6", "4e-6", "6e-6", "8e-6", "1.0e-5"]),
            (0, 9e7, ["0", "2e7", "4e7", "6e7", "8e7", "1.0e8"]),
        ):
            with self.subTest(f"{low} to {high}"):
                self.assertEqual([label for _, label in charts._value_ticks(low, high)], labels)

    def test_ticks_of_any_range_hold_it_and_differ(self):
        for low in (-1e149, -1e9, -1.0, -1e-9, 0.0, 1e-160, 1e-9, 0.1, 2.3, 1e6, 1e149):
            for span in (0.0, 1e-170, 1e-14, 1e-9, 0.3, 1.0, 7e5, 1e10, 9e149):
                high = low + span
                ticks = charts._value_ticks(low, high)
                step = ticks[1][0] - ticks[0][0]
                with self.subTest(f"{low} to {high}"):
                    self.assertLessEqual(ticks[0][0], low + 1e-5 * step)
                    self.assertGreaterEqual(ticks[-1][0], high - 1e-5 * step)
                    self.assertEqual(len({label for _, label in ticks}), len(ticks))
                    self.assertTrue(3 <= len(ticks) <= 8, ticks)
                    for value, label in ticks:
                        self.assertLessEqual(abs(float(label) - value), 1e-6 * step + 1e-15 * abs(value))

    def test_steps(self):
        for first, last, steps in (
            (1, 1, [1]),
            (1, 3, [1, 2, 3]),
            (1, 20, [5, 10, 15, 20]),
            (0, 16, [0, 2, 4, 6, 8, 10, 12, 14, 16]),
            (901, 1000, [920, 940, 960, 980, 1000]),
        ):
            self.assertEqual(charts._step_ticks(first, last), steps)

    def test_everything_lies_within_the_picture(self):
        for values in ([1e12, -1e12, 3.0], [1.0000001, 1.0000002, 1.0000003], [5.0, 5.0, 5.0], [1e-12, 3e-12, 2e-12]):
            page = self.drawn(Curve("a", "loss", [10, 500, 100000], values), Curve("b", "loss", [3], [values[0]]))
            (svg,) = page.all("svg")
            width, height = float(svg["width"]), float(svg["height"])
            self.assertEqual(svg["viewbox"], f"0 0 {svg['width']} {svg['height']}")
            for tag, attributes in page.tags:
                for name, most in (
                    ("x", width),
                    ("x1", width),
                    ("x2", width),
                    ("cx", width),
                    ("y", height),
                    ("y1", height),
                    ("y2", height),
                    ("cy", height),
                ):
                    if name in attributes:
                        self.assertTrue(0 <= float(attributes[name]) <= most, f"{tag} {attributes}")
                if tag == "polyline":
                    for point in attributes["points"].split():
                        x, y = map(float, point.split(","))
                        self.assertTrue(0 <= x <= width - charts.RIGHT and 10 <= y <= 210, point)


if __name__ == "__main__":
    unittest.main()
