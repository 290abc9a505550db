#!/usr/bin/env python3
"""tools/regression/launch.py: ranks started directly, by the installed torchrun, and by a stand-in for srun."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from regression.devices import claim_port
from regression.launch import make_launcher
from regression.processes import LaunchError, ProcessSpec, last_lines, run_processes

# A program without arguments; a shell's, so that it starts quickly.
PROGRAM = """#!/bin/sh
echo "rank ${RANK-$SLURM_PROCID} of ${WORLD_SIZE-$SLURM_NTASKS}, local $LOCAL_RANK of $LOCAL_WORLD_SIZE"
echo "meets at $MASTER_ADDR:$MASTER_PORT" >&2
echo "threads $OMP_NUM_THREADS, GPUs '$CUDA_VISIBLE_DEVICES', case '$CASE', place $(pwd)"
"""
# The other rank has spoken by the time at which one fails; each run has a HOME of its own.
FAILING = """#!/bin/sh
rank=${RANK-$SLURM_PROCID}
echo "rank $rank works"
[ "$rank" = 0 ] && : > "$HOME/works"
[ "$rank" = 1 ] && {
  until [ -e "$HOME/works" ]; do sleep 0.02; done
  echo "rank 1 is broken" >&2; exit 3
}
exec sleep 600
"""
# Starts its tasks, replaces %t and %%, and ends them when one fails, as the real one does with --kill-on-bad-exit.
SRUN = """
import os, re, signal, subprocess, sys, time
words = sys.argv[1:]
options = {}
while words[0].startswith("--"):
    name, equals, value = words.pop(0).partition("=")
    options[name] = value if equals else words.pop(0)
assert options["--kill-on-bad-exit"] == "1" and options["--export"] == "ALL", options
count = int(options["--ntasks"])
tasks = []
for task in range(count):
    path = re.sub("%(.)", lambda found: {"t": str(task), "%": "%"}[found[1]], options["--output"])
    env = {**os.environ, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task), "SLURM_NTASKS": str(count)}
    tasks.append(subprocess.Popen(words, env=env, stdout=open(path, "w"), stderr=subprocess.STDOUT))
worst = 0
while any(task.poll() is None for task in tasks):
    time.sleep(0.02)
    for number, task in enumerate(tasks):
        if task.poll():
            worst = task.returncode
            how = f"Exited with exit code {worst}" if worst > 0 else signal.strsignal(-worst)
            print(f"srun: error: node-1: task {number}: {how}", file=sys.stderr, flush=True)
            for other in tasks:
                if other.poll() is None: other.terminate(); other.wait()
            sys.exit(abs(worst))
"""
# Of launchers around the runner, which are not meant for its ranks.
OUTER = {
    "RANK": "5", "WORLD_SIZE": "9", "LOCAL_RANK": "5", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_ERROR_FILE": "/nowhere", "PET_NNODES": "7",
    "SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "OMPI_COMM_WORLD_RANK": "0", "PMI_RANK": "0",
    "PMIX_NAMESPACE": "x", "MPI_LOCALRANKID": "0", "CUDA_VISIBLE_DEVICES": "0,1,2,3",
}  # fmt: skip


class WithFolder(unittest.TestCase):
    def setUp(self):
        contexts = contextlib.ExitStack()
        self.addCleanup(contexts.close)
        # Blanks, quotes and percent signs are in people's folders, too.
        self.top = pathlib.Path(contexts.enter_context(tempfile.TemporaryDirectory()))
        self.folder = self.top / "a b'%t%%"
        self.folder.mkdir()
        self.temporary = self.top / "tmp"
        self.temporary.mkdir()
        self.port = contexts.enter_context(claim_port())
        bin_folder = self.top / "bin"
        bin_folder.mkdir()
        (bin_folder / "srun.py").write_text(SRUN)
        (bin_folder / "srun").write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {bin_folder}/srun.py "$@"\n')
        (bin_folder / "srun").chmod(0o755)
        path = f"{bin_folder}:{os.environ['PATH']}"
        contexts.enter_context(mock.patch.dict(os.environ, {"PATH": path}))
        self.environment = {"PATH": path, "HOME": str(self.top), "TMPDIR": str(self.temporary)}

    def program(self, text):
        path = self.folder / "program $x"
        path.write_text(text)
        path.chmod(0o755)
        return [str(path)]

    def launcher(self, name, outer=OUTER, **more):
        return make_launcher(name, sys.executable, self.top, {**self.environment, **outer, **more})

    def run_ranks(self, launcher, program, ranks=2, env=None, gpus=None, **limits):
        """The outcome, what the launcher makes of it, and the logs by rank."""
        specs = launcher.specs(self.program(program), ranks, env or {}, self.folder, self.port, gpus)
        outcome = run_processes(specs, limits.pop("timeout", 120), port=self.port, **limits)
        self.assertEqual(outcome.leftovers, [])
        self.assertEqual(list(self.temporary.iterdir()), [], "left in TMPDIR")
        found = launcher.ranks(outcome, ranks, self.folder)
        return outcome, found, {rank: last_lines(log) for rank, log in found.logs.items()}

    def shown(self, command, **environment):
        """What a shell does with a line for people."""
        done = subprocess.run(
            ["/bin/sh", "-c", command], env={**self.environment, **environment}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False, timeout=120
        )  # fmt: skip
        return sorted(done.stdout.splitlines())

    def expected(self, rank, threads=None, gpus="", port=None):
        threads = threads or max(1, len(os.sched_getaffinity(0)) // 2)
        return [
            f"rank {rank} of 2, local {rank} of 2",
            f"meets at 127.0.0.1:{port or self.port}",
            f"threads {threads}, GPUs '{gpus}', case 'its own', place {self.top}",
        ]


class Direct(WithFolder):
    def test_ranks_know_each_other_and_nothing_of_outer_launchers(self):
        _, found, logs = self.run_ranks(self.launcher(None), PROGRAM, env={"CASE": "its own"})
        self.assertEqual(logs, {0: self.expected(0), 1: self.expected(1)})
        self.assertEqual((found.exit_codes, found.failing_rank), ([0, 0], None))
        spec = self.launcher(None).specs(["x"], 1, {}, self.folder, 1, None)[0]
        kept = {*self.environment, "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"}
        given = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
        self.assertEqual(set(spec.env), kept | given)

    def test_gpus_are_those_that_were_claimed(self):
        _, _, logs = self.run_ranks(self.launcher(None), PROGRAM, env={"CASE": "its own"}, gpus=["GPU-a", "GPU-b"])
        self.assertEqual(logs[1], self.expected(1, gpus="GPU-a,GPU-b"))

    def test_threads_are_kept_where_they_are_set(self):
        launcher = self.launcher(None, OMP_NUM_THREADS="3")
        _, _, logs = self.run_ranks(launcher, PROGRAM, env={"CASE": "its own"})
        self.assertEqual(logs[0], self.expected(0, threads=3))
        _, _, logs = self.run_ranks(launcher, PROGRAM, env={"CASE": "its own", "OMP_NUM_THREADS": "4"})
        self.assertEqual(logs[0], self.expected(0, threads=4))

    def test_the_failing_rank(self):
        _, found, _ = self.run_ranks(self.launcher(None), FAILING, after_failure=0.2)
        self.assertEqual((found.exit_codes, found.failing_rank), ([-signal.SIGTERM, 3], 1))
        self.assertEqual(last_lines(found.telling_log), ["rank 1 works", "rank 1 is broken"])

    def test_of_ranks_that_hang_one_tells(self):
        program = '#!/bin/sh\necho rank $RANK\n[ "$RANK" = 0 ] || sleep 600\n'
        outcome, found, _ = self.run_ranks(self.launcher(None), program, timeout=5)
        self.assertEqual((outcome.timed_out, found.failing_rank), (True, None))
        self.assertEqual(last_lines(found.telling_log), ["rank 1"])

    def test_what_the_launcher_sets_a_case_may_not(self):
        for name in ("RANK", "MASTER_ADDR", "SLURM_PROCID", "TORCHELASTIC_RUN_ID", "CUDA_VISIBLE_DEVICES"):
            message = f"a case sets {name}, which its launcher sets"
            with self.subTest(name), self.assertRaisesRegex(LaunchError, message):
                self.launcher(None).specs(["x"], 1, {name: "1"}, self.folder, 1, None)

    def test_the_line_for_a_shell_does_the_same(self):
        argv = self.program(PROGRAM)
        line = self.launcher(None).shell(argv, 2, {"CASE": "its own"})
        self.assertEqual(self.shown(line), sorted(self.expected(0, port=29500) + self.expected(1, port=29500)))
        line = self.launcher(None, OMP_NUM_THREADS="1").shell(argv, 1, {"CASE": "'"}, ["GPU-a"])
        self.assertIn(f"threads 1, GPUs 'GPU-a', case ''', place {self.top}", self.shown(line))

    def test_a_program_that_makes_its_ranks_is_alone(self):
        spec = self.launcher(None).single_spec(self.program(PROGRAM), {"CASE": "its own"}, self.folder, 2, ["GPU-a"])
        self.assertEqual(set(spec.env), {*self.environment, "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CASE"})
        outcome = run_processes([spec], 60)
        found = self.launcher(None).single_ranks(outcome, self.folder)
        self.assertEqual((found.exit_codes, found.failing_rank, list(found.logs)), ([0], None, [0]))
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
        expected = f"threads {threads}, GPUs 'GPU-a', case 'its own', place {self.top}"
        self.assertEqual(last_lines(found.telling_log, 1), [expected])
        line = self.launcher(None).single_shell(spec.argv, {"CASE": "its own"}, 2, ["GPU-a"])
        self.assertIn(expected, self.shown(line))

    def test_an_unknown_launcher_is_refused(self):
        with self.assertRaisesRegex(LaunchError, "no launcher 'mpirun', expected torchrun or srun"):
            make_launcher("mpirun", sys.executable)


class Torchrun(WithFolder):
    """Under the torchrun of the Python that runs this."""

    def test_ranks_know_each_other_and_nothing_of_outer_launchers(self):
        outcome, found, logs = self.run_ranks(self.launcher("torchrun"), PROGRAM, env={"CASE": "its own"})
        self.assertEqual(outcome.exit_codes, [0], last_lines(self.folder / "torchrun.log"))
        for rank, lines in logs.items():
            # torchrun serves the ranks' store at a port that the kernel gave it.
            self.assertRegex(lines[1], r"^meets at 127\.0\.0\.1:\d+$")
            self.assertEqual([lines[0], lines[2]], self.expected(rank)[::2])
        self.assertEqual((list(logs), found.exit_codes, found.failing_rank), ([0, 1], [0, 0], None))

    def test_the_failing_rank(self):
        outcome, found, logs = self.run_ranks(self.launcher("torchrun"), FAILING)
        self.assertEqual(outcome.exit_codes, [1])
        self.assertEqual((found.exit_codes[1], found.failing_rank), (3, 1), last_lines(self.folder / "torchrun.log"))
        self.assertEqual(last_lines(found.telling_log), ["rank 1 works", "rank 1 is broken"])
        self.assertEqual(logs[0], ["rank 0 works"])

    def test_ranks_that_ignore_the_stop_are_ended(self):
        program = "#!/bin/sh\ntrap '' TERM\necho rank $RANK\nwhile true; do sleep 0.1; done\n"
        specs = self.launcher("torchrun").specs(self.program(program), 2, {}, self.folder, self.port, None)
        # Fails as soon as both ranks are there.
        waiting = "until [ -s rank-0.log ] && [ -s rank-1.log ]; do sleep 0.1; done; exit 1"
        failing = ProcessSpec(["/bin/sh", "-c", waiting], self.environment, self.folder / "waiting.log", self.folder)
        outcome = run_processes([*specs, failing], 120, grace=1, after_failure=0, port=self.port)
        self.assertEqual((outcome.failed_first, outcome.stopped, outcome.leftovers), (1, [0], []))
        self.assertEqual(last_lines(self.folder / "rank-1.log"), ["rank 1"])

    def test_a_torchrun_that_is_killed_leaves_ranks_that_are_found(self):
        program = "#!/bin/sh\n[ $RANK = 0 ] && kill -KILL $PPID\nexec sleep 600\n"
        specs = self.launcher("torchrun").specs(self.program(program), 1, {}, self.folder, self.port, None)
        outcome = run_processes(specs, 120, port=self.port)
        self.assertEqual(outcome.exit_codes, [-signal.SIGKILL])
        self.assertRegex("; ".join(outcome.leftovers), r"^process \d+ \(sleep 600\) outlived the run$")

    def test_a_torchrun_that_does_not_start_tells_itself(self):
        python = self.top / "bin" / "python"
        python.write_text("#!/bin/sh\necho No module named torch >&2; exit 1\n")
        python.chmod(0o755)
        launcher = make_launcher("torchrun", str(python), self.top, self.environment)
        _, found, _ = self.run_ranks(launcher, PROGRAM)
        self.assertEqual((found.exit_codes, found.failing_rank, found.logs), ([1], None, {}))
        self.assertEqual(last_lines(found.telling_log), ["No module named torch"])

    def test_the_line_for_a_shell_does_the_same(self):
        line = self.launcher("torchrun").shell(self.program(PROGRAM), 2, {"CASE": "its own"})
        shown = self.shown(line)
        for rank in range(2):
            for expected in (self.expected(rank)[0], self.expected(rank)[2]):
                self.assertIn(expected, shown)


class Srun(WithFolder):
    def test_tasks_get_slurms_variables_and_the_port(self):
        outer = {**OUTER, "MASTER_ADDR": "node-1"}
        _, found, logs = self.run_ranks(self.launcher("srun", outer), PROGRAM, env={"CASE": "its own"})
        place = f"threads , GPUs '', case 'its own', place {self.top}"
        for rank in range(2):
            self.assertEqual(logs[rank], [f"rank {rank} of 2, local  of ", f"meets at node-1:{self.port}", place])
        self.assertEqual((found.exit_codes, found.failing_rank), ([0, 0], None))

    def test_what_the_allocation_says_is_kept_and_the_rest_is_not(self):
        env = self.launcher("srun").specs(["x"], 2, {}, self.folder, 7, ["GPU-a"])[0].env
        self.assertEqual(
            {name: env[name] for name in OUTER if name in env},
            {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "7", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
            | {name: value for name, value in OUTER.items() if name.startswith("SLURM_")},
        )

    def test_the_failing_rank(self):
        outcome, found, logs = self.run_ranks(self.launcher("srun"), FAILING)
        self.assertEqual((outcome.exit_codes, found.exit_codes, found.failing_rank), ([3], [None, 3], 1))
        self.assertEqual(last_lines(found.telling_log), ["rank 1 works", "rank 1 is broken"])
        self.assertEqual(logs[0], ["rank 0 works"])

    def test_a_rank_that_dies_by_a_signal(self):
        program = FAILING.replace("exit 3", "kill -SEGV $$")
        _, found, _ = self.run_ranks(self.launcher("srun"), program)
        self.assertEqual((found.exit_codes, found.failing_rank), ([None, None], 1))

    def test_an_srun_that_fails_tells_itself(self):
        (self.top / "bin" / "srun").write_text("#!/bin/sh\necho srun: error: Unable to allocate >&2; exit 1\n")
        _, found, _ = self.run_ranks(self.launcher("srun"), PROGRAM)
        self.assertEqual((found.exit_codes, found.failing_rank, found.logs), ([1], None, {}))
        self.assertEqual(last_lines(found.telling_log), ["srun: error: Unable to allocate"])

    def test_tasks_that_hang_are_ended(self):
        program = "#!/bin/sh\necho $SLURM_PROCID; sleep 600\n"
        outcome, found, _ = self.run_ranks(self.launcher("srun"), program, timeout=10)
        self.assertEqual((outcome.timed_out, found.failing_rank), (True, None))
        self.assertEqual(last_lines(found.telling_log), ["0"])

    def test_the_line_for_a_shell(self):
        line = self.launcher("srun").shell(["my program", "--set", "a=b c"], 2, {"CASE": "its own"})
        self.assertEqual(
            line,
            f"cd {self.top} && CUDA_VISIBLE_DEVICES= CASE='its own' srun --ntasks 2 --kill-on-bad-exit=1 --export=ALL "
            "'my program' --set 'a=b c'",
        )
        self.assertNotIn("CUDA", self.launcher("srun").shell(["x"], 2, {}, ["GPU-a"]))

    def test_outside_of_an_allocation_it_is_refused(self):
        with self.assertRaisesRegex(LaunchError, "srun needs an allocation, but SLURM_JOB_ID is not set"):
            self.launcher("srun", outer={})


if __name__ == "__main__":
    unittest.main()
