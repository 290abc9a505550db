#!/usr/bin/env python3
"""Writes a byte-level training file from the Python sources of the installed torch package.

The same torch version gives the same bytes on every machine: the files are taken in the order of their relative paths
and the result is cut at --max-bytes. Size and SHA-256 of the file are printed. Nothing is downloaded, and torch is not
imported. The file is data.format `bytes` for hsdp_train: one token a byte, vocabulary 256.
"""

import argparse
import hashlib
import importlib.util
import os
import pathlib
import re
import sys
import tempfile


def fail(message):
    print(f"[prepare_data] {message}", file=sys.stderr)
    sys.exit(2)


def installed_torch():
    """Folder of the torch package that this Python would import."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        fail(f"no torch package in {sys.executable}, expected one; run it with the Python that has torch, or name a "
             "folder of sources with --source")
    return pathlib.Path(spec.origin).parent


def version_of(source):
    """The `__version__` in the folder's version.py, so that the printed line says what pins the bytes."""
    file = source / "version.py"
    match = re.search(r"^__version__ = '([^']+)'", file.read_text(), re.MULTILINE) if file.is_file() else None
    return match.group(1) if match else "unknown version"


def corpus(source, max_bytes):
    """The sources under `source`, joined in the order of their paths, cut at max_bytes; and how many files that took."""
    paths = sorted(path.relative_to(source).as_posix() for path in source.rglob("*.py"))
    parts, size, used = [], 0, 0
    for path in paths:
        if size >= max_bytes:
            break
        content = (source / path).read_bytes()
        parts.append(content)
        size += len(content)
        used += 1
    return b"".join(parts)[:max_bytes], used


def write_atomically(path, content):
    """A reader sees the old file or the new one, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("data/quickstart.bin"))
    parser.add_argument("--source", type=pathlib.Path, help="folder of *.py files (default: the installed torch package)")
    parser.add_argument("--max-bytes", type=int, default=8 * 1024 * 1024, help="size at which the file is cut (8 MiB)")
    arguments = parser.parse_args()
    if arguments.max_bytes <= 0:
        fail(f"--max-bytes is {arguments.max_bytes}, expected a positive number")
    source = arguments.source or installed_torch()
    if not source.is_dir():
        fail(f"--source {source} is not a folder")
    content, files = corpus(source, arguments.max_bytes)
    if not content:
        fail(f"no *.py files under {source}, expected sources to read")
    if arguments.out.is_dir():
        fail(f"--out {arguments.out} is a folder, expected a file name")
    unchanged = arguments.out.is_file() and arguments.out.read_bytes() == content
    if not unchanged:
        try:
            write_atomically(arguments.out, content)
        except OSError as error:
            fail(f"cannot write {arguments.out}: {error.strerror}")
    print(f"{arguments.out}: {'unchanged' if unchanged else 'written'}, {len(content)} bytes, sha256 "
          f"{hashlib.sha256(content).hexdigest()}, from {files} files of torch {version_of(source)}")


if __name__ == "__main__":
    main()
