#!/usr/bin/env python3
"""Races hsdp_bench against peer.py and prints one JSON line a case: medians of both sides and their ratio.

  compare.py [--cases PATTERN] [--rounds N] [--steps N] [--bench PATH] [--python PATH]
  compare.py --device cuda [--ranks N] [--peak-tflops X] [--override NAME=NUMBER ...] [--peer-first] ...

All sides of a case run in turn, round after round, so that both see the same machine; docs/benchmarks.md says what the
keys mean. With --device cuda the cases are the sizes, in bf16, with a GPU a rank.
"""
import argparse
import fnmatch
import json
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent


class Runner:
    """Starts one side and returns its line. `programs` has the command of each. Lines are appended to the file `runs`,
    where one is named, as soon as they are there."""

    def __init__(self, programs, runs=None):
        self.programs = programs
        self.runs = runs

    def run(self, program, mode, shape, extra=()):
        command = [*self.programs[program], mode, *extra]
        for name, value in shape.items():
            command += [f"--{name}", str(value)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}\n{done.stderr}")
        # Libraries may print there as well, NCCL with NCCL_DEBUG for one.
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            sys.exit(f"{' '.join(command)} printed no figures\n{done.stdout}{done.stderr}")
        line = json.loads(lines[-1])
        if self.runs:
            with open(self.runs, "a", encoding="utf-8") as file:
                file.write(json.dumps({"program": program, **figures({**shape, **line})}) + "\n")
        return line


class Sides:
    """The lines of several sides of one case, round by round."""

    def __init__(self, runner, sides, shape, rounds, peer_first=False):
        self.lines = {name: [] for name in sides}
        for round_number in range(rounds):
            # Whoever goes first has the machine as the round before left it: take turns.
            order = list(sides) if (round_number + peer_first) % 2 == 0 else list(reversed(sides))
            for name in order:
                program, mode, *extra = sides[name]
                self.lines[name].append(runner.run(program, mode, shape, *extra))
        parameters = {name: lines[0]["parameters"] for name, lines in self.lines.items()}
        if len(set(parameters.values())) != 1:
            sys.exit(f"the sides have unlike models: {parameters}")
        self.parameters = next(iter(parameters.values()))

    def median(self, name, key):
        return statistics.median(line[key] for line in self.lines[name])

    def ratios(self, name, other, value):
        return [value(a) / value(b) for a, b in zip(self.lines[name], self.lines[other])]

    def step_ratios(self, name, other):
        return self.ratios(name, other, lambda line: line["step_ms"])

    def processor_ratios(self, name, other):
        return self.ratios(name, other, lambda line: line["processor_ms"])


def figures(value):
    """Rounds to four significant digits, at any depth."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, list):
        return [figures(one) for one in value]
    if isinstance(value, dict):
        return {key: figures(one) for key, one in value.items()}
    return value


def spread(ratios):
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def overhead(runner, options):
    """What sharding adds to a step at one rank, a unit: 16 blocks and the root."""
    shape = {"ranks": 1, "width": 64, "layers": 16, "batch": 1, "sequence": 8, "steps": 5 * options.steps}
    sides = Sides(runner, {
        "hsdp": ("hsdp", "hsdp"),
        "plain": ("hsdp", "alone"),
        "fsdp2": ("peer", "fsdp2"),
        "peer_plain": ("peer", "alone"),
    }, shape, options.rounds)
    units = shape["layers"] + 1
    added = {
        name: [(a["step_ms"] - b["step_ms"]) / units for a, b in zip(sides.lines[name], sides.lines[plain])]
        for name, plain in (("hsdp", "plain"), ("fsdp2", "peer_plain"))
    }
    return {
        "units": units,
        "parameters": sides.parameters,
        "step_ms": {name: sides.median(name, "step_ms") for name in sides.lines},
        "added_ms_a_unit": {name: spread(values) for name, values in added.items()},
        "limit_ms": 0.15,
    }


def race(mode, peer_mode, width, layers):
    """Two ranks over Gloo: a peer, and copies that do not communicate, which no scheme can beat."""

    def case(runner, options):
        shape = {"ranks": 2, "width": width, "layers": layers, "batch": 2, "sequence": 128, "steps": options.steps}
        sides = Sides(runner, {
            "hsdp": ("hsdp", mode),
            peer_mode: ("peer", peer_mode),
            "alone": ("hsdp", "alone"),
        }, shape, options.rounds)
        return {
            **shape,
            "parameters": sides.parameters,
            "step_ms": {name: sides.median(name, "step_ms") for name in sides.lines},
            "processor_ms": {name: sides.median(name, "processor_ms") for name in sides.lines},
            "to_peer": spread(sides.step_ratios("hsdp", peer_mode)),
            "processor_to_peer": spread(sides.processor_ratios("hsdp", peer_mode)),
            "to_alone": spread(sides.step_ratios("hsdp", "alone")),
            "peer_to_alone": spread(sides.step_ratios(peer_mode, "alone")),
        }

    return case


def memory(runner, options):
    """Two ranks: resident memory at its peak against the peer's, and counted bytes against what must be there."""
    shape = {"ranks": 2, "width": 768, "layers": 8, "batch": 2, "sequence": 128, "steps": 5}
    sides = Sides(runner, {"hsdp": ("hsdp", "hsdp"), "fsdp2": ("peer", "fsdp2")}, shape, min(options.rounds, 3))
    counted = runner.run("hsdp", "hsdp", shape, ["--memory"])
    plain = runner.run("hsdp", "alone", {**shape, "ranks": 1}, ["--memory"])
    limit = 4 * counted["shard_mib"] + counted["two_units_mib"] + plain["activation_mib"]
    peak = {name: sides.median(name, "peak_rss_mib") for name in sides.lines}
    added = {name: peak[name] - sides.median(name, "start_rss_mib") for name in sides.lines}
    return {
        **shape,
        "parameters": sides.parameters,
        "peak_rss_mib": peak,
        "peak_ratio": peak["hsdp"] / peak["fsdp2"],
        "beyond_start_mib": added,
        "beyond_start_ratio": added["hsdp"] / added["fsdp2"],
        "limit_ratio": 0.6,
        "counted": {
            "peak_mib": counted["peak_tensor_mib"],
            "four_shards_mib": 4 * counted["shard_mib"],
            "two_units_mib": counted["two_units_mib"],
            "activation_mib": plain["activation_mib"],
            "ratio": counted["peak_tensor_mib"] / limit,
            "limit_ratio": 1.1,
        },
    }


# Dense bf16 peaks in TFLOP/s, by a part of the name that CUDA gives.
PEAK_TFLOPS = {
    "A100": 312,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H200 NVL": 835,
    "H200": 989,
    "GH200": 989,
    "GB200": 2500,
    "B200": 2250,
}


def peak_tflops(device_name):
    """None for a GPU that is not known, and for the host."""
    for part, peak in PEAK_TFLOPS.items():
        if part in device_name:
            return peak
    return None


def size(name):
    """A model by name, sharded over the ranks in bf16: speed, use of the device, and memory."""

    def case(runner, options):
        shape = {"size": name, "ranks": options.ranks, "steps": options.steps, "device": options.device}
        shape |= dict(options.override)
        sides = Sides(runner, {"hsdp": ("hsdp", "hsdp", ["--bf16"]), "fsdp2": ("peer", "fsdp2", ["--bf16"])}, shape,
                      options.rounds, options.peer_first)
        first = sides.lines["hsdp"][0]
        peak = options.peak_tflops or peak_tflops(first["device_name"])

        def of_all(key):
            if key not in first:
                return None  # the host's allocator does not count
            return {side: sides.median(side, key) for side in sides.lines}

        tflops = of_all("model_tflops_a_rank")
        tokens = sides.ratios("hsdp", "fsdp2", lambda line: line["tokens_per_second"])
        return {
            **{key: first[key] for key in ("device", "device_name", "ranks", "width", "layers", "batch", "sequence")},
            "vocabulary": first["vocabulary"],
            "steps": options.steps,
            "parameters": sides.parameters,
            "step_ms": of_all("step_ms"),
            "tokens_per_second": of_all("tokens_per_second"),
            "tokens_to_peer": spread(tokens),
            "model_tflops_a_rank": tflops,
            "peak_tflops": peak,
            "mfu": {side: value / peak for side, value in tflops.items()} if peak else None,
            "peak_allocated_mib": of_all("peak_allocated_mib"),
            "peak_reserved_mib": of_all("peak_reserved_mib"),
        }

    return case


CASES = {
    "overhead": overhead,
    "sharded_256x4": race("hsdp", "fsdp2", 256, 4),
    "sharded_512x8": race("hsdp", "fsdp2", 512, 8),
    "sharded_768x8": race("hsdp", "fsdp2", 768, 8),
    "replicated_512x8": race("hsdp-ddp", "ddp", 512, 8),
    "memory": memory,
}
SIZE_CASES = {f"size_{name}": size(name) for name in ("small", "medium", "large")}


def override(text):
    name, equals, number = text.partition("=")
    if not equals or not number.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}, expected NAME=NUMBER")
    return name, int(number)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {**CASES, **SIZE_CASES}
    parser.add_argument("--cases", help=f"a pattern of {', '.join(known)}; by default those of the device")
    parser.add_argument("--device", choices=("host", "cuda"), default="host", help="of the sizes")
    parser.add_argument("--ranks", type=int, default=1, help="of the sizes")
    parser.add_argument("--peak-tflops", type=float, help="of one GPU in bf16, where its name is not known")
    parser.add_argument("--override", type=override, action="append", default=[], metavar="NAME=NUMBER",
                        help="an option of both programs for the sizes, for example batch=4")
    parser.add_argument("--peer-first", action="store_true", help="of the sizes, in the first round")
    parser.add_argument("--runs", metavar="FILE", help="append what each run of a side printed, as soon as it has")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side")
    parser.add_argument("--steps", type=int, default=10, help="counted steps of a run")
    parser.add_argument("--bench", default=str(ROOT / "build/release/tools/bench/hsdp_bench"))
    parser.add_argument("--python", default=str(ROOT / ".venv/bin/python"))
    options = parser.parse_args()
    if options.cases is None:
        chosen = list(SIZE_CASES if options.device == "cuda" else CASES)
    else:
        chosen = [name for name in known if fnmatch.fnmatch(name, options.cases)]
    if not chosen:
        parser.error(f"no case matches {options.cases}; there are {', '.join(known)}")
    if options.device == "cuda" and not set(chosen) <= set(SIZE_CASES):
        parser.error(f"only {', '.join(SIZE_CASES)} run on cuda")
    runner = Runner({"hsdp": [options.bench], "peer": [options.python, str(HERE / "peer.py")]}, options.runs)
    for name in chosen:
        line = {"case": name, "rounds": options.rounds, **known[name](runner, options)}
        print(json.dumps(figures(line)), flush=True)


if __name__ == "__main__":
    main()
