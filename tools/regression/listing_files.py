"""The files of a list: what it includes, its variables, defaults, bases and cases, each as it is written."""
from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
from collections.abc import Iterator

import yaml

from .case import Place
from .listing_keys import KEYS, KEYS_OF_LIST, OF_TESTS, KeyReader, Keys, laid_over
from .listing_matrix import Expansion, MatrixReader
from .listing_nodes import Given, Misfit, Problems, Scope, check_without_variables, load, place_of

NAME = r"[a-z0-9_]+"
NAME_EXPECTED = "lower-case letters, digits and underscores"


@dataclasses.dataclass
class Draft:
    """A base or a case. `keys` are its own; what it inherits is looked up once every file is read."""

    name: str
    place: Place
    keys: Keys
    bases: list[Given]
    # Of a case: what its file and those that include it lay under every case.
    defaults: Keys = dataclasses.field(default_factory=dict)
    # Of a case; None: the matrix could not be made out.
    expansions: list[Expansion] | None = None


class Files:
    """Bases and cases of a list and of all that it includes, by name. Those of included files come first."""

    def __init__(self, problems: Problems, root: pathlib.Path):
        self.bases: dict[str, Draft] = {}
        self.cases: dict[str, Draft] = {}
        # Whether every base and every case could be read as far as its name: no name is unknown otherwise.
        self.complete = True
        self._problems = problems
        self._root = root
        self._seen: set[pathlib.Path] = set()

    def read(
        self, path: pathlib.Path, asked_at: Place, variables: dict[str, yaml.Node], defaults: Keys
    ) -> pathlib.Path:
        """Reads one file under the variables and the defaults of what includes it. Returns its folder of goldens."""
        folder = path.parent
        goldens = folder / "goldens"
        self._seen.add(path.resolve())
        node = load(path, self._problems, asked_at)
        if node is None:
            self.complete = False
            return goldens
        plain = Scope(self._problems, {})
        entries = plain.known_entries(node, "list", KEYS_OF_LIST)
        if "variables" in entries:
            with self._problems.collected():
                variables = self._variables(plain, entries["variables"]) | variables
        scope = Scope(self._problems, variables)
        reader = _DraftReader(scope, self._root)
        if "defaults" in entries:
            with self._problems.collected():
                defaults = laid_over(defaults, reader.defaults(entries["defaults"]))
        if "goldens" in entries:
            with self._problems.collected():
                goldens = folder / scope.word(entries["goldens"], "goldens", r"(?s:.+)", "the path of a folder")
        if "include" in entries:
            with self._reading_names():
                for name in scope.texts(entries["include"], "include"):
                    with self._reading_names():
                        self._include(folder / name.value, name.place, variables, defaults)
        if "bases" in entries:
            with self._reading_names():
                for name, key, value in scope.entries(entries["bases"], "bases"):
                    with self._reading_names():
                        self._keep(self.bases, "base", reader.base(name, key, value))
        if "cases" in entries:
            with self._reading_names():
                for item in scope.items(entries["cases"], "cases"):
                    with self._reading_names():
                        self._keep(self.cases, "case", reader.case(item, defaults))
        return goldens

    @contextlib.contextmanager
    def _reading_names(self) -> Iterator[None]:
        """Collects a misfit of what would have given names."""
        try:
            yield
        except Misfit as misfit:
            self._problems.add(misfit.place, misfit.what)
            self.complete = False

    def _variables(self, scope: Scope, node: yaml.Node) -> dict[str, yaml.Node]:
        variables = {}
        for name, key_node, value in scope.entries(node, "variables"):
            # One that is refused is known all the same.
            variables[name] = value
            with self._problems.collected():
                if not re.fullmatch(NAME, name):
                    raise Misfit(place_of(key_node), f"variables: key {name!r}, expected {NAME_EXPECTED}")
                check_without_variables(value, f"variable {name!r}")
        return variables

    def _include(self, path: pathlib.Path, place: Place, variables: dict[str, yaml.Node], defaults: Keys) -> None:
        if path.resolve() in self._seen:
            raise Misfit(place, f"include: {path} is read already, expected each file once and none inside itself")
        self.read(path, place, variables, defaults)

    def _keep(self, among: dict[str, Draft], kind: str, draft: Draft) -> None:
        if draft.name in among:
            first = among[draft.name].place
            self._problems.add(draft.place, f"{kind} {draft.name!r} is given twice, first at {first}, expected it once")
        else:
            among[draft.name] = draft


class _DraftReader:
    """Reads the bases, cases and defaults of one file."""

    def __init__(self, scope: Scope, root: pathlib.Path):
        self._scope = scope
        self._keys = KeyReader(scope, root)
        self._matrix = MatrixReader(scope, self._keys)

    def defaults(self, node: yaml.Node) -> Keys:
        known = [key for key in KEYS if key not in OF_TESTS]
        return self._keys.read(self._scope.known_entries(node, "defaults", known))

    def base(self, name: str, key_node: yaml.Node, node: yaml.Node) -> Draft:
        entries = self._scope.known_entries(node, f"base {name!r}", (*KEYS, "base"))
        draft = Draft(name, place_of(key_node), self._keys.read(entries), self._bases(entries))
        if not re.fullmatch(NAME, name):
            raise Misfit(draft.place, f"bases: key {name!r}, expected {NAME_EXPECTED}")
        return draft

    def case(self, node: yaml.Node, defaults: Keys) -> Draft:
        entries = self._scope.known_entries(node, "case", ("name", "base", *KEYS, "matrix", "except"))
        draft = Draft("", place_of(node), self._keys.read(entries), self._bases(entries), defaults)
        with self._scope.problems.collected():
            draft.expansions = self._expansions(entries)
        if "name" not in entries:
            raise Misfit(draft.place, "case: 'name' is missing, expected a name")
        draft.name = self._scope.word(entries["name"], "name", NAME, NAME_EXPECTED)
        return draft

    def _bases(self, entries: dict[str, yaml.Node]) -> list[Given]:
        if "base" in entries:
            with self._scope.problems.collected():
                return self._scope.texts(entries["base"], "base")
        return []

    def _expansions(self, entries: dict[str, yaml.Node]) -> list[Expansion]:
        left_out = entries.get("except")
        if "matrix" in entries:
            return self._matrix.read(entries["matrix"], left_out)
        if left_out is not None:
            raise Misfit(place_of(left_out), "except: there is no matrix, expected one beside it")
        return [Expansion({}, {})]
