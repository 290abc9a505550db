"""report.xml: JUnit XML as Jenkins, GitLab and the usual actions of GitHub read it.

They agree on little beyond testcase, failure and skipped. A reason is both an attribute (Jenkins) and content
(GitLab). A case that passed when tried again has Surefire's flakyFailure, which Jenkins shows and the others pass over.
"""
from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

from ..case import FAILED, FLAKY, LEFT_OUT
from ..texts import printable


def to_junit(document: dict[str, Any]) -> bytes:
    counts = document["counts"]
    totals = {
        "name": document["list"],
        "tests": len(document["cases"]),
        "failures": counts[FAILED],
        "errors": 0,
        "skipped": counts[LEFT_OUT],
        "time": _seconds(document["seconds"]),
    }
    root = _element(None, "testsuites", totals)
    environment = document["environment"]
    suite = _element(
        root,
        "testsuite",
        # The schema's date and time has no zone.
        {**totals, "timestamp": str(environment["date"]).rstrip("Z"), "hostname": environment["host"]},
    )
    properties = _element(suite, "properties")
    for name, value in flat({**environment, "regress": document["command"]}):
        _element(properties, "property", {"name": name, "value": value})
    for case in document["cases"]:
        _add_case(suite, document["list"], case)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n"


def flat(environment: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and texts: `variables` one by one, an array's entries in one line."""
    pairs = []
    for name, value in environment.items():
        if isinstance(value, dict):
            pairs += flat(value)
        elif isinstance(value, list):
            pairs.append((name, ", ".join(str(one) for one in value)))
        else:
            pairs.append((name, str(value)))
    return pairs


def _add_case(suite: ElementTree.Element, list_name: str, case: dict[str, Any]) -> None:
    place = case["definition"]["place"]
    attributes = {
        "classname": list_name,
        "name": case["name"],
        "time": _seconds(case["seconds"]),
        "file": place["file"],
        "line": place["line"],
    }
    element = _element(suite, "testcase", attributes)
    message = "; ".join(case["reasons"])
    if case["status"] == LEFT_OUT:
        _element(element, "skipped", {"message": message}, message)
    elif case["status"] == FAILED:
        _element(element, "failure", {"message": message, "type": "regression"}, _failure_text(case))
    elif case["status"] == FLAKY:
        flaky = _element(element, "flakyFailure", {"message": message, "type": "regression"})
        _element(flaky, "stackTrace", {}, _failure_text(case))
    if case["confirmed"]:
        _element(element, "system-out", {}, "\n".join(case["confirmed"]))


def _failure_text(case: dict[str, Any]) -> str:
    parts = list(case["reasons"])
    if case["log_tail"]:
        rank = case["failing_rank"]
        parts += ["", "last lines:" if rank is None else f"last lines of rank {rank}:", *case["log_tail"]]
    if case["command"]:
        parts += ["", f"repeat: {case['command']}"]
    return "\n".join(parts)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}"


def _element(
    parent: ElementTree.Element | None, tag: str, attributes: dict[str, Any] | None = None, text: str | None = None
) -> ElementTree.Element:
    texts = {name: printable(str(value)) for name, value in (attributes or {}).items()}
    element = ElementTree.Element(tag, texts) if parent is None else ElementTree.SubElement(parent, tag, texts)
    if text is not None:
        element.text = printable(text)
    return element
