"""What a run ran on: versions, driver, device, machine and commit, for reports and as the key of goldens."""
from __future__ import annotations

import datetime
import json
import os
import pathlib
import platform
import re
import socket
import subprocess
from typing import Any

from .devices import Devices

UNKNOWN = "unknown"
NONE = "none"

# Variables that change what runs.
VARIABLES = ("NCCL_", "TORCH_NCCL_", "HSDP_", "OMP_", "MKL_", "CUBLAS_", "ATEN_")

# Loading libtorch from a cold disk takes longest.
_TIMEOUT_SECONDS = 120

_PYTHON_VERSIONS = """
import importlib.metadata, json
print(json.dumps({(one.metadata["Name"] or "").lower(): one.version for one in importlib.metadata.distributions()}))
"""


def describe_environment(root: pathlib.Path, build: pathlib.Path, python: str, devices: Devices) -> dict[str, Any]:
    """Flat but for `variables`, which has those of VARIABLES by name, and `gpus`.

    root is the project's folder, build that of its build, python the interpreter of fsdp2_train. What cannot be found
    out is "unknown", what is not there "none"; neither is an error.
    """
    build = pathlib.Path(build)
    versions = program_versions(build / "apps" / "hsdp_train")
    if "hsdp" not in versions:
        versions["hsdp"] = cached_version(build / "CMakeCache.txt")
    if "torch" not in versions or "nccl" not in versions:
        packages = python_versions(python)
        versions.setdefault("torch", packages.get("torch", UNKNOWN))
        nccl = [version for name, version in sorted(packages.items()) if name.startswith("nvidia-nccl-cu")]
        versions.setdefault("nccl", nccl[0] if nccl else NONE)
    commit, dirty = repository_state(root)
    return {
        "hsdp": versions["hsdp"],
        "torch": versions["torch"],
        "cuda": versions.get("cuda", NONE),
        "nccl": versions["nccl"],
        "gloo": versions.get("gloo", UNKNOWN),
        "driver": devices.driver or driver_version(),
        "device": devices.kind,
        "device_name": devices.name,
        "gpus": [f"{gpu.index}: {gpu.name} {gpu.uuid}" for gpu in devices.gpus],
        "processor": processor_model(),
        "cores": len(os.sched_getaffinity(0)),
        "host": socket.gethostname(),
        "system": operating_system(),
        "commit": commit,
        "dirty": dirty,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
    }


def program_versions(program: pathlib.Path) -> dict[str, str]:
    """The `name version` lines that `program --version` prints; empty where it does not know --version."""
    printed = _output([str(program), "--version"])
    found = {}
    for line in (printed or "").splitlines():
        name, _, value = line.strip().partition(" ")
        if re.fullmatch(r"[A-Za-z][\w.-]*", name) and value.strip():
            found[name.lower()] = value.strip()
    if "torch" in found:
        found["torch"] = _release(found["torch"])
    return found


def cached_version(cache: pathlib.Path) -> str:
    """The project's version in a CMakeCache.txt."""
    try:
        text = cache.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return UNKNOWN
    found = re.search(r"^CMAKE_PROJECT_VERSION:\w+=(\S+)$", text, re.MULTILINE)
    return found[1] if found else UNKNOWN


def python_versions(python: str) -> dict[str, str]:
    """Package in lower case -> version, of what is installed beside `python`. Imports none of it."""
    try:
        packages = json.loads(_output([python, "-c", _PYTHON_VERSIONS]) or "{}")
    except ValueError:
        return {}
    return {name: _release(version) for name, version in packages.items()}


def driver_version() -> str:
    """Of the NVIDIA driver: "none" where there is no nvidia-smi, "unknown" where it fails."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, check=False)
    except FileNotFoundError:
        return NONE
    except (OSError, subprocess.TimeoutExpired):
        return UNKNOWN
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else UNKNOWN


def repository_state(root: pathlib.Path) -> tuple[str, int | str]:
    """The commit, and how many files differ from it or are new."""
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    status = _git(root, "status", "--porcelain")
    return (commit or UNKNOWN).strip(), UNKNOWN if status is None else len(status.splitlines())


def processor_model() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine() or UNKNOWN


def operating_system() -> str:
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        name = platform.system()
    return f"{name}, {platform.system()} {platform.release()} {platform.machine()}"


def _release(version: str) -> str:
    """Without the local part: torch is 2.11.0 to C++ and 2.11.0+cu130 to Python."""
    return version.partition("+")[0]


def _git(root: pathlib.Path, *arguments: str) -> str | None:
    # A hook or another repository's git may have set where its repository is. No locks: others may be at work in it.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return _output(["git", "--no-optional-locks", "-C", str(root), *arguments], environment)


def _output(command: list[str], environment: dict[str, str] | None = None) -> str | None:
    """The standard output of a command that ends with 0; None for any other."""
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
