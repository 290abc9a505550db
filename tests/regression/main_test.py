#!/usr/bin/env python3
"""tools/regress from the command line to the report, with programs of a few lines in place of the built ones."""
import json
import os
import pathlib
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest
import unittest.mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

# A training program: a `fake.` setting a word on how it behaves. Its loss at step s is scale / s.
TRAIN = """
    import json, os, pathlib, sys, time, yaml
    settings = dict(text.split("=", 1) for text in sys.argv[1:] if "=" in text)
    folder = pathlib.Path(settings["metrics.folder"])
    steps, first = int(settings.get("training.steps", 3)), int(settings.get("fake.first", 1))
    rank = int(os.environ["RANK"])
    print("rank", rank, "of", os.environ["WORLD_SIZE"], "sees", os.environ.get("FAKE_WORD"), flush=True)
    print("gpus", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
    if settings.get("fake.memory"):
        pathlib.Path(settings["fake.memory"]).write_text("9000 MiB")
    if settings.get("fake.count"):  # fails the first so many times
        count = pathlib.Path(settings["fake.count"])
        left = int(count.read_text())
        if rank == 0:
            count.write_text(str(left - 1))
        if left > 0:
            sys.exit("not yet")
    if settings.get("fake.exit") and rank == int(os.environ["WORLD_SIZE"]) - 1:
        sys.exit(int(settings["fake.exit"]))
    if settings.get("fake.meet") and rank == 0:  # waits for the other run
        pathlib.Path(settings["fake.meet"], str(os.getpid())).touch()
        for _ in range(2400):
            if len(os.listdir(settings["fake.meet"])) == 2:
                break
            time.sleep(0.1)
        else:
            sys.exit("nobody came")
    if settings.get("fake.sleep"):
        time.sleep(float(settings["fake.sleep"]))
    if rank > 0:
        sys.exit(0)
    scale = float(settings.get("fake.scale", 1.0))
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(first, steps + 1):
            loss = None if settings.get("fake.nan") == str(step) else scale / step
            if settings.get("fake.skip") == str(step):
                continue
            print(json.dumps({"step": step, "ranks": int(settings.get("fake.ranks", os.environ["WORLD_SIZE"])), "loss": loss, "grad_norm": 1.0, "peak_memory_bytes": 100 + step,
                              "tokens_per_second": float(settings.get("fake.speed", 100))}), file=file)
    config = {"training": {"steps": steps}}
    for name, text in settings.items():
        section, key = name.removeprefix("--").split(".")
        if name != settings.get("fake.deaf"):
            config.setdefault(section, {})[key] = yaml.safe_load(text)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    if settings.get("checkpoint.folder"):
        checkpoint = pathlib.Path(settings["checkpoint.folder"]) / f"step-{steps}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "weights").write_text(settings.get("fake.weights", ""))
"""
CHECKPOINT = """
    import pathlib, sys
    a, b = (pathlib.Path(folder, "weights").read_text() for folder in sys.argv[2:4])
    print("", end="" if a == b else "lm_head.weight differs")
    sys.exit(a != b)
"""
# A GoogleTest program that says what its filter tells it to.
TEST = """
    import json, sys
    filter, report = sys.argv[1].split("=", 1)[1], sys.argv[2].split(":", 1)[1]
    words = [] if filter == "none" else filter.split(",")
    tests = [{"name": f"T{i}", "result": {"skip": "SKIPPED", "disabled": "SUPPRESSED"}.get(word, "COMPLETED"),
              **({"failures": [{"failure": "f"}]} if word == "fail" else {}),
              **({"skipped": [{"message": "no such device"}]} if word == "skip" else {})} for i, word in enumerate(words)]
    json.dump({"testsuites": [{"name": "S", "testsuite": tests}]}, open(report, "w"))
    sys.exit("fail" in words)
"""
# Four GPUs of a host, the memory of the first as a file says.
NVIDIA_SMI = """
    folder=$(dirname "$0")
    case "$1" in
      --query-gpu=index*) for i in 0 1 2 3; do echo "$i, GPU-$i$i, NVIDIA H200, 570.10"; done;;
      --query-gpu=uuid*) for i in 1 2 3; do echo "GPU-$i$i, 500 MiB"; done; echo "GPU-00, $(cat "$folder/memory")";;
      --query-gpu=driver*) echo 570.10;;
      --query-compute*) ;;
      *) exit 9;;
    esac
"""
CONFIG = "config: tests/regression/tiny.yaml"


class Regress(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        for name, text in (("apps/hsdp_train", TRAIN), ("tests/plain_train", TRAIN), ("apps/hsdp_checkpoint", CHECKPOINT),
                           ("tests/some_test", TEST)):
            path = self.folder / "build" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"#!{sys.executable}\n{textwrap.dedent(text)}")
            path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def command(self, text, *arguments, device="cpu"):
        (self.folder / "list.yaml").write_text(textwrap.dedent(text))
        return [str(ROOT / "tools/regress"), str(self.folder / "list.yaml"), "--build", str(self.folder / "build"), "--out",
                str(self.folder / "out"), "--device", device, *arguments]

    def environment(self):
        return os.environ | {"HSDP_PYTHON": sys.executable, "NO_COLOR": "1"}

    def regress(self, text, *arguments, **more):
        done = subprocess.run(self.command(text, *arguments, **more), capture_output=True, text=True, timeout=300,
                              env=self.environment(), check=False)
        self.output = done.stdout + done.stderr
        return done.returncode

    def results(self):
        report = json.loads((self.folder / "out/latest/report.json").read_text())
        return {case["name"]: case for case in report["cases"]}

    def reason(self, name):
        return " ".join(self.results()[name]["reasons"])

    def cases(self, *cases):
        return "cases:\n" + "\n".join(f"  - {{{CONFIG}, {case}}}" for case in cases)

    def test_equal_curves_pass_and_run_once(self):
        code = self.regress(self.cases("name: one", "name: two, ranks: 3, equals: {case: one, loss: bitwise, grad_norm: 0.1}",
                                       "name: three, equals: [{case: one, loss: bitwise}, {case: two, loss: bitwise}]"))
        self.assertEqual(code, 0, self.output)
        self.assertEqual({name: case["status"] for name, case in self.results().items()},
                         {"one": "passed", "two": "passed", "three": "passed"})
        latest = self.folder / "out/latest"
        self.assertEqual(sorted(path.relative_to(latest).as_posix() for path in latest.glob("cases/*/*/rank-*.log")),
                         ["cases/one/run-1/rank-0.log", "cases/three/run-1/rank-0.log", "cases/two/run-1/rank-0.log",
                          "cases/two/run-1/rank-1.log", "cases/two/run-1/rank-2.log"])
        self.assertEqual({path.name for path in latest.iterdir()}, {"cases", "report.html", "report.json", "report.xml"})

    def test_unlike_curves_fail_with_step_values_and_the_command(self):
        code = self.regress(self.cases("name: one", 'name: two, set: {fake.scale: 1.5}, equals: {case: one, loss: 0.1}'))
        self.assertEqual(code, 1, self.output)
        self.assertIn("loss at step 1 is 1.5, one has 1.0, relative difference 0.333, 0.1 allowed", self.output)
        self.assertIn(f"{self.folder}/list.yaml --only two --device cpu", self.output)
        self.assertEqual(self.results()["one"]["status"], "passed")

    def test_a_reference_runs_though_it_was_not_chosen(self):
        self.assertEqual(self.regress(self.cases("name: one", "name: two, equals: {case: one, loss: bitwise}"), "--only", "two"), 0)
        self.assertEqual(list(self.results()), ["two"])

    def test_what_is_compared_with_a_failure_fails(self):
        code = self.regress(self.cases('name: one, set: {fake.exit: 7}', "name: two, equals: {case: one, loss: bitwise}"), "--only", "two")
        self.assertEqual(code, 1)
        self.assertEqual(self.reason("two"), "one, which it needs, failed: rank 0 ended with 7")
        self.assertIn("rank 0 of 1 sees None", self.output)
        self.assertIn("cases/one/run-1/rank-0.log", self.output)

    def test_what_is_compared_with_a_case_that_fails_its_own_checks_fails(self):
        code = self.regress(self.cases("name: one, bounds: {peak_memory_bytes: {at_most: 1}}", "name: two, equals: {case: one, loss: bitwise}"),
                            "--only", "two")
        self.assertEqual(code, 1)
        self.assertIn("one, which it needs, failed: peak_memory_bytes at step 1 is 101", self.reason("two"))

    def test_a_program_that_does_not_hear_a_setting_fails(self):
        text = self.cases("name: one, set: {fake.word: 7, fake.deaf: fake.word}", "name: two, set: {fake.word: 1e-3, fake.list: [a, \"b c\"]}",
                          "name: three, steps: 2, set: {fake.deaf: training.steps}")
        self.assertEqual(self.regress(text), 1)
        self.assertEqual(self.reason("one"), "fake.word is None in the run's config.yaml, expected 7")
        self.assertEqual(self.results()["two"]["status"], "passed", self.output)

    def test_ranks_that_train_apart_fail(self):
        self.assertEqual(self.regress(self.cases("name: one, ranks: 2, set: {fake.ranks: 1}")), 1)
        self.assertIn("1 ranks trained together at step 1, expected 2", self.reason("one"))

    def test_the_rank_that_fails_is_named_and_its_lines_shown(self):
        self.assertEqual(self.regress(self.cases('name: one, ranks: 3, environment: {FAKE_WORD: hello}, set: {fake.exit: 5}')), 1)
        self.assertEqual(self.reason("one"), "rank 2 ended with 5")
        self.assertIn("rank 2 of 3 sees hello", self.output)

    def test_steps_that_are_missing_or_no_number_fail(self):
        self.assertEqual(self.regress(self.cases('name: gap, set: {fake.skip: 2}', 'name: nan, set: {fake.nan: 2}',
                                                 "name: late, first_step: 2", 'name: good, steps: 5, first_step: 2, set: {fake.first: 2}')), 1)
        self.assertEqual({name: case["status"] for name, case in self.results().items()},
                         {"gap": "failed", "nan": "failed", "late": "failed", "good": "passed"})
        self.assertIn("missing [2]", self.reason("gap"))
        self.assertIn("loss at step 2 is None", self.reason("nan"))
        self.assertIn("not expected [1]", self.reason("late"))

    def test_bounds(self):
        self.assertEqual(self.regress(self.cases("name: one, bounds: {peak_memory_bytes: {at_most: 103, at_least: 101}}",
                                                 "name: two, bounds: {peak_memory_bytes: {at_most: 102}}")), 1)
        self.assertIn("peak_memory_bytes at step 3 is 103, expected at most 102", self.reason("two"))
        self.assertEqual(self.results()["one"]["status"], "passed")

    def test_weights(self):
        saving = 'checkpoint.folder: "{out}/checkpoints"'
        self.assertEqual(self.regress(self.cases(
            f"name: one, set: {{{saving}, fake.weights: a}}",
            f"name: same, set: {{{saving}, fake.weights: a}}, equals: {{case: one, weights: bitwise}}",
            f"name: other, set: {{{saving}, fake.weights: b}}, equals: {{case: one, weights: bitwise}}",
            f"name: longer, steps: 4, first_step: 4, set: {{{saving}, fake.first: 4}}, equals: {{case: one, weights: bitwise}}",
            "name: none, equals: {case: one, weights: bitwise}")), 1)
        self.assertEqual([name for name, case in self.results().items() if case["status"] == "passed"], ["one", "same"])
        self.assertIn("weights after step-3 differ from those of one: lm_head.weight differs", self.reason("other"))
        self.assertIn("has no checkpoint; set checkpoint.folder", self.reason("none"))

    def test_folders_of_other_cases(self):
        code = self.regress(self.cases("name: one, set: {fake.word: \"{out:two}/x\"}, ranks: 1", "name: two"), "--only", "one")
        self.assertEqual(code, 0, self.output)
        run = self.results()["one"]["runs"][0]["command"]
        self.assertIn("/cases/two/run-1/x", run)

    def test_time_limit(self):
        start = time.monotonic()
        self.assertEqual(self.regress(self.cases('name: one, ranks: 2, timeout: 1.5, set: {fake.sleep: 60}')), 1)
        self.assertIn("took longer than its time limit of 1.5 s and was stopped, ranks 0, 1 still running", self.reason("one"))
        self.assertLess(time.monotonic() - start, 50)

    def test_retries_make_flaky_and_are_off_by_default(self):
        count = self.folder / "count"
        text = self.cases(f"name: one, set: {{fake.count: {count}}}")
        count.write_text("1")
        self.assertEqual(self.regress(text), 1)
        count.write_text("1")
        self.assertEqual(self.regress(text, "--retries", "2"), 0)
        self.assertEqual(self.results()["one"]["status"], "flaky")
        self.assertIn("FLAKY", self.output)
        count.write_text("9")
        self.assertEqual(self.regress(text, "--retries", "1"), 1)
        self.assertEqual(self.results()["one"]["status"], "failed")

    def test_goldens_are_missing_recorded_compared_and_outlived(self):
        text = self.cases("name: one, golden: {loss: 1.0e-3}, set: {fake.scale: $scale}")
        self.assertEqual(self.regress("variables: {scale: 1.0}\n" + text), 1)
        self.assertIn("no golden at", self.output)
        self.assertIn("--only one --device cpu --build", self.output)
        self.assertIn("--record-goldens --reason 'WHY'", self.output)
        for arguments in (("--record-goldens",), ("--reason", "why"), ("--record-goldens", "--reason", " "),
                          ("--record-goldens", "--reason", "why", "--retries", "1")):
            self.assertEqual(self.regress("variables: {scale: 1.0}\n" + text, *arguments), 2)
        self.assertEqual(list(self.folder.glob("goldens/*")), [])
        self.assertEqual(self.regress("variables: {scale: 1.0}\n" + text, "--record-goldens", "--reason", "first"), 0)
        self.assertIn(f"one: recorded {self.folder}/goldens/one/", self.output)
        self.assertEqual(self.regress(self.cases("name: bare"), "--record-goldens", "--reason", "first"), 2)
        self.assertEqual(json.loads(next(self.folder.glob("goldens/one/*.json")).read_text())["reason"], "first")
        self.assertEqual(self.regress("variables: {scale: 1.0}\n" + text), 0)
        self.assertEqual(self.regress("variables: {scale: 1.01}\n" + text), 1)
        self.assertIn("was recorded with fake.scale 1.0, this case has 1.01", self.output)
        self.assertEqual(self.regress("variables: {scale: 1.0}\n" + text.replace("set: {", "set: {fake.new: 1, ")), 1)
        self.assertIn("was recorded without fake.new, this case has 1", self.output)
        path = next(self.folder.glob("goldens/one/*.json"))
        golden = json.loads(path.read_text())
        golden["metrics"]["loss"][1] *= 1.01
        path.write_text(json.dumps(golden))
        self.assertEqual(self.regress("variables: {scale: 1.0}\n" + text), 1)
        self.assertIn("loss at step 2 is 0.5, the golden has 0.505", self.output)

    def test_a_failed_case_is_not_recorded(self):
        text = self.cases("name: one, golden: {loss: 1.0e-3}, bounds: {peak_memory_bytes: {at_most: 1}}")
        self.assertEqual(self.regress(text, "--record-goldens", "--reason", "why"), 1)
        self.assertEqual(list(self.folder.glob("goldens/*")), [])

    def test_a_metric_that_is_not_logged_is_not_recorded(self):
        self.assertEqual(self.regress(self.cases("name: one, golden: {looss: 1.0e-3}"), "--record-goldens", "--reason", "why"), 1)
        self.assertIn("looss is not a number at every step, expected one to record", self.reason("one"))
        self.assertEqual(list(self.folder.glob("goldens/*")), [])

    def test_a_golden_that_cannot_be_written_is_told(self):
        (self.folder / "goldens").write_text("a file")
        self.assertEqual(self.regress(self.cases("name: one, golden: {loss: 0.1}"), "--record-goldens", "--reason", "why"), 1)
        self.assertIn("cannot be written: ", self.reason("one"))

    def test_throughput_runs_in_pairs(self):
        text = self.cases("name: slow, set: {fake.speed: 50}", "name: fast",
                          "name: kept, throughput: {case: fast, at_least: 0.9, pairs: 2}",
                          "name: lost, set: {fake.speed: 80}, throughput: {case: fast, at_least: 0.9, pairs: 3}")
        self.assertEqual(self.regress(text), 1)
        self.assertEqual([name for name, case in self.results().items() if case["status"] != "passed"], ["lost"])
        self.assertIn("tokens a second are 0.800 of those of fast (0.800 to 0.800 in 3 pairs, 80 against 100)", self.reason("lost"))
        self.assertEqual(len(list((self.folder / "out/latest/cases/fast").iterdir())), 1 + 2 + 3)

    def test_what_does_not_fit_is_left_out_and_not_passed(self):
        text = self.cases("name: gpu, devices: [cuda]", "name: needs, equals: {case: gpu, loss: 0.1}", "name: here")
        self.assertEqual(self.regress(text), 0)
        self.assertEqual({name: case["status"] for name, case in self.results().items()},
                         {"gpu": "left_out", "needs": "left_out", "here": "passed"})
        self.assertEqual(self.reason("gpu"), "runs on cuda, not on cpu")
        self.assertEqual(self.reason("needs"), "it needs gpu, which runs on cuda, not on cpu")
        self.assertEqual(self.regress(text, "--only", "gpu,needs"), 3)

    def test_exit_3_where_devices_are_missing(self):
        text = self.cases("name: one")
        self.assertEqual(self.regress(text, "--require-gpus", "1"), 3)
        self.assertIn("[device] 0 GPUs are visible, expected at least 1", self.output)

    def gpus(self):
        (self.folder / "bin").mkdir()
        path = self.folder / "bin/nvidia-smi"
        path.write_text("#!/bin/sh\n" + textwrap.dedent(NVIDIA_SMI))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        (self.folder / "bin/memory").write_text("500 MiB")
        return {"PATH": f"{self.folder}/bin:{os.environ['PATH']}"}

    def seen_gpus(self, out, case):
        log = (self.folder / out / f"latest/cases/{case}/run-1/rank-0.log").read_text()
        return log.split("gpus ")[1].split()[0].split(",")

    def test_gpus_are_given_to_cases_and_counted(self):
        with unittest.mock.patch.dict(os.environ, self.gpus()):
            text = self.cases("name: two, ranks: 2", "name: four, ranks: 4, equals: {case: two, loss: bitwise}", "name: eight, ranks: 8")
            self.assertEqual(self.regress(text, "--require-gpus", "4", device="auto"), 0, self.output)
            self.assertEqual(self.regress(text, "--require-gpus", "5", device="auto"), 3)
            self.assertEqual(self.regress(text, "--require-gpus", "4", device="auto"), 0, self.output)
        self.assertEqual(self.seen_gpus("out", "two"), ["GPU-00", "GPU-11"])
        self.assertEqual(self.seen_gpus("out", "four"), ["GPU-00", "GPU-11", "GPU-22", "GPU-33"])
        self.assertEqual(self.reason("eight"), "needs 8 GPUs, 4 are visible")
        self.assertEqual(self.regress(text), 0)
        self.assertIn("gpus \n", (self.folder / "out/latest/cases/two/run-1/rank-0.log").read_text())

    def test_memory_of_gpus_that_is_left_fails(self):
        with unittest.mock.patch.dict(os.environ, self.gpus()):
            text = self.cases(f"name: one, set: {{fake.memory: {self.folder}/bin/memory}}")
            self.assertEqual(self.regress(text, device="cuda"), 1)
        self.assertIn("left behind: ", self.reason("one"))
        self.assertIn("GPU-00", self.reason("one"))

    def test_two_runners_share_the_gpus(self):
        (self.folder / "meet").mkdir()
        with unittest.mock.patch.dict(os.environ, self.gpus()):
            command = self.command(self.cases(f"name: one, ranks: 2, set: {{fake.meet: {self.folder}/meet}}"), device="cuda")
            started = [subprocess.Popen([f"{word}{number}" if word.endswith("/out") else word for word in command],
                                        env=self.environment(), stdout=subprocess.DEVNULL) for number in (1, 2)]
            self.assertEqual([process.wait(timeout=300) for process in started], [0, 0])
        self.assertEqual(sorted(self.seen_gpus("out1", "one") + self.seen_gpus("out2", "one")), ["GPU-00", "GPU-11", "GPU-22", "GPU-33"])

    def test_programs_of_tests(self):
        text = "cases:\n" + "\n".join(f"  - {{name: {name}, test: some_test, filter: '{words}'}}" for name, words in (
            ("good", "pass,skip"), ("bad", "pass,fail"), ("skipped", "skip,skip"), ("empty", "none"), ("off", "disabled")))
        self.assertEqual(self.regress(text), 1)
        self.assertEqual({name: case["status"] for name, case in self.results().items()},
                         {"good": "passed", "bad": "failed", "skipped": "left_out", "empty": "failed", "off": "failed"})
        self.assertIn("1 of 2 tests failed: S.T1", self.reason("bad"))
        self.assertEqual(self.reason("skipped"), "all 2 tests were skipped: no such device")
        self.assertIn("no test fits its filter", self.reason("empty"))
        self.assertIn("none of 1 tests ran", self.reason("off"))
        self.assertEqual(self.results()["good"]["confirmed"], ["1 tests passed, 1 skipped: S.T1"])

    def test_a_program_that_is_not_built_fails(self):
        self.assertEqual(self.regress("cases: [{name: one, test: other_test}]"), 1)
        self.assertIn("tests/other_test is not there; is it built", self.reason("one"))

    def test_bad_lists_and_command_lines(self):
        self.assertEqual(self.regress("cases: [{name: one}]\n"), 2)
        self.assertIn(f"{self.folder}/list.yaml:1:", self.output)
        good = self.cases("name: one")
        for arguments in (("--only", "three"), ("--only", ""), ("--shard", "3/2"), ("--shard", "0/2"), ("--shard", "x"), ("--retries", "-1"),
                          ("--require-gpus", "many"), ("--launcher", "mpirun"), ("--nonsense",)):
            with self.subTest(arguments=arguments):
                self.assertEqual(self.regress(good, *arguments), 2, self.output)
        self.assertEqual(list(self.folder.glob("out/*")), [])

    def test_parts_of_a_list(self):
        text = self.cases("name: a", "name: b, equals: {case: a, loss: bitwise}", "name: c", "name: d")
        seen = []
        for number in (1, 2):
            self.assertEqual(self.regress(text, "--shard", f"{number}/2"), 0)
            seen += list(self.results())
        self.assertEqual(sorted(seen), ["a", "b", "c", "d"])

    def test_interrupted(self):
        process = subprocess.Popen(self.command(self.cases("name: one", 'name: two, ranks: 2, set: {fake.sleep: 600}', "name: three")),
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.environment())
        for _ in range(2400):
            logs = {log.name for log in self.folder.glob("out/*/cases/two/run-1/rank-?.log") if log.read_text().count("\n") >= 2}
            if len(logs) == 2:
                break
            time.sleep(0.1)
        self.assertEqual(len(logs), 2)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=300)
        self.assertEqual(process.returncode, 1, output)
        self.assertEqual({name: case["status"] for name, case in self.results().items()},
                         {"one": "passed", "two": "failed", "three": "left_out"})
        self.assertIn("interrupted", self.reason("two"))
        self.assertIn("rank 0 of 2 sees None", output)
        self.assertIn('failures="1"', (self.folder / "out/latest/report.xml").read_text())

    def test_latest_is_never_a_former_report(self):
        good = self.cases("name: one")
        for spoilt, code in ((lambda: self.regress("cases: 3"), 2), (lambda: self.regress(good, "--require-gpus", "1"), 3),
                             (lambda: self.regress(good, "--shard", "2/2"), 3)):
            self.assertEqual(self.regress(good), 0)
            self.assertTrue((self.folder / "out/latest").exists())
            self.assertEqual(spoilt(), code)
            self.assertFalse((self.folder / "out/latest").exists())

    def test_a_folder_that_cannot_be_written(self):
        (self.folder / "out").write_text("a file")
        self.assertEqual(self.regress(self.cases("name: one")), 1)
        self.assertIn("reports cannot be written there", self.output)
        self.assertNotIn("Traceback", self.output)

    def test_srun_outside_an_allocation(self):
        self.assertEqual(self.regress(self.cases("name: one"), "--launcher", "srun"), 2)
        self.assertNotIn("Traceback", self.output)

    def test_odd_numbers_fail_their_case_alone(self):
        path = self.folder / "build/apps/hsdp_train"
        path.write_text(path.read_text().replace('"grad_norm": 1.0', '"grad_norm": [1]' ))
        self.assertEqual(self.regress(self.cases("name: one", "name: two")), 1)
        self.assertEqual([case["status"] for case in self.results().values()], ["failed", "failed"])

    def test_another_package_of_this_name_in_the_working_folder_is_not_used(self):
        (self.folder / "regression").mkdir()
        (self.folder / "regression/__init__.py").write_text("raise SystemExit(9)")
        done = subprocess.run(self.command(self.cases("name: one")), cwd=self.folder, env=self.environment(), capture_output=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_former_reports_are_history(self):
        text = self.cases("name: one")
        for _ in range(2):
            self.assertEqual(self.regress(text), 0)
        folders = [path for path in (self.folder / "out").iterdir() if not path.is_symlink()]
        self.assertEqual(len(folders), 2)
        report = json.loads((self.folder / "out/latest/report.json").read_text())
        self.assertEqual(report["format"], 1)


if __name__ == "__main__":
    unittest.main()
