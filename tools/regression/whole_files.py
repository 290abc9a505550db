"""Writing a file that others may read at any moment."""
from __future__ import annotations

import os
import pathlib


def write_whole(path: pathlib.Path, content: bytes) -> None:
    """Puts a file in place of a former one, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
