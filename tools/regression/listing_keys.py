"""The keys of a case, of a base and of a list's defaults, each read by itself, and how one is laid over another."""
from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import yaml

from .case import Bound
from .launch import is_launchers
from .listing_nodes import Given, Misfit, Scope, got, is_nothing, is_plain, place_of

KEYS_OF_LIST = ("variables", "include", "goldens", "defaults", "bases", "cases")
PROGRAMS = ("hsdp_train", "plain_train", "fsdp2_train")
DEVICES = ("cpu", "cuda")
LONGEST_SECONDS = 7 * 24 * 3600

# What only a training program, or only a test executable, has a use for.
OF_TRAINING = ("program", "config", "steps", "first_step", "set", "golden", "equals", "bounds", "throughput")
OF_TESTS = ("test", "filter")
OF_BOTH = ("description", "ranks", "devices", "timeout", "environment")
KEYS = (*OF_BOTH, *OF_TRAINING, *OF_TESTS)
# Settings that the runner makes itself -> what a list has for them.
OF_RUNNER = {
    "training.steps": "the case's key steps",
    "metrics.folder": "none; it is {out}",
    "metrics.log_every": "none; every step is logged",
}
# Maps that are merged key by key; all else is replaced as a whole.
MERGED = ("set", "environment", "golden", "bounds")

# Key -> what is given, None where it could not be read. That of a merged key is again such a map.
Keys = dict[str, Given]


def laid_over(below: Keys, above: Keys) -> Keys:
    """What `above` gives, and of the rest what `below` gives."""
    result = below | above
    for key in MERGED:
        if key in below and key in above and below[key].value is not None and above[key].value is not None:
            result[key] = Given(below[key].value | above[key].value, above[key].place)
    return result


def is_sound(keys: Keys) -> bool:
    """Whether every value could be read."""
    return all(given.value is not None for given in keys.values())


def check_setting(key: str, place: Place) -> None:
    if not re.fullmatch(r"[a-z0-9_]+\.[a-z0-9_]+", key):
        raise Misfit(place, f"set: key {key!r}, expected section.key")
    if key in OF_RUNNER:
        raise Misfit(place, f"set: key {key!r} is the runner's, expected {OF_RUNNER[key]}")


def check_variable(key: str, place: Place) -> None:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
        raise Misfit(place, f"environment: key {key!r}, expected the name of an environment variable")
    if is_launchers(key) or key == "CUDA_VISIBLE_DEVICES":
        raise Misfit(place, f"environment: {key} is set by the launcher of a case, expected another variable")


def check_metric(key: str, place: Place) -> None:
    if not re.fullmatch(r"[a-z_]+(\.[a-z_]+)*", key):
        raise Misfit(place, f"metric {key!r}, expected a name such as loss or collectives.all_gathers")


class KeyReader:
    """Reads the keys of one file's cases. `root` is the folder that configurations are relative to."""

    def __init__(self, scope: Scope, root: pathlib.Path):
        self._scope = scope
        self._root = root

    def read(self, entries: dict[str, yaml.Node]) -> Keys:
        """All that are among KEYS. A value that does not fit is None after saying so."""
        keys: Keys = {}
        for key, node in entries.items():
            if key in KEYS:
                keys[key] = Given(None, place_of(node))
                with self._scope.problems.collected():
                    keys[key] = Given(self._value(key, node), place_of(node))
        return keys

    def _value(self, key: str, node: yaml.Node) -> Any:
        scope = self._scope
        if key in ("description", "filter"):
            return scope.word(node, key, r"(?s:.+)", "text that is not empty")
        if key == "program":
            return scope.choice(node, key, PROGRAMS)
        if key == "test":
            return scope.word(node, key, r"\w+", "the name of a test executable")
        if key in ("ranks", "steps", "first_step"):
            return scope.integer(node, key)
        if key == "timeout":
            return scope.number(node, "timeout in seconds", low=0.0, open_low=True, high=LONGEST_SECONDS)
        return getattr(self, f"_{key}")(node)

    def _config(self, node: yaml.Node) -> str:
        path = self._scope.word(node, "config", r"(?s:.+)", "the path of a file")
        try:
            found = (self._root / path).is_file()
        except OSError:  # a name that is too long
            found = False
        if not found:
            raise Misfit(place_of(node), f"config: there is no file {path!r} in {self._root}, expected a configuration")
        return path

    def _devices(self, node: yaml.Node) -> tuple[str, ...]:
        devices = [self._scope.choice(item, "devices", DEVICES) for item in self._scope.items(node, "devices")]
        if len(set(devices)) != len(devices):
            raise Misfit(place_of(node), f"devices: got {', '.join(devices)}, expected each of them once")
        return tuple(devices)

    def _map_of(self, node: yaml.Node, what: str, check_key, read, empty: bool) -> Keys:
        result: Keys = {}
        for key, key_node, value in self._scope.entries(node, what, empty):
            with self._scope.problems.collected():
                check_key(key, place_of(key_node))
                result[key] = Given(read(value, f"{what}.{key}"), place_of(value))
        return result

    def _set(self, node: yaml.Node) -> Keys:
        return self._map_of(node, "set", check_setting, self.setting, empty=True)

    def _environment(self, node: yaml.Node) -> Keys:
        return self._map_of(node, "environment", check_variable, self._scope.text, empty=True)

    def _golden(self, node: yaml.Node) -> Keys:
        return self._map_of(node, "golden", check_metric, self._scope.tolerance, empty=False)

    def _bounds(self, node: yaml.Node) -> Keys:
        return self._map_of(node, "bounds", check_metric, self._bound, empty=False)

    def _bound(self, node: yaml.Node, what: str) -> Bound:
        scope = self._scope
        entries = scope.known_entries(node, what, ("at_least", "at_most", "equals", "from_step"))
        from_step = scope.integer(entries["from_step"], f"{what}.from_step") if "from_step" in entries else 1
        limits = {key: scope.number(entries[key], f"{what}.{key}") for key in entries if key != "from_step"}
        exact = limits.pop("equals", None)
        if exact is None and not limits:
            raise Misfit(place_of(node), f"{what}: got no limit, expected at_least, at_most or equals")
        if exact is not None and limits:
            raise Misfit(place_of(node), f"{what}: got equals beside {', '.join(limits)}, expected equals alone")
        low, high = (limits.get("at_least"), limits.get("at_most")) if exact is None else (exact, exact)
        if low is not None and high is not None and low > high:
            raise Misfit(place_of(node), f"{what}: got at_least {low:g} above at_most {high:g}, expected a range")
        return Bound(metric=what.removeprefix("bounds."), at_least=low, at_most=high, from_step=from_step)

    def _equals(self, node: yaml.Node) -> list[dict[str, Any]]:
        """What `Equality` holds, but `case` is given with its place, since placeholders in it are filled in later."""
        node = self._scope.resolved(node)
        items = self._scope.items(node, "equals") if isinstance(node, yaml.SequenceNode) else [node]
        return [self._equality(item) for item in items]

    def _equality(self, node: yaml.Node) -> dict[str, Any]:
        scope = self._scope
        case, weights, metrics = None, None, {}
        for key, key_node, value in scope.entries(node, "equals"):
            if key == "case":
                case = Given(scope.word(value, "equals.case", r"(?s:.+)", "a case's name"), place_of(value))
            elif key == "weights":
                scope.choice(value, "equals.weights", ("bitwise",))
                weights = 0.0
            else:
                with scope.problems.collected():
                    check_metric(key, place_of(key_node))
                    metrics[key] = scope.tolerance(value, f"equals.{key}")
        if case is None:
            raise Misfit(place_of(node), "equals: 'case' is missing, expected the name of another case")
        if not metrics and weights is None:
            raise Misfit(place_of(node), "equals: got nothing to compare, expected a metric or weights")
        return {"case": case, "metrics": metrics, "weights": weights}

    def _throughput(self, node: yaml.Node) -> dict[str, Any]:
        """What `Throughput` holds; `case` as in equals."""
        scope = self._scope
        entries = scope.known_entries(node, "throughput", ("case", "at_least", "pairs"))
        for key in ("case", "at_least"):
            if key not in entries:
                raise Misfit(place_of(node), f"throughput: {key!r} is missing, expected a value")
        case = scope.word(entries["case"], "throughput.case", r"(?s:.+)", "a case's name")
        return {
            "case": Given(case, place_of(entries["case"])),
            "at_least": scope.number(entries["at_least"], "throughput.at_least", low=0.0, open_low=True),
            "pairs": scope.integer(entries["pairs"], "throughput.pairs") if "pairs" in entries else 3,
        }

    def setting(self, node: yaml.Node, what: str) -> str:
        """A value as hsdp_train takes it after `--set section.key=`: a scalar as it stands, a list in flow form."""
        scope = self._scope
        node = scope.resolved(node)
        if isinstance(node, yaml.SequenceNode):
            items = [scope.word(item, f"item of {what}", r"(?s:.+)", "text that is not empty") for item in node.value]
            # JSON's escapes are YAML's, too.
            return f"[{', '.join(json.dumps(item, ensure_ascii=False) for item in items)}]"
        if isinstance(node, yaml.MappingNode) or is_nothing(node):
            raise Misfit(place_of(node), f"{what}: {got(node)}, expected a scalar or a list")
        # --set knows no quotes, and some keys take the bare word for nothing.
        if node.value == "none" and not is_plain(node):
            raise Misfit(place_of(node), f"{what}: {got(node)}, expected none without quotes, or another text")
        return scope.word(node, what, r"(?s:.+)", "a value that is not empty")
