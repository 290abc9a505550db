"""Chooses cases of a list: by name, and as one of several parts that run elsewhere at the same time."""
from __future__ import annotations

import re

from .case import Case
from .listing_nodes import ListError, nearest


def select(cases: list[Case], pattern: str) -> list[Case]:
    """Cases that a pattern picks, in their order; a pattern that picks none is refused with ListError.

    `*` stands for any characters and `?` for one; all else is literal. Without either, a pattern is a name, and what is
    before `[` in one picks all expansions of a matrix. Commas outside brackets separate several patterns.
    """
    # A name of an expansion has commas of its own: name[ranks=2,reshard=true].
    patterns = [each.strip() for each in re.split(r",(?![^\[]*\])", pattern)]
    picked: set[str] = set()
    problems = []
    for each in patterns:
        expression = _expression(each)
        names = {case.name for case in cases if expression.fullmatch(case.name)}
        picked |= names
        if not names:
            known = [case.name for case in cases]
            problems.append(f"[list] --only {each!r} picks no case{nearest(each, known)}")
    if problems:
        raise ListError(problems)
    return [case for case in cases if case.name in picked]


def _expression(pattern: str) -> re.Pattern[str]:
    text = "".join({"*": ".*", "?": "."}.get(character, re.escape(character)) for character in pattern)
    return re.compile(text if re.search("[*?[]", pattern) else rf"{text}(\[.*\])?")


def part(cases: list[Case], i: int, n: int) -> list[Case]:
    """The i-th of n parts, counted from 1, in the order of `cases`. Each case is in exactly one part.

    Cases that need one another, or the same case, make a group and stay together, so that what they need runs once.
    Only a group that is larger than an even share is cut, in its order, into pieces of that size; what a piece needs of
    another runs in both. The largest go first, each to the part that has the fewest cases so far. Where there are fewer
    groups than parts, some parts are empty.
    """
    if not 1 <= i <= n:
        raise ListError([f"[list] part {i} of {n}, expected i/n with 1 <= i <= n"])
    share = -(-len(cases) // n)
    pieces = [group[begin : begin + share] for group in _groups(cases) for begin in range(0, len(group), share)]
    parts: list[list[int]] = [[] for _ in range(min(n, len(pieces)))]
    for piece in sorted(pieces, key=len, reverse=True):
        min(parts, key=len).extend(piece)
    return [cases[index] for index in sorted(parts[i - 1])] if i <= len(parts) else []


def _groups(cases: list[Case]) -> list[list[int]]:
    """Indices of cases that are connected by what they need, groups in the order of their first case."""
    above: dict[str, str] = {}

    def root(name: str) -> str:
        while above.setdefault(name, name) != name:
            name = above[name]
        return name

    for case in cases:
        for needed in case.needs:
            # What is needed need not be among the cases itself.
            above[root(case.name)] = root(needed)
    groups: dict[str, list[int]] = {}
    for index, case in enumerate(cases):
        groups.setdefault(root(case.name), []).append(index)
    return list(groups.values())
