#!/usr/bin/env python3
"""Times checkpoints of the models of hsdp_checkpoint_bench.cpp as PyTorch writes them (torch.distributed.checkpoint of
FSDP2 models, over Gloo, one thread a rank), and prints one JSON line with the keys of hsdp_checkpoint_bench.

  checkpoint_peer.py files [--ranks N] [--folder F] [--megabytes N] [--width N] [--repeats N] [--drop-cache]
  checkpoint_peer.py async [--ranks N] [--folder F] [--width N] [--layers N] [--batch N] [--sequence N] [--steps N]
                           [--every N]
"""
import argparse
import ctypes
import json
import os
import pathlib
import shutil
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from peer import DEFAULTS, WARMUP_STEPS, Gpt

M_MMAP_THRESHOLD = -3
# As in hsdp_checkpoint_bench.cpp: larger pieces of memory come from the system each time.
FRESH_MEMORY_BYTES = 1 << 20


def sharded(model, units, arguments):
    mesh = init_device_mesh("cpu", (arguments.ranks,))
    for unit in units:
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def sharded_layers(arguments):
    """On meta."""
    count = max(1, (arguments.megabytes << 20) // (4 * arguments.width**2))
    with torch.device("meta"):
        model = nn.Module()
        model.layers = nn.ModuleList(nn.Linear(arguments.width, arguments.width) for _ in range(count))
    return sharded(model, model.layers, arguments)


def slowest(values):
    values = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.tolist()


def drop_cache(folder):
    for path in pathlib.Path(folder).rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_files(rank, arguments, line):
    model = sharded_layers(arguments)
    model.to_empty(device="cpu")
    torch.manual_seed(rank)
    for parameter in model.parameters():
        parameter.to_local().detach().uniform_()
    line["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    line["bytes"] = line["parameters"] * 4
    folder = f"{arguments.folder}/checkpoint"
    seconds = {"save": [], "load": []}

    def timed(name, work):
        if rank == 0:
            os.sync()
        dist.barrier()
        start = time.perf_counter()
        work()
        (taken,) = slowest([time.perf_counter() - start])
        if repeat > 0:
            seconds[name].append(taken)

    def load():
        fresh.to_empty(device="cpu")
        dcp.load({"model": fresh.state_dict()}, checkpoint_id=folder)

    for repeat in range(arguments.repeats + 1):
        timed("save", lambda: dcp.save({"model": model.state_dict()}, checkpoint_id=folder))
        if arguments.drop_cache and rank == 0:
            drop_cache(folder)
        fresh = sharded_layers(arguments)
        timed("load", load)
        for parameter, expected in zip(fresh.parameters(), model.parameters()):
            if not torch.equal(parameter.to_local(), expected.to_local()):
                raise RuntimeError("what was read is not what was written")
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)
    line |= {f"{name}_s": values for name, values in seconds.items()}


def run_async(rank, arguments, line):
    torch.manual_seed(0)
    vocabulary = DEFAULTS["vocabulary"]
    model = Gpt(arguments.width, arguments.layers, arguments.sequence, vocabulary)
    line["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    line["bytes"] = line["parameters"] * 4 * 3
    model = sharded(model, model.blocks, arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    # The saving thread's collectives must not mix with training's.
    group = dist.new_group(backend="gloo")
    torch.manual_seed(rank)
    steps, overlapping, copies = [], [], []
    pending = None
    for step in range(WARMUP_STEPS + arguments.steps):
        ids = torch.randint(0, vocabulary, (arguments.batch, arguments.sequence))
        dist.barrier()
        overlaps = pending is not None
        start = time.perf_counter()
        functional.cross_entropy(model(ids).view(-1, vocabulary), ids.view(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if pending is not None and pending.done():
            pending.result()
            pending = None
        taken = time.perf_counter() - start
        if step < WARMUP_STEPS:
            continue
        steps.append(taken)
        overlapping.append(overlaps)
        if len(steps) % arguments.every != 0:
            continue
        if pending is not None:
            pending.result()
        dist.barrier()
        if rank == 0:
            for former in pathlib.Path(arguments.folder).iterdir():
                shutil.rmtree(former)
        dist.barrier()
        start = time.perf_counter()
        model_state, optimizer_state = get_state_dict(model, optimizer)
        pending = dcp.async_save({"model": model_state, "optimizer": optimizer_state},
                                 checkpoint_id=f"{arguments.folder}/step-{len(steps)}", process_group=group)
        copies.append(time.perf_counter() - start)
    if pending is not None:
        pending.result()
    steps, copies = slowest(steps), slowest(copies)
    during = statistics.median(1e3 * taken for taken, overlaps in zip(steps, overlapping) if overlaps)
    others = statistics.median(1e3 * taken for taken, overlaps in zip(steps, overlapping) if not overlaps)
    copy = statistics.median(copies) * 1e3
    line |= {
        "saves": len(copies),
        "overlapping_steps": sum(overlapping),
        "other_steps": len(steps) - sum(overlapping),
        "overlapping_step_ms": during,
        "other_step_ms": others,
        "overlapping_to_others": during / others,
        "copy_ms": copy,
        "copy_to_step": copy / others,
    }


def run(rank, arguments, store):
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, FRESH_MEMORY_BYTES)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=arguments.ranks)
    line = {"mode": arguments.mode, "ranks": arguments.ranks}
    (run_files if arguments.mode == "files" else run_async)(rank, arguments, line)
    if rank == 0:
        print(json.dumps(line), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    numbers = {
        "files": {"megabytes": 1024, "width": 2048, "repeats": 3},
        "async": {"width": 512, "layers": 4, "batch": 2, "sequence": 128, "steps": 40, "every": 10},
    }
    for mode, defaults in numbers.items():
        options = modes.add_parser(mode)
        options.add_argument("--folder", default=".")
        for name, default in {"ranks": 2, **defaults}.items():
            options.add_argument(f"--{name}", type=int, default=default)
        if mode == "files":
            options.add_argument("--drop-cache", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, tempfile.TemporaryDirectory() as meeting:
        arguments.folder = folder
        torch.multiprocessing.spawn(run, (arguments, f"{meeting}/store"), arguments.ranks)


if __name__ == "__main__":
    main()
