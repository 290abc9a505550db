"""Run folders, the link `latest`, and what is read of former reports."""

import contextlib
import io
import json
import multiprocessing
import os
import pathlib
import re
import sys
import tempfile
import threading
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))

from regression import history


def report(**changes):
    return {
        "format": 1,
        "list": "cpu",
        "environment": {"date": "2026-01-01T00:00:00Z"},
        "cases": [{"name": "a", "status": "passed", "seconds": 1.0, "figures": {}}],
        **changes,
    }


def make_folders(out, number, names):
    names.put([history.new_run_folder(out).name for _ in range(number)])


class RunFoldersTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.out = pathlib.Path(scratch.name) / "some" / "out"

    def test_a_folder_has_time_and_process(self):
        folder = history.new_run_folder(self.out)
        self.assertTrue(folder.is_dir())
        self.assertEqual(folder.parent, self.out)
        self.assertRegex(folder.name, rf"^\d{{8}}T\d{{6}}Z-{os.getpid()}$")

    def test_processes_and_threads_never_share(self):
        names = multiprocessing.Queue()
        processes = [multiprocessing.Process(target=make_folders, args=(self.out, 20, names)) for _ in range(4)]
        for process in processes:
            process.start()
        mine = []
        threads = [
            threading.Thread(target=lambda: mine.append(history.new_run_folder(self.out).name)) for _ in range(20)
        ]
        for thread in threads:
            thread.start()
        made = [name for _ in processes for name in names.get(timeout=60)]
        for one in processes + threads:
            one.join(60)
        made += mine
        self.assertEqual(len(made), 100)
        self.assertEqual(sorted(made), sorted(path.name for path in self.out.iterdir()))

    def test_latest_moves_on(self):
        for _ in range(2):
            folder = history.new_run_folder(self.out)
            history.point_latest(self.out, folder)
            self.assertEqual(os.readlink(self.out / "latest"), folder.name)
        self.assertEqual(len(list(self.out.iterdir())), 3)

    def test_latest_that_is_a_folder_is_kept_and_told(self):
        folder = history.new_run_folder(self.out)
        (self.out / "latest").mkdir()
        with contextlib.redirect_stderr(io.StringIO()) as said:
            history.point_latest(self.out, folder)
        self.assertIn(f"[history] {self.out}/latest does not lead to this run: ", said.getvalue())
        self.assertFalse((self.out / "latest").is_symlink())
        self.assertEqual(len(list(self.out.iterdir())), 2)


class ReadHistoryTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.out = pathlib.Path(scratch.name)

    def put(self, name, content):
        folder = self.out / name
        folder.mkdir()
        if isinstance(content, dict):
            content = json.dumps(content)
        (folder / "report.json").write_bytes(content if isinstance(content, bytes) else content.encode())

    def read(self, limit=10):
        with contextlib.redirect_stderr(io.StringIO()) as said:
            found = history.read_history(self.out, "cpu", limit)
        return [one["folder"] for one in found], said.getvalue()

    def test_nothing_there(self):
        self.assertEqual(self.read(), ([], ""))
        self.out = self.out / "missing"
        self.assertEqual(self.read(), ([], ""))

    def test_newest_first_and_no_more_than_asked(self):
        # By time, then process, then number; as texts "-9" would come after "-10".
        names = ["20260101T000000Z-9", "20260101T000000Z-10", "20260101T000000Z-10-2", "20260102T000000Z-1"]
        for name in names:
            self.put(name, report())
        (self.out / "latest").symlink_to(names[0])
        self.assertEqual(self.read(), (names[::-1], ""))
        self.assertEqual(self.read(limit=2), (names[:1:-1], ""))

    def test_the_report_is_whole(self):
        self.put("20260101T000000Z-9", report(more=[1]))
        self.assertEqual(history.read_history(self.out, "cpu"), [report(more=[1], folder="20260101T000000Z-9")])

    def test_other_lists_and_folders_without_a_report_are_passed_over(self):
        self.put("20260101T000000Z-1", report(list="nightly"))
        self.put("20260101T000000Z-2", report())
        (self.out / "20260101T000000Z-3").mkdir()
        (self.out / "20260101T000000Z-4").write_text("a file")
        (self.out / "notes").mkdir()
        self.assertEqual(self.read(), (["20260101T000000Z-2"], ""))

    def test_what_is_no_report_is_left_out_and_told(self):
        case = report()["cases"][0]
        bad = {
            "": "is no whole JSON document",
            json.dumps(report())[:-20]: "is no whole JSON document",
            b"\xff\xfe{}": "is no whole JSON document",
            "[" * 100000: "is no whole JSON document",
            "[]": "is not one of tools/regress",
            '{"created": 1}': "is not one of tools/regress",
            json.dumps(report(format=0)): "has format 0, expected 1",
            json.dumps(report(format=2)): "has format 2, expected 1",
            json.dumps(report(list=None)): "has no list or no environment",
            json.dumps(report(environment=[])): "has no list or no environment",
            json.dumps(report(environment={})): "has no date",
            json.dumps(report(cases=None)): "has cases without a name, a status, seconds or figures",
            json.dumps(
                report(cases=[{**case, "status": "green"}])
            ): "has cases without a name, a status, seconds or figures",
            json.dumps(
                report(cases=[{**case, "seconds": "1"}])
            ): "has cases without a name, a status, seconds or figures",
            json.dumps(
                report(cases=[{**case, "seconds": float("nan")}])
            ): "has cases without a name, a status, seconds or figures",
            json.dumps(report(cases=["a"])): "has cases without a name, a status, seconds or figures",
        }
        self.put("20250101T000000Z-1", report())
        expected = []
        for number, (content, problem) in enumerate(bad.items()):
            name = f"20260101T000000Z-{number}"
            self.put(name, content)
            expected.append(f"[history] {self.out}/{name}/report.json is left out of the history: it {problem}\n")
        found, said = self.read()
        self.assertEqual(found, ["20250101T000000Z-1"])
        self.assertEqual(said, "".join(reversed(expected)))

    def test_what_cannot_be_read_is_told(self):
        (self.out / "20260101T000000Z-1" / "report.json").mkdir(parents=True)
        found, said = self.read()
        self.assertEqual(found, [])
        self.assertTrue(
            re.search(r"Z-1/report.json is left out of the history: it cannot be read: Is a directory", said), said
        )

    def test_a_report_in_a_folder_of_another_name_is_told(self):
        self.put("copy of a run", report())
        problem = "its folder is not named as a run's"
        self.assertEqual(
            self.read(), ([], f"[history] {self.out}/copy of a run/report.json is left out of the history: {problem}\n")
        )


if __name__ == "__main__":
    unittest.main()
