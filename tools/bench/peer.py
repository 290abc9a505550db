#!/usr/bin/env python3
"""Times training steps of the GPT of gpt.cpp under PyTorch's FSDP2 or DDP, and prints one JSON line with the keys of
hsdp_bench: over Gloo, one thread a rank, or with --device cuda over NCCL, one GPU a rank.

  peer.py MODE [--ranks N] [--size NAME] [--width N] [--layers N] [--batch N] [--sequence N] [--vocabulary N] [--steps N]
          [--device host|cuda] [--bf16]

MODE is fsdp2 (a fully_shard call a block and one for the root), ddp, or alone (unconnected copies). --size is small,
medium or large, as in hsdp_bench; --bf16 computes in bf16 and reduces in fp32 (fsdp2).
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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

DEFAULTS = {"width": 64, "layers": 2, "batch": 1, "sequence": 32, "vocabulary": 256}
SIZES = {
    "small": {"width": 768, "layers": 12, "batch": 16, "sequence": 1024, "vocabulary": 50304},
    "medium": {"width": 1024, "layers": 24, "batch": 16, "sequence": 1024, "vocabulary": 50304},
    "large": {"width": 2048, "layers": 24, "batch": 8, "sequence": 1024, "vocabulary": 50304},
}
WARMUP_STEPS = 3
MEBI = 1024 * 1024


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
    def __init__(self, width, layers, sequence, vocabulary):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def processor_ms():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return (usage.ru_utime + usage.ru_stime) * 1e3


def peak_rss_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


class StepTimes:
    """Milliseconds of steps: on the host between two calls, on a GPU between events, which never hold the host up."""

    def __init__(self, on_gpu):
        self.on_gpu = on_gpu
        self.marks = []

    def mark(self):
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def milliseconds(self):
        pairs = list(zip(self.marks[::2], self.marks[1::2]))
        if self.on_gpu:
            torch.cuda.synchronize()
            return [begin.elapsed_time(end) for begin, end in pairs]
        return [(end - begin) * 1e3 for begin, end in pairs]


def make_model(arguments, rank, device):
    """The model of this rank, and its number of parameters."""
    shape = (arguments.width, arguments.layers, arguments.sequence, arguments.vocabulary)
    on_gpu = device.type == "cuda"
    sharded = arguments.mode == "fsdp2"
    with torch.device("meta" if on_gpu and sharded else device):
        model = Gpt(*shape)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if sharded:
        options = {"mesh": init_device_mesh("cuda" if on_gpu else "cpu", (arguments.ranks,))}
        if arguments.bf16:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        if on_gpu:
            # Any values do, and the host would take longer to make them than the steps take.
            model.to_empty(device=device)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(0.0, 0.02)
    elif arguments.mode == "ddp":
        model = nn.parallel.DistributedDataParallel(model, device_ids=[rank] if on_gpu else None)
    return model, parameters


def run(rank, arguments, barrier, store):
    torch.set_num_threads(1)
    on_gpu = arguments.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    if arguments.mode != "alone":
        torch.distributed.init_process_group(
            "nccl" if on_gpu else "gloo", init_method=f"file://{store}", rank=rank, world_size=arguments.ranks,
            device_id=device if on_gpu else None)
    start_rss = peak_rss_mib()
    torch.manual_seed(0)
    model, parameters = make_model(arguments, rank, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    torch.manual_seed(rank)
    steps, processor = StepTimes(on_gpu), 0
    for step in range(WARMUP_STEPS + arguments.steps):
        ids = torch.randint(0, arguments.vocabulary, (arguments.batch, arguments.sequence), device=device)
        if step == WARMUP_STEPS:
            if on_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            barrier.wait()
            processor = processor_ms()
        if step >= WARMUP_STEPS:
            steps.mark()
        functional.cross_entropy(model(ids).float().flatten(0, 1), ids.view(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= WARMUP_STEPS:
            steps.mark()
    times = steps.milliseconds()
    processor = (processor_ms() - processor) / arguments.steps
    if rank == 0:
        names = ("mode", "ranks", "width", "layers", "batch", "sequence", "vocabulary", "device", "bf16")
        line = {name: getattr(arguments, name) for name in names}
        step = statistics.median(times)
        tokens = arguments.batch * arguments.sequence
        multiplied = parameters - (arguments.vocabulary + arguments.sequence) * arguments.width
        flops = tokens * (6 * multiplied + 12 * arguments.layers * arguments.width * arguments.sequence)
        line |= {
            "device_name": torch.cuda.get_device_name() if on_gpu else "",
            "start_rss_mib": start_rss,
            "parameters": parameters,
            "step_ms": step,
            "fastest_step_ms": min(times),
            "processor_ms": processor,
            "tokens_per_second": arguments.ranks * tokens / step * 1e3,
            "model_tflops_a_rank": flops / step * 1e-9,
            "peak_rss_mib": peak_rss_mib(),
        }
        if on_gpu:
            line |= {
                "peak_allocated_mib": torch.cuda.max_memory_allocated() / MEBI,
                "peak_reserved_mib": torch.cuda.max_memory_reserved() / MEBI,
            }
        print(json.dumps(line), flush=True)
    if arguments.mode != "alone":
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("fsdp2", "ddp", "alone"))
    for name, default in {"ranks": 1, "steps": 20}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--size", choices=SIZES)
    for name in DEFAULTS:
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--device", choices=("host", "cuda"), default="host")
    parser.add_argument("--bf16", action="store_true")
    arguments = parser.parse_args()
    if arguments.bf16 and arguments.mode != "fsdp2":
        parser.error(f"--bf16 with {arguments.mode}, expected fsdp2")
    for name, default in (SIZES[arguments.size] if arguments.size else DEFAULTS).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    barrier = torch.multiprocessing.get_context("spawn").Barrier(arguments.ranks)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (arguments, barrier, f"{folder}/store"), arguments.ranks)


if __name__ == "__main__":
    main()
