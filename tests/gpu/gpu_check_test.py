#!/usr/bin/env python3
"""tools/gpu_check.sh as far as it goes without building anything, its results, and what compare.py knows of GPUs."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools/bench")]
sys.dont_write_bytecode = True

import compare
import gpu_check_results

SCRIPT = str(ROOT / "tools/gpu_check.sh")

JUNIT = """<?xml version="1.0" encoding="UTF-8"?>
<testsuite name="x" tests="3">
  <testcase name="gpu.a" classname="gpu.a" time="1.26" status="run">
    <system-out>[ RUN      ] A.Passes
[       OK ] A.Passes (12 ms)
[ RUN      ] A.Needs
/src/a.cpp:7: Skipped
needs 2 GPUs, and 1 can be seen

[  SKIPPED ] A.Needs (0 ms)
[  SKIPPED ] 1 test, listed below:
[  SKIPPED ] A.Needs
</system-out></testcase>
  <testcase name="gpu.b" classname="gpu.b" time="2" status="fail"><failure message=""/>
    <system-out>[ RUN      ] B/Fails.Always/0
[  FAILED  ] B/Fails.Always/0, where GetParam() = 4 (3 ms)
</system-out></testcase>
  <testcase name="gpu.c" classname="gpu.c" time="0" status="notrun"><skipped message="x"/></testcase>
  <testcase name="gpu.d" classname="gpu.d" time="3" status="fail"><failure message=""/>
    <system-out>Segmentation fault</system-out></testcase>
</testsuite>
"""


class Script(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        # On a machine with GPUs as well, none is to be used here.
        program = self.folder / "nvidia-smi"
        program.write_text("#!/bin/sh\nexit 9\n")
        program.chmod(0o755)
        self.environment = {**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}"}

    def run_script(self, *arguments):
        return subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, check=False, timeout=120,
                              env=self.environment)

    def expect_refusal(self, arguments, text):
        done = self.run_script(*arguments)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn(text, done.stderr)

    def test_help_and_unknown_commands(self):
        for arguments in (["--help"], ["run", "--help"], ["pack", "-h"]):
            done = self.run_script(*arguments)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("--dry-run", done.stdout)
        self.expect_refusal([], "tools/gpu_check.sh pack FOLDER")
        self.expect_refusal(["walk"], "tools/gpu_check.sh pack FOLDER")

    def test_wrong_arguments_are_refused(self):
        output = str(self.folder / "out")
        self.expect_refusal(["run"], "run needs --output")
        self.expect_refusal(["run", "--output"], "--output needs a value")
        self.expect_refusal(["run", "--output", output, "--fast"], "unknown option --fast")
        for option in ("--budget", "--jobs", "--ranks"):
            self.expect_refusal(["run", "--output", output, option, "none"], f"{option} none, expected a number")
        self.expect_refusal(["run", "--output", output, "--brought", str(self.folder)], "was not made by pack")
        self.expect_refusal(["run", "--output", output, "--python", "/bin/false"], "/bin/false has no torch")
        self.expect_refusal(["run", "--output", output, "--python", sys.executable], "nvidia-smi shows no GPU")
        self.expect_refusal(["pack"], "pack needs a folder")
        self.expect_refusal(["pack", "a", "b"], "one folder")
        self.expect_refusal(["pack", str(self.folder)], "is not empty")
        self.expect_refusal(["pack", str(self.folder / "new"), "--googletest", output], "missing (Debian names): googletest")
        self.assertFalse((self.folder / "out").exists())
        self.assertFalse((self.folder / "new").exists())

    def test_packs_what_building_needs_and_does_so_again(self):
        if not pathlib.Path("/usr/src/googletest/CMakeLists.txt").exists():
            self.skipTest("no sources of googletest in /usr/src")
        brought = self.folder / "with a blank"
        for _ in range(2):
            done = self.run_script("pack", str(brought))
            self.assertEqual(done.returncode, 0, done.stderr)
            for name in ("include/nlohmann/json.hpp", "include/CLI/CLI.hpp", "include/gloo/algorithm.h", "include/xxhash.h",
                         "googletest/googlemock/src/gmock-all.cc", "googletest/googletest/src/gtest-all.cc"):
                self.assertTrue((brought / name).is_file(), name)
            for package in ("CLI11", "nlohmann_json"):
                text = (brought / f"lib/cmake/{package}/{package}Config.cmake").read_text()
                self.assertIn('"${CMAKE_CURRENT_LIST_DIR}/../../../include"', text)
            self.assertIn("include/xxhash.h", (brought / "list.txt").read_text())

    def test_a_run_that_has_no_time_says_what_it_left_out(self):
        output = self.folder / "out put"
        done = self.run_script("run", "--dry-run", "--output", str(output), "--build", str(self.folder / "build"),
                               "--budget", "1", "--python", sys.executable)
        self.assertEqual(done.returncode, 1, done.stderr)
        found = json.loads((output / "results.json").read_text())
        self.assertEqual(found["dry_run"], True)
        self.assertEqual(found["benchmark"], [])
        states = {part["name"]: part["state"] for part in found["parts"]}
        self.assertIn(states["configure"], ("out of time", "not run"))
        self.assertEqual(states["tests"], "not run")
        self.assertIn("tests: not run, nothing was built", done.stderr)
        text = (output / "environment.txt").read_text()
        for title in ("nvidia-smi", "nvcc --version", "cmake --version", "g++ --version"):
            self.assertIn(f"==== {title}", text)


    def test_a_run_that_is_ended_leaves_what_it_knows(self):
        output = self.folder / "out"
        # Takes the place of the first program that a run starts.
        program = self.folder / "cmake"
        program.write_text("#!/bin/sh\n[ $1 = --version ] || { touch '%s/begun'; exec sleep 300; }\n" % self.folder)
        program.chmod(0o755)
        run = subprocess.Popen([SCRIPT, "run", "--dry-run", "--output", str(output), "--build", str(self.folder / "build"),
                                "--python", sys.executable], stderr=subprocess.PIPE, text=True, env=self.environment)
        self.addCleanup(run.stderr.close)
        self.addCleanup(run.kill)
        end = time.monotonic() + 60
        while not (self.folder / "begun").exists() and time.monotonic() < end:
            time.sleep(0.05)
        run.terminate()
        self.assertEqual(run.wait(timeout=60), 1)
        found = json.loads((output / "results.json").read_text())
        self.assertEqual([(part["name"], part["state"]) for part in found["parts"]], [("configure", "stopped")])
        self.assertIn("stopped", run.stderr.read())


class Results(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "tests.xml").write_text(JUNIT)
        (self.folder / "benchmark.jsonl").write_text('{"case": "size_small"}\n')

    def test_count_programs_and_cases(self):
        parts = gpu_check_results.read_parts("build\tpassed\t61\tstatus 0\ntests\tfailed\t7\tstatus 8\n")
        found = gpu_check_results.results(parts, self.folder, 70, False)
        self.assertEqual(found["parts"][0], {"name": "build", "state": "passed", "seconds": 61, "remark": "status 0"})
        self.assertEqual(found["tests"]["programs"], {"failed": 2, "passed": 1, "skipped": 1})
        self.assertEqual(found["tests"]["cases"], {"failed": 1, "passed": 1, "skipped": 1})
        self.assertEqual(found["tests"]["each"][0]["cases"][1],
                         {"name": "A.Needs", "state": "skipped", "ms": 0, "reason": "needs 2 GPUs, and 1 can be seen"})
        self.assertEqual(found["tests"]["each"][1]["cases"], [{"name": "B/Fails.Always/0", "state": "failed", "ms": 3}])
        self.assertEqual(found["benchmark"], [{"case": "size_small"}])
        lines = list(gpu_check_results.summary(found))
        self.assertEqual(lines[:4], [
            "tests: failed, status 8",
            "gpu.a: A.Needs skipped: needs 2 GPUs, and 1 can be seen",
            "gpu.b: B/Fails.Always/0 failed",
            "gpu.d: failed outside of its cases",
        ])

    def test_without_tests(self):
        (self.folder / "tests.xml").unlink()
        found = gpu_check_results.results([], self.folder, 1, True)
        self.assertNotIn("tests", found)
        self.assertEqual(list(gpu_check_results.summary(found)), [])


class Compare(unittest.TestCase):
    def test_peaks_are_those_of_the_name(self):
        for name, peak in {
            "NVIDIA A100-SXM4-80GB": 312,
            "NVIDIA H100 80GB HBM3": 989,
            "NVIDIA H100 PCIe": 756,
            "NVIDIA H200": 989,
            "NVIDIA B200": 2250,
            "NVIDIA GeForce RTX 4090": None,
            "": None,
        }.items():
            self.assertEqual(compare.peak_tflops(name), peak, name)

    def test_overrides(self):
        self.assertEqual(compare.override("batch=4"), ("batch", 4))
        for text in ("batch", "batch=", "batch=x", "batch=-1"):
            with self.assertRaisesRegex(Exception, "expected NAME=NUMBER"):
                compare.override(text)


if __name__ == "__main__":
    unittest.main()
