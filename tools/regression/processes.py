"""Runs the processes of one case: together, for a limited time, and so that nothing of them stays behind."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence

from . import devices, leftovers

# A rank that outlives a failed one normally finds out and says so; after these seconds it is stopped.
# Characters of a line of a log that are shown.
LONGEST_LINE = 2000
AFTER_FAILURE_SECONDS = 20.0
# What ends a little after the ranks, as Python's resource tracker does, is no leftover.
SETTLE_SECONDS = 5.0
# A killed process that waits for a dead disk does not end.
KILL_SECONDS = 10.0
POLL_SECONDS = 0.1
GPU_MEMORY_TOLERANCE_MIB = 64

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Isolated from PYTHON* variables and site packages, it starts quickly and always alike.
WATCHDOG = (
    "-I", "-S", "-c",
    f"import sys; sys.path.insert(0, {str(pathlib.Path(__file__).resolve().parents[1])!r}); "
    "from regression.watchdog import main; main()",
)  # fmt: skip

# Loaded before a fork: afterwards a lock may be held for ever.
_LIBC = ctypes.CDLL(None, use_errno=True)


class LaunchError(Exception):
    """A program could not be started."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP came. Whoever handles KeyboardInterrupt handles it."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.signal = number


@dataclasses.dataclass(frozen=True)
class ProcessSpec:
    """One process to start. `env` is all of its environment; `log` gets its stdout and stderr."""

    argv: Sequence[str]
    env: Mapping[str, str]
    log: pathlib.Path
    cwd: pathlib.Path | None = None


@dataclasses.dataclass
class Outcome:
    """How the processes ended, by their place in the list."""

    # Negative: the signal that ended it. None: it could not be killed.
    exit_codes: list[int | None]
    seconds: float
    # Not set when a failure came first.
    timed_out: bool = False
    failed_first: int | None = None
    # Those that did not end by themselves: after the time limit, or after a failure of another.
    stopped: list[int] = dataclasses.field(default_factory=list)
    # Sentences.
    leftovers: list[str] = dataclasses.field(default_factory=list)


def last_lines(log: pathlib.Path, count: int = 50) -> list[str]:
    """The end of a log; nothing when there is none."""
    try:
        with open(log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 256 * 1024))
            return [line[:LONGEST_LINE] for line in file.read().decode(errors="replace").splitlines()[-count:]]
    except OSError:
        return []


def run_processes(
    specs: Sequence[ProcessSpec],
    timeout: float,
    grace: float = 10.0,
    after_failure: float = AFTER_FAILURE_SECONDS,
    port: int | None = None,
    gpus: Sequence[str] = (),
) -> Outcome:
    """Starts all of `specs` in one process group and returns when nothing of them runs any more.

    At the time limit, `after_failure` seconds after the first failure, and when the runner is interrupted, all that
    still runs gets SIGTERM and `grace` seconds later SIGKILL. An interrupt then goes on as KeyboardInterrupt. When the
    runner itself is killed, its processes are killed, too.

    Afterwards `port` must be free of listeners, the `gpus` (UUIDs, claimed by the caller) empty as before, and
    /dev/shm without new entries that nobody uses.

    To be called from the main thread: a process dies with the thread that started it.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("run_processes was called outside the main thread")
    traces = _Traces(port, gpus)
    with _raising_on_termination():
        case = _Case(specs)
        try:
            with _blocked(signal.SIGCHLD):  # wakes the one that waits, and nothing else
                case.start()
                outcome = case.run(timeout, grace, after_failure)
            outcome.leftovers = _settle(case, traces)
            outcome.exit_codes = case.exit_codes()
            return outcome
        except BaseException:
            # A second Ctrl-C must not leave anything running; this takes `grace` seconds and a few.
            with _blocked(signal.SIGCHLD, *ENDING_SIGNALS):
                case.stop(grace)
            raise
        finally:
            with _blocked(*ENDING_SIGNALS):
                case.close()


class _Case:
    """The processes of one case, those they started, and the watchdog that ends them if the runner is killed."""

    def __init__(self, specs: Sequence[ProcessSpec]):
        self._specs = specs
        self._run = uuid.uuid4().hex
        self._processes: list[subprocess.Popen] = []
        self._codes: list[int | None] = [None] * len(specs)
        self._group: int | None = None
        if _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
        self._not_of_run = {process.pid for process in leftovers.children(os.getpid())}
        # In a session of its own, so that what ends the runner's group does not reach it.
        self._watchdog = subprocess.Popen(
            [sys.executable, *WATCHDOG, self._run],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        self._not_of_run.add(self._watchdog.pid)

    def start(self) -> None:
        """Starts all; when that fails, those before it run on until stop()."""
        for spec in self._specs:
            spec.log.parent.mkdir(parents=True, exist_ok=True)
            # An interrupt between a start and its being known here would lose a process.
            with open(spec.log, "wb") as log, _blocked(*ENDING_SIGNALS) as unblocked:
                try:
                    process = subprocess.Popen(
                        spec.argv,
                        env={**spec.env, leftovers.MARKER: self._run},
                        cwd=spec.cwd,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        preexec_fn=_preparation(self._group, os.getpid(), unblocked - {signal.SIGCHLD}),
                    )
                except OSError as error:
                    # The folder to start in may be what is missing.
                    what = "" if error.filename in (None, spec.argv[0]) else f"{error.filename}: "
                    raise LaunchError(f"[launch] {spec.argv[0]} cannot be started: {what}{error.strerror}") from error
                self._processes.append(process)
                if self._group is None:
                    self._group = process.pid
                    # One that does not read is found out below.
                    self._tell_watchdog(f"group {self._group}\n")
        # Not earlier: the ranks need not wait while it starts.
        if self._watchdog.stdout.readline() != "ready\n":
            raise LaunchError("[launch] the watchdog for the case that the runner is killed does not start; see above")

    def run(self, timeout: float, grace: float, after_failure: float) -> Outcome:
        """Waits for all to end and stops them when they do not."""
        started = time.monotonic()
        deadline = started + timeout
        outcome = Outcome([], 0.0)
        while self._look() and time.monotonic() < deadline:
            if outcome.failed_first is None and (failed := self._failed()):
                outcome.failed_first = failed[0]
                deadline = min(deadline, time.monotonic() + after_failure)
            _wait_for_child(min(POLL_SECONDS, deadline - time.monotonic()))
        if outcome.failed_first is None and (failed := self._failed()):
            outcome.failed_first = failed[0]
        outcome.stopped = [i for i, code in enumerate(self._codes) if code is None]
        outcome.timed_out = bool(outcome.stopped) and outcome.failed_first is None
        if outcome.stopped:
            self.stop(grace)
        outcome.seconds = time.monotonic() - started
        return outcome

    def living(self) -> list[leftovers.Process]:
        return leftovers.living_processes(self._run, self._group, os.getpid(), self._not_of_run)

    def stop(self, grace: float) -> None:
        """SIGTERM, and SIGKILL for what is left after `grace` seconds."""
        for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, KILL_SECONDS)):
            deadline = time.monotonic() + seconds
            living = self._signal(number)
            while living and time.monotonic() < deadline:
                _wait_for_child(POLL_SECONDS)
                # What was forked meanwhile has not got the signal; a second SIGTERM would cut a clean ending short.
                living = self._signal(number) if number == signal.SIGKILL else self.living()
            if not living:
                return

    def exit_codes(self) -> list[int | None]:
        self._look()
        return self._codes

    def close(self) -> None:
        """Forgets the processes, which are expected to have ended, and lets the watchdog go."""
        for process in self._processes:
            process.poll()
        for orphan in leftovers.children(os.getpid()):
            if orphan.has_ended and orphan.pid not in self._not_of_run:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(orphan.pid, os.WNOHANG)
        self._tell_watchdog("done\n")
        with contextlib.suppress(BrokenPipeError):
            self._watchdog.stdin.close()
        self._watchdog.stdout.close()
        try:
            self._watchdog.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._watchdog.kill()
            self._watchdog.wait()

    def _tell_watchdog(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._watchdog.stdin.write(line)
            self._watchdog.stdin.flush()

    def _look(self) -> bool:
        """Notes who has ended, and says whether somebody has not.

        Nobody is reaped before close(): so no number of theirs, nor that of the group, is given to a stranger.
        """
        for i, process in enumerate(self._processes):
            if self._codes[i] is None:
                ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is not None:
                    by_itself = ended.si_code == os.CLD_EXITED
                    self._codes[i] = ended.si_status if by_itself else -ended.si_status
        return None in self._codes

    def _failed(self) -> list[int]:
        """Who has failed, the likeliest cause first: who dies by a signal does not do so because of another."""
        failed = [i for i, code in enumerate(self._codes) if code]
        return sorted(failed, key=lambda i: self._codes[i] > 0)

    def _signal(self, number: signal.Signals) -> list[leftovers.Process]:
        """Signals all that runs and returns it."""
        living = self.living()
        for process in living:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, number)
        return living


class _Traces:
    """What must be as it was before a run: a port without listeners, shared memory, and memory of GPUs."""

    def __init__(self, port: int | None, gpus: Sequence[str]):
        self._port, self._gpus = port, gpus
        self._shared_memory = leftovers.shared_memory()
        if gpus:
            self._memory, self._pids = devices.memory_used(), devices.compute_pids()

    def describe(self) -> list[str]:
        """A sentence for each difference."""
        found = []
        if self._port is not None:
            found += [f"{who} still listens at port {self._port}" for who in leftovers.listeners(self._port)]
        return found + self.describe_shared_memory() + self._describe_gpus()

    def describe_shared_memory(self) -> list[str]:
        return [
            f"{path} is left in shared memory, and no process uses it"
            for path in leftovers.abandoned_shared_memory(self._shared_memory)
        ]

    def _describe_gpus(self) -> list[str]:
        if not self._gpus:
            return []
        found = []
        memory, pids = devices.memory_used(), devices.compute_pids()
        for gpu in self._gpus:
            if gpu in memory and gpu in self._memory:
                before, after = self._memory[gpu], memory[gpu]
                if after > before + GPU_MEMORY_TOLERANCE_MIB:
                    found.append(f"GPU {gpu} has {after} MiB in use, {before} MiB before the run")
            for pid in sorted(pids.get(gpu, set()) - self._pids.get(gpu, set())):
                found.append(f"GPU {gpu} is in use by process {pid}, which did not use it before the run")
        return found


def _settle(case: _Case, traces: _Traces) -> list[str]:
    """Waits a little for what ends late, describes what is left then, and kills those processes."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        living, found = case.living(), traces.describe()
        if not living and not found:
            return []
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_SECONDS)
    found = [f"{process} outlived the run" for process in living] + found
    case.stop(grace=0.0)
    found += [f"{process} cannot be killed" for process in case.living()]
    # The killed ones may have been the last to use some.
    return found + [line for line in traces.describe_shared_memory() if line not in found]


def _preparation(group: int | None, runner: int, mask: set[signal.Signals]) -> Callable[[], None]:
    """What a new process does before it becomes its program."""

    def prepare() -> None:
        os.setpgid(0, group or 0)
        if _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0 or os.getppid() != runner:
            os._exit(127)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return prepare


def _wait_for_child(seconds: float) -> None:
    """Returns when a child ends, at the latest after `seconds`. SIGCHLD must be blocked."""
    if seconds > 0:
        signal.sigtimedwait({signal.SIGCHLD}, seconds)


@contextlib.contextmanager
def _blocked(*signals: signal.Signals) -> Iterator[set[signal.Signals]]:
    """Puts signals off until the end; gives those that were blocked before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _raising_on_termination() -> Iterator[None]:
    """SIGTERM and SIGHUP, which would end the runner at once, raise Terminated; as nohup sets it, SIGHUP does not."""

    def handle(number, _):
        raise Terminated(number)

    taken = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) == signal.SIG_DFL
    ]
    for number in taken:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
