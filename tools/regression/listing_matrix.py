"""A case's matrix: every combination of its values is a case of its own, `name[key=label,...]`."""
from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import yaml

from .case import Place
from .listing_keys import KeyReader, Keys, check_setting, check_variable
from .listing_nodes import Given, Misfit, Scope, got, nearest, place_of
from .placeholders import OUT

LABEL = r"[A-Za-z0-9_.+-]+"
PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(:[^{}\s]*)?\}")
# A list that asks for more has a slip in it.
MOST_EXPANSIONS = 1000


@dataclasses.dataclass(frozen=True)
class Axis:
    """One key of a matrix: `ranks`, `steps`, `set.section.key` or `environment.NAME`."""

    key: str
    # Label -> value, in the order in which they are written.
    values: dict[str, Given]

    @property
    def short(self) -> str:
        """As in names of expansions."""
        return self.key.rsplit(".", 1)[-1]


@dataclasses.dataclass(frozen=True)
class Expansion:
    """One combination. Without a matrix there is one that has no labels."""

    # Short key -> label.
    labels: dict[str, str]
    # Key -> value.
    values: dict[str, Given]

    def name(self, case: str) -> str:
        if not self.labels:
            return case
        return f"{case}[{','.join(f'{short}={label}' for short, label in self.labels.items())}]"

    def laid_over(self, keys: Keys) -> Keys:
        """The case's keys with the combination's values in their place."""
        result = dict(keys)
        for key, given in self.values.items():
            group, _, name = key.partition(".")
            if name:
                below = result[group].value if group in result else {}
                result[group] = Given(below | {name: given}, given.place)
            else:
                result[key] = given
        return result

    def fill(self, text: Given, runs: bool = False) -> str:
        """The text with `{key}` replaced by labels. `{out}` and `{out:CASE}` stay if the text may have them (`runs`);
        other words in braces are refused."""
        filled = PLACEHOLDER.sub(
            lambda match: match[0] if match[2] else self.labels.get(match[1], match[0]), text.value)
        rest = OUT.sub("", filled) if runs else filled
        if unknown := PLACEHOLDER.search(rest):
            known = [f"{{{short}}}" for short in self.labels] + (["{out}", "{out:CASE}"] if runs else [])
            raise Misfit(text.place, f"unknown placeholder {unknown[0]!r}{nearest(unknown[0], known)}")
        return filled


class MatrixReader:
    def __init__(self, scope: Scope, keys: KeyReader):
        self._scope = scope
        self._keys = keys

    def read(self, node: yaml.Node, left_out: yaml.Node | None) -> list[Expansion]:
        """All combinations, the last key's values running fastest, without those that `left_out` names."""
        axes: list[Axis] = []
        places: dict[str, Place] = {}
        for key, key_node, value in self._scope.entries(node, "matrix", empty=False):
            axis = self._axis(key, key_node, value)
            if axis.short in places:
                what = f"matrix: {key!r} is shortened to {axis.short!r} in names, as is the key at {places[axis.short]}"
                raise Misfit(place_of(key_node), f"{what}, expected keys with last parts of their own")
            if axis.short == "out":
                raise Misfit(place_of(key_node), f"matrix: {key!r}, expected a key that {{out}} is no placeholder of")
            places[axis.short] = place_of(key_node)
            axes.append(axis)
        if (count := math.prod(len(axis.values) for axis in axes)) > MOST_EXPANSIONS:
            raise Misfit(place_of(node), f"matrix: got {count} combinations, expected at most {MOST_EXPANSIONS}")
        labels = [dict(zip([axis.short for axis in axes], combination))
                  for combination in itertools.product(*(axis.values for axis in axes))]
        kept = labels if left_out is None else self._without(labels, axes, left_out)
        return [Expansion(each, {axis.key: axis.values[each[axis.short]] for axis in axes}) for each in kept]

    def _axis(self, key: str, key_node: yaml.Node, node: yaml.Node) -> Axis:
        what = f"matrix.{key}"
        read = self._reader_of(key, place_of(key_node))
        node = self._scope.resolved(node)
        if isinstance(node, yaml.MappingNode):
            labelled = self._scope.entries(node, what, empty=False)
        else:
            labelled = [(item.value, item, item) for item in self._scope.items(node, what)]
        values: dict[str, Given] = {}
        for label, label_node, value in labelled:
            if not isinstance(label, str) or not re.fullmatch(LABEL, label):
                shown = f"label {label!r}" if isinstance(label, str) else got(label_node)
                expected = "letters, digits, '_', '.', '+' and '-'; other values are given as {label: value}"
                raise Misfit(place_of(label_node), f"{what}: {shown}, expected {expected}")
            if label in values:
                raise Misfit(place_of(label_node), f"{what}: {label!r} is given twice, expected each value once")
            values[label] = Given(read(value, what), place_of(value))
        return Axis(key, values)

    def _reader_of(self, key: str, place: Place) -> Callable[[yaml.Node, str], Any]:
        """What reads the values of a key."""
        group, _, name = key.partition(".")
        if key in ("ranks", "steps"):
            return self._scope.integer
        if group == "set" and name:
            check_setting(name, place)
            return self._keys.setting
        if group == "environment" and name:
            check_variable(name, place)
            return self._scope.text
        raise Misfit(place, f"matrix: key {key!r}, expected ranks, steps, set.section.key or environment.NAME")

    def _without(self, combinations: list[dict[str, str]], axes: list[Axis], node: yaml.Node) -> list[dict[str, str]]:
        """The combinations that fit no entry of `except`: an entry's labels are all among theirs."""
        known = {axis.short: axis for axis in axes}
        kept = combinations
        for item in self._scope.items(node, "except"):
            entry: dict[str, str] = {}
            for short, key_node, value in self._scope.entries(item, "except", empty=False):
                if short not in known:
                    raise Misfit(place_of(key_node), f"except: unknown key {short!r}{nearest(short, known)}")
                entry[short] = self._scope.choice(value, f"except.{short}", tuple(known[short].values))
            kept = [each for each in kept if not entry.items() <= each.items()]
        if not kept:
            raise Misfit(place_of(node), "except: leaves out every combination, expected at least one that stays")
        return kept
