"""Which GPUs this process may use, and claims that keep two runners on one host from the same GPU or port."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import pathlib
import platform
import random
import re
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence

# Runners with another TMPDIR, as Slurm and CI give one to each job, have to meet here as well.
CLAIMS_FOLDER = pathlib.Path("/tmp") / f"hsdp-regress-{os.getuid()}"
NVIDIA_SMI_SECONDS = 60
POLL_SECONDS = 0.5

LOWEST_PORT = 10000
# Other programs take these without asking: hsdp inside a Slurm job, torchrun's rendezvous, c10d's store.
SPOKEN_FOR = {*range(15000, 25000), 29400, 29500}


class DeviceError(Exception):
    """The devices are not what the user asked for, or are taken."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi lists it; `index` is nvidia-smi's."""

    index: int
    uuid: str
    name: str


@dataclasses.dataclass(frozen=True)
class Devices:
    """What a runner has to work with. `driver` is empty on cpu."""

    kind: str
    # The product's name; of unlike GPUs all names.
    name: str
    gpus: tuple[Gpu, ...] = ()
    driver: str = ""


def nvidia_smi(query: str) -> list[list[str]]:
    """The rows of `nvidia-smi --QUERY --format=csv,noheader`; none where there is no nvidia-smi or no GPU."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--{query}", "--format=csv,noheader"]
    shown = " ".join(command)
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=NVIDIA_SMI_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise DeviceError(f"[device] {shown} did not end within {NVIDIA_SMI_SECONDS} s") from None
    text = (done.stdout + done.stderr).strip()
    if "No devices were found" in text:
        return []
    if done.returncode != 0:
        raise DeviceError(
            f"[device] {shown} ended with {done.returncode}: {text}; --device cpu runs without asking for GPUs"
        )
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def visible_gpus(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Those of the host's GPUs that CUDA_VISIBLE_DEVICES leaves to this process, in its order.

    MIG instances are left alone: they count as no GPU.
    """
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return tuple(gpus)
    if text.strip() in ("", "NoDevFiles"):
        return ()
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in text.split(",")):
        if entry == "-1":  # CUDA reads no further
            break
        if entry.startswith("MIG-"):
            continue
        gpu = _named_gpu(entry, gpus, text, environment)
        if gpu in chosen:
            raise DeviceError(f"[device] CUDA_VISIBLE_DEVICES={text} names GPU {gpu.index} twice, expected it once")
        chosen.append(gpu)
    return tuple(chosen)


def _named_gpu(entry: str, gpus: Sequence[Gpu], text: str, environment: Mapping[str, str]) -> Gpu:
    if re.fullmatch(r"[0-9]+", entry):
        by_bus = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        if not by_bus and len({gpu.name for gpu in gpus}) > 1:
            raise DeviceError(
                f"[device] CUDA_VISIBLE_DEVICES={text} numbers unlike GPUs in CUDA's own order; name them by UUID, or "
                "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
            )
        found = [gpu for gpu in gpus if gpu.index == int(entry)]
    else:
        found = [gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
    if len(found) != 1:
        raise DeviceError(
            f"[device] CUDA_VISIBLE_DEVICES={text} has '{entry}', which is {len(found)} of the host's GPUs, expected "
            "one; nvidia-smi -L lists them"
        )
    return found[0]


def find_devices(choice: str, environment: Mapping[str, str] | None = None) -> Devices:
    """`choice` is auto, cpu or cuda; auto is cuda where this process may use a GPU."""
    environment = os.environ if environment is None else environment
    cpu = Devices("cpu", "cpu-" + platform.machine())
    if choice == "cpu":
        return cpu
    if choice not in ("auto", "cuda"):
        raise DeviceError(f"[device] no device '{choice}', expected auto, cpu or cuda")
    rows = nvidia_smi("query-gpu=index,uuid,name,driver_version")
    for row in rows:
        if len(row) != 4 or not row[0].isdigit():
            raise DeviceError(f"[device] nvidia-smi wrote '{', '.join(row)}', expected index, uuid, name, driver")
    gpus = visible_gpus([Gpu(int(index), uuid, name) for index, uuid, name, _ in rows], environment)
    if gpus:
        return Devices("cuda", " + ".join(sorted({gpu.name for gpu in gpus})), gpus, rows[0][3])
    if choice == "auto":
        return cpu
    if not rows:
        raise DeviceError("[device] --device cuda, but nvidia-smi lists no GPU; --device cpu runs without one")
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    raise DeviceError(
        f"[device] --device cuda, but CUDA_VISIBLE_DEVICES={visible} leaves none of the {len(rows)} GPUs to this "
        "process; unset it or name GPUs"
    )


def memory_used() -> dict[str, int]:
    """UUID -> MiB in use, of the GPUs whose driver tells."""
    used = {}
    for uuid, text in nvidia_smi("query-gpu=uuid,memory.used"):
        amount = text.removesuffix(" MiB")
        if amount.isdigit():
            used[uuid] = int(amount)
    return used


def compute_pids() -> dict[str, set[int]]:
    """UUID -> processes that have a CUDA context there, as the driver numbers them: on the host, not in a container."""
    found: dict[str, set[int]] = {}
    for uuid, pid in nvidia_smi("query-compute-apps=gpu_uuid,pid"):
        if pid.isdigit():
            found.setdefault(uuid, set()).add(int(pid))
    return found


class _Claim:
    """A locked file. The kernel unlocks it when its holder ends, however that happens."""

    def __init__(self, path: pathlib.Path, descriptor: int):
        self._path, self._descriptor = path, descriptor

    def release(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def _claims_folder() -> pathlib.Path:
    CLAIMS_FOLDER.mkdir(mode=0o700, exist_ok=True)
    found = CLAIMS_FOLDER.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise DeviceError(f"[device] {CLAIMS_FOLDER} is not a folder of this user; remove it")
    return CLAIMS_FOLDER


def _claim(name: str) -> _Claim | str:
    """The claim, or who has it."""
    path = _claims_folder() / f"{name}.lock"
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last holder may have removed the file since it was opened: that lock keeps out nobody.
            current = path.stat()
            if os.path.samestat(current, os.fstat(descriptor)):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()}".encode())
                return _Claim(path, descriptor)
        except FileNotFoundError:
            pass
        except BlockingIOError:
            holder = os.pread(descriptor, 100, 0).decode(errors="replace")
            os.close(descriptor)
            return holder or "another process"
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


class GpuClaims:
    """Holds `count` of `gpus` for a run: `with GpuClaims(devices.gpus, 2, 60) as claimed:` gives two of them.

    Waits up to `wait_seconds` for other runners, and holds nothing meanwhile, so that two of them never wait for each
    other. Runners of other users are not seen.
    """

    def __init__(self, gpus: Sequence[Gpu], count: int, wait_seconds: float):
        if not 0 <= count <= len(gpus):
            raise DeviceError(f"[device] {count} GPUs asked for, this process may use {len(gpus)}")
        self._gpus, self._count, self._wait_seconds = tuple(gpus), count, wait_seconds
        self._claims: list[_Claim] = []

    def __enter__(self) -> tuple[Gpu, ...]:
        deadline = time.monotonic() + self._wait_seconds
        while True:
            claimed, held = self._try()
            if len(claimed) == self._count:
                return claimed
            self._release()
            if time.monotonic() >= deadline:
                raise DeviceError(
                    f"[device] no {self._count} free GPUs of {len(self._gpus)} within {self._wait_seconds:g} s; "
                    f"claimed by other runners: {', '.join(held)}"
                )
            # Runners that woke together would get into each other's way again.
            time.sleep(POLL_SECONDS * random.uniform(0.5, 1.5))

    def __exit__(self, *_) -> None:
        self._release()

    def _try(self) -> tuple[tuple[Gpu, ...], list[str]]:
        claimed: list[Gpu] = []
        held: list[str] = []
        try:
            for gpu in self._gpus:
                if len(claimed) == self._count:
                    break
                got = _claim("gpu-" + gpu.uuid)
                if isinstance(got, _Claim):
                    self._claims.append(got)
                    claimed.append(gpu)
                else:
                    held.append(f"GPU {gpu.index} ({gpu.uuid}) by {got}")
        except BaseException:
            self._release()
            raise
        return tuple(claimed), held

    def _release(self) -> None:
        while self._claims:
            self._claims.pop().release()


def ephemeral_ports() -> range:
    """The ports that the kernel hands out to whoever asks for any."""
    low, high = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return range(int(low), int(high) + 1)


def candidate_ports(ephemeral: range) -> list[int]:
    """All ports that a run may claim; with few or none outside `ephemeral`, those inside as well."""
    usable = [port for port in range(LOWEST_PORT, 65536) if port not in SPOKEN_FOR]
    outside = [port for port in usable if port not in ephemeral]
    return outside if len(outside) >= 100 else usable


def is_free(port: int) -> bool:
    """Whether a server can listen there, on all addresses of both families."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            server = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            if error.errno == errno.EAFNOSUPPORT:
                continue
            raise
        with server:
            # Connections that are closing do not count.
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                server.bind((address, port))
                server.listen(1)
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:  # a family without addresses
                    continue
                return False
    return True


@contextlib.contextmanager
def claim_port() -> Iterator[int]:
    """A port that is free and that no other runner of this user claims."""
    ports = candidate_ports(ephemeral_ports())
    random.shuffle(ports)
    for port in ports:
        claim = _claim(f"port-{port}")
        if not isinstance(claim, _Claim):
            continue
        try:
            if is_free(port):
                yield port
                return
        finally:
            claim.release()
    raise DeviceError(f"[device] none of {len(ports)} ports from {min(ports)} to {max(ports)} is free")
