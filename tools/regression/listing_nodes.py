"""Strict, typed access to the YAML of a list: every refusal names its file, line and column, counted from 1.

Scalars are judged by what is written, not by YAML 1.1's idea of it: `1e-5` is a number, `012`, `0x1f` and `1_000` are
none, and `on` is a text.
"""
from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import os
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from .case import Place

INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]*)")
NUMBER = re.compile(r"[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([^{}]*)\})", re.ASCII)
LARGEST_INTEGER = 2**31 - 1
LARGEST_FILE = 1 << 20


class ListError(ValueError):
    """A list, or a choice of its cases, that cannot be run: one line a problem."""

    def __init__(self, problems: list[str]):
        super().__init__("\n".join(problems))
        self.problems = problems


class Misfit(Exception):
    """One problem, on its way to Problems."""

    def __init__(self, place: Place, what: str):
        super().__init__(what)
        self.place = place
        self.what = what


class Problems:
    """Gathers what is wrong with a list's files, so that all of it is said at once."""

    def __init__(self):
        self._found: dict[tuple[Place, str], None] = {}

    def __len__(self) -> int:
        return len(self._found)

    def add(self, place: Place, what: str) -> None:
        self._found[place, what] = None

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        """A misfit ends the block and is kept."""
        try:
            yield
        except Misfit as misfit:
            self.add(misfit.place, misfit.what)

    def raise_if_any(self) -> None:
        if not self._found:
            return
        files = list(dict.fromkeys(place.file for place, _ in self._found))
        by_place = sorted(self._found, key=lambda each: (files.index(each[0].file), each[0].line, each[0].column))
        raise ListError([f"[list] {place}: {what}" for place, what in by_place])


@dataclasses.dataclass(frozen=True)
class Given:
    """A value, and where it is written."""

    value: Any
    place: Place


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: what may have been meant, or what there is."""
    known = list(known)
    if close := difflib.get_close_matches(word, known, n=1):
        return f"; did you mean {close[0]!r}?"
    more = f" and {len(known) - 20} more" if len(known) > 20 else ""
    return f", expected one of {', '.join(known[:20])}{more}" if known else ", there are none"


def place_of(node: yaml.Node) -> Place:
    return place_of_mark(node.start_mark)


def place_of_mark(mark: yaml.Mark) -> Place:
    return Place(mark.name, mark.line + 1, mark.column + 1)


def got(node: yaml.Node) -> str:
    if isinstance(node, yaml.SequenceNode):
        return "got a list"
    if isinstance(node, yaml.MappingNode):
        return "got a map"
    if is_nothing(node):
        return "got nothing"
    return f"got {node.value!r}" if is_plain(node) else f"got the text {node.value!r}"


def is_plain(node: yaml.Node) -> bool:
    """Whether a scalar is written without quotes and not as a block."""
    return isinstance(node, yaml.ScalarNode) and node.style is None


def is_nothing(node: yaml.Node) -> bool:
    return is_plain(node) and node.tag.endswith(":null")


def implicit_tag(kind: type[yaml.Node], value: Any, plain: bool) -> str:
    return yaml.resolver.Resolver().resolve(kind, value, (plain, not plain))


# ---- files ----


def load(path: pathlib.Path, problems: Problems, asked_at: Place) -> yaml.MappingNode | None:
    """The map at the top of a file; None after saying what is wrong. `asked_at` is the place of the file's name."""
    text = _text_of(path, problems, asked_at)
    if text is None:
        return None
    start = Place(str(path), 1, 1)
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        loader.name = str(path)
        node = loader.get_single_node()
        if node is None:
            raise Misfit(start, "the file is empty, expected a map with cases")
        _check_tree(node, {})
    except yaml.reader.ReaderError as error:
        what = f"not valid YAML: character U+{error.character:04X}, expected text"
        problems.add(_place_at(path, text[: error.position]), what)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = ", ".join(each for each in (error.context, error.problem) if each)
        problems.add(place_of_mark(mark) if mark else start, f"not valid YAML: {what}")
    except RecursionError:
        problems.add(start, "not valid YAML: nested too deeply")
    except (ValueError, OverflowError):
        # PyYAML lets what chr() says about an escape such as "\UFFFFFFFF" through.
        place = place_of_mark(loader.get_mark()) if loader else start
        problems.add(place, "not valid YAML: an escape or a number that is out of range")
    except Misfit as misfit:
        problems.add(misfit.place, misfit.what)
    else:
        if isinstance(node, yaml.MappingNode):
            return node
        problems.add(place_of(node), f"{got(node)}, expected a map with cases at the top of the file")
    return None


def _text_of(path: pathlib.Path, problems: Problems, asked_at: Place) -> str | None:
    try:
        if path.is_dir() or (path.exists() and not path.is_file()):
            raise Misfit(asked_at, f"{path} is a folder or a device, expected a YAML file")
        data = path.read_bytes()
        if len(data) > LARGEST_FILE:
            raise Misfit(asked_at, f"{path} has {len(data)} bytes, expected at most {LARGEST_FILE}")
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode("utf-8", "replace")
        problems.add(_place_at(path, before), "not valid YAML: the file is not UTF-8, expected text")
    except OSError as error:
        problems.add(asked_at, f"{path} cannot be read: {os.strerror(error.errno)}, expected a YAML file")
    except Misfit as misfit:
        problems.add(misfit.place, misfit.what)
    return None


def _place_at(path: pathlib.Path, before: str) -> Place:
    """The place of what follows the text `before`."""
    return Place(str(path), before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1)


def _check_tree(node: yaml.Node, open_nodes: dict[int, bool]) -> None:
    """Refuses tags, and aliases inside what they name, which would never end. `open_nodes`: id -> still inside it."""
    if id(node) in open_nodes:
        if open_nodes[id(node)]:
            raise Misfit(place_of(node), "an anchor's alias is inside what it names, expected YAML that ends")
        return
    open_nodes[id(node)] = True
    if node.tag != implicit_tag(type(node), node.value, is_plain(node)):
        raise Misfit(place_of(node), f"tag {node.tag!r}, expected a value without a tag")
    children = node.value if isinstance(node.value, list) else []
    for child in children:
        for each in child if isinstance(child, tuple) else (child,):
            _check_tree(each, open_nodes)
    open_nodes[id(node)] = False


def check_without_variables(node: yaml.Node, what: str) -> None:
    """Refuses variables inside the value of one."""
    waiting, seen = [node], {id(node)}
    while waiting:
        each = waiting.pop()
        if isinstance(each, yaml.ScalarNode):
            if VARIABLE.search(each.value):
                raise Misfit(place_of(each), f"{what}: {got(each)}, expected a value without variables")
            continue
        for child in each.value:
            children = child if isinstance(child, tuple) else (child,)
            waiting += [one for one in children if id(one) not in seen]
            seen |= {id(one) for one in children}


# ---- values ----


class Scope:
    """Reads the nodes of one file. `$name` and `${name}` are replaced by the variable's value, of any type, where they
    are a scalar as a whole, and by its text inside a longer one. A `$` before anything else is a `$`."""

    def __init__(self, problems: Problems, variables: dict[str, yaml.Node]):
        self.problems = problems
        self.variables = variables

    def resolved(self, node: yaml.Node) -> yaml.Node:
        """The node with variables filled in, at the place where they are used."""
        if not isinstance(node, yaml.ScalarNode):
            return node
        if whole := VARIABLE.fullmatch(node.value):
            found = self._variable(node, whole)
            copy = type(found)(found.tag, found.value, node.start_mark, node.end_mark)
            if isinstance(found, yaml.ScalarNode):
                copy.style = found.style
            return copy
        text = VARIABLE.sub(lambda match: self._scalar_variable(node, match), node.value)
        tag = implicit_tag(yaml.ScalarNode, text, is_plain(node))
        return yaml.ScalarNode(tag, text, node.start_mark, node.end_mark, node.style)

    def _variable(self, node: yaml.Node, match: re.Match[str]) -> yaml.Node:
        name = match[1] or match[2]
        if name not in self.variables:
            raise Misfit(place_of(node), f"unknown variable {name!r}{nearest(name, self.variables)}")
        return self.variables[name]

    def _scalar_variable(self, node: yaml.Node, match: re.Match[str]) -> str:
        found = self._variable(node, match)
        if not isinstance(found, yaml.ScalarNode) or is_nothing(found):
            what = f"variable {match[0]!r} inside a text: {got(found)}, expected a variable that is text or a number"
            raise Misfit(place_of(node), what)
        return found.value

    def text(self, node: yaml.Node, what: str) -> str:
        """A scalar as it is written; it may be empty."""
        node = self.resolved(node)
        if not isinstance(node, yaml.ScalarNode) or is_nothing(node):
            raise Misfit(place_of(node), f"{what}: {got(node)}, expected text")
        if re.search("[\0\ud800-\udfff]", node.value):
            raise Misfit(place_of(node), f"{what}: {got(node)}, expected text without null characters and surrogates")
        return node.value

    def word(self, node: yaml.Node, what: str, pattern: str, expected: str) -> str:
        text = self.text(node, what)
        if not re.fullmatch(pattern, text, re.ASCII):
            raise Misfit(place_of(node), f"{what}: got {text!r}, expected {expected}")
        return text

    def choice(self, node: yaml.Node, what: str, choices: tuple[str, ...]) -> str:
        text = self.text(node, what)
        if text not in choices:
            raise Misfit(place_of(node), f"{what}: got {text!r}{nearest(text, choices)}")
        return text

    def integer(self, node: yaml.Node, what: str) -> int:
        """An int of at least 1."""
        node = self.resolved(node)
        sound = is_plain(node) and INTEGER.fullmatch(node.value) and len(node.value) < 20
        if not sound or not 1 <= int(node.value) <= LARGEST_INTEGER:
            raise Misfit(place_of(node), f"{what}: {got(node)}, expected an int from 1 to {LARGEST_INTEGER}")
        return int(node.value)

    def number(self, node: yaml.Node, what: str, low: float = -math.inf, open_low: bool = False,
               high: float = math.inf) -> float:
        """A finite number from `low`, which does not count itself if `open_low`, to `high`."""
        node = self.resolved(node)
        value = float(node.value) if is_plain(node) and NUMBER.fullmatch(node.value) else math.nan
        if math.isfinite(value) and low <= value <= high and not (open_low and value == low):
            return value
        expected = "a finite number"
        if low != -math.inf:
            expected += f" {'above' if open_low else 'of at least'} {low:g}"
        if high != math.inf:
            expected += f" and at most {high:g}"
        raise Misfit(place_of(node), f"{what}: {got(node)}, expected {expected}")

    def tolerance(self, node: yaml.Node, what: str) -> float:
        """A relative difference that is still equal; 0.0 for `bitwise`."""
        node = self.resolved(node)
        if is_plain(node) and node.value == "bitwise":
            return 0.0
        try:
            # From 1 on every two numbers of one sign would be equal: somebody means per cent.
            return self.number(node, what, low=0.0, high=0.99)
        except Misfit as misfit:
            raise Misfit(misfit.place, f"{misfit.what}, or bitwise") from None

    def items(self, node: yaml.Node, what: str) -> list[yaml.Node]:
        """The nodes of a list that is not empty, variables filled in."""
        node = self.resolved(node)
        if not isinstance(node, yaml.SequenceNode):
            raise Misfit(place_of(node), f"{what}: {got(node)}, expected a list")
        if not node.value:
            raise Misfit(place_of(node), f"{what}: got an empty list, expected a list with at least one item")
        return [self.resolved(item) for item in node.value]

    def texts(self, node: yaml.Node, what: str) -> list[Given]:
        """A text, or the texts of a list; none is empty."""
        node = self.resolved(node)
        items = self.items(node, what) if isinstance(node, yaml.SequenceNode) else [node]
        return [Given(self.word(item, what, r"(?s:.+)", "text that is not empty"), place_of(item)) for item in items]

    def entries(self, node: yaml.Node, what: str, empty: bool = True) -> list[tuple[str, yaml.Node, yaml.Node]]:
        """Key, its node and the value's node of a map. A repeated key is left out after saying so."""
        node = self.resolved(node)
        if not isinstance(node, yaml.MappingNode):
            raise Misfit(place_of(node), f"{what}: {got(node)}, expected a map")
        if not node.value and not empty:
            raise Misfit(place_of(node), f"{what}: got an empty map, expected at least one key")
        seen: dict[str, Place] = {}
        result = []
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or not key.value:
                self.problems.add(place_of(key), f"{what}: {got(key)} as key, expected a word")
            elif key.value in seen:
                where = f"first given at {seen[key.value]}"
                self.problems.add(place_of(key), f"{what}: repeated key {key.value!r}, {where}, expected it once")
            else:
                seen[key.value] = place_of(key)
                result.append((key.value, key, value))
        return result

    def known_entries(self, node: yaml.Node, what: str, known: Iterable[str]) -> dict[str, yaml.Node]:
        """Key -> value's node, of the keys that are known; others are refused."""
        known = list(known)
        result = {}
        for key, key_node, value in self.entries(node, what):
            if key in known:
                result[key] = value
            else:
                self.problems.add(place_of(key_node), f"{what}: unknown key {key!r}{nearest(key, known)}")
        return result
