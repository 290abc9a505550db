#!/usr/bin/env python3
"""tools/regression/checks.py: curves, bounds and ratios by hand."""
import math
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))

from regression import checks
from regression.case import Bound


def lines(*losses, first=1, **more):
    return [{"step": first + i, "loss": loss, "grad_norm": 1.0, **more} for i, loss in enumerate(losses)]


class RelativeDifference(unittest.TestCase):
    def test_is_by_the_larger_of_the_two(self):
        for a, b, expected in ((1.0, 1.0, 0.0), (0.0, 0.0, 0.0), (1.0, 2.0, 0.5), (2.0, 1.0, 0.5), (-1.0, 1.0, 2.0),
                               (0.0, 1e-300, 1.0)):
            with self.subTest(a=a, b=b):
                self.assertEqual(checks.relative_difference(a, b), expected)


class Compare(unittest.TestCase):
    def test_names_the_first_step_with_both_values_and_the_largest_difference(self):
        verdict = checks.compare(lines(4.0, 2.0, 1.0), lines(4.0, 2.5, 0.5), "other", {"loss": 0.1})
        self.assertEqual(verdict.failures, ["loss at step 2 is 2.0, other has 2.5, relative difference 0.2, 0.1 allowed; "
                                            "largest 0.5 at step 3"])
        self.assertEqual(verdict.confirmed, [])

    def test_a_tolerance_includes_its_end(self):
        self.assertEqual(checks.compare(lines(2.0), lines(1.5), "other", {"loss": 0.25}).confirmed,
                         ["loss of steps 1 to 1 differs from other by at most 0.25, 0.25 allowed"])
        self.assertNotEqual(checks.compare(lines(2.0), lines(1.5), "other", {"loss": 0.2499}).failures, [])

    def test_bitwise_sees_the_last_bit(self):
        next_one = math.nextafter(1.0, 2.0)
        self.assertEqual(checks.compare(lines(next_one), lines(1.0), "other", {"loss": 0.0}).failures,
                         ["loss at step 1 is 1.0000000000000002, other has 1.0, relative difference 2.22e-16, bitwise; "
                          "largest 2.22e-16 at step 1"])
        self.assertEqual(checks.compare(lines(1.0, 3.0), lines(1.0, 3.0), "other", {"loss": 0.0}).confirmed,
                         ["loss of steps 1 to 2 is bitwise that of other"])

    def test_a_run_that_goes_on_is_compared_from_its_first_step(self):
        verdict = checks.compare(lines(3.0, first=3), lines(1.0, 2.0, 3.0), "other", {"loss": 0.0})
        self.assertEqual(verdict.confirmed, ["loss of steps 3 to 3 is bitwise that of other"])

    def test_steps_that_the_other_lacks_fail(self):
        for mine, other in ((lines(1.0, 1.0), lines(1.0)), ([], lines(1.0))):
            self.assertIn("lacks steps", checks.compare(mine, other, "other", {"loss": 1.0}).failures[0])

    def test_a_metric_that_one_side_lacks_fails(self):
        mine, other = lines(1.0, collectives={"all_gathers": 3}), lines(1.0)
        self.assertEqual(checks.compare(mine, other, "other", {"collectives.all_gathers": 1.0}).failures,
                         ["collectives.all_gathers is not a number in other at step 1, expected one to compare"])
        self.assertEqual(checks.compare(other, mine, "other", {"collectives.all_gathers": 1.0}).failures,
                         ["collectives.all_gathers is not a number in this case at step 1, expected one to compare"])
        self.assertNotEqual(checks.compare(lines(None), lines(1.0), "other", {"loss": 1.0}).failures, [])
        self.assertNotEqual(checks.compare(lines(True), lines(1.0), "other", {"loss": 1.0}).failures, [])
        for value in (math.nan, math.inf):
            self.assertNotEqual(checks.compare(lines(value), lines(value), "other", {"loss": 0.5}).failures, [])


class Steps(unittest.TestCase):
    def test_each_once_and_finite(self):
        self.assertEqual(checks.check_steps(lines(4.0, 2.0, ranks=3), 1, 2, 3).confirmed, ["steps 1 to 2 were logged, loss 4 to 2"])
        for found, first, last in ((lines(1.0), 1, 2), (lines(1.0, 1.0), 1, 1), (lines(1.0), 2, 2), ([], 1, 1)):
            with self.subTest(first=first, last=last):
                self.assertIn("were expected in the metrics", checks.check_steps(found, first, last, 3).failures[0])

    def test_a_loss_or_norm_that_is_none_or_infinite_fails(self):
        for value in (None, math.inf, math.nan, "1.0"):
            self.assertIn("loss at step 2", checks.check_steps(lines(1.0, value, ranks=3), 1, 2, 3).failures[0])
        broken = lines(1.0)
        broken[0]["grad_norm"] = None
        self.assertEqual(checks.check_steps(broken, 1, 1, 3).failures, ["grad_norm at step 1 is None, expected a finite number"])


    def test_ranks_that_train_apart_fail(self):
        for ranks, found in ((2, lines(1.0, ranks=1)), (2, lines(1.0))):
            self.assertIn("ranks trained together at step 1, expected 2", checks.check_steps(found, 1, 1, ranks).failures[0])


class Bounds(unittest.TestCase):
    def check(self, values, **bound):
        found = [{"step": i + 1, "a": {"b": value}} for i, value in enumerate(values)]
        return checks.check_bound(found, Bound("a.b", **bound))

    def test_hold_at_every_step(self):
        self.assertEqual(self.check([5, 6], at_least=5, at_most=6).confirmed, ["a.b is 5 to 6, at least 5 and at most 6"])
        self.assertEqual(self.check([5, 5], at_least=5, at_most=5).confirmed, ["a.b is 5, exactly 5"])
        self.assertEqual(self.check([5, 7], at_most=6).failures, ["a.b at step 2 is 7, expected at most 6"])
        self.assertEqual(self.check([4, 5], at_least=5).failures, ["a.b at step 1 is 4, expected at least 5"])
        self.assertEqual(self.check([5, 4], at_least=5, at_most=5).failures, ["a.b at step 2 is 4, expected exactly 5"])

    def test_hold_from_a_step_on(self):
        self.assertEqual(self.check([9, 5], at_most=5, from_step=2).failures, [])
        self.assertIn("expected such steps", self.check([5], at_most=5, from_step=2).failures[0])

    def test_a_metric_that_is_no_finite_number_fails(self):
        for value in (None, "4", True, math.nan, -math.inf, 10**400):
            self.assertIn("not a number at step 1", self.check([value], at_most=5).failures[0])


class Throughput(unittest.TestCase):
    def test_is_the_median_without_the_first_step(self):
        found = [{"step": i, "tokens_per_second": value} for i, value in enumerate((1.0, 10.0, 30.0, 20.0))]
        self.assertEqual(checks.tokens_per_second(found), 20.0)
        self.assertEqual(checks.tokens_per_second(found[:1]), 1.0)
        self.assertIsNone(checks.tokens_per_second([]))
        self.assertIsNone(checks.tokens_per_second([{"step": 1}, {"step": 2}]))
        self.assertIsNone(checks.tokens_per_second([{"step": 1, "tokens_per_second": math.inf}]))

    def test_the_median_of_the_ratios_counts(self):
        pairs = [(50.0, 100.0), (90.0, 100.0), (80.0, 100.0)]
        self.assertEqual(checks.check_throughput(pairs, "other", 0.8).failures, [])
        self.assertEqual(checks.check_throughput(pairs, "other", 0.81).failures, [
            "tokens a second are 0.800 of those of other (0.500 to 0.900 in 3 pairs, 80 against 100), expected at least 0.81"])


if __name__ == "__main__":
    unittest.main()
