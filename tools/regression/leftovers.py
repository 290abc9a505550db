"""What a run left on this machine, read from /proc: processes, listening ports, shared memory."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterator

# Set for every process of a run: it finds those that left their process group.
MARKER = "HSDP_REGRESS_RUN"
SHARED_MEMORY = pathlib.Path("/dev/shm")
COMMAND_LENGTH = 200


@dataclasses.dataclass(frozen=True)
class Process:
    """A process as /proc/PID/stat shows it."""

    pid: int
    state: str
    parent: int
    group: int

    @property
    def has_ended(self) -> bool:
        return self.state in "ZX"

    def __str__(self) -> str:
        return f"process {self.pid} ({command_line(self.pid)})"


def command_line(pid: int) -> str:
    """What `pid` was started as, shortened; `?` once it is gone."""
    try:
        words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return "?"
    text = b" ".join(words).decode(errors="replace").replace("\n", " ")
    return text if len(text) <= COMMAND_LENGTH else text[: COMMAND_LENGTH - 3] + "..."


def all_processes() -> Iterator[Process]:
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            text = pathlib.Path(f"/proc/{entry}/stat").read_text(errors="replace")
        except OSError:  # ended meanwhile
            continue
        # The name before it may hold blanks and brackets.
        state, parent, group = text[text.rindex(")") + 1 :].split()[:3]
        yield Process(int(entry), state, int(parent), int(group))


def children(pid: int) -> list[Process]:
    return [process for process in all_processes() if process.parent == pid]


def has_marker(pid: int, run: str) -> bool:
    try:
        variables = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # ended meanwhile, or another user's
        return False
    return f"{MARKER}={run}".encode() in variables


def living_processes(run: str, group: int | None, foster_parent: int, not_of_run: set[int]) -> list[Process]:
    """Living processes of a run: in its group, with its marker, or orphans that came to `foster_parent`."""
    return [
        process
        for process in all_processes()
        if not process.has_ended
        and process.pid not in not_of_run
        and process.pid != foster_parent
        and (process.group == group or process.parent == foster_parent or has_marker(process.pid, run))
    ]


def listeners(port: int) -> list[str]:
    """Who listens at a TCP port, of either family: one description a socket."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except FileNotFoundError:  # a kernel without this family
            continue
        for line in lines:
            cells = line.split()
            local, state, inode = cells[1], cells[3], cells[9]
            if state == "0A" and int(local.rsplit(":", 1)[1], 16) == port:
                inodes.add(int(inode))
    return [_socket_owner(inode) for inode in sorted(inodes)]


def _socket_owner(inode: int) -> str:
    for process in all_processes():
        for link in _links(process.pid):
            if link == f"socket:[{inode}]":
                return str(process)
    return "a process that this user may not look at"


def _links(pid: int) -> Iterator[str]:
    try:
        entries = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for entry in entries:
        try:
            yield os.readlink(f"/proc/{pid}/fd/{entry}")
        except OSError:
            continue


def shared_memory() -> set[tuple[str, int]]:
    """Name and inode of this user's entries in /dev/shm."""
    found = set()
    try:
        for entry in os.scandir(SHARED_MEMORY):
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if status.st_uid == os.getuid():
                found.add((entry.name, status.st_ino))
    except FileNotFoundError:  # a container without it
        pass
    return found


def abandoned_shared_memory(before: set[tuple[str, int]]) -> list[str]:
    """Paths of entries that were not there before and that no living process has open or mapped."""
    new = {str(SHARED_MEMORY / name): name for name, _ in shared_memory() - before}
    if not new:
        return []
    for process in all_processes():
        held = set(_links(process.pid)) | _mapped(process.pid)
        for path in held & new.keys():
            del new[path]
    # What is gone by now was in use when it was listed.
    return sorted(path for path in new if os.path.lexists(path))


def _mapped(pid: int) -> set[str]:
    try:
        lines = pathlib.Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return {cells[5] for cells in (line.split(None, 5) for line in lines) if len(cells) == 6}
