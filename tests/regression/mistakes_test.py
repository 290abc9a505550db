#!/usr/bin/env python3
"""Each mistake that is planted into the built hsdp_train makes a named case of cpu.yaml fail, and for the right reason."""
import json
import os
import pathlib
import stat
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("HSDP_BUILD_FOLDER", ROOT / "build/release")).resolve()

# Mistake -> the case that catches it, and what its reason begins with. docs/regression.md has the same table.
CAUGHT_BY = {
    "scale_gradients": ("sharded[ranks=2]", "grad_norm at step 1 is"),
    "skip_reduce_scatter": ("collectives", "collectives.reduce_scatters at step 1 is 3, expected exactly 4"),
    "drop_padding": ("sharded[ranks=3]", "loss at step 2 is"),
    "swap_shards": ("sharded[ranks=2]", "loss at step 1 is"),
    "leak_unit": ("memory", "peak_memory_bytes at step"),
}


class Mistakes(unittest.TestCase):
    """A build like the real one whose hsdp_train makes a mistake; all else is linked to."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.build = self.folder / "build"
        (self.build / "apps").mkdir(parents=True)
        (self.build / "apps/hsdp_checkpoint").symlink_to(BUILD / "apps/hsdp_checkpoint")
        (self.build / "tests").symlink_to(BUILD / "tests")

    def plant(self, mistake):
        program = self.build / "apps/hsdp_train"
        program.write_text("#!/bin/sh\n"
                           f'case " $* " in *" --version "*) exec "{BUILD}/apps/hsdp_train" "$@";; esac\n'
                           f'HSDP_MISTAKE={mistake} LD_PRELOAD="{BUILD}/tests/libhsdp_mistakes.so" '
                           f'exec "{BUILD}/apps/hsdp_train" "$@"\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def run_case(self, case):
        done = subprocess.run([ROOT / "tools/regress", ROOT / "tests/regression/cpu.yaml", "--only", case, "--device", "cpu",
                               "--build", self.build, "--out", self.folder / "out"], capture_output=True, text=True, timeout=300,
                              env=os.environ | {"HSDP_PYTHON": sys.executable}, check=False)
        report = json.loads((self.folder / "out/latest/report.json").read_text())
        return done, {one["name"]: one for one in report["cases"]}[case]

    def test_are_caught(self):
        for mistake, (case, reason) in CAUGHT_BY.items():
            with self.subTest(mistake=mistake):
                self.plant(mistake)
                done, result = self.run_case(case)
                self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
                self.assertEqual(result["status"], "failed")
                self.assertTrue(result["reasons"][0].startswith(reason), result["reasons"])

    def test_a_planted_run_without_its_mistake_is_told(self):
        self.plant("drop_padding")  # two ranks have even shards
        done, result = self.run_case("sharded[ranks=2]")
        self.assertEqual(done.returncode, 1)
        self.assertRegex(result["reasons"][0], "^rank [01] ended with 65$")
        self.assertIn("drop_padding was not planted", done.stdout)
        self.plant("no_such_mistake")
        done, result = self.run_case("sharded[ranks=2]")
        self.assertIn("HSDP_MISTAKE is 'no_such_mistake', expected one of", done.stdout)

    def test_the_page_has_the_same_table(self):
        page = (ROOT / "docs/regression.md").read_text()
        table = page[page.index("| Mistake |"):].split("\n\n")[0].splitlines()[2:]
        told = {tuple(cell.split("`")[1] for cell in line.split("|")[1:3]) for line in table}
        self.assertEqual(told, {(mistake, case) for mistake, (case, _) in CAUGHT_BY.items()})


if __name__ == "__main__":
    unittest.main()
