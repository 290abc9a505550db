"""report.html: what it says, that it stands alone, and that no text of a case can break it."""

import json
import math
import pathlib
import re
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))

from regression.case import FAILED, FLAKY, LEFT_OUT, PASSED, Case, Curve, Place, Result, Run
from regression.history import read_history
from reports_support import ENVIRONMENT, HOSTILE, SHOWN, ReportsTest, result


class HtmlTest(ReportsTest):
    def history(self):
        """Two former reports; in the newer one "gone" ran and "a" did not fit."""
        folders = [self.run_folder(f"2026010{day}T000000Z-1") for day in (1, 2)]
        older = {**ENVIRONMENT, "date": "2026-01-01T00:00:00Z", "torch": "2.10.0"}
        newer = {**ENVIRONMENT, "date": "2026-01-02T00:00:00Z", "torch": "2.10.1", "extra": "x"}
        ran = result(
            "a", FLAKY, ["oops"], seconds=2.0, figures={"speed": 80.0, "same": 1.0, "old": 5.0, "zero": 0.0, "odd": 1.0}
        )
        self.write(ran, environment=older, folder=folders[0])
        self.write(result("a", LEFT_OUT, ["x"]), result("gone", FAILED, ["y"]), environment=newer, folder=folders[1])
        self.assertEqual(len(read_history(self.out, "cpu")), 2)
        return read_history(self.out, "cpu")

    def test_summary(self):
        for results, verdict, status in (
            ([], "Nothing ran", "left_out"),
            ([result("a", LEFT_OUT, ["x"])], "Nothing ran", "left_out"),
            ([result("a", PASSED), result("b", LEFT_OUT, ["x"])], "Passed: 1 of the 1 that ran", "passed"),
            ([result("a", PASSED), result("b", FLAKY)], "Flaky: 1 of the 2 that ran; none failed for good", "flaky"),
            ([result("a", PASSED), result("b", FLAKY), result("c", FAILED)], "Failed: 1 of the 3 that ran", "failed"),
        ):
            with self.subTest(verdict):
                self.write(*results)
                page = self.page()
                self.assertIn(verdict, page.text)
                self.assertIn({"class": f"verdict {status}"}, page.all("p"))
        for word, count in (("✗ FAIL", "1"), ("≈ FLAKY", "1"), ("○ LEFT OUT", "0"), ("✓ PASS", "1")):
            self.assertEqual(page.row(word), [word, count])

    def test_rows_and_details(self):
        self.write(result("first", PASSED, seconds=1), self.failed(), result("b", LEFT_OUT, ["needs 4 GPUs"]))
        page = self.page()
        rows = [[" ".join(cell.split()) for cell in row] for row in page.rows if len(row) == 5][1:]
        self.assertEqual(
            rows,
            [
                ["✗ FAIL", "a[ranks=2]", "2.8 s", "", "loss first differs at step 3: 1.5 against 1.25and more"],
                ["○ LEFT OUT", "b", "–", "", "needs 4 GPUs"],
                ["✓ PASS", "first", "1.0 s", "", ""],
            ],
        )
        self.assertEqual(page.all("details"), [{"open": None}, {}, {}])
        for text in (
            "grad_norm of 2 steps",
            "Last lines of rank 1\n",
            "one\ntwo",
            "tools/regress cpu.yaml --only a",
            "Run 1 of 1: 2.5 s, ended by the time limit",
            "Exit codes by rank: 0, unknown.",
            "process 7",
            "a[ranks=2]: 1 of 3 values cannot be drawn, the first is Infinity at step 2",
            "tests/regression/cpu.yaml:12:5",
        ):
            self.assertIn(text, page.text)
        self.assertEqual([one["href"] for one in page.all("a")], ["a%5Branks%3D2%5D/rank%201.log"])
        self.assertIn("rank 0: /else/0", page.text)

    def test_it_needs_nothing_from_elsewhere(self):
        self.write(self.failed(), history=self.history())
        page = self.page()
        self.assertNotIn("http", self.html())
        self.assertNotIn("url(", self.html())
        self.assertNotIn("@import", self.html())
        self.assertEqual({tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "base"}, set())
        for _, attributes in page.tags:
            self.assertEqual([name for name in attributes if name.startswith("on") or name in ("src", "style")], [])

    def test_hostile_texts(self):
        def everywhere(text):
            logs = {0: self.folder / "javascript:x" / "l\"'<.log"}
            run = Run(self.folder / "r", text, [1], 1.0, failing_rank=0, problem=text, logs=logs, leftovers=[text])
            curves = [Curve(text, text, [1, 2], [1.0, 2.0]), Curve(text, text, [1], [math.nan])]
            case = Case(text, Place(text, 1, 1), text)
            more = {"confirmed": [text], "runs": [run], "log_tail": [text], "curves": curves, "command": text}
            self.write(
                Result(case, FAILED, [text], figures={text: 1.0}, **more),
                Result(case, LEFT_OUT, [text]),
                environment={**ENVIRONMENT, "device_name": text, "variables": {text: text}},
                command=text,
            )
            return self.page()

        plain = everywhere("plain")
        hostile = everywhere(HOSTILE)
        self.assertEqual([tag for tag, _ in hostile.tags], [tag for tag, _ in plain.tags])
        self.assertEqual([list(names) for _, names in hostile.tags], [list(names) for _, names in plain.tags])
        self.assertEqual(hostile.text.count(SHOWN), plain.text.count("plain"))
        self.assertGreater(plain.text.count("plain"), 15)
        self.assertEqual(re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f]", self.html()), [])
        self.assertEqual([one["href"] for one in hostile.all("a")], ["javascript%3Ax/l%22%27%3C.log"])

    def test_a_log_keeps_its_first_empty_line(self):
        # HTML drops a line end right after <pre>.
        self.write(result("a", FAILED, log_tail=["", "x"]))
        self.assertIn("<pre>\n\nx</pre>", self.html())

    def test_history(self):
        now = result(
            "a", PASSED, seconds=3.0, figures={"speed": 100.0, "same": 1.0, "new": 7.0, "zero": 0.5, "odd": math.nan}
        )
        self.write(now, result("fresh", PASSED), history=self.history())
        page = self.page()
        self.assertEqual(page.row("✓ PASS"), ["✓ PASS", "2"])
        rows = [[" ".join(cell.split()) for cell in row] for row in page.rows if len(row) == 5][1:]
        self.assertEqual(rows[0][:4], ["✓ PASS", "a", "3.0 s+50.0 %", "≈○"])
        self.assertEqual(rows[1][:4], ["✓ PASS", "fresh (new)", "0.0 s", "··"])
        titles = [one["title"] for one in page.all("span") if "title" in one]
        self.assertEqual(titles[:2], ["FLAKY, 2026-01-01T00:00:00Z", "LEFT OUT, 2026-01-02T00:00:00Z"])
        self.assertIn("Figures, and those of 2026-01-01T00:00:00Z\n", page.text)
        for row in (
            ["speed", "100", "80", "+25.0 %"],
            ["same", "1", "1", "same"],
            ["new", "7", "–", "new"],
            ["old", "–", "5", "gone"],
            ["zero", "0.5", "0", "+0.5"],
            ["odd", "nan", "1", "not finite"],
        ):
            self.assertEqual(page.row(row[0]), row)
        self.assertIn("In the report of 2026-01-02T00:00:00Z, not in this one\ngone (FAIL)", page.text)
        self.assertEqual(
            [one["href"] for one in page.all("a")],
            ["../20260102T000000Z-1/report.html", "../20260101T000000Z-1/report.html"],
        )
        self.assertEqual(
            page.row("2026-01-02T00:00:00Z")[1:], ["0123456789ab", "A processor", "1", "0", "1", "0", "0.0 s"]
        )

    def test_environment_beside_that_of_the_previous_report(self):
        self.write(result("a", PASSED), history=self.history())
        page = self.page()
        self.assertEqual(page.row("torch"), ["torch", "2.11.0", "2.10.1"])
        self.assertEqual(page.row("extra"), ["extra", "none", "x"])
        self.assertEqual(page.row("dirty"), ["dirty", "2", ""])
        self.assertEqual(page.row("date"), ["date", "2026-01-02T03:04:05Z", ""])
        self.assertEqual(page.row("OMP_NUM_THREADS"), ["OMP_NUM_THREADS", "1", ""])

    def test_figures_of_another_device_say_so(self):
        history = self.history()
        history[1]["environment"]["device_name"] = "Another"
        self.write(result("a", PASSED, figures={"speed": 1.0}), history=history)
        self.assertIn("Figures, and those of 2026-01-01T00:00:00Z on Another", self.page().text)

    def test_the_least_that_a_former_report_may_have(self):
        case = {"name": "a", "status": "passed", "seconds": 1.0, "figures": {"x": "NaN", "y": [], "z": 10**400}}
        least = {"format": 1, "list": "cpu", "environment": {"date": "2026-01-01T00:00:00Z"}, "cases": [case]}
        folder = self.run_folder("20260101T000000Z-1")
        (folder / "report.json").write_text(json.dumps(least))
        self.write(result("a", PASSED, figures={"x": 1.0}), history=read_history(self.out, "cpu"))
        page = self.page()
        self.assertEqual(page.row("x"), ["x", "1", "nan", "not finite"])
        self.assertEqual(page.row("2026-01-01T00:00:00Z")[1:3], ["unknown", "unknown"])

    def test_ten_former_reports(self):
        past = [
            {"format": 1, "folder": f"f{n}", "list": "cpu", "environment": {"date": f"d{n}"}, "cases": []}
            for n in range(10)
        ]
        self.write(result("a", PASSED), history=past)
        self.assertEqual(self.page().row("✓ PASS")[0], "✓ PASS")
        rows = [row for row in self.page().rows if len(row) == 5][1:]
        self.assertEqual(rows[0][3], "·" * 10)

    def test_status_is_not_by_colour_alone(self):
        self.write(*(result(status, status, ["x"]) for status in (PASSED, FAILED, FLAKY, LEFT_OUT)))
        rows = [" ".join(row[0].split()) for row in self.page().rows if len(row) == 5][1:]
        self.assertEqual(rows, ["✗ FAIL", "≈ FLAKY", "○ LEFT OUT", "✓ PASS"])

    def test_light_dark_and_print(self):
        self.write(result("a", PASSED))
        for rule in ("@media (prefers-color-scheme: dark)", "@media print", "color-scheme: light dark"):
            self.assertIn(rule, self.html())


if __name__ == "__main__":
    unittest.main()
