"""Texts of programs, made fit to be shown: a log may hold anything."""
from __future__ import annotations

import re

from .case import FAILED, FLAKY, LEFT_OUT, PASSED

STATUS_WORDS = {PASSED: "PASS", FAILED: "FAIL", FLAKY: "FLAKY", LEFT_OUT: "LEFT OUT"}

# Colours and cursor movements of terminals: CSI and OSC sequences, and the escapes of two characters.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
# What XML 1.0 cannot hold, lone surrogates (bytes that were no UTF-8) included. A terminal would obey C1 controls.
_UNFIT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def printable(text: str) -> str:
    """`text` without terminal escapes, each other character that XML 1.0 or a terminal cannot take as U+FFFD, and with
    "\\n" as the only line end."""
    text = _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return _UNFIT.sub("\ufffd", text)


def duration(seconds: float) -> str:
    """`3.1 s`, `2 min 05 s` or `1 h 02 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
