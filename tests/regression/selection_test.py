#!/usr/bin/env python3
"""tools/regression/selection.py: cases by name, and parts of a list."""
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))

from regression.case import Case, Place
from regression.listing import ListError, part, select


def named(*names, needs=None):
    return [Case(name=name, place=Place("list.yaml", 1, 1), needs=(needs or {}).get(name, ())) for name in names]


class Select(unittest.TestCase):
    def setUp(self):
        self.cases = named("a", "ab", "b[ranks=2,keep=yes]", "b[ranks=3,keep=yes]", "b[ranks=3,keep=no]", "bb[ranks=2]")

    def picks(self, pattern):
        return [case.name for case in select(self.cases, pattern)]

    def test_patterns(self):
        b2, b3, b3_no = (case.name for case in self.cases[2:5])
        for pattern, expected in (
            ("a", ["a"]),
            ("a*", ["a", "ab"]),
            ("a?", ["ab"]),
            ("b", [b2, b3, b3_no]),
            (b3, [b3]),
            ("b[ranks=3*", [b3, b3_no]),
            ("b[ranks=?,keep=yes]", [b2, b3]),
            ("*[ranks=2*", [b2, "bb[ranks=2]"]),
            ("bb,a", ["a", "bb[ranks=2]"]),
            (f"a*,{b2},{b3}", ["a", "ab", b2, b3]),
            ("a, ab", ["a", "ab"]),
            ("*", [case.name for case in self.cases]),
        ):
            with self.subTest(pattern=pattern):
                self.assertEqual(self.picks(pattern), expected)

    def test_patterns_that_pick_nothing_are_refused(self):
        for pattern, expected in (
            ("[ab]", ["[list] --only '[ab]' picks no case; did you mean 'ab'?"]),
            ("A", ["[list] --only 'A' picks no case, expected one of " + ", ".join(case.name for case in self.cases)]),
            ("b[ranks=4]", ["[list] --only 'b[ranks=4]' picks no case; did you mean 'bb[ranks=2]'?"]),
            ("bb[ranks=22]", ["[list] --only 'bb[ranks=22]' picks no case; did you mean 'bb[ranks=2]'?"]),
            ("a,abc,abb", ["[list] --only 'abc' picks no case; did you mean 'ab'?",
                           "[list] --only 'abb' picks no case; did you mean 'ab'?"]),
        ):
            with self.subTest(pattern=pattern), self.assertRaises(ListError) as caught:
                self.picks(pattern)
            self.assertEqual(caught.exception.problems, expected)
        for pattern in ("", ",", "a,", ",a"):
            with self.subTest(pattern=pattern), self.assertRaisesRegex(ListError, "--only '' picks no case"):
                self.picks(pattern)


class Part(unittest.TestCase):
    def parts(self, cases, n):
        return [[case.name for case in part(cases, i, n)] for i in range(1, n + 1)]

    def test_cases_that_need_one_another_stay_together(self):
        cases = named("a", "b", "c", "d", "e", "f", needs={"d": ("a",), "e": ("d",), "f": ("c",)})
        # Groups ade, cf, b of shares of 3.
        self.assertEqual(self.parts(cases, 2), [["a", "d", "e"], ["b", "c", "f"]])
        self.assertEqual(self.parts(cases, 1), [["a", "b", "c", "d", "e", "f"]])

    def test_cases_that_need_the_same_case_stay_together_without_it(self):
        cases = named("a", "b", "c", "d", needs={"a": ("x",), "c": ("x",)})
        self.assertEqual(self.parts(cases, 2), [["a", "c"], ["b", "d"]])

    def test_a_group_beyond_an_even_share_is_cut(self):
        cases = named(*"abcdefgh", needs={name: ("a",) for name in "bcdef"})
        # A share is 3: abc, def, g, h.
        self.assertEqual(self.parts(cases, 3), [["a", "b", "c"], ["d", "e", "f"], ["g", "h"]])

    def test_every_case_is_in_one_part(self):
        cases = named(*"abcdefghijk", needs={"b": ("a",), "d": ("c",), "k": ("a", "j"), "h": ("i",)})
        for n in range(1, 14):
            with self.subTest(n=n):
                parts = self.parts(cases, n)
                self.assertEqual(sorted(sum(parts, [])), list("abcdefghijk"))
                self.assertTrue(all(each == sorted(each) for each in parts))
                self.assertLessEqual(max(map(len, parts)), 2 * -(-11 // n))

    def test_more_parts_than_cases_leave_some_empty(self):
        self.assertEqual(self.parts(named("a", "b"), 3), [["a"], ["b"], []])
        self.assertEqual(part([], 1, 2), [])
        self.assertEqual(part(named("a"), 10**12, 10**12), [])

    def test_parts_that_there_are_not(self):
        for i, n in ((0, 2), (3, 2), (-1, 2), (1, 0)):
            with self.subTest(i=i, n=n), self.assertRaisesRegex(ListError, rf"^\[list\] part {i} of {n}, expected i/n"):
                part(named("a"), i, n)


if __name__ == "__main__":
    unittest.main()
