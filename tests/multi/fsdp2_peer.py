"""The other side of fsdp2_cross_check_test: trains its cases with torch's own fully_shard, or DDP, over Gloo.

    fsdp2_peer.py FOLDER

FOLDER/cases.json is what the test wrote, one object a case. For each case this writes FOLDER/<name>/weights.pt, the
values both sides start from, and FOLDER/<name>/<rank>.pt, what that rank had at each step: a dict of tensors.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    def __init__(self, case):
        super().__init__()
        width = case["width"]
        self.embedding = nn.Embedding(case["vocabulary"], width)
        self.features = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width, case["hidden"]) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        if not case["tied"]:
            self.head = nn.Linear(width, case["vocabulary"], bias=False)
        self.tied = case["tied"]

    def forward(self, tokens, features):
        x = self.embedding(tokens) + self.features(features)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return F.linear(x, self.embedding.weight) if self.tied else self.head(x)


def batch(case, rank, step, micro):
    """The same closed forms as the test's."""
    start = 7 * rank + 11 * step + 5 * micro
    index = torch.arange(3 * 4) + start
    tokens = (index * index % case["vocabulary"]).view(3, 4)
    targets = ((3 * index + 1) % case["vocabulary"]).view(3, 4)
    features = torch.sin(torch.arange(3 * 4 * 4, dtype=torch.float64) * 0.37 + start).float().view(3, 4, 4)
    return tokens, features, targets


def dtype_of(name):
    return getattr(torch, name) if name else None


def shard(model, case, mesh):
    if case["data_parallel"]:
        return DistributedDataParallel(model)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype_of(case["param_dtype"]), reduce_dtype=dtype_of(case["reduce_dtype"])
    )
    options = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": case["reshard_after_forward"]}
    if case["shard_dim"]:
        dim = case["shard_dim"]
        options["shard_placement_fn"] = lambda parameter: Shard(dim) if parameter.dim() > dim else None
    for block in model.blocks:
        fully_shard(block, **options)
    if case["norm_with_head"]:
        fully_shard([model.norm, model.head], **options)
    # Each module casts its own output there; here it is the whole model's.
    options["mp_policy"] = dataclasses.replace(policy, output_dtype=dtype_of(case["output_dtype"]))
    fully_shard(model, **options)
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            # Gloo has no averages.
            module.set_force_sum_reduction_for_comms(True)
            if case["divide_factor"]:
                module.set_gradient_divide_factor(case["divide_factor"])
    return model


def sync_of(model, case, is_last):
    """What a backward communicates is the case's choice; the last of a step always completes the gradients."""
    if case["sync"] == "each":
        return contextlib.nullcontext()
    if case["data_parallel"]:
        return contextlib.nullcontext() if is_last else model.no_sync()
    if case["sync"] == "last all-reduce":
        model.set_requires_all_reduce(is_last)
    else:
        model.set_requires_gradient_sync(is_last)
    return contextlib.nullcontext()


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(rank, case, mesh, folder):
    torch.manual_seed(5)
    net = Net(case)
    if rank == 0:
        torch.save(net.state_dict(), f"{folder}/weights.pt")
    model = shard(net, case, mesh)
    make = {
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, weight_decay=0.1),
        "FusedAdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, weight_decay=0.1, fused=True),
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    }
    optimizer = make[case["optimizer"]](net.parameters())
    seen = {}
    for step in range(case["steps"]):
        optimizer.zero_grad()
        for micro in range(case["micro_batches"]):
            tokens, features, targets = batch(case, rank, step, micro)
            with sync_of(model, case, micro + 1 == case["micro_batches"]):
                logits = model(tokens, features)
                loss = F.cross_entropy(
                    logits.float().flatten(0, 1), targets.flatten(), reduction="sum" if case["summed_loss"] else "mean"
                )
                loss.backward()
            seen[f"{step} logits {micro}"] = logits.detach().clone()
            seen[f"{step} loss {micro}"] = loss.detach().clone()
        for name, parameter in net.named_parameters():
            seen[f"{step} gradient {name}"] = whole(parameter.grad)
        if case["max_norm"]:
            seen[f"{step} norm"] = whole(torch.nn.utils.clip_grad_norm_(net.parameters(), case["max_norm"]))
        optimizer.step()
        for name, parameter in net.named_parameters():
            seen[f"{step} parameter {name}"] = whole(parameter)
    for name, parameter in net.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        seen[f"shard {name}"] = local.detach().clone()
    torch.save(seen, f"{folder}/{rank}.pt")


def run_rank(rank, ranks, cases, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous_{ranks}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=60),
    )
    meshes = {}
    for case in cases:
        sizes = tuple(case["mesh"])
        if sizes not in meshes:
            meshes[sizes] = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
        try:
            train(rank, case, meshes[sizes], f"{folder}/{case['name']}")
        except Exception as error:
            raise RuntimeError(f"case {case['name']} failed") from error
    dist.destroy_process_group()


def main():
    folder = sys.argv[1]
    with open(f"{folder}/cases.json") as file:
        cases = json.load(file)
    for case in cases:
        os.makedirs(f"{folder}/{case['name']}", exist_ok=True)
    # torch is imported once, and has not started threads yet.
    for ranks in sorted({case["ranks"] for case in cases}):
        chosen = [case for case in cases if case["ranks"] == ranks]
        mp.start_processes(run_rank, (ranks, chosen, folder), nprocs=ranks, start_method="fork")


if __name__ == "__main__":
    main()
