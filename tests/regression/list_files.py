"""What tests of lists share: lists as texts, read from a folder of their own."""
import pathlib
import tempfile
import unittest

from regression.listing import ListError, read_list

# A case that is right, and where a case's further keys go on.
CASE = "cases:\n- name: a\n  config: c.yaml\n"


def in_case(line):
    """A list of one case whose line 4, from column 3 on, is `line`."""
    return f"{CASE}  {line}\n"


class ListTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.write("c.yaml", "model: {}\n")

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def read(self, text, **others):
        """The list `text`; others: name of a further file without .yaml -> its text."""
        for name, other in others.items():
            self.write(f"{name}.yaml", other)
        return read_list(self.write("list.yaml", text), self.root)

    def cases(self, text, **others):
        return {case.name: case for case in self.read(text, **others).cases}

    def problems(self, text, **others):
        """All problems as `file:line:column: what`, files without their folder."""
        with self.assertRaises(ListError) as caught:
            self.read(text, **others)
        error = caught.exception
        self.assertEqual(str(error), "\n".join(error.problems))
        for problem in error.problems:
            self.assertTrue(problem.startswith(f"[list] {self.root}/"), problem)
        return [problem.removeprefix("[list] ").replace(f"{self.root}/", "") for problem in error.problems]

    def refuses(self, text, *expected, **others):
        """The list's problems are `line:column: what`, or `file:line:column: what` for other files."""
        places = [f"list.yaml:{each}" if each[0].isdigit() else each for each in expected]
        with self.subTest(text=text):
            self.assertEqual(self.problems(text, **others), places)
