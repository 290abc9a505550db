#!/usr/bin/env python3
"""tools/regression/listing.py: every refusal, with its place and to the letter."""
import pathlib
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tools"), str(HERE)]

from list_files import CASE, ListTest, in_case
from regression.listing import ListError, read_list

INT = "expected an int from 1 to 2147483647"
TEXT = "expected text that is not empty"
METRIC = "expected a name such as loss or collectives.all_gathers"


class RefusedFiles(ListTest):
    def test_files_that_are_no_list(self):
        self.refuses("", "1:1: the file is empty, expected a map with cases")
        self.refuses("# nothing\n", "1:1: the file is empty, expected a map with cases")
        self.refuses("---\n", "2:1: got nothing, expected a map with cases at the top of the file")
        self.refuses("- a\n", "1:1: got a list, expected a map with cases at the top of the file")
        self.refuses("{}", "1:1: there are no cases, expected at least one")
        self.refuses("bases: {x: {ranks: 1}}\n", "1:1: there are no cases, expected at least one")
        self.refuses("cases: []\n", "1:8: cases: got an empty list, expected a list with at least one item")
        self.refuses("cases: {}\n", "1:8: cases: got a map, expected a list")
        self.refuses("cases: [3]\n", "1:9: case: got '3', expected a map")

    def test_yaml_that_is_broken(self):
        self.refuses("cases:\n  - {name: a\n",
                     "3:1: not valid YAML: while parsing a flow mapping, expected ',' or '}', but got '<stream end>'")
        self.refuses("cases:\n\t- a\n", "2:1: not valid YAML: while scanning for the next token, found character '\\t' "
                     "that cannot start any token")
        self.refuses("cases: *x\n", "1:8: not valid YAML: found undefined alias 'x'")
        self.refuses("a: 1\n---\nb: 1\n", "2:1: not valid YAML: expected a single document in the stream, but found "
                     "another document")
        self.refuses("a: 1\nb: x\x07\n", "2:5: not valid YAML: character U+0007, expected text")
        self.refuses(b"a: 1\nb: \xc3\xa9\xff\n", "2:5: not valid YAML: the file is not UTF-8, expected text")
        self.refuses("a: " + 3000 * "[", "1:1: not valid YAML: nested too deeply")
        for escape in ("FFFFFFFF", "00110000"):
            self.refuses(f'a: "\\U{escape}"', "1:7: not valid YAML: an escape or a number that is out of range")
        self.refuses("cases: &x [*x]\n", "1:8: an anchor's alias is inside what it names, expected YAML that ends")
        self.refuses("cases: !!set {}\n", "1:8: tag 'tag:yaml.org,2002:set', expected a value without a tag")
        self.refuses(in_case('ranks: !!int "2"'), "4:10: tag 'tag:yaml.org,2002:int', expected a value without a tag")
        self.refuses(in_case("description: '" + (1 << 20) * "x" + "'"),
                     f"1:1: list.yaml has {(1 << 20) + 52} bytes, expected at most 1048576")

    def test_a_list_that_cannot_be_read(self):
        for name, what in (("missing.yaml", "cannot be read: No such file or directory, expected a YAML file"),
                           ("", "is a folder or a device, expected a YAML file")):
            path = self.root / name
            with self.assertRaises(ListError) as caught:
                read_list(path, self.root)
            self.assertEqual(caught.exception.problems, [f"[list] {path}:1:1: {path} {what}"])

    def test_includes(self):
        self.refuses("include: [one.yaml, nowhere.yaml]\n" + CASE, "1:21: nowhere.yaml cannot be read: No such file or "
                     "directory, expected a YAML file", one="{}")
        self.refuses("include: one.yaml\n" + CASE, "one.yaml:1:5: not valid YAML: mapping values are not allowed here",
                     one="a: b: c")
        twice = "is read already, expected each file once and none inside itself"
        self.refuses("include: [one.yaml, ./one.yaml]\n" + CASE, f"1:21: include: one.yaml {twice}", one="{}")
        self.refuses("include: one.yaml\n" + CASE, f"one.yaml:1:10: include: list.yaml {twice}",
                     one="include: list.yaml\n")
        self.refuses("include: list.yaml\n" + CASE, f"1:10: include: list.yaml {twice}")
        self.refuses("include:\n" + CASE, "1:9: include: got nothing, expected text")
        self.refuses("include: ['']\n" + CASE, f"1:11: include: got '', {TEXT}")

    def test_all_problems_of_all_files_at_once(self):
        self.refuses(
            "include: one.yaml\nbases: {b: {rank: 2}}\ncases:\n- {name: a, base: [b, c], ranks: 0}\n- {name: a}\n",
            f"one.yaml:1:42: steps: got 'many', {INT}",
            "one.yaml:2:19: unknown base 'd', expected one of b",
            "list.yaml:2:13: base 'b': unknown key 'rank'; did you mean 'ranks'?",
            "list.yaml:4:23: unknown base 'c', expected one of b",
            f"list.yaml:4:34: ranks: got '0', {INT}",
            "list.yaml:5:3: case 'a' is given twice, first at list.yaml:4:3, expected it once",
            one="cases: [{name: x, config: c.yaml, steps: many},\n  {name: y, base: d}]\n",
        )

    def test_a_file_that_is_broken_makes_no_name_unknown(self):
        self.refuses("include: [one.yaml]\ncases: [{name: a, base: b, equals: {case: c, loss: 0}}]\n",
                     "one.yaml:1:1: the file is empty, expected a map with cases", one="")
        self.refuses("cases:\n- {config: c.yaml}\n- {name: a, config: c.yaml, equals: {case: c, loss: 0}}\n",
                     "2:3: case: 'name' is missing, expected a name")


class RefusedKeys(ListTest):
    def test_unknown_keys(self):
        self.refuses(CASE + "case: 3\n", "4:1: list: unknown key 'case'; did you mean 'cases'?")
        self.refuses(CASE + "x: 3\n",
                     "4:1: list: unknown key 'x', expected one of variables, include, goldens, defaults, bases, cases")
        self.refuses(in_case("rank: 3"), "4:3: case: unknown key 'rank'; did you mean 'ranks'?")
        keys = ("description, ranks, devices, timeout, environment, program, config, steps, first_step, set, golden, "
                "equals, bounds, throughput, test, filter")
        self.refuses("bases: {b: {matrix: {ranks: [1]}}}\n" + CASE,
                     f"1:13: base 'b': unknown key 'matrix', expected one of {keys}, base")
        for key in ("test", "filter", "base", "name"):
            with self.subTest(key=key):
                problem, = self.problems(f"defaults: {{{key}: x}}\n" + CASE)
                self.assertTrue(problem.startswith(f"list.yaml:1:12: defaults: unknown key '{key}'"), problem)
        self.refuses(in_case("<<: {ranks: 3}"),
                     f"4:3: case: unknown key '<<', expected one of name, base, {keys}, matrix, except")
        self.refuses(in_case("bounds: {loss: {at_mst: 1, equals: 1}}"),
                     "4:19: bounds.loss: unknown key 'at_mst'; did you mean 'at_most'?")
        self.refuses(in_case("throughput: {case: a, at_least: 1, pair: 2}"),
                     "4:22: case 'a' needs itself, expected another case",
                     "4:38: throughput: unknown key 'pair'; did you mean 'pairs'?")

    def test_repeated_keys(self):
        self.refuses(CASE + "cases: []\n",
                     "4:1: list: repeated key 'cases', first given at list.yaml:1:1, expected it once")
        self.refuses(in_case("config: d.yaml"),
                     "4:3: case: repeated key 'config', first given at list.yaml:3:3, expected it once")
        for key in ("set", "environment", "golden", "bounds", "matrix"):
            first, second = len(key) + 6, len(key) + 14
            expected = f"{key}: repeated key 'x.y', first given at list.yaml:4:{first}, expected it once"
            with self.subTest(key=key):
                self.assertIn(f"list.yaml:4:{second}: {expected}", self.problems(in_case(f"{key}: {{x.y: 1, x.y: 2}}")))
        self.refuses("bases:\n  b: {}\n  b: {}\n" + CASE,
                     "3:3: bases: repeated key 'b', first given at list.yaml:2:3, expected it once")
        self.refuses("bases: {b: {}}\ninclude: one.yaml\n" + CASE,
                     "1:9: base 'b' is given twice, first at one.yaml:1:9, expected it once", one="bases: {b: {}}")

    def test_keys_that_are_no_words(self):
        self.refuses(in_case("[a]: 3"), "4:3: case: got a list as key, expected a word")
        self.refuses(in_case("? {a: 1}\n  : 3"), "4:5: case: got a map as key, expected a word")
        self.refuses(in_case("'': 3"), "4:3: case: got the text '' as key, expected a word")
        for line, column, what in (
            ("set: {steps: 3}", 9, "set: key 'steps', expected section.key"),
            ("set: {a.b.c: 3}", 9, "set: key 'a.b.c', expected section.key"),
            ("set: {a.b=1: 3}", 9, "set: key 'a.b=1', expected section.key"),
            ("set: {$a.b: 3}", 9, "set: key '$a.b', expected section.key"),
            ("set: {training.steps: 3}", 9, "set: key 'training.steps' is the runner's, expected the case's key steps"),
            ("set: {metrics.folder: x}", 9, "set: key 'metrics.folder' is the runner's, expected none; it is {out}"),
            ("set: {metrics.log_every: 2}", 9,
             "set: key 'metrics.log_every' is the runner's, expected none; every step is logged"),
            ("environment: {A-B: 3}", 17, "environment: key 'A-B', expected the name of an environment variable"),
            ("environment: {1A: 3}", 17, "environment: key '1A', expected the name of an environment variable"),
            ("golden: {Loss: 1}", 12, f"metric 'Loss', {METRIC}"),
            ("bounds: {loss.: {equals: 1}}", 12, f"metric 'loss.', {METRIC}"),
        ):
            self.refuses(in_case(line), f"4:{column}: {what}")
        self.refuses("bases: {B: {}}\n" + CASE,
                     "1:9: bases: key 'B', expected lower-case letters, digits and underscores")
        self.refuses("variables: {a-b: 1}\n" + CASE,
                     "1:13: variables: key 'a-b', expected lower-case letters, digits and underscores")

    def test_names(self):
        expected = "expected lower-case letters, digits and underscores"
        self.refuses("cases:\n- {config: c.yaml}\n", "2:3: case: 'name' is missing, expected a name")
        for name in ("A", "a-b", "a b", "'a[1]'", "''", '"a\\n"', "é"):
            with self.subTest(name=name):
                problem, = self.problems(f"cases: [{{name: {name}, config: c.yaml}}]\n")
                self.assertRegex(problem, f"^list.yaml:1:16: name: got .*, {expected}$")
        self.refuses("cases: [{name: [a], config: c.yaml}]\n", "1:16: name: got a list, expected text")
        self.refuses(CASE + "- name: a\n  config: c.yaml\n",
                     "4:3: case 'a' is given twice, first at list.yaml:2:3, expected it once")
        name = 201 * "a"
        self.refuses(f"cases: [{{name: {name}, config: c.yaml}}]\n",
                     f"1:9: case '{name}' with its matrix has a name of 201 characters, expected at most 200; shorten "
                     "its labels")


class RefusedValues(ListTest):
    def test_values_that_do_not_fit(self):
        relative = "expected a finite number of at least 0 and at most 0.99, or bitwise"
        week = "expected a finite number above 0 and at most 604800"
        for line, column, what in (
            ("ranks: 0", 10, f"ranks: got '0', {INT}"),
            ("ranks: -2", 10, f"ranks: got '-2', {INT}"),
            ("ranks: 2.0", 10, f"ranks: got '2.0', {INT}"),
            ("ranks: true", 10, f"ranks: got 'true', {INT}"),
            ("ranks: 012", 10, f"ranks: got '012', {INT}"),
            ("ranks: 0x2", 10, f"ranks: got '0x2', {INT}"),
            ("ranks: 1_0", 10, f"ranks: got '1_0', {INT}"),
            ("ranks: ٣", 10, f"ranks: got '٣', {INT}"),
            ("ranks: '2'", 10, f"ranks: got the text '2', {INT}"),
            ("ranks: 2147483648", 10, f"ranks: got '2147483648', {INT}"),
            (f"ranks: {5000 * '9'}", 10, f"ranks: got '{5000 * '9'}', {INT}"),
            ("ranks:", 9, f"ranks: got nothing, {INT}"),
            ("ranks: ~", 10, f"ranks: got nothing, {INT}"),
            ("ranks: [2]", 10, f"ranks: got a list, {INT}"),
            ("steps: 0", 10, f"steps: got '0', {INT}"),
            ("first_step: 0", 15, f"first_step: got '0', {INT}"),
            ("timeout: 0", 12, f"timeout in seconds: got '0', {week}"),
            ("timeout: .inf", 12, f"timeout in seconds: got '.inf', {week}"),
            ("timeout: 1e8", 12, f"timeout in seconds: got '1e8', {week}"),
            ("timeout: 1:30", 12, f"timeout in seconds: got '1:30', {week}"),
            ("timeout: yes", 12, f"timeout in seconds: got 'yes', {week}"),
            ("description: [a]", 16, "description: got a list, expected text"),
            ("description: ''", 16, f"description: got '', {TEXT}"),
            ("program: train", 12, "program: got 'train'; did you mean 'hsdp_train'?"),
            ("program: x", 12, "program: got 'x', expected one of hsdp_train, plain_train, fsdp2_train"),
            ("devices: cuda", 12, "devices: got 'cuda', expected a list"),
            ("devices: []", 12, "devices: got an empty list, expected a list with at least one item"),
            ("devices: [cpu, gpu]", 18, "devices: got 'gpu'; did you mean 'cpu'?"),
            ("devices: [cpu, cpu]", 12, "devices: got cpu, cpu, expected each of them once"),
            ("base: []", 9, "base: got an empty list, expected a list with at least one item"),
            ("base: {a: 1}", 9, "base: got a map, expected text"),
            ("set: [a]", 8, "set: got a list, expected a map"),
            ("set: {x.y: }", 13, "set.x.y: got nothing, expected a scalar or a list"),
            ("set: {x.y: null}", 14, "set.x.y: got nothing, expected a scalar or a list"),
            ("set: {x.y: {a: 1}}", 14, "set.x.y: got a map, expected a scalar or a list"),
            ("set: {x.y: ''}", 14, "set.x.y: got '', expected a value that is not empty"),
            ("set: {x.y: 'none'}", 14, "set.x.y: got the text 'none', expected none without quotes, or another text"),
            ("set: {x.y: [a, [b]]}", 18, "item of set.x.y: got a list, expected text"),
            ("set: {x.y: [a, ~]}", 18, "item of set.x.y: got nothing, expected text"),
            ("set: {x.y: [a, '']}", 18, f"item of set.x.y: got '', {TEXT}"),
            ('set: {x.y: "a\\0"}', 14, "set.x.y: got the text 'a\\x00', expected text without null characters and "
             "surrogates"),
            ('environment: {A: "\\uD800"}', 20, "environment.A: got the text '\\ud800', expected text without null "
             "characters and surrogates"),
            ("environment: {A: [1]}", 20, "environment.A: got a list, expected text"),
            ("environment: {A: }", 19, "environment.A: got nothing, expected text"),
            ("golden: {}", 11, "golden: got an empty map, expected at least one key"),
            ("golden: true", 11, "golden: got 'true', expected a map"),
            ("golden: {loss: -1}", 18, f"golden.loss: got '-1', {relative}"),
            ("golden: {loss: .nan}", 18, f"golden.loss: got '.nan', {relative}"),
            ("golden: {loss: nan}", 18, f"golden.loss: got 'nan', {relative}"),
            ("golden: {loss: 1e999}", 18, f"golden.loss: got '1e999', {relative}"),
            ("environment: {RANK: 3}", 17, "environment: RANK is set by the launcher of a case, expected another variable"),
            ("environment: {CUDA_VISIBLE_DEVICES: 0}", 17,
             "environment: CUDA_VISIBLE_DEVICES is set by the launcher of a case, expected another variable"),
            ("golden: {loss: 5}", 18, f"golden.loss: got '5', {relative}"),
            ("golden: {loss: '1'}", 18, f"golden.loss: got the text '1', {relative}"),
            ("golden: {loss: bits}", 18, f"golden.loss: got 'bits', {relative}"),
            ("bounds: {}", 11, "bounds: got an empty map, expected at least one key"),
            ("bounds: {loss: 3}", 18, "bounds.loss: got '3', expected a map"),
            ("bounds: {loss: {from_step: 2}}", 18, "bounds.loss: got no limit, expected at_least, at_most or equals"),
            ("bounds: {loss: {equals: 1, at_most: 2}}", 18,
             "bounds.loss: got equals beside at_most, expected equals alone"),
            ("bounds: {loss: {at_least: 2, at_most: 1}}", 18,
             "bounds.loss: got at_least 2 above at_most 1, expected a range"),
            ("bounds: {loss: {at_most: x}}", 28, "bounds.loss.at_most: got 'x', expected a finite number"),
            ("bounds: {loss: {at_most: 1, from_step: 0}}", 42, f"bounds.loss.from_step: got '0', {INT}"),
            ("throughput: {case: b}", 15, "throughput: 'at_least' is missing, expected a value"),
            ("throughput: {at_least: 1}", 15, "throughput: 'case' is missing, expected a value"),
            ("throughput: {case: b, at_least: 0}", 35,
             "throughput.at_least: got '0', expected a finite number above 0"),
            ("throughput: {case: b, at_least: 1, pairs: 0}", 45, f"throughput.pairs: got '0', {INT}"),
            ("throughput: {case: '', at_least: 1}", 22, "throughput.case: got '', expected a case's name"),
            ("equals: b", 11, "equals: got 'b', expected a map"),
            ("equals: []", 11, "equals: got an empty list, expected a list with at least one item"),
            ("equals: {loss: 0}", 11, "equals: 'case' is missing, expected the name of another case"),
            ("equals: {case: b}", 11, "equals: got nothing to compare, expected a metric or weights"),
            ("equals: {case: [b], loss: 0}", 18, "equals.case: got a list, expected text"),
            ("equals: {case: b, weights: 1e-3}", 30, "equals.weights: got '1e-3', expected one of bitwise"),
            ("matrix: {}", 11, "matrix: got an empty map, expected at least one key"),
            ("matrix: [a]", 11, "matrix: got a list, expected a map"),
            ("except: [{ranks: 1}]", 11, "except: there is no matrix, expected one beside it"),
        ):
            self.refuses(in_case(line), f"4:{column}: {what}")

    def test_metrics_in_equals(self):
        self.refuses(in_case("equals: {case: b, Loss: 0, lr: 0}") + "- {name: b, config: c.yaml}\n",
                     f"4:21: metric 'Loss', {METRIC}")
        self.refuses(in_case("equals: {case: b, loss: x, lr: 0}") + "- {name: b, config: c.yaml}\n",
                     "4:27: equals.loss: got 'x', expected a finite number of at least 0 and at most 0.99, or bitwise")

    def test_configurations(self):
        self.refuses("cases: [{name: a}]\n",
                     "1:9: case 'a': 'config' is missing, expected the path of a configuration, or 'test'")
        for name in ("d.yaml", "."):
            self.assertEqual(self.problems(f"cases: [{{name: a, config: {name}}}]\n"),
                             [f"list.yaml:1:27: config: there is no file '{name}' in {self.root}, expected a "
                              "configuration"])

    def test_keys_of_the_other_kind(self):
        tail = "of no use to case 't', which runs a test, expected it elsewhere"
        self.refuses("bases: {b: {config: c.yaml}}\n"
                     "cases: [{name: t, base: b, test: x, steps: 3, matrix: {set.x.y: [1]}}]\n",
                     f"1:21: config: {tail}", f"2:44: steps: {tail}", f"2:66: set.x.y: {tail}")
        for line in ("program: hsdp_train", "config: c.yaml", "steps: 1", "first_step: 1", "set: {}",
                     "golden: {loss: 0}", "equals: {case: b, loss: 0}", "bounds: {loss: {equals: 1}}",
                     "throughput: {case: b, at_least: 1}"):
            key = line.partition(":")[0]
            self.refuses(f"cases:\n- {{name: b, config: c.yaml}}\n- name: t\n  test: x\n  {line}\n",
                         f"5:{len(key) + 5}: {key}: {tail}")
        self.refuses(in_case("filter: X.*"),
                     "4:11: filter: of no use to case 'a', which has no test, expected it elsewhere")
        self.refuses("cases: [{name: t, test: ../x}]\n",
                     "1:25: test: got '../x', expected the name of a test executable")

    def test_what_would_hold_of_no_step(self):
        tail = "case 'a' has 4 steps, expected at most as many"
        self.refuses(in_case("steps: 4\n  first_step: 5"), f"5:15: first_step: got 5, {tail}")
        self.refuses(in_case("steps: 4\n  bounds: {loss: {at_most: 1, from_step: 5}}"),
                     f"5:18: bounds.loss.from_step: got 5, {tail}")
        self.assertEqual(self.cases(in_case("steps: 5\n  first_step: 5"))["a"].first_step, 5)

    def test_variables(self):
        self.refuses("variables: {few: 2}\n" + in_case("ranks: $fw"),
                     "5:10: unknown variable 'fw'; did you mean 'few'?")
        self.refuses(in_case("description: 1 ${fw} 2"), "4:16: unknown variable 'fw', there are none")
        self.refuses(in_case("environment: {A: $HOME/x}"), "4:20: unknown variable 'HOME', there are none")
        self.refuses(in_case('description: "a ${} b"'), "4:16: unknown variable '', there are none")
        self.refuses("variables: {few: [2]}\n" + in_case("description: 1 $few"),
                     "5:16: variable '$few' inside a text: got a list, expected a variable that is text or a number")
        self.refuses("variables: {few: ~}\n" + in_case("description: 1 $few"),
                     "5:16: variable '$few' inside a text: got nothing, expected a variable that is text or a number")
        self.refuses("variables: {a: 1, b: [[$a]]}\n" + CASE,
                     "1:24: variable 'b': got '$a', expected a value without variables")
        self.refuses("variables: [a]\n" + CASE, "1:12: variables: got a list, expected a map")


class RefusedReferences(ListTest):
    def test_bases(self):
        self.refuses("bases: {tiny: {}}\n" + in_case("base: tyny"), "5:9: unknown base 'tyny'; did you mean 'tiny'?")
        self.refuses("bases: {tiny: {base: tyny}}\n" + in_case("base: tiny"),
                     "1:22: unknown base 'tyny'; did you mean 'tiny'?")
        self.refuses("bases:\n  a: {base: b}\n  b: {base: c}\n  c: {base: b}\n" + in_case("base: a"),
                     "3:13: bases inherit from one another: b -> c -> b, expected no loop")
        self.refuses("bases: {a: {base: a}}\n" + in_case("base: a"),
                     "1:19: bases inherit from one another: a -> a, expected no loop")

    def test_cases(self):
        other = "- {name: other, config: c.yaml}\n"
        for line, column in (
            ("equals: {loss: 0, case: othr}", 27),
            ("throughput: {at_least: 1, case: othr}", 35),
            ("set: {x.y: '{out:othr}'}", 14),
            ("environment: {A: '{out:othr}'}", 20),
            ("set: {x.l: [a, '{out:othr}']}", 14),
        ):
            self.refuses(in_case(line) + other,
                         f"4:{column}: case 'a' needs unknown case 'othr'; did you mean 'other'?")
        # One that is refused itself is known all the same.
        self.refuses(in_case("equals: {loss: 0, case: b}") + "- {name: b, config: c.yaml, ranks: 0}\n",
                     f"5:36: ranks: got '0', {INT}")
        self.refuses(in_case("set: {x.y: '{out:}'}"), "4:14: case 'a' needs unknown case '', expected one of a")

    def test_cases_with_a_matrix(self):
        other = "- {name: other, config: c.yaml, matrix: {ranks: [2, 3]}, except: [{ranks: 3}]}\n"
        self.refuses(in_case("equals: {loss: 0, case: other}") + other,
                     "4:27: case 'a' needs 'other', which has a matrix, expected one of its expansions, such as "
                     "'other[ranks=2]'")
        self.refuses(in_case("equals: {loss: 0, case: 'other[ranks=3]'}") + other,
                     "4:27: case 'a' needs unknown case 'other[ranks=3]'; did you mean 'other[ranks=2]'?")
        # A matrix that is refused makes no name unknown.
        self.refuses(in_case("equals: {loss: 0, case: 'other[ranks=3]'}") + other.replace("[2, 3]", "[2, x]"),
                     f"5:53: matrix.ranks: got 'x', {INT}")

    def test_loops(self):
        def case(name, other, more=""):
            return f"- {{name: {name}, config: c.yaml, equals: {{loss: 0, case: {other}}}{more}}}\n"

        self.refuses("cases:\n" + case("a", "a"), "2:53: case 'a' needs itself, expected another case")
        self.refuses(in_case("set: {x.y: '{out:a}'}"), "4:14: case 'a' needs itself, expected another case")
        self.refuses("cases:\n" + case("a", "b") + case("b", "c") + case("c", "d") + case("d", "b"),
                     "3:53: cases need one another: b -> c -> d -> b, expected no loop")
        self.refuses("cases:\n" + case("a", "b") + case("b", "a") + case("c", "d") + case("d", "c"),
                     "2:53: cases need one another: a -> b -> a, expected no loop",
                     "4:53: cases need one another: c -> d -> c, expected no loop")

    def test_nothing_is_compared_with_a_test(self):
        other = "- {name: t, test: x_test}\n"
        what = "case 'a' is compared with 't', which runs a test, expected a case that trains"
        self.refuses(in_case("equals: {loss: 0, case: t}") + other, f"4:27: {what}")
        self.refuses(in_case("throughput: {at_least: 1, case: t}") + other, f"4:35: {what}")
        self.assertEqual(self.cases(in_case("set: {x.y: '{out:t}'}") + other)["a"].needs, ("t",))

    def test_placeholders(self):
        self.refuses(in_case("set: {x.y: '{ranks}'}"),
                     "4:14: unknown placeholder '{ranks}', expected one of {out}, {out:CASE}")
        self.refuses(in_case("environment: {A: '{rank}'}\n  matrix: {ranks: [1]}"),
                     "4:20: unknown placeholder '{rank}'; did you mean '{ranks}'?")
        self.refuses(in_case("set: {x.l: [a, '{b}']}"),
                     "4:14: unknown placeholder '{b}', expected one of {out}, {out:CASE}")
        self.refuses(in_case("set: {x.y: '{in:b}'}"),
                     "4:14: unknown placeholder '{in:b}', expected one of {out}, {out:CASE}")
        self.refuses(in_case("equals: {case: '{out}', loss: 0}"), "4:18: unknown placeholder '{out}', there are none")
        self.refuses(in_case("throughput: {case: 'b[ranks={steps}]', at_least: 1}\n  matrix: {ranks: [1]}"),
                     "4:22: unknown placeholder '{steps}', expected one of {ranks}")


class RefusedMatrices(ListTest):
    def test_keys_and_values(self):
        label = "expected letters, digits, '_', '.', '+' and '-'; other values are given as {label: value}"
        for matrix, column, what in (
            ("{timeout: [1]}", 12, "matrix: key 'timeout', expected ranks, steps, set.section.key or environment.NAME"),
            ("{set: [1]}", 12, "matrix: key 'set', expected ranks, steps, set.section.key or environment.NAME"),
            ("{set.steps: [1]}", 12, "set: key 'steps', expected section.key"),
            ("{set.training.steps: [1]}", 12,
             "set: key 'training.steps' is the runner's, expected the case's key steps"),
            ("{environment.A-B: [1]}", 12, "environment: key 'A-B', expected the name of an environment variable"),
            ("{set.x.out: [1]}", 12, "matrix: 'set.x.out', expected a key that {out} is no placeholder of"),
            ("{set.x.a: [1], set.y.a: [1]}", 26,
             "matrix: 'set.y.a' is shortened to 'a' in names, as is the key at list.yaml:4:12, expected keys with last "
             "parts of their own"),
            ("{ranks: []}", 19, "matrix.ranks: got an empty list, expected a list with at least one item"),
            ("{ranks: {}}", 19, "matrix.ranks: got an empty map, expected at least one key"),
            ("{ranks: 2}", 19, "matrix.ranks: got '2', expected a list"),
            ("{ranks: [2, 0]}", 23, f"matrix.ranks: got '0', {INT}"),
            ("{steps: {few: x}}", 25, f"matrix.steps: got 'x', {INT}"),
            ("{ranks: [2, 2]}", 23, "matrix.ranks: '2' is given twice, expected each value once"),
            ("{set.x.y: [[a]]}", 22, f"matrix.set.x.y: got a list, {label}"),
            ("{set.x.y: [a b]}", 22, f"matrix.set.x.y: label 'a b', {label}"),
            ("{set.x.y: {'a,b': 1}}", 22, f"matrix.set.x.y: label 'a,b', {label}"),
            ("{set.x.y: {a: ~}}", 25, "matrix.set.x.y: got nothing, expected a scalar or a list"),
            ("{environment.A: {a: [1]}}", 31, "matrix.environment.A: got a list, expected text"),
        ):
            self.refuses(in_case(f"matrix: {matrix}"), f"4:{column}: {what}")

    def test_too_many_combinations(self):
        values = ", ".join(map(str, range(32)))
        self.refuses(in_case(f"matrix: {{set.x.a: [{values}], set.x.b: [{values}]}}"),
                     "4:11: matrix: got 1024 combinations, expected at most 1000")

    def test_except(self):
        for entries, column, what in (
            ("{ranks: 1}", 11, "except: got a map, expected a list"),
            ("[]", 11, "except: got an empty list, expected a list with at least one item"),
            ("[{}]", 12, "except: got an empty map, expected at least one key"),
            ("[ranks]", 12, "except: got 'ranks', expected a map"),
            ("[{rank: 1}]", 13, "except: unknown key 'rank'; did you mean 'ranks'?"),
            ("[{set.x.keep: yes}]", 13, "except: unknown key 'set.x.keep', expected one of ranks, keep"),
            ("[{ranks: 3}]", 20, "except.ranks: got '3', expected one of 1, 2"),
            ("[{keep: true}]", 19, "except.keep: got 'true', expected one of yes, no"),
            ("[{ranks: 1}, {ranks: 2}]", 11, "except: leaves out every combination, expected at least one that stays"),
        ):
            matrix = "matrix: {ranks: [1, 2], set.x.keep: {yes: true, no: false}}"
            self.refuses(in_case(f"except: {entries}\n  {matrix}"), f"4:{column}: {what}")


if __name__ == "__main__":
    unittest.main()
