#!/usr/bin/env python3
"""tools/regression/listing.py: lists by hand and what they expand to."""
import pathlib
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tools"), str(HERE)]

from list_files import CASE, ListTest, in_case
from regression.case import Bound, Case, Equality, Place, Throughput


class Values(ListTest):
    def test_a_case_of_few_words_has_the_defaults(self):
        result = self.read(CASE)
        path = str(self.root / "list.yaml")
        self.assertEqual(result.cases, [Case(name="a", place=Place(path, 2, 3), config="c.yaml")])
        self.assertEqual((result.goldens, result.name), (self.root / "goldens", "list"))

    def test_every_key_of_a_case_that_trains(self):
        case = self.cases("""
cases:
- name: other
  config: c.yaml
- name: all_keys
  description: "what: it is"
  program: plain_train
  config: c.yaml
  ranks: 3
  devices: [cuda]
  steps: 9
  first_step: 5
  timeout: 1.5e2
  set: {training.lr: 1e-5, parallelism.shard: auto}
  environment: {HSDP_DEBUG_COLLECTIVES: 1, EMPTY: ""}
  golden: {loss: 1e-4, collectives.all_gathers: bitwise}
  equals:
  - {case: other, loss: 0, grad_norm: 1e-4}
  - {case: other, weights: bitwise}
  bounds:
    peak_memory_bytes: {at_most: 1.0e9, from_step: 9}
    loss: {at_least: -1, at_most: 5}
    collectives.all_gathers: {equals: 12}
  throughput: {case: other, at_least: 0.8, pairs: 5}
""")["all_keys"]
        expected = Case(
            name="all_keys",
            place=Place(str(self.root / "list.yaml"), 5, 3),
            description="what: it is",
            program="plain_train",
            config="c.yaml",
            settings={"training.lr": "1e-5", "parallelism.shard": "auto"},
            environment={"HSDP_DEBUG_COLLECTIVES": "1", "EMPTY": ""},
            ranks=3,
            steps=9,
            first_step=5,
            devices=("cuda",),
            timeout_seconds=150.0,
            golden={"loss": 1e-4, "collectives.all_gathers": 0.0},
            equals=(Equality("other", {"loss": 0.0, "grad_norm": 1e-4}), Equality("other", {}, weights=0.0)),
            bounds=(
                Bound("peak_memory_bytes", at_most=1e9, from_step=9),
                Bound("loss", at_least=-1.0, at_most=5.0),
                Bound("collectives.all_gathers", at_least=12.0, at_most=12.0),
            ),
            throughput=Throughput("other", 0.8, pairs=5),
            needs=("other",),
        )
        self.assertEqual(case, expected)

    def test_a_test_executable(self):
        case = self.cases('cases: [{name: t, test: mesh_modes_test, filter: "Hybrid.*", ranks: 2, timeout: 9}]')["t"]
        place = Place(str(self.root / "list.yaml"), 1, 9)
        self.assertEqual(case, Case("t", place, program="mesh_modes_test", is_test=True, filter="Hybrid.*", ranks=2,
                                    timeout_seconds=9.0))

    def test_settings_are_kept_as_they_are_written(self):
        written = {
            "true": "true",
            "yes": "yes",
            "012": "012",
            "1e-5": "1e-5",
            "0x1F": "0x1F",
            "2001-12-14": "2001-12-14",
            "none": "none",
            '"a: b"': "a: b",
            "'it''s'": "it's",
            '["**norm**"]': '["**norm**"]',
            "[]": "[]",
            "[model.layers.*, 2, 'a\"b', \"tab\\t\"]": '["model.layers.*", "2", "a\\"b", "tab\\t"]',
            "'[\"**norm**\"]'": '["**norm**"]',
            "'{}'": "{}",
            "'{a: 1}'": "{a: 1}",
            "'{\"a\": {}}'": '{"a": {}}',
            "costs $5": "costs $5",
        }
        for text, expected in written.items():
            with self.subTest(text=text):
                self.assertEqual(self.cases(in_case(f"set: {{x.y: {text}}}"))["a"].settings, {"x.y": expected})

    def test_numbers_are_read_whether_or_not_yaml_takes_them_for_some(self):
        for text, expected in (("1e-5", 1e-5), ("1E-2", 0.01), (".5", 0.5), ("+0.", 0.0), ("0", 0.0), ("0.25", 0.25)):
            with self.subTest(text=text):
                self.assertEqual(self.cases(in_case(f"golden: {{loss: {text}}}"))["a"].golden, {"loss": expected})

    def test_anchors_stand_for_what_they_name(self):
        other = "- {name: b, config: c.yaml, set: *s}\n"
        cases = self.cases("cases:\n- {name: a, config: c.yaml, set: &s {x.y: 1}}\n" + other)
        self.assertEqual(cases["b"].settings, {"x.y": "1"})

    def test_goldens_lie_beside_the_list(self):
        self.assertEqual(self.read(CASE + "goldens: ../curves\n").goldens, self.root / "../curves")


class Inheritance(ListTest):
    def test_own_keys_then_later_bases_then_earlier_then_defaults(self):
        case = self.cases("""
defaults: {ranks: 1, steps: 1, timeout: 1, description: d, set: {x.a: 0, x.b: 0, x.c: 0, x.d: 0}}
bases:
  one: {config: c.yaml, ranks: 2, steps: 2, timeout: 2, set: {x.a: 1, x.b: 1, x.c: 1}}
  two: {ranks: 3, steps: 3, set: {x.a: 2, x.b: 2}}
cases:
- {name: a, base: [one, two], ranks: 4, set: {x.a: 3}}
""")["a"]
        self.assertEqual((case.ranks, case.steps, case.timeout_seconds, case.description), (4, 3, 2.0, "d"))
        self.assertEqual(case.settings, {"x.a": "3", "x.b": "2", "x.c": "1", "x.d": "0"})

    def test_four_maps_are_merged_and_all_else_is_replaced(self):
        case = self.cases("""
bases:
  one:
    config: c.yaml
    environment: {A: 1, B: 1}
    golden: {loss: 0, lr: 0}
    bounds: {loss: {at_least: 1}, lr: {at_least: 1, from_step: 7}}
    equals: {case: other, loss: 0}
cases:
- {name: other, config: c.yaml}
- name: a
  base: one
  environment: {B: 2}
  golden: {lr: 0.2}
  bounds: {lr: {at_most: 2}}
  equals: {case: other, lr: 0.2}
""")["a"]
        self.assertEqual(case.environment, {"A": "1", "B": "2"})
        self.assertEqual(case.golden, {"loss": 0.0, "lr": 0.2})
        self.assertEqual(case.bounds, (Bound("loss", at_least=1.0), Bound("lr", at_most=2.0)))
        self.assertEqual(case.equals, (Equality("other", {"lr": 0.2}),))

    def test_bases_have_bases_in_any_order(self):
        case = self.cases("""
bases:
  top: {base: middle, ranks: 3}
  middle: {base: bottom, ranks: 2, steps: 2}
  bottom: {config: c.yaml, ranks: 1, steps: 1, first_step: 1, timeout: 1}
cases: [{name: a, base: top}]
""")["a"]
        self.assertEqual((case.ranks, case.steps, case.timeout_seconds), (3, 2, 1.0))

    def test_defaults_for_training_do_not_concern_tests(self):
        case = self.cases("defaults: {config: c.yaml, steps: 3, ranks: 2}\ncases: [{name: a, test: x_test}]\n")["a"]
        self.assertEqual((case.config, case.steps, case.ranks), ("", None, 2))


class Includes(ListTest):
    def test_included_cases_come_first_in_the_order_of_files(self):
        result = self.read(
            "include: [one.yaml, two.yaml]\ncases: [{name: own, config: c.yaml}]\n",
            one="include: deep.yaml\ncases: [{name: first, config: c.yaml}]\n",
            deep="cases: [{name: deep, config: c.yaml}]\n",
            two="cases: [{name: second, config: c.yaml}]\n",
        )
        self.assertEqual([case.name for case in result.cases], ["deep", "first", "second", "own"])
        self.assertEqual(result.cases[0].place, Place(str(self.root / "deep.yaml"), 1, 9))

    def test_paths_are_relative_to_the_file_that_has_them(self):
        self.write("sub/one.yaml", "include: two.yaml\ngoldens: theirs\n")
        self.write("sub/two.yaml", "cases: [{name: a, config: c.yaml}]\n")
        result = self.read("include: sub/one.yaml\ngoldens: ours\n")
        self.assertEqual([case.name for case in result.cases], ["a"])
        self.assertEqual(result.goldens, self.root / "ours")

    def test_variables_of_the_including_file_win(self):
        cases = self.cases(
            "variables: {few: 5}\ninclude: one.yaml\n",
            one="variables: {few: 2, many: 3}\ninclude: two.yaml\n"
            "cases: [{name: a, config: c.yaml, ranks: $few, steps: $many}]\n",
            two="variables: {many: 4, own: 7}\n"
            "cases: [{name: b, config: c.yaml, ranks: $few, steps: $many, timeout: $own}]\n",
        )
        self.assertEqual((cases["a"].ranks, cases["a"].steps), (5, 3))
        self.assertEqual((cases["b"].ranks, cases["b"].steps, cases["b"].timeout_seconds), (5, 3, 7.0))

    def test_variables_stay_in_their_file(self):
        self.refuses("include: one.yaml\ncases: [{name: a, config: c.yaml, ranks: $few}]\n",
                     "2:42: unknown variable 'few', there are none", one="variables: {few: 2}\n")

    def test_defaults_of_an_included_file_win(self):
        cases = self.cases(
            "defaults: {ranks: 1, steps: 1, config: c.yaml}\ninclude: one.yaml\ncases: [{name: own}]\n",
            one="defaults: {ranks: 2}\ncases: [{name: theirs}]\n",
        )
        self.assertEqual((cases["own"].ranks, cases["own"].steps), (1, 1))
        self.assertEqual((cases["theirs"].ranks, cases["theirs"].steps), (2, 1))

    def test_bases_are_shared_by_all_files(self):
        cases = self.cases(
            "include: one.yaml\nbases: {ours: {config: c.yaml, ranks: 4}}\ncases: [{name: a, base: theirs}]\n",
            one="bases: {theirs: {config: c.yaml, ranks: 3}}\ncases: [{name: b, base: ours}]\n",
        )
        self.assertEqual((cases["a"].ranks, cases["b"].ranks), (3, 4))


class Variables(ListTest):
    def test_a_whole_scalar_takes_the_value_of_any_type(self):
        case = self.cases("""
variables: {n: 3, kinds: [cuda], tolerances: {loss: 1e-3}, patterns: ["**norm**"]}
cases:
- {name: a, config: c.yaml, ranks: $n, steps: "${n}", devices: $kinds, golden: $tolerances, set: {x.y: $patterns}}
""")["a"]
        self.assertEqual((case.ranks, case.steps, case.devices, case.golden), (3, 3, ("cuda",), {"loss": 1e-3}))
        self.assertEqual(case.settings, {"x.y": '["**norm**"]'})

    def test_a_longer_text_takes_its_text(self):
        case = self.cases("""
variables: {n: 3, word: some}
cases:
- {name: "a_${word}", config: c.yaml, description: "${n} of $word-thing", steps: 1$n}
""")["a_some"]
        self.assertEqual((case.description, case.steps), ("3 of some-thing", 13))

    def test_a_value_in_quotes_stays_in_quotes(self):
        self.refuses('variables: {n: "3"}\n' + in_case("ranks: $n"),
                     "5:10: ranks: got the text '3', expected an int from 1 to 2147483647")


class Matrices(ListTest):
    def test_every_combination_the_last_key_fastest(self):
        cases = self.cases("""
cases:
- name: a
  config: c.yaml
  ranks: 9
  set: {parallelism.shard: 8, x.y: 1}
  environment: {A: 1, B: 1}
  matrix:
    ranks: [2, 3]
    steps: [4]
    set.parallelism.reshard_after_forward: {keep: false, some: [a, b]}
    environment.A: [on, 1.5]
""")
        self.assertEqual(list(cases), [
            f"a[ranks={ranks},steps=4,reshard_after_forward={reshard},A={a}]"
            for ranks in (2, 3) for reshard in ("keep", "some") for a in ("on", "1.5")
        ])
        case = cases["a[ranks=3,steps=4,reshard_after_forward=some,A=on]"]
        self.assertEqual((case.ranks, case.steps), (3, 4))
        expected = {"parallelism.shard": "8", "x.y": "1", "parallelism.reshard_after_forward": '["a", "b"]'}
        self.assertEqual(case.settings, expected)
        self.assertEqual(case.environment, {"A": "on", "B": "1"})

    def test_a_matrix_gives_maps_that_the_case_has_not(self):
        case = self.cases(in_case("matrix: {set.x.y: [1]}"))["a[y=1]"]
        self.assertEqual(case.settings, {"x.y": "1"})

    def test_except_leaves_out_what_fits_all_of_an_entry(self):
        cases = self.cases("""
cases:
- name: a
  config: c.yaml
  matrix: {ranks: [1, 2, 3], set.x.keep: {yes: true, no: false}}
  except: [{ranks: 3, keep: yes}, {ranks: 1}]
""")
        self.assertEqual(list(cases), ["a[ranks=2,keep=yes]", "a[ranks=2,keep=no]", "a[ranks=3,keep=no]"])

    def test_placeholders_are_labels(self):
        cases = self.cases("""
cases:
- {name: one, config: c.yaml, matrix: {ranks: [2, 3]}}
- name: a
  config: c.yaml
  matrix: {ranks: [2, 3], set.x.keep: {kept: true}, environment.LEVEL: [7]}
  set: {x.y: "{ranks}/{keep}/{LEVEL}/{}", x.l: ["{ranks}", "{out}"], x.z: "{out:one[ranks={ranks}]}/{out}"}
  environment: {B: "{keep}"}
  equals: {case: "one[ranks={ranks}]", loss: 0}
  throughput: {case: "one[ranks={ranks}]", at_least: 1}
""")
        case = cases["a[ranks=3,keep=kept,LEVEL=7]"]
        self.assertEqual(case.settings, {
            "x.y": "3/kept/7/{}", "x.l": '["3", "{out}"]', "x.z": "{out:one[ranks=3]}/{out}", "x.keep": "true"})
        self.assertEqual(case.environment, {"B": "kept", "LEVEL": "7"})
        self.assertEqual((case.equals[0].case, case.throughput.case), ("one[ranks=3]", "one[ranks=3]"))
        self.assertEqual(case.needs, ("one[ranks=3]",))

    def test_needs_are_those_of_equals_then_throughput_then_texts(self):
        case = self.cases("""
cases:
- name: a
  config: c.yaml
  environment: {A: "{out:f}{out:c}"}
  set: {x.y: "{out:d} {out:e} {out}"}
  throughput: {case: c, at_least: 1}
  equals: [{case: b, loss: 0}, {case: c, loss: 0}, {case: b, lr: 0}]
""" + "".join(f"- {{name: {name}, config: c.yaml}}\n" for name in "bcdef"))["a"]
        self.assertEqual(case.needs, ("b", "c", "d", "e", "f"))


if __name__ == "__main__":
    unittest.main()
