#!/usr/bin/env python3
"""tools/regression/processes.py with real processes, which do all that ranks should not."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import unittest
import uuid
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from regression import devices, leftovers, processes
from regression.processes import LaunchError, ProcessSpec, Terminated, last_lines, run_processes

# Long enough to be found by whoever waits for it; nothing here may take as long.
FOR_EVER = 600
IGNORE_TERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
# Leaves a grandchild in a session of its own, which runs `code`, without the run's variables where `clean`.
DAEMON = """
import os, subprocess, sys, time
def daemon(code, clean):
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.set_inheritable(writing, True)
            code += f"\\nimport os, time; os.write({writing}, b'x'); time.sleep(600)"
            os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", code], {} if clean else os.environ)
        os._exit(0)
    os.wait()
    os.close(writing)
    os.read(reading, 1)
"""


def is_running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def eventually(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class WithFolder(unittest.TestCase):
    def setUp(self):
        self.contexts = contextlib.ExitStack()
        self.addCleanup(self.contexts.close)
        self.folder = pathlib.Path(self.contexts.enter_context(tempfile.TemporaryDirectory()))
        # No test has a leftover that goes away by itself later than this.
        self.contexts.enter_context(mock.patch.object(processes, "SETTLE_SECONDS", 2))

    def spec(self, code, name="rank"):
        """A process that runs Python `code`, in the test's folder."""
        argv = [sys.executable, "-I", "-S", "-c", textwrap.dedent(code)]
        return ProcessSpec(argv, dict(os.environ), self.folder / f"{name}.log", self.folder)

    def run_codes(self, *codes, timeout=60.0, **options):
        specs = [self.spec(code, f"rank-{i}") for i, code in enumerate(codes)]
        return run_processes(specs, timeout, **options)

    def stop_when_ready(self, *codes, grace):
        """Runs `codes` and one process more, which fails when each of them has made its file `ready-N`."""
        files = [f"ready-{i}" for i in range(len(codes))]
        waiter = f"""
            import os, time
            while not all(map(os.path.exists, {files})): time.sleep(0.01)
            raise SystemExit(1)
        """
        outcome = self.run_codes(*codes, waiter, after_failure=0, grace=grace)
        self.assertEqual((outcome.failed_first, outcome.stopped), (len(codes), list(range(len(codes)))))
        return outcome.exit_codes[:-1], outcome.leftovers

    def pid_in(self, name):
        """Of a process that wrote its number to a file."""
        path = self.folder / name
        self.assertTrue(eventually(lambda: path.exists() and path.read_text().endswith("\n")), name)
        return int(path.read_text())

    def assert_nothing_runs(self):
        """No process has this test's folder as its place any more."""
        there = []
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdigit() and os.readlink(f"/proc/{entry}/cwd").startswith(str(self.folder)):
                    there.append(leftovers.command_line(int(entry)))
        self.assertEqual(there, [])


class Endings(WithFolder):
    def test_processes_that_end_well(self):
        outcome = self.run_codes("print('out', flush=True); import os; os.write(2, b'err\\n')", "pass")
        self.assertEqual(outcome.exit_codes, [0, 0])
        self.assertEqual((outcome.timed_out, outcome.failed_first, outcome.stopped), (False, None, []))
        self.assertEqual(outcome.leftovers, [])
        self.assertEqual(last_lines(self.folder / "rank-0.log"), ["out", "err"])

    def test_all_are_in_one_group_of_their_own_without_input_and_with_the_marker(self):
        code = "import os, sys; print(os.getpgrp(), repr(sys.stdin.read()), 'HSDP_REGRESS_RUN' in os.environ)"
        self.run_codes(code, code, code)
        lines = [last_lines(self.folder / f"rank-{i}.log")[0].split() for i in range(3)]
        self.assertEqual(len({line[0] for line in lines}), 1)
        self.assertNotEqual(int(lines[0][0]), os.getpgrp())
        self.assertEqual([line[1:] for line in lines], [["''", "True"]] * 3)

    def test_the_first_leaves_before_the_others_start(self):
        outcome = self.run_codes("pass", *["import time; time.sleep(0.2)"] * 5)
        self.assertEqual(outcome.exit_codes, [0] * 6)

    def test_numbers_are_not_given_to_strangers_while_the_run_lasts(self):
        code = """
            import os, time
            def state():
                with open("pid") as file: pid = int(file.read())
                with open(f"/proc/{pid}/stat") as file: return file.read().rpartition(")")[2].split()[0]
            while not os.path.exists("pid") or state() != "Z": time.sleep(0.01)
            time.sleep(0.5)
            assert state() == "Z"
        """
        first = """
            import os
            with open("new", "w") as file: file.write(str(os.getpid()))
            os.rename("new", "pid")
        """
        self.assertEqual(self.run_codes(first, code).exit_codes, [0, 0])

    def test_signals_are_as_usual_in_the_processes(self):
        outcome = self.run_codes("import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))")
        self.assertEqual((outcome.exit_codes, last_lines(self.folder / "rank-0.log")), ([0], ["set()"]))

    def test_signals_are_as_before_afterwards(self):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGTERM)
        self.run_codes("pass")
        self.assertEqual((signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGTERM)), before)

    def test_no_child_of_the_runner_is_left_not_even_a_dead_one(self):
        self.run_codes("import os; os.fork() or (os.setsid(), os.fork())", "raise SystemExit(1)")
        self.assertEqual(leftovers.children(os.getpid()), [])

    def test_who_fails_first_is_told_from_who_follows(self):
        after = """
            import time
            def state():
                try:
                    with open("pid") as file: pid = file.read()
                    with open(f"/proc/{int(pid)}/stat") as file: return file.read().rpartition(")")[2].split()[0]
                except (OSError, ValueError):
                    return "not there yet"
            while state() != "Z": time.sleep(0.02)
        """
        outcome = self.run_codes(
            after + "    raise SystemExit(1)",
            """
            import os, signal
            with open("pid", "w") as file: file.write(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSEGV)
            """,
            after,
        )
        self.assertEqual(outcome.exit_codes, [1, -signal.SIGSEGV, 0])
        self.assertEqual((outcome.failed_first, outcome.stopped, outcome.timed_out), (1, [], False))

    def test_others_are_stopped_some_time_after_a_failure(self):
        outcome = self.run_codes(f"import time; time.sleep({FOR_EVER})", "raise SystemExit(3)", after_failure=0.3)
        self.assertEqual(outcome.exit_codes, [-signal.SIGTERM, 3])
        self.assertEqual((outcome.failed_first, outcome.stopped, outcome.timed_out), (1, [0], False))

    def test_time_limit(self):
        outcome = self.run_codes(f"import time; time.sleep({FOR_EVER})", "pass", timeout=5)
        self.assertEqual(outcome.exit_codes, [-signal.SIGTERM, 0])
        self.assertEqual((outcome.failed_first, outcome.stopped, outcome.timed_out), (None, [0], True))
        self.assertEqual(outcome.leftovers, [])

    def test_who_ends_at_sigterm_may_finish(self):
        code = f"""
            import signal, sys, time
            def finish(*_):
                time.sleep(0.5)
                print("finished")
                sys.exit(7)
            signal.signal(signal.SIGTERM, finish)
            open("ready-0", "w").close()
            time.sleep({FOR_EVER})
        """
        self.assertEqual(self.stop_when_ready(code, grace=60), ([7], []))
        self.assertEqual(last_lines(self.folder / "rank-0.log"), ["finished"])

    def test_who_ignores_sigterm_is_killed_with_its_children(self):
        codes = [
            f"{IGNORE_TERM}import os; os.fork(); os.fork(); open('ready-{i}', 'w').close(); time.sleep({FOR_EVER})"
            for i in range(2)
        ]
        self.assertEqual(self.stop_when_ready(*codes, grace=0.3), ([-signal.SIGKILL] * 2, []))
        self.assert_nothing_runs()

    def test_a_stop_reaches_other_sessions(self):
        # As torchrun starts its ranks.
        code = DAEMON + IGNORE_TERM + f"daemon('', False); open('ready-0', 'w').close(); time.sleep({FOR_EVER})"
        self.assertEqual(self.stop_when_ready(code, grace=0.2), ([-signal.SIGKILL], []))
        self.assert_nothing_runs()

    def test_a_program_that_is_missing_stops_the_others(self):
        waiting = self.spec(f"import time; time.sleep({FOR_EVER})")
        specs = [waiting, ProcessSpec(["/nowhere/x"], {}, self.folder / "log")]
        with self.assertRaisesRegex(LaunchError, r"^\[launch\] /nowhere/x cannot be started: No such file"):
            run_processes(specs, 60.0)
        self.assert_nothing_runs()

    def test_a_folder_that_is_missing_is_named(self):
        spec = ProcessSpec([sys.executable], {}, self.folder / "log", self.folder / "gone")
        with self.assertRaisesRegex(LaunchError, "cannot be started: .*/gone: No such file"):
            run_processes([spec], 60.0)

    def test_another_thread_is_refused(self):
        caught = []

        def call():
            try:
                run_processes([], 1.0)
            except RuntimeError as error:
                caught.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        self.assertEqual(caught, ["run_processes was called outside the main thread"])


class Leftovers(WithFolder):
    def test_a_daemon_is_found_by_its_marker_and_killed(self):
        outcome = self.run_codes(DAEMON + "daemon('tag = 1', False)")
        self.assertEqual(outcome.exit_codes, [0])
        self.assertEqual(len(outcome.leftovers), 1, outcome.leftovers)
        self.assertRegex(outcome.leftovers[0], r"^process \d+ \(.*tag = 1.*\) outlived the run$")
        self.assert_nothing_runs()

    def test_a_daemon_without_the_marker_is_found_as_an_orphan(self):
        outcome = self.run_codes(DAEMON + "daemon('tag = 2', True)")
        self.assertEqual(len(outcome.leftovers), 1, outcome.leftovers)
        self.assertRegex(outcome.leftovers[0], r"^process \d+ \(.*tag = 2.*\) outlived the run$")
        self.assert_nothing_runs()

    def test_a_child_that_stays_is_found_in_the_group(self):
        outcome = self.run_codes(f"import os, time\nif os.fork() == 0: time.sleep({FOR_EVER})")
        self.assertEqual(len(outcome.leftovers), 1, outcome.leftovers)
        self.assert_nothing_runs()

    def test_what_ends_soon_is_no_leftover(self):
        self.contexts.enter_context(mock.patch.object(processes, "SETTLE_SECONDS", 30))
        outcome = self.run_codes("import os, time\nif os.fork() == 0: time.sleep(0.2)")
        self.assertEqual(outcome.leftovers, [])

    def test_processes_of_others_are_left_alone(self):
        other = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOR_EVER})"])
        try:
            outcome = self.run_codes("pass")
            self.assertEqual(outcome.leftovers, [])
            self.assertIsNone(other.poll())
        finally:
            other.kill()
            other.wait()

    def test_a_listener_at_the_claimed_port(self):
        with devices.claim_port() as port:
            listen = "import socket; s = socket.socket(socket.{0}); s.bind(('{1}', %d)); s.listen()" % port
            for family, address in (("AF_INET", "127.0.0.1"), ("AF_INET6", "::1")):
                with self.subTest(family):
                    code = listen.format(family, address)
                    outcome = self.run_codes(DAEMON + f"daemon({code!r}, False)", port=port)
                    self.assertEqual(len(outcome.leftovers), 2, outcome.leftovers)
                    expected = rf"^process \d+ \(.*s.listen.*\) still listens at port {port}$"
                    self.assertRegex(outcome.leftovers[1], expected)
            # Connected and closed, which leaves a socket in TIME_WAIT.
            code = f"""
                import socket
                server = socket.create_server(("127.0.0.1", {port}))
                client = socket.create_connection(("127.0.0.1", {port}))
                server.accept()[0].close()
            """
            self.assertEqual(self.run_codes(code, port=port).leftovers, [])

    def test_shared_memory(self):
        path = pathlib.Path("/dev/shm") / f"hsdp-test-{uuid.uuid4().hex}"
        self.addCleanup(path.unlink, missing_ok=True)
        outcome = self.run_codes(f"open({str(path)!r}, 'w').close()")
        self.assertEqual(outcome.leftovers, [f"{path} is left in shared memory, and no process uses it"])
        self.assertTrue(path.exists())
        # It was there before.
        self.assertEqual(self.run_codes("pass").leftovers, [])

    def test_shared_memory_of_a_killed_leftover(self):
        path = pathlib.Path("/dev/shm") / f"hsdp-test-{uuid.uuid4().hex}"
        self.addCleanup(path.unlink, missing_ok=True)
        holder = f"f = open({str(path)!r}, 'w')"
        outcome = self.run_codes(DAEMON + f"daemon({holder!r}, False)")
        self.assertEqual(len(outcome.leftovers), 2, outcome.leftovers)
        self.assertEqual(outcome.leftovers[1], f"{path} is left in shared memory, and no process uses it")

    def test_shared_memory_that_others_use_is_theirs(self):
        # Python's own mmap keeps the file open.
        mapped = (
            "import ctypes; f.truncate(4096); map = ctypes.CDLL(None).mmap; map.restype = ctypes.c_void_p; "
            "assert map(None, ctypes.c_size_t(4096), 3, 1, f.fileno(), ctypes.c_long(0)) not in (None, 2**64 - 1); "
            "f.close()"
        )
        for use in ("", mapped):
            path = pathlib.Path("/dev/shm") / f"hsdp-test-{uuid.uuid4().hex}"
            self.addCleanup(path.unlink, missing_ok=True)
            go = self.folder / "go"
            os.mkfifo(go)
            # Opens it only after the run has begun.
            other_code = f"open({str(go)!r}).read(); f = open({str(path)!r}, 'w+'); {use}"
            other_code += f"\nimport time; time.sleep({FOR_EVER})"
            other = subprocess.Popen([sys.executable, "-c", other_code])
            try:
                start = f"""
                    import os, time
                    open({str(go)!r}, "w").close()
                    while not os.path.exists({str(path)!r}): time.sleep(0.01)
                    time.sleep(0.3)
                """
                self.assertEqual(self.run_codes(start).leftovers, [])
            finally:
                other.kill()
                other.wait()
                go.unlink()

    def test_memory_and_processes_of_gpus(self):
        for after, pids, expected in (
            (1064, {7}, []),
            (1065, {7}, ["GPU GPU-a has 1065 MiB in use, 1000 MiB before the run"]),
            (1000, {7, 8}, ["GPU GPU-a is in use by process 8, which did not use it before the run"]),
        ):
            memory = [{"GPU-a": 1000, "GPU-b": 0}] + [{"GPU-a": after, "GPU-b": 9000}] * 100
            apps = [{"GPU-a": {7}}] + [{"GPU-a": pids, "GPU-b": {9}}] * 100
            with self.subTest(after), mock.patch.object(devices, "memory_used", side_effect=memory):
                with mock.patch.object(devices, "compute_pids", side_effect=apps):
                    self.assertEqual(self.run_codes("pass", gpus=["GPU-a"]).leftovers, expected)


class Interrupts(WithFolder):
    """A runner in a process of its own, whose ranks ignore SIGTERM and have a daemon each."""

    def start_runner(self, rank):
        code = f"""
            import os, pathlib, signal, sys
            sys.path.insert(0, {str(ROOT / "tools")!r})
            from regression.processes import ProcessSpec, run_processes
            rank = pathlib.Path("rank.py").read_text()
            specs = [
                ProcessSpec([sys.executable, "-c", rank, str(i)], dict(os.environ), pathlib.Path(f"rank-{{i}}.log"))
                for i in range(2)
            ]
            try:
                run_processes(specs, 300, grace=0.5)
            except KeyboardInterrupt as interrupt:
                print("interrupted", type(interrupt).__name__, interrupt, flush=True)
        """
        (self.folder / "rank.py").write_text(textwrap.dedent(rank))
        runner = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)], cwd=self.folder, stdout=subprocess.PIPE, text=True
        )
        self.addCleanup(runner.stdout.close)
        self.addCleanup(runner.wait)
        self.addCleanup(runner.kill)
        return runner

    RANK = f"""{DAEMON}{IGNORE_TERM}
daemon('', False)
print(os.getpid(), file=open('pid-' + sys.argv[1], 'w'))
time.sleep({FOR_EVER})
"""

    def start(self):
        runner = self.start_runner(self.RANK)
        self.assertTrue(is_running(self.pid_in("pid-0")) and is_running(self.pid_in("pid-1")))
        return runner

    def test_a_killed_runner_leaves_nothing(self):
        runner = self.start()
        runner.kill()
        runner.wait()
        self.assertTrue(eventually(lambda: not self.running_there()), self.running_there())

    def test_a_watchdog_whose_runner_is_killed_before_it_is_ready(self):
        environment = {**os.environ, leftovers.MARKER: "this one"}
        stray = subprocess.Popen(["sleep", str(FOR_EVER)], env=environment, start_new_session=True)
        self.addCleanup(stray.kill)
        watchdog = subprocess.Popen(
            [sys.executable, *processes.WATCHDOG, "this one"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        watchdog.stdout.close()
        watchdog.stdin.close()
        self.assertEqual((watchdog.wait(60), stray.wait(60)), (0, -signal.SIGKILL))

    def test_a_watchdog_that_does_not_start_stops_the_run(self):
        with mock.patch.object(processes, "WATCHDOG", ("-c", "raise SystemExit(1)")):
            with self.assertRaisesRegex(LaunchError, "the watchdog for .* does not start"):
                self.run_codes(f"import time; time.sleep({FOR_EVER})")
        self.assert_nothing_runs()

    def running_there(self):
        try:
            self.assert_nothing_runs()
        except AssertionError as error:
            return str(error)
        return ""

    def test_interrupts_stop_the_ranks_and_go_on(self):
        for number, said in (
            (signal.SIGINT, "interrupted KeyboardInterrupt \n"),
            (signal.SIGTERM, "interrupted Terminated SIGTERM\n"),
            (signal.SIGHUP, "interrupted Terminated SIGHUP\n"),
        ):
            with self.subTest(number):
                runner = self.start()
                runner.send_signal(number)
                self.assertEqual(runner.communicate(timeout=60)[0], said)
                self.assert_nothing_runs()
                for rank in range(2):
                    (self.folder / f"pid-{rank}").unlink()

    def test_a_second_interrupt_leaves_nothing_either(self):
        runner = self.start()
        for _ in range(3):
            runner.send_signal(signal.SIGINT)
            time.sleep(0.1)
        runner.communicate(timeout=60)
        self.assert_nothing_runs()

    def test_terminated_is_a_keyboard_interrupt(self):
        self.assertEqual((str(Terminated(15)), Terminated(15).signal), ("SIGTERM", 15))
        self.assertIsInstance(Terminated(15), KeyboardInterrupt)


class LastLines(WithFolder):
    def test_the_end_of_a_log(self):
        log = self.folder / "log"
        self.assertEqual(last_lines(log), [])
        log.write_bytes(b"".join(b"line %d\n" % i for i in range(100)))
        self.assertEqual(last_lines(log), [f"line {i}" for i in range(50, 100)])
        self.assertEqual(last_lines(log, 1), ["line 99"])
        log.write_bytes(b"x" * 1_000_000 + b"\n\xffend")
        self.assertEqual(last_lines(log, 1), ["\ufffdend"])


if __name__ == "__main__":
    unittest.main()
