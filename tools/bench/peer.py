#!/usr/bin/env python3
"""Times training steps of the GPT of gpt.cpp under PyTorch's FSDP2 or DDP, over Gloo, one thread a rank, and prints one
JSON line with the keys of hsdp_bench.

  peer.py MODE [--ranks N] [--width N] [--layers N] [--batch N] [--sequence N] [--steps N]

MODE is fsdp2 (a fully_shard call a block and one for the root), ddp, or alone (unconnected copies).
"""
import argparse
import json
import resource
import statistics
import tempfile
import time

import torch
import torch.distributed
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

VOCAB = 256
WARMUP_STEPS = 3


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return y + self.down(functional.gelu(self.up(self.norm2(y))))


class Gpt(nn.Module):
    def __init__(self, width, layers, sequence):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.positions = nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def processor_ms():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return (usage.ru_utime + usage.ru_stime) * 1e3


def peak_rss_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def run(rank, arguments, barrier, store):
    torch.set_num_threads(1)
    if arguments.mode != "alone":
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=arguments.ranks)
    start_rss = peak_rss_mib()
    torch.manual_seed(0)
    model = Gpt(arguments.width, arguments.layers, arguments.sequence)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if arguments.mode == "fsdp2":
        mesh = init_device_mesh("cpu", (arguments.ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif arguments.mode == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    torch.manual_seed(rank)
    times, processor = [], 0
    for step in range(WARMUP_STEPS + arguments.steps):
        ids = torch.randint(0, VOCAB, (arguments.batch, arguments.sequence))
        if step == WARMUP_STEPS:
            barrier.wait()
            processor = processor_ms()
        start = time.perf_counter()
        functional.cross_entropy(model(ids).view(-1, VOCAB), ids.view(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= WARMUP_STEPS:
            times.append((time.perf_counter() - start) * 1e3)
    processor = (processor_ms() - processor) / arguments.steps
    if rank == 0:
        line = {name: getattr(arguments, name) for name in ("mode", "ranks", "width", "layers", "batch", "sequence")}
        step = statistics.median(times)
        tokens = arguments.ranks * arguments.batch * arguments.sequence
        line |= {
            "start_rss_mib": start_rss,
            "parameters": parameters,
            "step_ms": step,
            "fastest_step_ms": min(times),
            "processor_ms": processor,
            "tokens_per_second": tokens / step * 1e3,
            "peak_rss_mib": peak_rss_mib(),
        }
        print(json.dumps(line), flush=True)
    if arguments.mode != "alone":
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("fsdp2", "ddp", "alone"))
    for name, default in {"ranks": 1, "width": 64, "layers": 2, "batch": 1, "sequence": 32, "steps": 20}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    barrier = torch.multiprocessing.get_context("spawn").Barrier(arguments.ranks)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (arguments, barrier, f"{folder}/store"), arguments.ranks)


if __name__ == "__main__":
    main()
