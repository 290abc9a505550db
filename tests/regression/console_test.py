"""What the runner prints, to the letter."""

import io
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))

from regression.case import FAILED, FLAKY, LEFT_OUT, PASSED, Case, Place, Result, Run
from regression.console import Console
from regression.texts import duration, printable

PLACE = Place("cpu.yaml", 3, 5)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def result(name, status, reasons=(), **more):
    return Result(Case(name, PLACE), status, list(reasons), **more)


def printed(*results, stream=None, environment=None):
    stream = stream or io.StringIO()
    console = Console(stream, environment or {})
    for one in results:
        console.case_done(one)
    return stream.getvalue()


def summary(*results, report=""):
    stream = io.StringIO()
    Console(stream, {}).summary(list(results), report)
    return stream.getvalue()


class CaseLinesTest(unittest.TestCase):
    def test_passed(self):
        self.assertEqual(printed(result("sharded[ranks=2]", PASSED, seconds=3.14)), "PASS sharded[ranks=2] 3.1 s\n")

    def test_left_out(self):
        self.assertEqual(
            printed(result("a", LEFT_OUT, ["needs 4 GPUs, 0 are visible", "is for cuda"])),
            "LEFT OUT a: needs 4 GPUs, 0 are visible; is for cuda\n",
        )

    def test_failed(self):
        runs = [
            Run(pathlib.Path("o"), "c", [0, 1], 1.0, failing_rank=0, telling_log=pathlib.Path("o/first.log")),
            Run(pathlib.Path("o"), "c", [0, 1], 1.0, failing_rank=1, telling_log=pathlib.Path("o/rank-1.log")),
        ]
        failed = result(
            "a",
            FAILED,
            ["loss first differs at step 3: 1.5 against 1.25", "grad_norm\ntoo"],
            seconds=61,
            runs=[*runs, Run(pathlib.Path("o"), "c", [0, 0], 1.0)],
            log_tail=["first", "", "last"],
            telling_run=runs[1],
            command="tools/regress cpu.yaml --only a",
        )
        self.assertEqual(
            printed(failed),
            """\
FAIL a 1 min 01 s
  loss first differs at step 3: 1.5 against 1.25
  grad_norm
  too
  last lines of rank 1 (o/rank-1.log):
    first

    last
  repeat: tools/regress cpu.yaml --only a
""",
        )

    def test_failed_before_it_ran(self):
        self.assertEqual(printed(result("a", FAILED, ["there is no golden"])), "FAIL a 0.0 s\n  there is no golden\n")

    def test_flaky_says_why_it_failed_at_first(self):
        flaky = result("a", FLAKY, ["ended with 1"], seconds=2, log_tail=["oops"], command="again")
        self.assertEqual(printed(flaky), "FLAKY a 2.0 s\n  ended with 1\n  last lines:\n    oops\n  repeat: again\n")

    def test_a_log_cannot_leave_its_block_or_steer_the_terminal(self):
        tail = ["\x1b[31mred\x1b[0m\x1b]0;title\x07", "10 %\r20 %\r\n", "bell\x07 \x9b31m \udcff", "PASS b 1.0 s"]
        self.assertEqual(
            printed(result("a\nPASS c", FAILED, log_tail=tail)),
            "FAIL a PASS c 0.0 s\n  last lines:\n    red\n    10 %\n    20 %\n    bell\ufffd \ufffd31m \ufffd\n"
            "    PASS b 1.0 s\n",
        )

    def test_each_case_is_one_write(self):
        class Counting(io.StringIO):
            writes = 0

            def write(self, text):
                self.writes += 1
                return super().write(text)

        stream = Counting()
        printed(result("a", FAILED, ["x", "y"], log_tail=["z"], command="c"), stream=stream)
        self.assertEqual(stream.writes, 1)

    def test_a_stream_that_cannot_show_a_letter(self):
        stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        Console(stream, {}).case_done(result("caf\u00e9", PASSED, seconds=1))
        self.assertEqual(stream.buffer.getvalue(), b"PASS caf? 1.0 s\n")


class ColourTest(unittest.TestCase):
    def test_on_a_terminal(self):
        self.assertEqual(printed(result("a", PASSED), stream=Terminal()), "\x1b[32mPASS\x1b[0m a 0.0 s\n")
        self.assertEqual(printed(result("a", FAILED), stream=Terminal()), "\x1b[31mFAIL\x1b[0m a 0.0 s\n")

    def test_not_when_asked_not_to(self):
        for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
            self.assertEqual(printed(result("a", PASSED), stream=Terminal(), environment=environment), "PASS a 0.0 s\n")

    def test_an_empty_no_color_asks_for_nothing(self):
        self.assertIn("\x1b[32m", printed(result("a", PASSED), stream=Terminal(), environment={"NO_COLOR": ""}))


class SummaryTest(unittest.TestCase):
    def test_all_kinds(self):
        results = [
            result("good", PASSED, seconds=1),
            result("skipped", LEFT_OUT, ["needs 4 GPUs", "no srun"]),
            result("bad", FAILED, ["loss differs", "and more"], seconds=2.5),
            result("better", PASSED, seconds=1),
            result("shaky", FLAKY, ["ended with 1"], seconds=3),
            result("other", LEFT_OUT, ["is for cuda"]),
        ]
        self.assertEqual(
            summary(*results, report="out/report.html"),
            """
6 cases: 2 passed, 1 failed, 1 flaky, 2 left out; 7.5 s
  FAIL bad: loss differs
  FLAKY shaky: ended with 1
  LEFT OUT skipped: needs 4 GPUs; no srun
  LEFT OUT other: is for cuda
report: out/report.html
""",
        )

    def test_what_was_left_out_is_not_passed(self):
        self.assertEqual(
            summary(result("a", LEFT_OUT, ["is for cuda"])),
            "\n1 case: 0 passed, 0 failed, 0 flaky, 1 left out; 0.0 s\nnothing ran\n  LEFT OUT a: is for cuda\n",
        )

    def test_no_cases(self):
        self.assertEqual(summary(), "\n0 cases: 0 passed, 0 failed, 0 flaky, 0 left out; 0.0 s\nnothing ran\n")


class TextsTest(unittest.TestCase):
    def test_durations(self):
        for seconds, text in (
            (0, "0.0 s"),
            (59.94, "59.9 s"),
            (59.96, "1 min 00 s"),
            (125, "2 min 05 s"),
            (3599.6, "1 h 00 min"),
            (7380, "2 h 03 min"),
        ):
            self.assertEqual(duration(seconds), text)

    def test_every_character_is_one_that_xml_can_hold(self):
        shown = printable("".join(map(chr, range(0x11000))))
        allowed = {
            "\t",
            "\n",
            *map(chr, range(0x20, 0xD800)),
            *map(chr, range(0xE000, 0xFFFE)),
            *map(chr, range(0x10000, 0x11000)),
        }
        self.assertEqual(set(shown) - allowed, set())
        self.assertEqual(printable("a\tb\u00e9\U0001f600"), "a\tb\u00e9\U0001f600")


if __name__ == "__main__":
    unittest.main()
