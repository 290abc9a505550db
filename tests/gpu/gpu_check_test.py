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

# What ctest has said of four tests when it is killed: one has ended well, one badly, one is at work, one has not begun.
LOG = """
  Test #1: gpu.a
  Test #2: gpu.b
  Test #3: gpu.c
  Test #4: gpu.d
==== tests: ctest
    Start 1: gpu.a
1: Test timeout computed to be: 240
1: [ RUN      ] A.Passes
    Start 2: gpu.b
2: [ RUN      ] B.Dies
1: [       OK ] A.Passes (12 ms)
1/4 Test #1: gpu.a ...........................   Passed    1.26 sec
    Start 3: gpu.c
2/4 Test #2: gpu.b ...........................***Exception: SegFault  0.30 sec
3: [ RUN      ] C.Passes
3: [       OK ] C.Passes (5 ms)
3: [ RUN      ] C/Hangs.ForEver/0
"""


class WithFolder(unittest.TestCase):
    """Runs the script without a GPU and with programs of its own before all others."""

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


class Script(WithFolder):
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
            text = (brought / "lib/cmake/GTest/GTestConfig.cmake").read_text()
            self.assertIn('add_subdirectory("${CMAKE_CURRENT_LIST_DIR}/../../../googletest"', text)
            self.assertIn("include/xxhash.h", (brought / "list.txt").read_text())

    def test_a_run_that_has_no_time_says_what_it_left_out(self):
        output = self.folder / "out put"
        done = self.run_script("run", "--dry-run", "--output", str(output), "--build", str(self.folder / "build"),
                               "--budget", "1", "--python", sys.executable)
        self.assertEqual(done.returncode, 1, done.stderr)
        found = json.loads((output / "results.json").read_text())
        self.assertEqual(found["dry_run"], True)
        self.assertEqual(found["benchmark"], [])
        self.assertEqual(found["benchmark_runs"], [])
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
        program.write_text("#!/bin/sh\n[ $1 = --version ] && { echo cmake version 3.25.0; exit; }\n"
                           "touch '%s/begun'; exec sleep 300\n" % self.folder)
        program.chmod(0o755)
        run = subprocess.Popen([SCRIPT, "run", "--dry-run", "--output", str(output), "--build", str(self.folder / "build"),
                                "--python", sys.executable], stderr=subprocess.PIPE, text=True, env=self.environment)
        self.addCleanup(run.stderr.close)
        self.addCleanup(run.kill)
        end = time.monotonic() + 60
        while not (self.folder / "begun").exists() and time.monotonic() < end:
            time.sleep(0.05)
        # Somebody who ends it without a word finds this much.
        found = json.loads((output / "results.json").read_text())
        self.assertEqual([(part["name"], part["state"]) for part in found["parts"]], [("configure", "running")])
        self.assertIn(found["parts"][0]["limit"], range(1, 480))
        run.terminate()
        self.assertEqual(run.wait(timeout=60), 1)
        found = json.loads((output / "results.json").read_text())
        self.assertEqual([(part["name"], part["state"]) for part in found["parts"]], [("configure", "stopped")])
        said = run.stderr.read()
        self.assertIn("configure: may take ", said)
        self.assertIn("stopped", said)

    def test_a_cmake_that_is_too_old_is_refused(self):
        program = self.folder / "cmake"
        program.write_text("#!/bin/sh\necho cmake version 3.22.1\n")
        program.chmod(0o755)
        # A Python beside which there is no other.
        python = self.folder / "python"
        python.write_text("#!/bin/sh\nexec '%s' \"$@\"\n" % sys.executable)
        python.chmod(0o755)
        self.expect_refusal(["run", "--dry-run", "--output", str(self.folder / "out"), "--python", str(python)],
                            "cmake before 3.25: cmake")


FIGURES = {"device": "host", "device_name": "", "ranks": 1, "width": 64, "layers": 2, "batch": 1, "sequence": 64,
           "vocabulary": 256, "parameters": 7, "step_ms": 1.5, "tokens_per_second": 10.0, "model_tflops_a_rank": 0.5}


class WholeRun(WithFolder):
    """The parts of a run in their order, with programs that take the place of all that is built."""

    def setUp(self):
        super().setUp()
        self.output = self.folder / "out"
        tests = self.folder / "build/hsdp/tests/gpu"
        bench = self.folder / "build/hsdp/tools/bench"
        tests.mkdir(parents=True)
        bench.mkdir(parents=True)
        figures = f"#!/bin/sh\n[ -e '{self.folder}/slow' ] && sleep 4\necho '{json.dumps(FIGURES)}'\n"
        self.program("hsdp_bench", figures, bench)
        self.program("memory_gpu_test", "", tests)
        self.program("steady_gpu_test", "", tests)
        self.program("cmake", '#!/bin/sh\n[ $1 = --version ] && echo cmake version 3.25.0\n'
                     f'[ $1 = --build ] && [ -e "{self.folder}/breaks" ] && exit 1\nexit 0\n')
        # All is up to date but one test.
        self.program("ninja", '#!/bin/sh\ncase $* in *steady*) echo "[1/2]";; *) echo "ninja: no work to do.";; esac\n')
        self.program("ctest", "#!/bin/sh\necho \"$@\"\ncase $* in *--show-only*) echo '  Test #1: gpu.a';; esac\n")
        # Runs the project's scripts, but for the peer, which would take long.
        peer = self.program("peer", figures)
        self.python = self.program("python", f'#!/bin/sh\ncase $1 in */peer.py) exec {peer};; esac\n'
                                   f'exec "{sys.executable}" "$@"\n')

    def program(self, name, text, folder=None):
        path = (folder or self.folder) / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def parts(self, status, *arguments, how=("--dry-run",)):
        done = self.run_script("run", *how, "--output", str(self.output), "--build", str(self.folder / "build"),
                               "--python", str(self.python), *arguments)
        self.assertEqual(done.returncode, status, done.stderr)
        self.found = json.loads((self.output / "results.json").read_text())
        return [(part["name"], part["state"]) for part in self.found["parts"]]

    def test_what_matters_most_comes_first(self):
        sizes = [f"benchmark of size {size} with" for size in ("small", "medium", "large")]
        names = ["configure", "build", "tests", *(f"{size} 1 ranks" for size in sizes), *(f"{size} 3 ranks" for size in sizes),
                 *(f"{size} 1 ranks, peer first" for size in sizes)]
        self.assertEqual(self.parts(0, "--ranks", "3"), [(name, "passed") for name in names])
        limits = [part["limit"] for part in self.found["parts"]]
        self.assertTrue(all(480 > limit > 300 for limit in limits), limits)
        self.assertLessEqual(limits[1], limits[0] - 60, "a minute is left for what could be built")
        self.assertLessEqual(limits[2], limits[0] - 120, "two minutes are left for the benchmark")
        self.assertEqual([line["case"] for line in self.found["benchmark"]], 3 * ["size_small", "size_medium", "size_large"])
        programs = [line["program"] for line in self.found["benchmark_runs"]]
        self.assertEqual(programs, 6 * ["hsdp", "peer"] + 3 * ["peer", "hsdp"])
        self.assertEqual(self.found["tests"]["each"], [{"name": "gpu.a", "state": "not run", "seconds": 0, "cases": []}])

    def test_with_gpus_they_are_what_is_built_for_and_run_on(self):
        self.program("nvidia-smi", '#!/bin/sh\ncase $* in *=name*) printf "NVIDIA H200\\nNVIDIA H200\\n";;\n'
                     '*compute_cap*) printf "9.0\\n9.0\\n";; esac\n')
        names = [name for name, state in self.parts(0, how=()) if state == "passed"]
        self.assertEqual(len(names), 3 + 9, names)
        self.assertIn("benchmark of size large with 2 ranks", names)
        self.assertEqual(self.found["dry_run"], False)
        log = {name: (self.output / f"{name}.log").read_text() for name in ("build", "tests", "benchmark")}
        self.assertIn("-DHSDP_CUDA_ARCHITECTURES=90", log["build"])
        self.assertNotIn("HSDP_GPU_DRY_RUN", log["tests"])
        self.assertIn("--device cuda", log["benchmark"])
        self.assertNotIn("--override", log["benchmark"])

    def test_what_does_not_fit_is_named_with_its_reason(self):
        (self.folder / "slow").touch()
        states = dict(self.parts(1, "--ranks", "1", "--budget", "30"))
        self.assertEqual(states["benchmark of size small with 1 ranks"], "passed")
        self.assertEqual(states["benchmark of size large with 1 ranks"], "not run")
        reasons = {part["name"]: part["remark"] for part in self.found["parts"]}
        self.assertRegex(reasons["benchmark of size large with 1 ranks"], r"^-?\d+ s are left, and it takes about \d+ s$")
        self.assertRegex(reasons["benchmark of size small with 1 ranks, peer first"], r"^-?\d+ s are left, and it takes")
        self.assertLess(self.found["seconds"], 30)

    def test_a_build_that_fails_keeps_nothing_else_from_running(self):
        (self.folder / "breaks").touch()
        states = dict(self.parts(1, "--ranks", "1"))
        self.assertEqual(states["build"], "failed")
        self.assertEqual(states["tests"], "passed")
        self.assertEqual(states["benchmark of size large with 1 ranks"], "passed")
        tests = self.folder / "build/hsdp/tests/gpu"
        self.assertTrue((tests / "memory_gpu_test").exists())
        self.assertFalse((tests / "steady_gpu_test").exists(), "a program of an earlier build")


class Results(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "tests.xml").write_text(JUNIT)
        (self.folder / "benchmark.jsonl").write_text('{"case": "size_small"}\n')

    def test_count_programs_and_cases(self):
        parts = gpu_check_results.read_parts("build\trunning\t0\t300\tbegun\nbuild\tpassed\t61\t300\tstatus 0\n"
                                             "tests\tfailed\t7\t90\tstatus 8\n")
        found = gpu_check_results.results(parts, self.folder, 70, False)
        self.assertEqual(found["parts"][0], {"name": "build", "state": "passed", "seconds": 61, "limit": 300,
                                             "remark": "status 0"})
        self.assertEqual(len(found["parts"]), 2)
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

    def test_before_the_tests_have_ended_their_log_says_what_they_did(self):
        (self.folder / "tests.xml").unlink()
        (self.folder / "tests.log").write_text(LOG)
        (self.folder / "benchmark_runs.jsonl").write_text('{"program": "hsdp"}\n{"progr')
        found = gpu_check_results.results([], self.folder, 70, False)
        self.assertEqual([(test["name"], test["state"]) for test in found["tests"]["each"]],
                         [("gpu.a", "passed"), ("gpu.b", "failed"), ("gpu.c", "cut off"), ("gpu.d", "not run")])
        self.assertEqual(found["tests"]["each"][2]["cases"], [
            {"name": "C.Passes", "state": "passed", "ms": 5}, {"name": "C/Hangs.ForEver/0", "state": "cut off"}])
        self.assertEqual(found["benchmark_runs"], [{"program": "hsdp"}])
        self.assertEqual(list(gpu_check_results.summary(found)), [
            "gpu.b: B.Dies cut off",
            "gpu.b: failed outside of its cases",
            "gpu.c: C/Hangs.ForEver/0 cut off",
            "gpu.c: cut off",
            "gpu.d: not run",
            "cases: {'cut off': 2, 'passed': 2}",
        ])

    def test_what_ctest_had_no_time_for_is_named(self):
        (self.folder / "tests.log").write_text(LOG + "  Test #5: gpu.e\n")
        found = gpu_check_results.results([], self.folder, 70, False)
        self.assertEqual([(test["name"], test["state"]) for test in found["tests"]["each"]],
                         [("gpu.a", "passed"), ("gpu.b", "failed"), ("gpu.c", "skipped"), ("gpu.d", "failed"),
                          ("gpu.e", "not run")])

    def test_without_tests(self):
        (self.folder / "tests.xml").unlink()
        found = gpu_check_results.results([], self.folder, 1, True)
        self.assertNotIn("tests", found)
        self.assertEqual(list(gpu_check_results.summary(found)), [])


class Compare(unittest.TestCase):
    def test_each_run_is_kept_and_either_side_goes_first(self):
        with tempfile.TemporaryDirectory() as folder:
            runs = pathlib.Path(folder) / "runs"
            say = ["sh", "-c", "echo '{\"parameters\": 7}'"]
            runner = compare.Runner({"hsdp": say, "peer": say}, runs)
            sides = {"ours": ("hsdp", "hsdp"), "theirs": ("peer", "fsdp2")}
            compare.Sides(runner, sides, {"ranks": 1}, 1)
            compare.Sides(runner, sides, {"ranks": 1}, 1, peer_first=True)
            # A side that fails takes nothing away of what the others said.
            runner.programs["peer"] = ["false"]
            with self.assertRaises(SystemExit):
                compare.Sides(runner, sides, {"ranks": 1}, 1)
            lines = [json.loads(line) for line in runs.read_text().splitlines()]
        self.assertEqual([line["program"] for line in lines], ["hsdp", "peer", "peer", "hsdp", "hsdp"])
        self.assertEqual(lines[0], {"program": "hsdp", "ranks": 1, "parameters": 7})

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
