#!/usr/bin/env python3
"""tools/regression/goldens.py: what is kept with a curve, and when it no longer counts."""
import json
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))

from regression.case import Case, Place
from regression.goldens import GoldenError, golden_path, read_golden, record_golden

ENVIRONMENT = {"device": "cpu", "device_name": "cpu-x86_64", "torch": "2.11.0+cu130", "nccl": "2.28.9", "driver": "none",
               "processor": "some", "date": "2026-01-02T03:04:05Z", "commit": "abc",
               "dirty": 0}
CASE = Case("curve[ranks=2,reshard=true]", Place("list.yaml", 1, 1), ranks=2, golden={"loss": 0.0, "collectives.all_gathers": 0.0})
LINES = [{"step": step, "loss": 1.0 / step, "collectives": {"all_gathers": 7}} for step in (1, 2, 3)]
SETTINGS = {"training.steps": 3, "optimizer.lr": 0.1, "metrics.folder": "/somewhere", "data.path": "a"}


class Goldens(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.path = golden_path(self.folder, CASE, ENVIRONMENT)

    def record(self):
        record_golden(self.path, CASE, LINES, SETTINGS, ENVIRONMENT, "the first one")

    def test_are_keyed_by_device_torch_nccl_and_ranks(self):
        def name(**other):
            return golden_path(self.folder, CASE, ENVIRONMENT | other).relative_to(self.folder).as_posix()

        case = "curve.ranks=2.reshard=true"
        self.assertEqual(name(), f"{case}/cpu-x86_64_torch-2.11.0_nccl-none_ranks-2.json")
        self.assertEqual(name(device="cuda", device_name="NVIDIA H200"), f"{case}/NVIDIA-H200_torch-2.11.0_nccl-2.28.9_ranks-2.json")

    def test_come_back_as_they_were_recorded(self):
        self.record()
        self.assertEqual(read_golden(self.path, CASE, SETTINGS), LINES)
        self.assertEqual([path.name for path in self.path.parent.iterdir()], [self.path.name])
        kept = json.loads(self.path.read_text())
        self.assertEqual((kept["reason"], kept["commit"], kept["recorded"]), ("the first one", "abc", "2026-01-02T03:04:05Z"))

    def test_do_not_depend_on_folders(self):
        self.record()
        read_golden(self.path, CASE, SETTINGS | {"metrics.folder": "/elsewhere", "data.path": "b"})

    def refused(self, settings=None, case=CASE):
        with self.assertRaises(GoldenError) as caught:
            read_golden(self.path, case, settings or SETTINGS)
        return str(caught.exception)

    def test_of_other_settings_do_not_count(self):
        self.record()
        self.assertEqual(self.refused(SETTINGS | {"optimizer.lr": 0.2}),
                         f"golden {self.path} was recorded with optimizer.lr 0.1, this case has 0.2")
        without = {name: value for name, value in SETTINGS.items() if name != "training.steps"}
        self.assertIn("training.steps 3, this case has None", self.refused(without))

    def test_without_a_metric_of_the_case_do_not_count(self):
        self.record()
        self.assertIn("has no grad_norm", self.refused(case=Case("curve", CASE.place, golden={"grad_norm": 0.1})))

    def test_that_are_missing_or_damaged_are_told(self):
        self.assertEqual(self.refused(), f"no golden at {self.path}")
        self.record()
        whole = json.loads(self.path.read_text())
        for broken in ("", "[]", "{}", "null", json.dumps(whole | {"format": 2}), json.dumps(whole | {"steps": [1]}),
                       json.dumps(whole | {"metrics": {"loss": [1]}}), json.dumps(whole | {"settings": None})):
            with self.subTest(broken=broken[:40]):
                self.path.write_text(broken)
                self.refused()


if __name__ == "__main__":
    unittest.main()
