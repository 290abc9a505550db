"""Runs cases in an order in which each finds the runs it is compared with, and says what became of each."""
from __future__ import annotations

import dataclasses
import json
import pathlib
import shlex
import subprocess
import time
import traceback
from typing import Any, Callable, Protocol

from . import checks
from .case import FAILED, FLAKY, LEFT_OUT, PASSED, Case, Result, Run
from .checks import Verdict
from .devices import Devices
from .goldens import GoldenError, golden_path, read_golden, record_golden
from .metrics import MetricsError, read_metrics, read_settings, same_setting, value_of
from .placeholders import fill_out, folder_name

PYTHON_PROGRAMS = {"fsdp2_train": "tests/regression/fsdp2_train.py"}
BUILT_PROGRAMS = {"hsdp_train": "apps/hsdp_train", "plain_train": "tests/plain_train"}


class Starter(Protocol):
    """Starts programs on the machine's devices; see starter.py."""

    # Whether ranks may lie on other hosts, whose devices are not seen from here.
    spreads: bool

    def start(self, case: Case, argv: list[str], environment: dict[str, str], folder: pathlib.Path) -> Run: ...
    def last_lines(self, run: Run) -> list[str]: ...


@dataclasses.dataclass(frozen=True)
class Options:
    root: pathlib.Path
    # Of the built programs.
    build: pathlib.Path
    # With torch, for programs in Python.
    python: str
    out: pathlib.Path
    goldens: pathlib.Path
    # The line that repeats a case alone.
    command: Callable[[Case], str]
    retries: int = 0
    # Why goldens are recorded rather than compared; None: they are compared.
    record_reason: str | None = None


@dataclasses.dataclass
class Attempt:
    """A case's program was run, and this is what that alone showed."""

    run: Run
    verdict: Verdict
    # What the program resolved, and what it was asked for.
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    asked: dict[str, str] = dataclasses.field(default_factory=dict)
    # Of a test executable: why all of it was skipped.
    skipped: str | None = None


class Runner:
    """One invocation. A case's program runs once, however many cases are compared with it, but for retries and pairs."""

    def __init__(self, cases: list[Case], devices: Devices, starter: Starter, environment: dict[str, Any], options: Options):
        self.cases = {case.name: case for case in cases}
        self.devices = devices
        self.starter = starter
        self.environment = environment
        self.options = options
        self.attempts: dict[str, Attempt] = {}
        self.launches: dict[str, int] = {}
        self.results: dict[str, Result] = {}

    def run(self, case: Case) -> Result:
        """What became of a case, found out now unless it was before. KeyboardInterrupt passes, nothing else does."""
        if case.name not in self.results:
            self.results[case.name] = self.find_out(case)
        return self.results[case.name]

    def find_out(self, case: Case) -> Result:
        started = time.monotonic()
        result = Result(case, LEFT_OUT, command=self.options.command(case))
        reason = self.misfit(case)
        if reason is not None:
            result.reasons = [reason]
            return result
        for attempt_number in range(self.options.retries + 1):
            if attempt_number > 0:
                self.attempts.pop(case.name, None)
            former = result.reasons
            try:
                self.judge(case, result)
            except Exception:  # what a program wrote can be odder than all that is thought of here; the other cases go on
                result.status = FAILED
                result.reasons = [f"the runner could not deal with this case: {traceback.format_exc(limit=-4)}"]
            if result.status != FAILED:
                break
        if result.status == PASSED and attempt_number > 0:
            result.status = FLAKY
            result.reasons = [f"passed at attempt {attempt_number + 1}; before: {reason}" for reason in former]
        result.seconds = time.monotonic() - started
        return result

    def misfit(self, case: Case) -> str | None:
        """Why a case, or one that it needs, cannot run on these devices."""
        for name in (*case.needs, case.name):
            needed = self.cases[name]
            who = "" if name == case.name else f"it needs {name}, which "
            if name != case.name and (deeper := self.misfit(needed)):
                return who + deeper
            if self.devices.kind not in needed.devices:
                return f"{who}runs on {' or '.join(needed.devices)}, not on {self.devices.kind}"
            if self.devices.kind == "cuda" and not self.starter.spreads and needed.ranks > len(self.devices.gpus):
                return f"{who}needs {needed.ranks} GPUs, {len(self.devices.gpus)} are visible"
        return None

    def judge(self, case: Case, result: Result) -> None:
        """Fills in everything but the time."""
        result.status, result.reasons, result.confirmed, result.curves = FAILED, [], [], []
        for name in case.needs:
            needed = self.run(self.cases[name])
            if needed.status not in (PASSED, FLAKY):
                result.reasons = [f"{name}, which it needs, {needed.status.replace('_', ' ')}: {needed.reasons[0]}"]
                result.log_tail, result.telling_run = needed.log_tail, needed.telling_run
                return
        if case.name not in self.attempts:
            self.attempts[case.name] = self.launch(case)
        attempt = self.attempts[case.name]
        result.runs.append(attempt.run)
        former, result.telling_run = result.telling_run, attempt.run
        if attempt.skipped is not None:
            result.status, result.reasons = LEFT_OUT, [attempt.skipped]
            return
        verdict = Verdict(list(attempt.verdict.failures), list(attempt.verdict.confirmed))
        if not verdict.failures and not case.is_test:
            self.compare(case, attempt, result, verdict)
        result.reasons, result.confirmed = verdict.failures, verdict.confirmed
        result.status = FAILED if verdict.failures else PASSED
        if result.status == FAILED:
            result.log_tail = self.starter.last_lines(result.telling_run)
        else:
            result.telling_run = former  # of the attempt that failed
        if attempt.run.metrics:
            result.figures = figures_of(attempt.run)

    def launch(self, case: Case) -> Attempt:
        number = self.launches[case.name] = self.launches.get(case.name, 0) + 1
        folder = self.options.out / "cases" / folder_name(case.name) / f"run-{number}"
        folder.mkdir(parents=True)
        outs = {name: attempt.run.folder for name, attempt in self.attempts.items()}

        def filled(text: str) -> str:
            return fill_out(text, folder, outs)

        environment = {name: filled(text) for name, text in case.environment.items()}
        settings: dict[str, str] = {}
        if case.is_test:
            report = folder / "tests.json"
            argv = [str(self.options.build / "tests" / case.program), f"--gtest_filter={case.filter}", f"--gtest_output=json:{report}"]
        else:
            argv = [*self.program(case), "--config", case.config]
            settings = {name: filled(text) for name, text in case.settings.items()}
            settings |= {"metrics.folder": str(folder), "metrics.log_every": "1"}
            if case.steps is not None:
                settings["training.steps"] = str(case.steps)
            for name, text in settings.items():
                argv += ["--set", f"{name}={text}"]
        if not pathlib.Path(argv[0]).exists():
            run = Run(folder, shlex.join(argv), [], 0.0)
            return Attempt(run, Verdict([f"{argv[0]} is not there; is it built, and has it this name?"]))
        run = self.starter.start(case, argv, environment, folder)
        attempt = Attempt(run, process_verdict(run, case), asked=settings)
        if case.is_test:
            read_test_report(report, attempt)
        elif not attempt.verdict.failures:
            self.read_run(case, attempt)
        return attempt

    def program(self, case: Case) -> list[str]:
        if case.program in PYTHON_PROGRAMS:
            return [self.options.python, str(self.options.root / PYTHON_PROGRAMS[case.program])]
        return [str(self.options.build / BUILT_PROGRAMS[case.program])]

    def read_run(self, case: Case, attempt: Attempt) -> None:
        """What a training program left, if it left all that it should."""
        try:
            attempt.run.metrics = read_metrics(attempt.run.folder / "metrics.jsonl")
            attempt.settings = read_settings(attempt.run.folder / "config.yaml")
            last = int(attempt.settings["training.steps"])
        except (MetricsError, KeyError, ValueError, TypeError, OverflowError) as error:
            attempt.verdict.failures.append(f"the run's files: {error!r}")
            return
        # A program that does not hear what a case asks for would otherwise be equal to what it is compared with.
        for name, text in attempt.asked.items():
            if not same_setting(text, attempt.settings.get(name)):
                attempt.verdict.failures.append(f"{name} is {attempt.settings.get(name)!r} in the run's config.yaml, expected {text}")
        attempt.verdict.add(checks.check_steps(attempt.run.metrics, case.first_step, last, case.ranks))

    def compare(self, case: Case, attempt: Attempt, result: Result, verdict: Verdict) -> None:
        lines = attempt.run.metrics
        shown = {"loss": None, "grad_norm": None}
        for bound in case.bounds:
            verdict.add(checks.check_bound(lines, bound))
            shown[bound.metric] = None
        others = []
        for equality in case.equals:
            other = self.attempts[equality.case]
            verdict.add(checks.compare(lines, other.run.metrics, equality.case, equality.metrics))
            shown |= dict.fromkeys(equality.metrics)
            others.append((equality.case, other.run.metrics))
            if equality.weights is not None:
                verdict.add(self.compare_weights(attempt.run, other.run, equality.case))
        if case.throughput is not None:
            verdict.add(self.race(case, result))
        if case.golden is not None:
            shown |= dict.fromkeys(case.golden)
            self.compare_with_golden(case, attempt, verdict, others)
        for metric in shown:
            result.curves += [checks.curve(label, metric, of) for label, of in ((case.name, lines), *others)]

    def compare_with_golden(self, case: Case, attempt: Attempt, verdict: Verdict, others: list) -> None:
        path = golden_path(self.options.goldens, case, self.environment)
        lines = attempt.run.metrics
        if self.options.record_reason is not None:
            # What fails otherwise is nothing to hold later runs to.
            missing = [metric for metric in case.golden for line in lines if value_of(line, metric) is None]
            if missing:
                verdict.failures.append(f"{missing[0]} is not a number at every step, expected one to record")
            if not verdict.failures:
                try:
                    record_golden(path, case, lines, attempt.settings, self.environment, self.options.record_reason)
                    verdict.confirmed.append(f"recorded {path}")
                except OSError as error:
                    verdict.failures.append(f"golden {path} cannot be written: {error}")
            return
        try:
            golden = read_golden(path, case, attempt.settings)
        except GoldenError as error:
            verdict.failures.append(f"{error}; if this run is right, record it with: {self.options.command(case)} "
                                    "--record-goldens --reason 'WHY'")
            return
        verdict.add(checks.compare(lines, golden, "the golden", case.golden))
        if len(golden) != len(lines):
            verdict.failures.append(f"the golden has {len(golden)} steps, the run {len(lines)}")
        others.append(("the golden", golden))

    def compare_weights(self, run: Run, other: Run, label: str) -> Verdict:
        folders = []
        for one in (run, other):
            steps = sorted((one.folder / "checkpoints").glob("step-*"), key=lambda path: int_or(path.name[5:], -1))
            if not steps:
                return Verdict([f"weights are compared and {one.folder / 'checkpoints'} has no checkpoint; set "
                                "checkpoint.folder to '{out}/checkpoints' in both cases"])
            folders.append(steps[-1])
        if folders[0].name != folders[1].name:
            return Verdict([f"the last checkpoint is {folders[0].name}, that of {label} is {folders[1].name}"])
        argv = [str(self.options.build / "apps/hsdp_checkpoint"), "diff", *map(str, folders)]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=300, check=False,
                                  stdin=subprocess.DEVNULL)
        except (OSError, subprocess.TimeoutExpired) as error:
            return Verdict([f"{shlex.join(argv)}: {error}"])
        if done.returncode == 0:
            return Verdict(confirmed=[f"weights after {folders[0].name} are bitwise those of {label}"])
        text = " ".join((done.stdout + done.stderr).split())
        return Verdict([f"weights after {folders[0].name} differ from those of {label}: {text[:400]}"])

    def race(self, case: Case, result: Result) -> Verdict:
        """Both cases again, in turn, so that both see the same machine; who goes first alternates."""
        throughput = case.throughput
        contestants = (case, self.cases[throughput.case])
        pairs = []
        for number in range(throughput.pairs):
            found: dict[str, float] = {}
            for one in contestants if number % 2 == 0 else reversed(contestants):
                attempt = self.launch(one)
                result.runs.append(attempt.run)
                if attempt.verdict.failures:
                    result.telling_run = attempt.run
                    return Verdict([f"{one.name} failed in pair {number + 1}: {attempt.verdict.failures[0]}"])
                speed = checks.tokens_per_second(attempt.run.metrics)
                if not speed:
                    return Verdict([f"{one.name} logged no tokens_per_second in pair {number + 1}"])
                found[one.name] = speed
            pairs.append((found[case.name], found[throughput.case]))
        return checks.check_throughput(pairs, throughput.case, throughput.at_least)


def process_verdict(run: Run, case: Case) -> Verdict:
    """How the processes ended, and what they left behind."""
    verdict = Verdict()
    if run.problem:
        verdict.failures.append(run.problem)
    elif run.timed_out:
        ranks = f", ranks {', '.join(map(str, run.stopped))} still running" if run.stopped else ""
        verdict.failures.append(f"took longer than its time limit of {case.timeout_seconds:g} s and was stopped{ranks}")
    elif run.failing_rank is not None:
        code = run.exit_codes[run.failing_rank] if run.failing_rank < len(run.exit_codes) else None
        how = "ended with an unknown code" if code is None else f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
        verdict.failures.append(f"rank {run.failing_rank} {how}")
    elif any(code != 0 for code in run.exit_codes) or not run.exit_codes:
        verdict.failures.append(f"the processes ended with {run.exit_codes}, expected 0")
    verdict.failures += [f"left behind: {leftover}" for leftover in run.leftovers]
    return verdict


def read_test_report(path: pathlib.Path, attempt: Attempt) -> None:
    """What GoogleTest says about itself: cases that ran, were skipped, or failed."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        tests = [(f"{suite['name']}.{test['name']}", test) for suite in report["testsuites"] for test in suite["testsuite"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        attempt.verdict.failures.append(f"the test's report {path} cannot be read: {error!r}")
        return
    failed = [name for name, test in tests if test.get("failures")]
    skipped = [(name, test) for name, test in tests if test.get("result") == "SKIPPED"]
    ran = sum(test.get("result") == "COMPLETED" for _, test in tests)
    if failed:
        attempt.verdict.failures.append(f"{len(failed)} of {len(tests)} tests failed: {', '.join(failed[:8])}")
    elif not tests:
        attempt.verdict.failures.append("no test fits its filter, expected at least one")
    elif ran == 0 and len(skipped) < len(tests):
        attempt.verdict.failures.append(f"none of {len(tests)} tests ran, expected at least one; disabled ones do not")
    elif ran == 0 and not attempt.verdict.failures:
        why = [entry.get("message", "") for _, test in skipped for entry in test.get("skipped", [])]
        attempt.skipped = f"all {len(tests)} tests were skipped: {' '.join(why[0].split()) if why else 'no reason given'}"
    else:
        rest = f", {len(skipped)} skipped: {', '.join(name for name, _ in skipped[:8])}" if skipped else ""
        attempt.verdict.confirmed.append(f"{ran} tests passed{rest}")


def figures_of(run: Run) -> dict[str, float]:
    last = run.metrics[-1]
    figures = {"final_loss": value_of(last, "loss"), "tokens_per_second": checks.tokens_per_second(run.metrics),
               "peak_memory_bytes": value_of(last, "peak_memory_bytes")}
    return {name: float(value) for name, value in figures.items() if value is not None}


def int_or(text: str, default: int) -> int:
    return int(text) if text.isdecimal() and text.isascii() else default
