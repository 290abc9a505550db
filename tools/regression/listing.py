"""Reads a list of regression cases: inheritance, variables and matrices are gone in what comes out."""
from __future__ import annotations

import dataclasses
import graphlib
import pathlib
from typing import Any

from .case import Case, Equality, Place, Throughput
from .listing_files import Draft, Files
from .listing_keys import OF_TESTS, OF_TRAINING, Keys, is_sound, laid_over
from .listing_matrix import Expansion
from .listing_nodes import Given, ListError, Misfit, Problems, nearest
from .placeholders import named_cases
from .selection import part, select

__all__ = ["CaseList", "ListError", "part", "read_list", "select"]

# It becomes the name of a folder.
LONGEST_NAME = 200


@dataclasses.dataclass
class CaseList:
    """A list as it runs."""

    # With every matrix expanded, in the order of the file; those of included files come first.
    cases: list[Case]
    # The folder of its goldens, which need not exist.
    goldens: pathlib.Path
    # The file's name without its ending.
    name: str


def read_list(path: pathlib.Path, root: pathlib.Path) -> CaseList:
    """Reads a list and what it includes; configurations are looked up below `root`, the project's folder.

    Raises ListError with all that is wrong in all files, `[list] file:line:column: what`, one line a problem.
    """
    problems = Problems()
    start = Place(str(path), 1, 1)
    files = Files(problems, root)
    goldens = files.read(path, start, {}, {})
    cases = _Builder(problems, files).build()
    if not cases and not problems:
        problems.add(start, "there are no cases, expected at least one")
    problems.raise_if_any()
    return CaseList(cases, goldens, path.stem)


class _Builder:
    """Turns drafts into cases, and checks what they say about one another."""

    def __init__(self, problems: Problems, files: Files):
        self._problems = problems
        self._files = files
        # Name -> all that a base gives; None where that could not be made out.
        self._bases: dict[str, Keys | None] = {}
        # None: there is such a case, but it could not be built.
        self._cases: dict[str, Case | None] = {}
        # Names of cases without what a matrix adds -> those of their expansions; None: these are not known.
        self._expansions: dict[str, list[str] | None] = {}
        # Case -> case that it needs -> where it says so.
        self._needs: dict[str, dict[str, Place]] = {}

    def build(self) -> list[Case]:
        self._build_bases()
        for draft in self._files.cases.values():
            self._expand(draft)
        for name, needs in self._needs.items():
            for other, place in needs.items():
                with self._problems.collected():
                    self._check_need(name, other, place)
        _, loops = _ordered({name: [other for other in needs if other != name] for name, needs in self._needs.items()})
        for loop in loops:
            place = self._needs[loop[0]][loop[1]]
            self._problems.add(place, f"cases need one another: {' -> '.join(loop)}, expected no loop")
        return [case for case in self._cases.values() if case is not None]

    # ---- inheritance ----

    def _build_bases(self) -> None:
        known = self._files.bases
        order, loops = _ordered({name: [given.value for given in base.bases] for name, base in known.items()})
        closing = {(loop[0], loop[1]): loop for loop in loops}
        for name in order:
            if name not in known:
                continue
            for given in known[name].bases:
                if loop := closing.get((name, given.value)):
                    what = f"bases inherit from one another: {' -> '.join(loop)}, expected no loop"
                    self._problems.add(given.place, what)
            inherited = self._inherited(known[name])
            self._bases[name] = None if inherited is None else laid_over(inherited, known[name].keys)

    def _inherited(self, draft: Draft) -> Keys | None:
        """What the bases of a draft give, later ones over earlier ones."""
        result: Keys | None = {}
        for given in draft.bases:
            # A base that is known but not built yet closes a loop.
            name = given.value
            below = self._bases.get(name)
            if name not in self._files.bases and self._files.complete:
                self._problems.add(given.place, f"unknown base {name!r}{nearest(name, self._files.bases)}")
            result = None if result is None or below is None else laid_over(result, below)
        return result

    # ---- cases ----

    def _expand(self, draft: Draft) -> None:
        inherited = self._inherited(draft)
        if draft.expansions is None:
            self._expansions[draft.name] = None
            return
        names = self._expansions[draft.name] = [expansion.name(draft.name) for expansion in draft.expansions]
        self._cases |= dict.fromkeys(names)
        if (longest := max(map(len, names))) > LONGEST_NAME:
            what = f"case {draft.name!r} with its matrix has a name of {longest} characters"
            self._problems.add(draft.place, f"{what}, expected at most {LONGEST_NAME}; shorten its labels")
        if inherited is None:
            return
        keys = laid_over(inherited, draft.keys)
        is_test = "test" in keys
        # Defaults are for all cases of a file, so that some do not concern tests.
        defaults = {key: given for key, given in draft.defaults.items() if not is_test or key not in OF_TRAINING}
        keys = laid_over(defaults, keys)
        if not is_sound(keys):
            return
        for key, given in (keys | draft.expansions[0].values).items():
            if key.partition(".")[0] in (OF_TRAINING if is_test else OF_TESTS):
                why = "which runs a test" if is_test else "which has no test"
                what = f"{key}: of no use to case {draft.name!r}, {why}, expected it elsewhere"
                self._problems.add(given.place, what)
        if not is_test and "config" not in keys:
            what = f"case {draft.name!r}: 'config' is missing, expected the path of a configuration, or 'test'"
            self._problems.add(draft.place, what)
        for name, expansion in zip(names, draft.expansions):
            self._cases[name] = self._case(name, draft.place, expansion, expansion.laid_over(keys))

    def _case(self, name: str, place: Place, expansion: Expansion, keys: Keys) -> Case:
        needs: dict[str, Place] = {}

        def value(key: str, default: Any) -> Any:
            return keys[key].value if key in keys else default

        def reference(given: Given) -> str:
            other = ""
            with self._problems.collected():
                other = expansion.fill(given)
                needs.setdefault(other, given.place)
            return other

        def texts(key: str) -> dict[str, str]:
            result = {}
            for word, given in value(key, {}).items():
                with self._problems.collected():
                    result[word] = expansion.fill(given, runs=True)
                    for other in named_cases(result[word]):
                        needs.setdefault(other, given.place)
            return result

        equals = tuple(
            Equality(reference(each["case"]), each["metrics"], each["weights"]) for each in value("equals", []))
        throughput = value("throughput", None)
        if throughput is not None:
            throughput = Throughput(reference(throughput["case"]), throughput["at_least"], throughput["pairs"])
        settings, environment = texts("set"), texts("environment")
        self._check_steps(name, keys)
        self._needs[name] = needs
        return Case(
            name=name,
            place=place,
            description=value("description", ""),
            program=value("test", value("program", "hsdp_train")),
            is_test="test" in keys,
            filter=value("filter", "*"),
            config=value("config", ""),
            settings=settings,
            environment=environment,
            ranks=value("ranks", 1),
            steps=value("steps", None),
            first_step=value("first_step", 1),
            devices=value("devices", Case.devices),
            timeout_seconds=value("timeout", Case.timeout_seconds),
            golden=_values_of(keys["golden"].value) if "golden" in keys else None,
            equals=equals,
            bounds=tuple(_values_of(value("bounds", {})).values()),
            throughput=throughput,
            needs=tuple(needs),
        )

    def _check_steps(self, name: str, keys: Keys) -> None:
        """Nothing may begin after the last step, where it would hold of no step at all."""
        if "steps" not in keys:
            return
        steps = keys["steps"].value
        beginnings = {"first_step": keys["first_step"]} if "first_step" in keys else {}
        for metric, given in keys["bounds"].value.items() if "bounds" in keys else ():
            beginnings[f"bounds.{metric}.from_step"] = Given(given.value.from_step, given.place)
        for what, given in beginnings.items():
            if given.value > steps:
                what = f"{what}: got {given.value}, case {name!r} has {steps} steps, expected at most as many"
                self._problems.add(given.place, what)

    def _check_need(self, name: str, other: str, place: Place) -> None:
        if name == other:
            raise Misfit(place, f"case {name!r} needs itself, expected another case")
        if other in self._cases:
            case, needed = self._cases[name], self._cases[other]
            compared = [each.case for each in (*case.equals, case.throughput) if each is not None]
            if needed is not None and needed.is_test and other in compared:
                what = f"case {name!r} is compared with {other!r}, which runs a test"
                raise Misfit(place, f"{what}, expected a case that trains")
            return
        stem = other.partition("[")[0]
        expansions = self._expansions.get(stem, [])
        # With a file or a matrix that could not be read nobody knows.
        if not self._files.complete or expansions is None:
            return
        if expansions and other == stem:
            what = f"case {name!r} needs {other!r}, which has a matrix"
            raise Misfit(place, f"{what}, expected one of its expansions, such as {expansions[0]!r}")
        raise Misfit(place, f"case {name!r} needs unknown case {other!r}{nearest(other, expansions or self._cases)}")


def _values_of(keys: Keys) -> dict[str, Any]:
    return {key: given.value for key, given in keys.items()}


def _ordered(edges: dict[str, list[str]]) -> tuple[list[str], list[list[str]]]:
    """Names after those that they lead to, and the loops, each closed: a, b, a. An edge of each loop, from its first
    name to its second, is left out for the order."""
    edges = {name: list(others) for name, others in edges.items()}
    loops: list[list[str]] = []
    while True:
        try:
            return list(graphlib.TopologicalSorter(edges).static_order()), loops
        except graphlib.CycleError as error:
            # It leads from what is needed to what needs it, and closes with the name that it began with.
            loop = error.args[1][:0:-1]
            begin = loop.index(min(loop, key=list(edges).index))
            loop = loop[begin:] + loop[:begin]
            loops.append([*loop, loop[0]])
            edges[loop[0]] = [other for other in edges[loop[0]] if other != loops[-1][1]]
