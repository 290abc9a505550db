"""`{out}` and `{out:NAME}` in the texts of a case: folders that are known only once it runs."""
from __future__ import annotations

import pathlib
import re

OUT = re.compile(r"\{out(?::([^{}]*))?\}")


def named_cases(text: str) -> list[str]:
    """Cases whose folder a text asks for."""
    return [match[1] for match in OUT.finditer(text) if match[1] is not None]


def fill_out(text: str, own: pathlib.Path, others: dict[str, pathlib.Path]) -> str:
    return OUT.sub(lambda match: str(own if match[1] is None else others[match[1]]), text)


def folder_name(case: str) -> str:
    """A case's name without what a shell or YAML takes for more than a letter: `sharded[ranks=2,reshard=true]` becomes
    `sharded.ranks=2.reshard=true`."""
    return case.replace("[", ".").replace("]", "").replace(",", ".")
