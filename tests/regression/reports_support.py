"""What the tests of reports share: results, and a reader of pages."""

import html.parser
import json
import math
import pathlib
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree

from regression import reports
from regression.case import FAILED, Case, Place, Result, Run, Curve

ENVIRONMENT = {
    "torch": "2.11.0",
    "device_name": "A processor",
    "gpus": ["0: A", "1: B"],
    "host": "here",
    "commit": "0123456789abcdef",
    "dirty": 2,
    "date": "2026-01-02T03:04:05Z",
    "variables": {"OMP_NUM_THREADS": "1"},
}
PLACE = Place("tests/regression/cpu.yaml", 12, 5)
HOSTILE = "<script>alert('&')</script> ]]> <!-- \x00\x07\x1b[31mred\x1b[0m \udcff\ufffe \" {{ 1 }}\r\nnext"
# HOSTILE as a reader sees it.
SHOWN = "<script>alert('&')</script> ]]> <!-- \ufffd\ufffdred \ufffd\ufffd \" {{ 1 }}\nnext"
VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(html.parser.HTMLParser):
    """Checks that elements nest, and keeps texts and attributes."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open = []
        self.tags = []
        self.texts = []
        self.rows = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute twice: {tag} {attrs}"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> within {self.open}"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(data)
            if self.rows and ("td" in self.open or "th" in self.open):
                self.rows[-1][-1] += data

    @property
    def text(self):
        return "".join(self.texts)

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]

    def row(self, start):
        return next([" ".join(cell.split()) for cell in row] for row in self.rows if row and row[0].strip() == start)


def result(name, status, reasons=(), **more):
    return Result(Case(name, PLACE), status, list(reasons), **more)


class ReportsTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.out = pathlib.Path(scratch.name)
        self.folder = self.run_folder("20260102T030405Z-1")

    def run_folder(self, name):
        folder = self.out / name
        folder.mkdir()
        return folder

    def write(self, *results, environment=ENVIRONMENT, history=(), folder=None, command="tools/regress cpu.yaml"):
        reports.write_reports(folder or self.folder, "cpu", list(results), environment, list(history), command)

    def json(self):
        return json.loads((self.folder / "report.json").read_text(encoding="utf-8"))

    def xml(self):
        return ElementTree.parse(self.folder / "report.xml").getroot()

    def html(self):
        return (self.folder / "report.html").read_text(encoding="utf-8")

    def page(self):
        return Page(self.html())

    def failed(self):
        log = self.folder / "a[ranks=2]" / "rank 1.log"
        run = Run(
            log.parent,
            "hsdp_train --x",
            [0, None],
            2.5,
            timed_out=True,
            failing_rank=1,
            logs={1: log, 0: pathlib.Path("/else/0")},
            telling_log=log,
            leftovers=["process 7"],
        )
        return result(
            "a[ranks=2]",
            FAILED,
            ["loss first differs at step 3: 1.5 against 1.25", "and more"],
            confirmed=["grad_norm of 2 steps"],
            seconds=2.75,
            runs=[run],
            telling_run=run,
            log_tail=["one", "two"],
            command="tools/regress cpu.yaml --only a",
            figures={"tokens_per_second": 100.0, "loss": math.nan},
            curves=[Curve("a[ranks=2]", "loss", [1, 2, 3], [2.0, math.inf, 1.5])],
        )
