"""What a list of regression cases says once it is read, and what running it found."""
from __future__ import annotations

import dataclasses
import pathlib
from typing import Any


@dataclasses.dataclass(frozen=True)
class Place:
    """Where something is written in a list."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclasses.dataclass(frozen=True)
class Equality:
    """The metrics of every step that both runs have are those of another case."""

    case: str
    # Metric -> the relative difference that is still equal; 0.0 is bitwise.
    metrics: dict[str, float]
    # The same for the weights of the last checkpoint; None: they are not compared.
    weights: float | None = None


@dataclasses.dataclass(frozen=True)
class Bound:
    """What a metric is allowed to be at every step from `from_step` on."""

    metric: str
    at_least: float | None = None
    at_most: float | None = None
    from_step: int = 1


@dataclasses.dataclass(frozen=True)
class Throughput:
    """Tokens a second against another case, as the median ratio of pairs that run in turn."""

    case: str
    at_least: float
    pairs: int = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of the result. A case without expectations still has to end well, with a finite loss at every step.

    Texts in `settings` and `environment` may hold `{out}`, this case's folder, and `{out:NAME}`, that of another case,
    which then runs before.
    """

    # Unique in its list; a matrix adds its values, as in `sharded[ranks=3,reshard=true]`.
    name: str
    place: Place
    description: str = ""
    # hsdp_train, plain_train, fsdp2_train, or a test executable's name where `is_test`.
    program: str = "hsdp_train"
    is_test: bool = False
    # Of a test executable: its --gtest_filter.
    filter: str = "*"
    # Of a training program, as written in the list: relative to the project's folder.
    config: str = ""
    # `section.key` -> YAML text, as after --set.
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    ranks: int = 1
    # None: what the configuration says.
    steps: int | None = None
    # The first logged step: 1 but for a case that goes on from a checkpoint.
    first_step: int = 1
    # Kinds of device that it can run on: a part of ("cpu", "cuda").
    devices: tuple[str, ...] = ("cpu", "cuda")
    timeout_seconds: float = 300.0
    # Metric -> relative tolerance against the recorded curve; None: there is none.
    golden: dict[str, float] | None = None
    equals: tuple[Equality, ...] = ()
    bounds: tuple[Bound, ...] = ()
    throughput: Throughput | None = None
    # Names of the cases whose runs this one reads, in the order in which they are named.
    needs: tuple[str, ...] = ()


@dataclasses.dataclass
class Run:
    """One launch of a case's program."""

    folder: pathlib.Path
    # As a shell would take it, for people.
    command: str
    # By rank, None where unknown: a launcher that hides its ranks has one entry.
    exit_codes: list[int | None]
    seconds: float
    timed_out: bool = False
    # Ranks that still ran at the time limit, where they are known.
    stopped: list[int] = dataclasses.field(default_factory=list)
    # The rank that failed first.
    failing_rank: int | None = None
    # Why it could not be started.
    problem: str = ""
    # rank -> file, stdout and stderr together.
    logs: dict[int, pathlib.Path] = dataclasses.field(default_factory=dict)
    # The log whose end tells what went wrong.
    telling_log: pathlib.Path | None = None
    # Sentences: processes, ports, shared memory or device memory that outlived the run.
    leftovers: list[str] = dataclasses.field(default_factory=list)
    # One object a logged step, as in metrics.jsonl.
    metrics: list[dict[str, Any]] = dataclasses.field(default_factory=list)


PASSED, FAILED, FLAKY, LEFT_OUT = "passed", "failed", "flaky", "left_out"


@dataclasses.dataclass
class Curve:
    """One metric by step, for the report's charts: `label` is this case, another case, or a golden."""

    label: str
    metric: str
    steps: list[int]
    values: list[float]


@dataclasses.dataclass
class Result:
    """What became of a case."""

    case: Case
    # PASSED, FAILED, FLAKY (failed, then passed when tried again) or LEFT_OUT.
    status: str
    # One sentence each: why it failed or was left out. Empty when it passed.
    reasons: list[str] = dataclasses.field(default_factory=list)
    # What was compared and found right, with figures.
    confirmed: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    runs: list[Run] = dataclasses.field(default_factory=list)
    # The last lines of the failing rank.
    log_tail: list[str] = dataclasses.field(default_factory=list)
    # Whose lines these are.
    telling_run: Run | None = None
    curves: list[Curve] = dataclasses.field(default_factory=list)
    # Repeats this case alone.
    command: str = ""
    # For history: name -> figure, for example tokens_per_second, final loss.
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
