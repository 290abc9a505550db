"""Ends what a runner started when the runner itself was killed.

processes.py starts main() with the run's marker as argument. It says `ready`. Standard input is a pipe that only the
runner writes to: `group N`, the process group of the run, then `done`. When that ends without `done`, the runner is
gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

from .leftovers import living_processes

GIVE_UP_SECONDS = 20


def kill_all(run: str, group: int | None) -> None:
    """Kills until nothing of the run is found twice in a row: one may be about to fork."""
    deadline = time.monotonic() + GIVE_UP_SECONDS
    nothing_found = 0
    if group is not None:
        # At once: the number of an empty group may be given out again.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    while nothing_found < 2 and time.monotonic() < deadline:
        found = living_processes(run, None, os.getpid(), set())
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        nothing_found = 0 if found else nothing_found + 1
        time.sleep(0.05)


def main() -> None:
    # Whoever interrupts the runner does not mean this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The runner may be gone already: all the more there is to do.
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), b"ready\n")
    group = None
    for line in sys.stdin:
        if line == "done\n":
            return
        group = int(line.removeprefix("group "))
    kill_all(sys.argv[1], group)
