#!/usr/bin/env python3
"""The lists that come with the project, and the page that describes them."""
import pathlib
import re
import sys
import tempfile
import unittest

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from regression.listing import read_list
from regression.listing_keys import KEYS, KEYS_OF_LIST
from regression.main import make_parser

LISTS = ROOT / "tests/regression"
PAGE = (ROOT / "docs/regression.md").read_text()


def cases_of(name):
    return read_list(LISTS / f"{name}.yaml", ROOT).cases


def rows(header):
    """First cells of the table whose header row starts with `header`, without backticks."""
    table = PAGE[PAGE.index(f"| {header} |"):].split("\n\n")[0].splitlines()[2:]
    return [line.split(" | ")[0].strip("| ").replace("\\|", "|") for line in table]


class Lists(unittest.TestCase):
    def test_train_with_every_configuration_of_the_project(self):
        configurations = {f"configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
        for name in ("cpu", "multi_gpu", "nightly"):
            shipped = {case.config: case for case in cases_of(name) if case.config.startswith("configs/") and case.steps == 5}
            self.assertEqual(set(shipped), configurations, name)

    def test_run_the_same_cases_on_gpus_with_more_ranks(self):
        def by_name(name):
            ranks = {}
            for case in cases_of(name):
                base = case.name.split("[")[0]
                ranks[base] = max(ranks.get(base, 0), case.ranks)
            return ranks

        host, gpus = by_name("cpu"), by_name("multi_gpu")
        self.assertEqual(set(host) - set(gpus), set())
        for name in ("sharded", "reshard_kept", "hybrid", "data_parallel", "recompute", "accumulation", "prefetch_off", "resumed", "bf16"):
            self.assertGreater(gpus[name], host[name], name)
        self.assertEqual({case.devices for case in cases_of("cpu")}, {("cpu",)})
        self.assertEqual({case.devices for case in cases_of("multi_gpu")}, {("cuda",)})

    def test_have_something_to_hold_to(self):
        for name in ("cpu", "multi_gpu", "nightly"):
            needed = {other for case in cases_of(name) for other in case.needs}
            for case in cases_of(name):
                alone = not (case.equals or case.bounds or case.golden or case.throughput or case.is_test)
                if alone and case.name not in needed:
                    self.assertTrue(case.config.startswith("configs/"), f"{name}: {case.name} is held to nothing")


class Page(unittest.TestCase):
    def test_lists_in_it_are_read(self):
        blocks = re.findall(r"```yml\n(.*?)```", PAGE, re.DOTALL)
        lists = [block for block in blocks if block.startswith("# LIST")]
        self.assertGreaterEqual(len(lists), 1)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "list.yaml")
            for block in lists:
                # Written for a list beside the shipped ones.
                path.write_text(block.replace("include: ", f"include: {LISTS}/"))
                names = [case.name for case in read_list(path, ROOT).cases]
                self.assertIn("in_shards[ranks=2,reshard_after_forward=true]", names)
        for block in blocks:
            self.assertIsNotNone(yaml.safe_load(block))

    def test_has_every_option_and_no_other(self):
        given = {option for action in make_parser()._actions for option in action.option_strings if option.startswith("--")}
        told = {option for row in rows("Option") for option in re.findall(r"--[a-z-]+", row)}
        self.assertEqual(told, given - {"--help"})

    def test_has_every_key_of_a_case_and_no_other(self):
        told = {key for row in rows("Key of a case") for key in re.findall(r"`([a-z_]+)`", row)}
        self.assertEqual(told, set(KEYS) | {"name", "base", "matrix", "except"})
        told = {key for row in rows("Key of a list") for key in re.findall(r"`([a-z_]+)`", row)}
        self.assertEqual(told, set(KEYS_OF_LIST))

    def test_names_cases_that_catch_mistakes(self):
        names = {case.name for case in cases_of("cpu")}
        table = PAGE[PAGE.index("| Mistake |"):].split("\n\n")[0].splitlines()[2:]
        self.assertGreaterEqual(len(table), 5)
        for line in table:
            self.assertIn(line.split("|")[2].split("`")[1], names)


if __name__ == "__main__":
    unittest.main()
