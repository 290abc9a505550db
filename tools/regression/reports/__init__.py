"""The reports of a run: report.json, report.xml (JUnit) and report.html."""
from __future__ import annotations

import pathlib
from typing import Any

from ..case import Result
from ..whole_files import write_whole
from .document import make_document, to_json
from .junit import to_junit
from .page import to_page


def write_reports(
    folder: pathlib.Path,
    list_name: str,
    results: list[Result],
    environment: dict[str, Any],
    history: list[dict[str, Any]],
    command: str,
) -> None:
    """Writes the three reports into `folder`, that of the run. `environment` is that of describe_environment, `history`
    that of read_history, `command` what started the run. Each file appears whole or not at all."""
    folder = pathlib.Path(folder)
    document = make_document(folder, list_name, results, environment, command)
    write_whole(folder / "report.json", to_json(document))
    write_whole(folder / "report.xml", to_junit(document))
    write_whole(folder / "report.html", to_page(document, history))
