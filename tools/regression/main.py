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
from .processes import LaunchError
from .reports import write_reports
from .runner import Options, Runner
from .starter import LocalStarter

ROOT = pathlib.Path(__file__).resolve().parents[2]
SUCCESS, SOME_FAILED, BAD_LIST, NOTHING_FITS = 0, 1, 2, 3
INTERRUPTED = "the runner was interrupted"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main(arguments: list[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.record_goldens != (options.reason is not None):
        parser.error("--record-goldens and --reason TEXT are given together: the reason is kept beside the curve")
    if options.reason is not None and not options.reason.strip():
        parser.error("--reason is empty, expected why the recorded curve is right")
    if options.record_goldens and options.retries:
        parser.error("--retries does not go with --record-goldens: what passes now and then is nothing to hold later runs to")
    # Whoever reads `latest` must not take a former report for this one's.
    with contextlib.suppress(OSError):
        (out_folder(options) / "latest").unlink()
    try:
        cases = read_list(options.list, ROOT)
        selected = select(cases.cases, options.only) if options.only is not None else list(cases.cases)
        selected = part(selected, *options.shard) if options.shard else selected
    except ListError as error:
        print(error, file=sys.stderr)
        return BAD_LIST
    if options.record_goldens and selected and not any(case.golden for case in selected):
        print("[list] none of the chosen cases has a golden, expected one to record", file=sys.stderr)
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
    if not selected:
        print("[list] this part of the list has no cases; it has fewer groups of cases than there are parts", file=sys.stderr)
        return NOTHING_FITS
    try:
        with stopping_on_signals():
            return run(options, arguments, cases, selected, devices)
    except KeyboardInterrupt:
        print("[regress] interrupted before the first case", file=sys.stderr)
        return SOME_FAILED
    except LaunchError as error:
        print(error, file=sys.stderr)
        return BAD_LIST
    except OSError as error:
        print(f"[regress] {out_folder(options)}: {error}; reports cannot be written there", file=sys.stderr)
        return SOME_FAILED


def out_folder(options: argparse.Namespace) -> pathlib.Path:
    return (options.out or ROOT / "runs/regress" / options.list.stem).resolve()


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
    out, build = out_folder(options), options.build.resolve()
    console = Console()
    console.begin(cases.name, len(selected), devices.name)
    starter = LocalStarter(ROOT, sys.executable, devices, options.launcher)
    environment = describe_environment(ROOT, build, sys.executable, devices)
    history = read_history(out, cases.name)
    folder = new_run_folder(out)
    results: list[Result] = []
    runner = Runner(cases.cases, devices, starter, environment, Options(
        root=ROOT, build=build, python=sys.executable, out=folder, goldens=cases.goldens.resolve(),
        command=lambda case: repeat_command(options, case), retries=options.retries, record_reason=options.reason))
    try:
        for case in selected:
            results.append(runner.run(case))
            console.case_done(results[-1])
    except KeyboardInterrupt:
        ignore_signals()
        # Never green: the case that ran or was about to has failed, those behind it are left out.
        status = FAILED
        for case in selected[len(results):]:
            results.append(Result(case, status, [INTERRUPTED], command=repeat_command(options, case)))
            if status == FAILED and starter.current is not None:
                results[-1].runs = [starter.current]
                results[-1].telling_run, results[-1].log_tail = starter.current, starter.last_lines(starter.current)
            console.case_done(results[-1])
            status = LEFT_OUT
    ignore_signals()
    write_reports(folder, cases.name, results, environment, history, shlex.join(["tools/regress", *arguments]))
    point_latest(out, folder)
    for result in results:
        console.recorded(result)
    console.summary(results, str(folder / "report.html"))
    return exit_code(results)


def exit_code(results: list[Result]) -> int:
    statuses = [result.status for result in results]
    if FAILED in statuses:
        return SOME_FAILED
    return SUCCESS if PASSED in statuses or FLAKY in statuses else NOTHING_FITS


def repeat_command(options: argparse.Namespace, case: Case) -> str:
    words = [str(ROOT / "tools/regress"), str(options.list.resolve()), "--only", case.name, "--device", options.device]
    if options.launcher:
        words += ["--launcher", options.launcher]
    if options.build.resolve() != ROOT / "build/release":
        words += ["--build", str(options.build.resolve())]
    return shlex.join(words)


@contextlib.contextmanager
def stopping_on_signals():
    """SIGTERM is as Ctrl-C: it ends the running case, and the reports say so."""
    def interrupt(*_):
        raise KeyboardInterrupt

    former = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """While reports are written: impatience must not cost them."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
