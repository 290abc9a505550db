"""report.json and report.xml: what they say, and that no text of a case can break them."""

import json
import math
import os
import pathlib
import sys
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))

from regression.case import FAILED, FLAKY, LEFT_OUT, PASSED
from regression.history import read_history
from regression.reports.comparison import Change, look_back
from reports_support import ENVIRONMENT, HOSTILE, SHOWN, ReportsTest, result


class WritingTest(ReportsTest):
    def test_nothing_but_the_reports_is_left(self):
        self.write(self.failed())
        self.assertEqual(sorted(os.listdir(self.folder)), ["report.html", "report.json", "report.xml"])

    def test_a_write_that_fails_leaves_the_former_report(self):
        self.write(result("a", PASSED))
        before = self.json()
        with mock.patch.object(os, "fsync", side_effect=OSError(28, "No space left on device")):
            with self.assertRaises(OSError):
                self.write(self.failed())
        self.assertEqual(self.json(), before)
        self.assertEqual(sorted(os.listdir(self.folder)), ["report.html", "report.json", "report.xml"])


class JsonTest(ReportsTest):
    def test_whole_document(self):
        self.write(self.failed(), result("b", LEFT_OUT, ["is for cuda"]))
        document = self.json()
        definition = document["cases"][0].pop("definition")
        self.assertEqual(definition["place"], {"file": "tests/regression/cpu.yaml", "line": 12, "column": 5})
        self.assertEqual((definition["program"], definition["devices"]), ("hsdp_train", ["cpu", "cuda"]))
        self.assertEqual(
            document["cases"][0],
            {
                "name": "a[ranks=2]",
                "status": "failed",
                "reasons": ["loss first differs at step 3: 1.5 against 1.25", "and more"],
                "confirmed": ["grad_norm of 2 steps"],
                "seconds": 2.75,
                "figures": {"tokens_per_second": 100.0, "loss": "NaN"},
                "command": "tools/regress cpu.yaml --only a",
                "failing_rank": 1,
                "log_tail": ["one", "two"],
                "curves": [
                    {"label": "a[ranks=2]", "metric": "loss", "steps": [1, 2, 3], "values": [2.0, "Infinity", 1.5]}
                ],
                "runs": [
                    {
                        "folder": "a[ranks=2]",
                        "command": "hsdp_train --x",
                        "exit_codes": [0, None],
                        "seconds": 2.5,
                        "timed_out": True,
                        "failing_rank": 1,
                        "problem": "",
                        "logs": {"0": "/else/0", "1": "a[ranks=2]/rank 1.log"},
                        "telling_log": "a[ranks=2]/rank 1.log",
                        "leftovers": ["process 7"],
                    }
                ],
            },
        )
        self.assertEqual(document["cases"][1]["status"], "left_out")
        del document["cases"]
        self.assertEqual(
            document,
            {
                "format": 1,
                "list": "cpu",
                "command": "tools/regress cpu.yaml",
                "environment": ENVIRONMENT,
                "counts": {"passed": 0, "failed": 1, "flaky": 0, "left_out": 1},
                "seconds": 2.75,
            },
        )

    def test_other_parsers_can_read_it(self):
        def refuse(constant):
            raise AssertionError(f"{constant} is no JSON")

        self.write(result(HOSTILE, FAILED, figures={"x": -math.inf, "y": math.nan}))
        text = (self.folder / "report.json").read_bytes().decode("ascii")
        document = json.loads(text, parse_constant=refuse)
        self.assertEqual(document["cases"][0]["figures"], {"x": "-Infinity", "y": "NaN"})
        self.assertEqual(document["cases"][0]["name"], HOSTILE.replace("\udcff", "\ufffd"))

    def test_it_is_history(self):
        self.write(self.failed())
        self.assertEqual(read_history(self.out, "cpu"), [{**self.json(), "folder": self.folder.name}])


class JunitTest(ReportsTest):
    def test_suite(self):
        self.write(
            self.failed(),
            result("b", LEFT_OUT, ["x"]),
            result("c", PASSED, seconds=1),
            result("d", FLAKY, ["y"], seconds=2),
        )
        totals = {"name": "cpu", "tests": "4", "failures": "1", "errors": "0", "skipped": "1", "time": "5.750"}
        root = self.xml()
        self.assertEqual((root.tag, root.attrib), ("testsuites", totals))
        (suite,) = root
        self.assertEqual(suite.tag, "testsuite")
        self.assertEqual(suite.attrib, {**totals, "timestamp": "2026-01-02T03:04:05", "hostname": "here"})
        self.assertEqual([child.tag for child in suite], ["properties"] + 4 * ["testcase"])
        self.assertEqual(
            {one.get("name"): one.get("value") for one in suite.find("properties")},
            {
                "torch": "2.11.0",
                "device_name": "A processor",
                "gpus": "0: A, 1: B",
                "host": "here",
                "commit": "0123456789abcdef",
                "dirty": "2",
                "date": "2026-01-02T03:04:05Z",
                "OMP_NUM_THREADS": "1",
                "regress": "tools/regress cpu.yaml",
            },
        )

    def test_cases(self):
        self.write(
            self.failed(),
            result("b", LEFT_OUT, ["needs 4", "no srun"]),
            result("c", PASSED),
            result("d", FLAKY, ["oops"]),
        )
        failed, left_out, passed, flaky = self.xml().iter("testcase")
        self.assertEqual(
            failed.attrib,
            {
                "classname": "cpu",
                "name": "a[ranks=2]",
                "time": "2.750",
                "file": "tests/regression/cpu.yaml",
                "line": "12",
            },
        )
        self.assertEqual([child.tag for child in failed], ["failure", "system-out"])
        self.assertEqual(
            failed[0].attrib,
            {"message": "loss first differs at step 3: 1.5 against 1.25; and more", "type": "regression"},
        )
        text = (
            "loss first differs at step 3: 1.5 against 1.25\nand more\n\nlast lines of rank 1:\none\ntwo\n\n"
            "repeat: tools/regress cpu.yaml --only a"
        )
        self.assertEqual(failed[0].text, text)
        self.assertEqual(failed[1].text, "grad_norm of 2 steps")
        self.assertEqual(
            [(child.tag, child.attrib, child.text) for child in left_out],
            [("skipped", {"message": "needs 4; no srun"}, "needs 4; no srun")],
        )
        self.assertEqual(list(passed), [])
        ((flaky_failure),) = flaky
        self.assertEqual(
            (flaky_failure.tag, flaky_failure.attrib), ("flakyFailure", {"message": "oops", "type": "regression"})
        )
        self.assertEqual([(child.tag, child.text) for child in flaky_failure], [("stackTrace", "oops")])

    def test_hostile_texts(self):
        self.write(
            result(HOSTILE, FAILED, [HOSTILE], log_tail=[HOSTILE], confirmed=[HOSTILE], command=HOSTILE),
            result("b", LEFT_OUT, [HOSTILE]),
            result("c", FLAKY, [HOSTILE]),
            environment={**ENVIRONMENT, "variables": {"NCCL_X": HOSTILE}},
            command=HOSTILE,
        )
        failed, left_out, flaky = self.xml().iter("testcase")
        self.assertEqual(failed.get("name"), SHOWN)
        self.assertEqual(failed[0].get("message"), SHOWN)
        self.assertEqual(failed[0].text, f"{SHOWN}\n\nlast lines:\n{SHOWN}\n\nrepeat: {SHOWN}")
        self.assertEqual(failed[1].text, SHOWN)
        self.assertEqual(left_out[0].text, SHOWN)
        self.assertEqual(flaky[0][0].text, SHOWN)
        self.assertEqual(self.xml().find(".//property[@name='NCCL_X']").get("value"), SHOWN)

    def test_every_byte_of_a_log(self):
        log = bytes(range(256)).decode("utf-8", "surrogateescape")
        self.write(result("a", FAILED, log_tail=[log, bytes(range(256)).decode("latin-1")]))
        (text,) = (one.text for one in self.xml().iter("failure"))
        self.assertIn(" !\"#$%&'()*+,-./0123456789:;<=>?@", text)


class ComparisonTest(unittest.TestCase):
    def test_changes(self):
        for now, before, text in (
            (1.0, 1.0, "same"),
            (3.0, 2.0, "+50.0 %"),
            (1.0, 2.0, "-50.0 %"),
            (-1.0, -2.0, "+50.0 %"),
            (2.00000001, 2.0, "+1e-08"),
            (5.0, 0.0, "+5"),
            (0.0, 0.0, "same"),
            (math.nan, math.nan, "not finite"),
            (math.inf, 1.0, "not finite"),
            (math.inf, math.inf, "same"),
            (None, 1.0, "gone"),
            (1.0, None, "new"),
        ):
            self.assertEqual(Change("x", now, before).text, text, (now, before))

    def test_what_did_not_run_is_not_compared(self):
        past = look_back(
            {"name": "a", "status": "left_out", "seconds": 0.0, "figures": {}},
            [{"cases": [{"name": "a", "status": "passed", "seconds": 1.0, "figures": {"x": 1.0}}]}],
        )
        self.assertEqual((past.statuses, past.is_new, past.seconds, past.figures), (["passed"], False, None, []))

    def test_without_history_nothing_is_new(self):
        past = look_back({"name": "a", "status": "passed", "seconds": 0.0, "figures": {}}, [])
        self.assertEqual((past.statuses, past.is_new, past.report), ([], False, None))


if __name__ == "__main__":
    unittest.main()
