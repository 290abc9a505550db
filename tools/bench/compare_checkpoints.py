#!/usr/bin/env python3
"""Races hsdp_checkpoint_bench against checkpoint_peer.py and prints a table of times and one of their ratios.

  compare_checkpoints.py [--rounds N] [--repeats N] [--ranks N] [--megabytes N] [--folder F] [--drop-cache]
                         [--steps N] [--every N] [--skip files|async] [--bench PATH] [--python PATH]

Both sides run in turn, round after round, so that both see the same machine and disk; docs/benchmarks.md says what the
rows mean.
"""
import argparse
import statistics
import sys

from compare import HERE, ROOT, Runner


def race(runner, mode, shape, extra, rounds):
    """The lines of both sides, round by round."""
    lines = {"hsdp": [], "peer": []}
    for number in range(rounds):
        for program in sorted(lines, reverse=number % 2 == 1):
            lines[program].append(runner.run(program, mode, shape, extra))
    if len({line["parameters"] for side in lines.values() for line in side}) != 1:
        sys.exit(f"the sides have unlike models: {lines}")
    return lines


def row(name, values, limit=""):
    print(f"{name:<34}" + "".join(f"{value:>10.4g}" for value in (statistics.median(values), min(values), max(values)))
          + f"{limit:>8}")


def heading(text):
    print(f"{text:<34}{'median':>10}{'least':>10}{'most':>10}{'limit':>8}", flush=True)


def pooled(lines, key):
    return [value for line in lines for value in line[key]]


def print_files(lines):
    hsdp, peer = lines["hsdp"], lines["peer"]
    print(f"{hsdp[0]['bytes'] / 1e9:.3g} GB over {hsdp[0]['ranks']} ranks")
    heading("seconds")
    for what, other in (("save", "write"), ("load", "read")):
        row(what, pooled(hsdp, f"{what}_s"))
        row(f"plain {other}", pooled(hsdp, f"{other}_s"))
        row(f"DCP {what}", pooled(peer, f"{what}_s"))
    heading("ratios")
    for what, other in (("save", "write"), ("load", "read")):
        ratios = [a / b for a, b in zip(pooled(hsdp, f"{what}_s"), pooled(hsdp, f"{other}_s"))]
        row(f"{what} / plain {other}", ratios, 1.3)
        medians = [[statistics.median(line[f"{what}_s"]) for line in side] for side in (hsdp, peer)]
        row(f"{what} / DCP {what}", [a / b for a, b in zip(*medians)], 1)


def print_async(lines):
    print(f"{lines['hsdp'][0]['bytes'] / 1e9:.3g} GB a save in the background, {lines['hsdp'][0]['ranks']} ranks")
    heading("milliseconds")
    for name, side in (("", lines["hsdp"]), ("DCP ", lines["peer"])):
        row(f"{name}steps during a save", [line["overlapping_step_ms"] for line in side])
        row(f"{name}other steps", [line["other_step_ms"] for line in side])
        row(f"{name}copying", [line["copy_ms"] for line in side])
    heading("ratios")
    row("steps during a save / others", [line["overlapping_to_others"] for line in lines["hsdp"]], 1.1)
    row("copying / step", [line["copy_to_step"] for line in lines["hsdp"]])
    row("DCP steps during a save / others", [line["overlapping_to_others"] for line in lines["peer"]])
    row("DCP copying / step", [line["copy_to_step"] for line in lines["peer"]])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side")
    parser.add_argument("--repeats", type=int, default=2, help="counted saves and loads of a run")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--folder", default=".", help="where files are written, and removed again")
    parser.add_argument("--drop-cache", action="store_true", help="read from the disk")
    parser.add_argument("--steps", type=int, default=40, help="counted steps of a run with saves in the background")
    parser.add_argument("--every", type=int, default=10, help="steps from save to save")
    parser.add_argument("--skip", choices=("files", "async"))
    parser.add_argument("--bench", default=str(ROOT / "build/release/tools/bench/hsdp_checkpoint_bench"))
    parser.add_argument("--python", default=str(ROOT / ".venv/bin/python"))
    options = parser.parse_args()
    runner = Runner({"hsdp": [options.bench], "peer": [options.python, str(HERE / "checkpoint_peer.py")]})
    shared = {"ranks": options.ranks, "folder": options.folder}
    if options.skip != "files":
        shape = {**shared, "megabytes": options.megabytes, "repeats": options.repeats}
        extra = ["--drop-cache"] if options.drop_cache else []
        print_files(race(runner, "files", shape, extra, options.rounds))
    if options.skip != "async":
        shape = {**shared, "steps": options.steps, "every": options.every}
        print_async(race(runner, "async", shape, [], options.rounds))


if __name__ == "__main__":
    main()
