"""Trains the model of a configuration with PyTorch's FSDP2, as hsdp_train does with this library:

    torchrun --nproc-per-node 2 tests/regression/fsdp2_train.py --config F [--set section.key=value ...]

It reads the configuration of hsdp_train and refuses settings that it does not honour. The initial weights are drawn here
and left in metrics.folder as weights.safetensors, so that hsdp_train can begin with them (checkpoint.weights). The
batches are the same, and so is the form of metrics.jsonl, but for the collectives, which FSDP2 does not count.
"""

import argparse
import dataclasses
import datetime
import json
import math
import os
import pathlib
import re
import resource
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from fsdp2_config import DTYPES, Mistake, read_config, section_of, to_yaml
from fsdp2_model import Transformer
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

USER_MISTAKE = 2

# ---- data: the batches of apps/data_loader.cpp ----

WORD = 2**64 - 1


def mix(x):
    """Scrambles 64 bits."""
    x = (x + 0x9E3779B97F4A7C15) & WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def permuted(index, size, key):
    """Where `index` goes in the permutation of range(size) that `key` chooses."""
    half = ((size - 1).bit_length() + 1) // 2
    mask = 2**half - 1
    value = index
    while True:
        left, right = value >> half, value & mask
        for turn in range(6):
            left, right = right, left ^ (mix(mix((key + turn) & WORD) ^ right) & mask)
        value = left << half | right
        if value < size:
            return value


@dataclasses.dataclass
class Data:
    tokens: torch.Tensor
    rows: int
    length: int
    seed: int

    @classmethod
    def read(cls, config):
        path, form = config["data.path"], config["data.format"]
        content = pathlib.Path(path).read_bytes()
        dtype = {"bytes": torch.uint8, "uint16": torch.uint16}.get(form)
        if form == "llmc":
            magic, version, count = (int.from_bytes(content[at : at + 4], "little") for at in (0, 4, 8))
            dtype = {(20240520, 1): torch.uint16, (20240801, 7): torch.uint32}.get((magic, version))
            if dtype is None:
                raise Mistake(f"[data] {path}: magic {magic} and version {version} are not those of llm.c")
            content = content[1024:]
            if len(content) != count * dtype.itemsize:
                raise Mistake(f"[data] {path}: {len(content)} bytes of tokens, expected {count} tokens")
        tokens = torch.frombuffer(bytearray(content), dtype=dtype)
        if int(tokens.long().max()) >= config["model.vocab_size"]:
            raise Mistake(f"[data] {path}: a token is not below model.vocab_size {config['model.vocab_size']}")
        data = cls(
            tokens, config["training.global_batch_size"], config["training.sequence_length"], config["training.seed"]
        )
        if data.windows < data.rows:
            raise Mistake(f"[data] {path}: {data.windows} windows, expected at least the global batch of {data.rows}")
        return data

    @property
    def windows(self):
        return (len(self.tokens) - 1) // self.length

    def batch(self, step):
        """Inputs and targets of the whole global batch of a step, from 0."""
        steps = self.windows // self.rows
        key = mix((mix(self.seed) + step // steps) & WORD)
        begins = [
            permuted(step % steps * self.rows + row, self.windows, key) * self.length for row in range(self.rows)
        ]
        rows = torch.stack([self.tokens[begin : begin + self.length + 1].long() for begin in begins])
        return rows[:, :-1], rows[:, 1:]


# ---- training ----


def mesh_of(config, kind):
    replicate, shard, ranks = config["parallelism.replicate"], config["parallelism.shard"], dist.get_world_size()
    shard = max(1, ranks // replicate) if shard in ("auto", -1) else shard
    if replicate * shard != ranks:
        raise Mistake(f"[parallelism] replicate {replicate} x shard {shard}, launched with {ranks} ranks")
    if replicate == 1:
        return init_device_mesh(kind, (shard,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (replicate, shard), mesh_dim_names=("replicate", "shard"))


def shard_model(model, config, mesh):
    """A unit a block, and the root."""
    reshard = config["parallelism.reshard_after_forward"]
    param_dtype, reduce_dtype, output_dtype = (
        DTYPES[config[f"mixed_precision.{name}_dtype"]] for name in ("param", "reduce", "output")
    )
    inner = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    outer = dataclasses.replace(inner, output_dtype=output_dtype)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True if reshard == "default" else reshard, mp_policy=inner)
    fully_shard(model, mesh=mesh, reshard_after_forward=None if reshard == "default" else reshard, mp_policy=outer)


def make_optimizer(model, config):
    """A group for each pattern without weight decay and one for the rest."""
    rest, groups = dict(model.named_parameters()), []
    for pattern in config["optimizer.no_decay"]:
        parts = re.split(r"(\*\*?)", pattern)
        expression = "".join({"*": "[^.]*", "**": ".*"}.get(part, re.escape(part)) for part in parts)
        names = [name for name in rest if re.fullmatch(expression, name)]
        if not names:
            raise Mistake(f"[optimizer] no_decay: pattern {pattern!r} fits no parameter")
        groups.append({"params": [rest.pop(name) for name in names], "weight_decay": 0.0})
    groups.append({"params": list(rest.values())})
    lr, decay = config["optimizer.lr"], config["optimizer.weight_decay"]
    if config["optimizer.name"].endswith("sgd"):
        return torch.optim.SGD(groups, lr=lr, momentum=config["optimizer.momentum"], weight_decay=decay)
    betas = config["optimizer.beta1"], config["optimizer.beta2"]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=config["optimizer.eps"], weight_decay=decay)


def lr_factor(config, step):
    """Of a step from 0: apps/lr_schedule.h."""
    warmup, steps, decay = config["lr_schedule.warmup_steps"], config["training.steps"], config["lr_schedule.decay"]
    if step < warmup:
        return (step + 1) / warmup
    if decay == "constant":
        return 1.0
    progress = (step - warmup) / (steps - warmup)
    remaining = 1.0 - progress if decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    least = config["lr_schedule.min_lr_factor"]
    return least + (1.0 - least) * remaining


def peak_memory(device):
    """Of this rank, in bytes, as hsdp_train tells it."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def train(config, data, device):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    steps, micro = config["training.steps"], config["training.gradient_accumulation"]
    if data.rows % (ranks * micro):
        raise Mistake(f"[data] global_batch_size {data.rows}, expected a multiple of {ranks} ranks x {micro}")
    mesh = mesh_of(config, device.type)
    torch.manual_seed(config["training.seed"])
    model = Transformer(section_of(config, "model"))
    weights = {name: value.detach().clone() for name, value in model.named_parameters()} if rank == 0 else {}
    model.to(device)
    shard_model(model, config, mesh)
    parameters = list(model.parameters())
    optimizer = make_optimizer(model, config)
    file = None
    if rank == 0:
        folder = pathlib.Path(config["metrics.folder"])
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / "weights.safetensors")
        (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        file = open(folder / "metrics.jsonl", "w", encoding="utf-8")

    own = data.rows // ranks
    max_norm = config["training.max_norm"] or math.inf
    start, logged_seconds, logged_step = time.monotonic(), 0.0, 0
    for step in range(1, steps + 1):
        lr = config["optimizer.lr"] * lr_factor(config, step - 1)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        inputs, targets = (part[rank * own : (rank + 1) * own].to(device) for part in data.batch(step - 1))
        total = torch.zeros(1, dtype=torch.float64, device=device)
        for i, (x, y) in enumerate(zip(inputs.chunk(micro), targets.chunk(micro), strict=True)):
            model.set_requires_gradient_sync(i + 1 == micro)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / micro
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(parameters, max_norm)
        norm = getattr(norm, "full_tensor", lambda: norm)().item()
        dist.all_reduce(total)
        if not (math.isfinite(total.item()) and math.isfinite(norm)):
            raise Mistake(f"[training] step {step}: loss is {total.item() / ranks} and grad_norm is {norm}")
        optimizer.step()
        if step not in (1, steps) and step % config["metrics.log_every"]:
            continue
        peak = torch.tensor(float(peak_memory(device)), dtype=torch.float64, device=device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        seconds = time.monotonic() - start
        tokens = data.rows * data.length
        line = {
            "step": step,
            "loss": total.item() / ranks,
            "grad_norm": norm,
            "lr": lr,
            "tokens_per_second": (step - logged_step) * tokens / (seconds - logged_seconds),
            "peak_memory_bytes": int(peak.item()),
            "tokens": step * tokens,
            "seconds": seconds,
            "ranks": ranks,
        }
        logged_seconds, logged_step = seconds, step
        if file:
            print(json.dumps(line), file=file, flush=True)
            print(f"step {step}/{steps} | loss {line['loss']:.4f} | grad_norm {norm:.4f}", flush=True)


def main():
    parser = argparse.ArgumentParser(prog="fsdp2_train.py", description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value")
    arguments = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    try:
        config = read_config(arguments.config, arguments.set)
        data = Data.read(config)
        backend = config["comm.backend"]
        if backend == "auto":
            backend = "nccl" if torch.cuda.is_available() else "gloo"
        local = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", local) if backend == "nccl" else torch.device("cpu")
        if backend == "nccl":
            torch.cuda.set_device(device)
        if "WORLD_SIZE" not in os.environ:  # alone
            os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
        timeout = datetime.timedelta(seconds=config["comm.timeout_seconds"])
        dist.init_process_group(backend, timeout=timeout)
        train(config, data, device)
        dist.destroy_process_group()
    except (Mistake, OSError, yaml.YAMLError) as error:
        if rank == 0:
            print(error, file=sys.stderr)
        return USER_MISTAKE
    return 0


if __name__ == "__main__":
    sys.exit(main())
