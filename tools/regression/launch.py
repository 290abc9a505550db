"""How the ranks of a case are started: directly, by torchrun, or by Slurm's srun."""

from __future__ import annotations

import abc
import dataclasses
import os
import pathlib
import re
import shlex
from collections.abc import Mapping, Sequence

from .processes import LaunchError, Outcome, ProcessSpec

# What launchers tell the processes that they start; hsdp/launch/launcher_env.h says what the programs read of it.
TORCHRUN_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_PORT",
)  # fmt: skip
# PET_ are torchrun's options.
TORCHRUN_PREFIXES = ("TORCHELASTIC_", "PET_")
OTHER_PREFIXES = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "HYDRA_")


@dataclasses.dataclass
class Ranks:
    """How the ranks of a run ended."""

    # By rank, None where unknown. When a launcher failed and does not tell of any rank, its own code is all there is.
    exit_codes: list[int | None]
    # Who failed first, where that is known.
    failing_rank: int | None
    logs: dict[int, pathlib.Path]
    # Whose last lines tell what went wrong.
    telling_log: pathlib.Path


class Launcher(abc.ABC):
    """Starts the ranks of a program.

    `env` is what a case sets beyond the inherited environment. `gpus` are the UUIDs that it may use, None on cpu.
    """

    name: str

    def __init__(self, python: str, cwd: pathlib.Path | None, inherited: Mapping[str, str]):
        self._python, self._cwd = python, cwd
        self._inherited = without_launchers(inherited)

    @abc.abstractmethod
    def specs(
        self,
        argv: Sequence[str],
        ranks: int,
        env: Mapping[str, str],
        folder: pathlib.Path,
        port: int,
        gpus: Sequence[str] | None,
    ) -> list[ProcessSpec]:
        """What to start for `ranks` ranks of `argv`; logs go to `folder`, and `port` is where the ranks meet."""

    @abc.abstractmethod
    def ranks(self, outcome: Outcome, ranks: int, folder: pathlib.Path) -> Ranks:
        """What `outcome`, that of specs(), means for the ranks."""

    @abc.abstractmethod
    def shell(
        self, argv: Sequence[str], ranks: int, env: Mapping[str, str], gpus: Sequence[str] | None = None
    ) -> str:
        """One line for a shell that does about the same."""

    def single_spec(
        self, argv: Sequence[str], env: Mapping[str, str], folder: pathlib.Path, ranks: int, gpus: Sequence[str] | None
    ) -> ProcessSpec:
        """A program that makes its `ranks` ranks itself, as tests do: started directly, by every launcher."""
        return self._spec(argv, env, {**self._threads(ranks), **visible(gpus)}, rank_log(folder, 0))

    def single_ranks(self, outcome: Outcome, folder: pathlib.Path) -> Ranks:
        """What `outcome`, that of single_spec(), means: rank 0 stands for all."""
        log = rank_log(folder, 0)
        return Ranks(outcome.exit_codes, outcome.failed_first, {0: log}, log)

    def single_shell(
        self, argv: Sequence[str], env: Mapping[str, str], ranks: int, gpus: Sequence[str] | None = None
    ) -> str:
        return self._line({**self._threads(ranks), **visible(gpus), **env}, argv)

    def _threads(self, ranks: int) -> dict[str, str]:
        """OMP_NUM_THREADS as tools/train.sh sets it."""
        if "OMP_NUM_THREADS" in self._inherited:
            return {"OMP_NUM_THREADS": self._inherited["OMP_NUM_THREADS"]}
        return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}

    def _spec(
        self, argv: Sequence[str], env: Mapping[str, str], launcher: Mapping[str, str], log: pathlib.Path
    ) -> ProcessSpec:
        """A process with the case's variables; of the launcher's it may change OMP_NUM_THREADS alone."""
        for name in env:
            if is_launchers(name) or name == "CUDA_VISIBLE_DEVICES":
                raise LaunchError(f"[launch] a case sets {name}, which its launcher sets; take it out of the case")
        return ProcessSpec(list(argv), {**self._inherited, **launcher, **env}, log, self._cwd)

    def _line(self, env: Mapping[str, str], argv: Sequence[str]) -> str:
        place = [] if self._cwd is None else [f"cd {shlex.quote(str(self._cwd))} &&"]
        return " ".join([*place, assignments(env, argv)])


class _Direct(Launcher):
    """One process a rank, as torchrun would start them, without torchrun's own."""

    name = "direct"

    def specs(self, argv, ranks, env, folder, port, gpus):
        return [
            self._spec(argv, env, {**self._world(str(rank), ranks, port), **visible(gpus)}, rank_log(folder, rank))
            for rank in range(ranks)
        ]

    def ranks(self, outcome, ranks, folder):
        logs = {rank: rank_log(folder, rank) for rank in range(ranks)}
        telling = outcome.failed_first
        if telling is None:
            telling = outcome.stopped[0] if outcome.stopped else 0
        return Ranks(outcome.exit_codes, outcome.failed_first, logs, logs[telling])

    def shell(self, argv, ranks, env, gpus=None):
        port = 29500
        shared = {**visible(gpus), **env}
        if ranks == 1:
            return self._line({**self._world("0", 1, port), **shared}, argv)
        # The rank is the loop's, so it must not be quoted.
        one = assignments({**self._world("0", ranks, port), **shared}, argv)
        one = one.replace(" RANK=0 ", " RANK=$rank ").replace(" LOCAL_RANK=0 ", " LOCAL_RANK=$rank ")
        loop = f"(trap 'kill 0' INT; for rank in $(seq 0 {ranks - 1}); do {one} & done; wait)"
        return loop if self._cwd is None else f"cd {shlex.quote(str(self._cwd))} && {loop}"

    def _world(self, rank: str, ranks: int, port: int) -> dict[str, str]:
        return {
            **self._threads(ranks),
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }


class _Torchrun(Launcher):
    """torchrun on this host. Its own messages are in torchrun.log."""

    name = "torchrun"
    # torchrun can keep stdout and stderr of a rank in two files only, which loses their order.
    _INTO_LOG = 'folder=$1; shift; exec "$@" >"$folder/rank-$RANK.log" 2>&1'

    def specs(self, argv, ranks, env, folder, port, gpus):
        command = [
            *self._command(ranks),
            # Not the host's name, which may be unknown to DNS.
            "--local-addr", "127.0.0.1",
            "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"127.0.0.1:{port}",
            "--rdzv-id", "regress",
            # Where the ranks' error files go, for which it would make a folder in /tmp that stays.
            "--log-dir", str(folder / "torchrun"),
            "/bin/sh", "-c", self._INTO_LOG, "sh", str(folder), *argv,
        ]  # fmt: skip
        launcher = {**self._threads(ranks), **visible(gpus)}
        return [self._spec(command, env, launcher, folder / "torchrun.log")]

    def ranks(self, outcome, ranks, folder):
        log = folder / "torchrun.log"
        text = _read(log)
        report = r"^ +rank +: (\d+) \(local_rank: \d+\)\n +exitcode +: (-?\d+) "
        codes = {int(rank): int(code) for rank, code in re.findall(report, text, re.MULTILINE)}
        # Torchrun lists the first failure last, under this heading.
        cause = re.search(report, text.partition("Root Cause (first observed failure):")[2], re.MULTILINE)
        return _hidden_ranks(outcome, ranks, folder, int(cause[1]) if cause else None, codes, log)

    def shell(self, argv, ranks, env, gpus=None):
        command = [*self._command(ranks), "--standalone", *argv]
        return self._line({**self._threads(ranks), **visible(gpus), **env}, command)

    def _command(self, ranks: int) -> list[str]:
        return [
            self._python, "-m", "torch.distributed.run", "--no-python", "--nnodes", "1", "--nproc-per-node", str(ranks)
        ]  # fmt: skip


class _Srun(Launcher):
    """Slurm's srun, in the allocation in which the runner was started. Its own messages are in srun.log.

    Ranks may be on several hosts: where they meet is theirs to find out, and so are their threads and GPUs. The port is
    given, so that two runners in an allocation do not meet.
    """

    name = "srun"

    def __init__(self, python: str, cwd: pathlib.Path | None, inherited: Mapping[str, str]):
        super().__init__(python, cwd, inherited)
        if not inherited.get("SLURM_JOB_ID"):
            raise LaunchError("[launch] srun needs an allocation, but SLURM_JOB_ID is not set; use salloc or sbatch")
        kept = {
            name: value
            for name, value in inherited.items()
            if name.startswith("SLURM_") or name in ("MASTER_ADDR", "CUDA_VISIBLE_DEVICES")
        }
        self._slurm = kept

    def specs(self, argv, ranks, env, folder, port, gpus):
        # Slurm replaces more than %t in the name of an output file.
        output = str(folder / "rank-").replace("%", "%%") + "%t.log"
        command = [*self._command(ranks), "--output", output, *argv]
        return [self._spec(command, env, {**self._world(gpus), "MASTER_PORT": str(port)}, folder / "srun.log")]

    def ranks(self, outcome, ranks, folder):
        log = folder / "srun.log"
        found = re.findall(r"^srun: error: .*: tasks? (\d+).*?: (.*)$", _read(log), re.MULTILINE)
        codes = {}
        for rank, how in found:
            code = re.match(r"Exited with exit code (\d+)$", how)
            codes.setdefault(int(rank), int(code[1]) if code else None)
        return _hidden_ranks(outcome, ranks, folder, int(found[0][0]) if found else None, codes, log)

    def shell(self, argv, ranks, env, gpus=None):
        hidden = visible(gpus) if gpus is None else {}
        return self._line({**hidden, **env}, [*self._command(ranks), *argv])

    def _world(self, gpus: Sequence[str] | None) -> dict[str, str]:
        return {**self._slurm, **visible(gpus)} if gpus is None else self._slurm

    def _command(self, ranks: int) -> list[str]:
        # A job may have been submitted with --export=NONE, which would hold for srun, too.
        return ["srun", "--ntasks", str(ranks), "--kill-on-bad-exit=1", "--export=ALL"]


LAUNCHERS = {None: _Direct, "torchrun": _Torchrun, "srun": _Srun}


def make_launcher(
    name: str | None,
    python: str,
    cwd: pathlib.Path | None = None,
    inherited: Mapping[str, str] | None = None,
) -> Launcher:
    """`name` is torchrun, srun or None, which starts the ranks directly. `python` has torch, for torchrun."""
    if name not in LAUNCHERS:
        raise LaunchError(f"[launch] no launcher '{name}', expected torchrun or srun, or none to start ranks directly")
    return LAUNCHERS[name](python, cwd, dict(os.environ if inherited is None else inherited))


def is_launchers(name: str) -> bool:
    """Whether a variable is one by which launchers speak to programs."""
    return (
        name in TORCHRUN_VARIABLES
        or name == "MASTER_ADDR"
        or name.startswith(TORCHRUN_PREFIXES)
        or name.startswith(OTHER_PREFIXES)
    )


def without_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what an outer launcher said, which is not meant for the ranks."""
    return {name: value for name, value in environment.items() if not is_launchers(name)}


def visible(gpus: Sequence[str] | None) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus or ())}


def rank_log(folder: pathlib.Path, rank: int) -> pathlib.Path:
    return folder / f"rank-{rank}.log"


def assignments(env: Mapping[str, str], argv: Sequence[str]) -> str:
    """`NAME=value ... program arguments` for a shell."""
    words = [f"{name}={shlex.quote(value) if value else ''}" for name, value in env.items()]
    return " ".join([*words, shlex.join(argv)])


def _read(log: pathlib.Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""


def _hidden_ranks(
    outcome: Outcome,
    ranks: int,
    folder: pathlib.Path,
    failing: int | None,
    codes: Mapping[int, int | None],
    launchers_log: pathlib.Path,
) -> Ranks:
    """What a launcher wrote about its ranks: who failed first, and how the failed ones ended."""
    logs = {rank: log for rank in range(ranks) if (log := rank_log(folder, rank)).exists()}
    if outcome.exit_codes == [0]:
        return Ranks([0] * ranks, None, logs, logs.get(0, launchers_log))
    if outcome.failed_first is None:  # stopped: what the launcher wrote then is about the stopping
        return Ranks(outcome.exit_codes, None, logs, logs.get(0, launchers_log))
    if failing is None:
        return Ranks(outcome.exit_codes, None, logs, launchers_log)
    return Ranks([codes.get(rank) for rank in range(ranks)], failing, logs, logs.get(failing, launchers_log))
