"""Starts the program of a case on the devices of this machine."""
from __future__ import annotations

import contextlib
import os
import pathlib

from .case import Case, Run
from .devices import DeviceError, Devices, GpuClaims, claim_port
from .launch import Ranks, make_launcher, rank_log
from .processes import LaunchError, Outcome, last_lines, run_processes

LAST_LINES = 50


class LocalStarter:
    """One program at a time, each with a port and GPUs that no other runner on this host uses meanwhile."""

    def __init__(self, root: pathlib.Path, python: str, devices: Devices, launcher: str | None):
        self.devices = devices
        self.spreads = launcher == "srun"
        # What runs at this moment, for who is interrupted.
        self.current: Run | None = None
        # A test that was told to run a part of itself would pass as the whole.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("GTEST_")}
        self.launcher = make_launcher(launcher, python, cwd=root, inherited=inherited)

    def start(self, case: Case, argv: list[str], environment: dict[str, str], folder: pathlib.Path) -> Run:
        """Returns when nothing of the program runs any more. What keeps it from starting is a failure of the run."""
        on_gpus = self.devices.kind == "cuda"
        run = Run(folder, "", [], 0.0, telling_log=rank_log(folder, 0))
        self.current = run
        try:
            with contextlib.ExitStack() as claims:
                port = claims.enter_context(claim_port())
                # Whoever holds GPUs gives them back within the time limit of a case like this one.
                claiming = on_gpus and (case.is_test or not self.spreads)  # srun's are given by Slurm
                count = case.ranks if claiming else 0
                claimed = claims.enter_context(GpuClaims(self.devices.gpus, count, case.timeout_seconds))
                gpus = [gpu.uuid for gpu in claimed]
                visible = gpus if on_gpus else None
                if case.is_test:
                    run.command = self.launcher.single_shell(argv, environment, case.ranks, visible)
                    specs = [self.launcher.single_spec(argv, environment, folder, case.ranks, visible)]
                else:
                    run.command = self.launcher.shell(argv, case.ranks, environment, visible)
                    specs = self.launcher.specs(argv, case.ranks, environment, folder, port, visible)
                outcome = run_processes(specs, case.timeout_seconds, port=port, gpus=gpus)
                ended = (self.launcher.single_ranks(outcome, folder) if case.is_test
                         else self.launcher.ranks(outcome, case.ranks, folder))
        except (DeviceError, LaunchError, OSError) as error:
            run.problem = str(error)
            run.telling_log = None
            outcome = None
        self.current = None
        return run if outcome is None else filled(run, outcome, ended)

    def last_lines(self, run: Run) -> list[str]:
        return last_lines(run.telling_log, LAST_LINES) if run.telling_log else []


def filled(run: Run, outcome: Outcome, ended: Ranks) -> Run:
    run.exit_codes = ended.exit_codes
    run.seconds = outcome.seconds
    run.timed_out = outcome.timed_out
    if len(outcome.exit_codes) == len(ended.exit_codes):  # processes are ranks
        run.stopped = outcome.stopped
    run.failing_rank = ended.failing_rank
    run.logs = ended.logs
    run.telling_log = ended.telling_log
    run.leftovers = outcome.leftovers
    return run
