"""The command line of tools/regress."""
from __future__ import annotations

import argparse
import contextlib
import pathlib
import shlex
import signal
import sys

from .case import FAILED, FLAKY, LEFT_OUT, PASSED, Case, Result
from .console import Console
from .devices import DeviceError, Devices, find_devices
from .environment import describe_environment
from .history import new_run_folder, point_latest, read_history
from .listing import CaseList, ListError, part, read_list, select
from .reports import write_reports
from .runner import Options, Runner
from .starter import LocalStarter

ROOT = pathlib.Path(__file__).resolve().parents[2]
SUCCESS, SOME_FAILED, BAD_LIST, NOTHING_FITS = 0, 1, 2, 3
INTERRUPTED = "not run: the runner was interrupted"


def main(arguments: list[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.record_goldens != (options.reason is not None):
        parser.error("--record-goldens and --reason TEXT are given together: the reason is kept beside the curve")
    if options.reason is not None and not options.reason.strip():
        parser.error("--reason is empty, expected why the recorded curve is right")
    try:
        cases = read_list(options.list, ROOT)
        selected = select(cases.cases, options.only) if options.only else list(cases.cases)
        selected = part(selected, *options.shard) if options.shard else selected
    except ListError as error:
        print(error, file=sys.stderr)
        return BAD_LIST
    try:
        devices = find_devices(options.device)
    except DeviceError as error:
        print(error, file=sys.stderr)
        return NOTHING_FITS
    if len(devices.gpus) < options.require_gpus:
        print(f"[device] {len(devices.gpus)} GPUs are visible, expected at least {options.require_gpus} (--require-gpus)",
              file=sys.stderr)
        return NOTHING_FITS
    return run(options, arguments, cases, selected, devices)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/regress", description="Runs a list of regression cases and reports what held.", epilog="Exit codes: 0 at "
        "least one case ran and none failed; 1 some failed; 2 the list or the command line is wrong; 3 nothing fitted the "
        "devices. docs/regression.md has the rest.")
    parser.add_argument("list", type=pathlib.Path, metavar="LIST.yaml")
    parser.add_argument("--only", metavar="PATTERN", help="cases by name; * and ? stand for anything, commas part several")
    parser.add_argument("--shard", type=shard, metavar="i/n", help="the i-th of n parts of the list, for several nodes")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs where there are any")
    parser.add_argument("--require-gpus", type=natural, default=0, metavar="N", help="stop with 3 where fewer are visible")
    parser.add_argument("--launcher", choices=("torchrun", "srun"), help="how ranks start; by default directly, on this host")
    parser.add_argument("--out", type=pathlib.Path, metavar="FOLDER", help="of reports; default runs/regress/<list>")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release", metavar="FOLDER", help="of the programs")
    parser.add_argument("--retries", type=natural, default=0, metavar="N", help="for cases that fail; what then passes is flaky")
    parser.add_argument("--record-goldens", action="store_true", help="write the curves of the cases instead of comparing them")
    parser.add_argument("--reason", metavar="TEXT", help="why the recorded curves are right")
    return parser


def natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}, expected a whole number from 0 on")
    return int(text)


def shard(text: str) -> tuple[int, int]:
    one, slash, many = text.partition("/")
    if not (slash and one.isdecimal() and many.isdecimal() and 1 <= int(one) <= int(many)):
        raise argparse.ArgumentTypeError(f"{text!r}, expected i/n with 1 <= i <= n, as in 2/4")
    return int(one), int(many)


def run(options: argparse.Namespace, arguments: list[str], cases: CaseList, selected: list[Case], devices: Devices) -> int:
    out = (options.out or ROOT / "runs/regress" / cases.name).resolve()
    build = options.build.resolve()
    history = read_history(out, cases.name)
    folder = new_run_folder(out)
    environment = describe_environment(ROOT, build, sys.executable, devices)
    console = Console()
    starter = LocalStarter(ROOT, sys.executable, devices, options.launcher)
    runner = Runner(cases.cases, devices, starter, environment, Options(
        root=ROOT, build=build, python=sys.executable, out=folder, goldens=cases.goldens.resolve(),
        command=lambda case: repeat_command(options, case), retries=options.retries, record_reason=options.reason))
    results: list[Result] = []
    with stopping_on_signals():
        try:
            for case in selected:
                results.append(runner.run(case))
                console.case_done(results[-1])
        except KeyboardInterrupt:
            interrupted = True
            for case in selected[len(results):]:
                results.append(Result(case, LEFT_OUT, [INTERRUPTED], command=repeat_command(options, case)))
        else:
            interrupted = False
    write_reports(folder, cases.name, results, environment, history, shlex.join(["tools/regress", *arguments]))
    point_latest(out, folder)
    console.summary(results, str(folder / "report.html"))
    return SOME_FAILED if interrupted else exit_code(results)


def exit_code(results: list[Result]) -> int:
    statuses = [result.status for result in results]
    if FAILED in statuses:
        return SOME_FAILED
    return SUCCESS if PASSED in statuses or FLAKY in statuses else NOTHING_FITS


def repeat_command(options: argparse.Namespace, case: Case) -> str:
    words = ["tools/regress", str(options.list), "--only", case.name, "--device", options.device]
    if options.launcher:
        words += ["--launcher", options.launcher]
    if options.build.resolve() != ROOT / "build/release":
        words += ["--build", str(options.build)]
    return shlex.join(words)


@contextlib.contextmanager
def stopping_on_signals():
    """SIGTERM ends the running case and is reported, as Ctrl-C is."""
    def interrupt(*_):
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
