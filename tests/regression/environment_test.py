"""describe_environment: versions of program, cache and Python, git state, variables."""

import datetime
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))

from regression import environment
from regression.devices import Devices, Gpu


class EnvironmentTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)
        self.build = self.folder / "build"
        (self.build / "apps").mkdir(parents=True)
        # A Python that knows these packages, and no nvidia-smi.
        self.python = self.script(
            "python", """echo '{"torch": "2.11.0+cu130", "nvidia-nccl-cu13": "2.28.9", "yaml": "6"}'"""
        )

    def script(self, name, body):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return str(path)

    def program(self, body):
        self.script("build/apps/hsdp_train", body)

    def described(self, devices=Devices("cpu", "A processor")):
        return environment.describe_environment(self.folder, self.build, self.python, devices)

    def repository(self):
        for command in (
            ["init", "--quiet"],
            ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--allow-empty", "-m", "first"],
        ):
            subprocess.run(["git", "-C", str(self.folder), *command], check=True)
        return subprocess.run(
            ["git", "-C", str(self.folder), "rev-parse", "HEAD"], check=True, capture_output=True, text=True
        ).stdout.strip()

    def test_versions_are_those_the_program_prints(self):
        self.program(
            "test \"$1\" = --version && printf 'hsdp 0.2.0\\ntorch 2.12.1+cpu\\ncuda 13.0\\nnccl 2.30.1\\ngloo yes\\n'"
        )
        found = self.described()
        self.assertEqual(
            {name: found[name] for name in ("hsdp", "torch", "cuda", "nccl", "gloo")},
            {"hsdp": "0.2.0", "torch": "2.12.1", "cuda": "13.0", "nccl": "2.30.1", "gloo": "yes"},
        )

    def test_a_build_without_nccl_does_not_get_that_of_python(self):
        self.program("printf 'hsdp 0.2.0\\nnccl none\\n'")
        found = self.described()
        self.assertEqual((found["nccl"], found["cuda"], found["gloo"]), ("none", "none", "unknown"))

    def test_other_lines_are_passed_over(self):
        self.program("printf '[W] a warning\\n\\n  hsdp   0.2.0  \\nTorch 2.12.1 \\nnccl\\n1 2\\n'")
        self.assertEqual(
            environment.program_versions(self.build / "apps/hsdp_train"), {"hsdp": "0.2.0", "torch": "2.12.1"}
        )

    def test_a_program_without_version_falls_back_to_cache_and_python(self):
        self.program("echo hsdp 9.9.9; exit 2")
        (self.build / "CMakeCache.txt").write_text(
            "CMAKE_PROJECT_VERSION_MAJOR:STATIC=7\nCMAKE_PROJECT_VERSION:STATIC=0.1.0\n"
        )
        found = self.described()
        self.assertEqual((found["hsdp"], found["torch"], found["nccl"]), ("0.1.0", "2.11.0", "2.28.9"))

    def test_without_build_and_python_all_is_unknown(self):
        self.python = str(self.folder / "missing")
        found = self.described()
        self.assertEqual((found["hsdp"], found["torch"], found["nccl"]), ("unknown", "unknown", "none"))

    def test_a_python_that_prints_nonsense_is_unknown(self):
        self.python = self.script("nonsense", "echo hello")
        self.assertEqual(self.described()["torch"], "unknown")

    def test_the_real_python_knows_its_packages(self):
        self.assertIn("jinja2", environment.python_versions(sys.executable))

    def test_driver(self):
        for body, expected in (
            ("echo 580.65.06; echo 580.65.06", "580.65.06"),
            ("echo NVIDIA-SMI has failed; exit 9", "unknown"),
            ("true", "unknown"),
        ):
            self.script("bin/nvidia-smi", body)
            with self.subTest(body), mock.patch.dict(os.environ, {"PATH": f"{self.folder}/bin:/usr/bin:/bin"}):
                self.assertEqual(environment.driver_version(), expected)
        with mock.patch.dict(os.environ, {"PATH": str(self.folder)}):
            self.assertEqual(environment.driver_version(), "none")

    def test_devices(self):
        devices = Devices("cuda", "NVIDIA H200", (Gpu(3, "GPU-ab", "NVIDIA H200"),), "580.1")
        found = self.described(devices)
        self.assertEqual(
            {name: found[name] for name in ("device", "device_name", "gpus", "driver")},
            {"device": "cuda", "device_name": "NVIDIA H200", "gpus": ["3: NVIDIA H200 GPU-ab"], "driver": "580.1"},
        )

    def test_outside_a_repository(self):
        with mock.patch.dict(os.environ, {"GIT_CEILING_DIRECTORIES": str(self.folder.parent)}):
            self.assertEqual(environment.repository_state(self.folder), ("unknown", "unknown"))

    def test_commit_and_number_of_changed_files(self):
        commit = self.repository()
        (self.folder / ".gitignore").write_text("/build\n/bin\n/python\n")
        self.assertEqual(environment.repository_state(self.folder), (commit, 1))
        (self.folder / "other").write_text("")
        self.assertEqual(environment.repository_state(self.folder), (commit, 2))

    def test_the_repository_of_a_calling_hook_is_not_taken(self):
        commit = self.repository()
        with mock.patch.dict(os.environ, {"GIT_DIR": "/nowhere"}):
            self.assertEqual(environment.repository_state(self.folder)[0], commit)

    def test_the_index_is_not_written(self):
        # Others may be at work in the repository; a plain `git status` notes in the index that `file` is unchanged.
        file = self.folder / "file"
        file.write_text("text")
        self.repository()
        subprocess.run(["git", "-C", str(self.folder), "add", "file"], check=True)
        os.utime(file, (1, 1))
        index = self.folder / ".git" / "index"
        before = index.read_bytes()
        environment.repository_state(self.folder)
        self.assertEqual(index.read_bytes(), before)

    def test_variables_that_change_what_runs(self):
        variables = {
            "NCCL_DEBUG": "INFO",
            "TORCH_NCCL_BLOCKING_WAIT": "1",
            "HSDP_PYTHON": "p",
            "OMP_NUM_THREADS": "2",
            "MKL_NUM_THREADS": "3",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "ATEN_CPU_CAPABILITY": "avx2",
        }
        with mock.patch.dict(os.environ, {**variables, "SECRET": "x", "A_NCCL_DEBUG": "y"}, clear=True):
            os.environ["PATH"] = "/usr/bin:/bin"
            self.assertEqual(self.described()["variables"], variables)
            self.assertEqual(list(self.described()["variables"]), sorted(variables))

    def test_machine_and_date(self):
        before = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
        found = self.described()
        date = datetime.datetime.strptime(found["date"], "%Y-%m-%dT%H:%M:%S%z")
        self.assertLessEqual(before, date)
        self.assertLessEqual(date, datetime.datetime.now(datetime.timezone.utc))
        self.assertEqual(found["cores"], len(os.sched_getaffinity(0)))
        self.assertEqual(found["host"], os.uname().nodename)
        self.assertIn(os.uname().release, found["system"])
        self.assertNotIn(found["processor"], ("", "unknown"))


if __name__ == "__main__":
    unittest.main()
