"""The other side of checkpoint_python_test: reads what it has saved, and writes what it loads, with torch over Gloo.

    checkpoint_peer.py FOLDER TOOL

FOLDER is the test's, TOOL is tools/dcp.py. Writes FOLDER/checks.json: by name of a check, why it failed, or "".
"""

import contextlib
import datetime
import importlib
import io
import json
import math
import os
import subprocess
import sys
import tempfile
import traceback
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

# ---- what both sides compute ----


class Values(nn.Module):
    """Parameters that some ranks have nothing of, and buffers of many dtypes."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.linear = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.head = nn.Linear(7, 3, bias=False)
        self.scale = nn.Parameter(torch.zeros(1))
        self.register_buffer("codes", torch.zeros(2, 3, dtype=torch.int32))
        self.register_buffer("positions", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("bytes", torch.zeros(4, dtype=torch.uint8))
        self.register_buffer("mask", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("small", torch.zeros(3, dtype=torch.float16))
        self.register_buffer("brain", torch.zeros(3, 2, dtype=torch.bfloat16))
        self.register_buffer("wide", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("number", torch.zeros((), dtype=torch.float32))


def closed_form(name, like):
    """Exact in every dtype, and other values for each name."""
    base = (torch.arange(like.numel()) + sum(name.encode())) % 120
    if like.dtype == torch.bool:
        base = base % 2
    elif like.is_floating_point():
        base = (base - 60).double() / 8
    elif like.dtype != torch.uint8:
        base = base - 60
    return base.to(like.dtype).view(like.shape)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.second = nn.Linear(9, 9)
        self.third = nn.Linear(9, 2)

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def start_value(name, like):
    return closed_form(name, like) / 30


def train_step(model, optimizer, step):
    """Every rank has the whole batch, so that the number of ranks does not matter."""
    inputs = torch.sin(torch.arange(12 * 6, dtype=torch.float64) * 0.37 + step).float().view(12, 6)
    targets = torch.cos(torch.arange(12 * 2, dtype=torch.float64) * 0.53 + step).float().view(12, 2)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()


def adamw(model):
    """Of two groups: biases do not decay."""
    named = list(model.named_parameters())
    groups = [
        {"params": [parameter for name, parameter in named if name.endswith(".weight")], "weight_decay": 0.1},
        {"params": [parameter for name, parameter in named if name.endswith(".bias")], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95), eps=1e-3)


# The other kinds, with all that their state may hold.
KINDS = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=1e-3, weight_decay=0.1, amsgrad=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, eps=1e-3, momentum=0.5, centered=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, lr_decay=0.01),
}


# ---- running ----


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def sharded(model, mesh, units):
    for unit in units:
        fully_shard(getattr(model, unit), mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            # Gloo has no averages.
            module.set_force_sum_reduction_for_comms(True)
    return model


def run_rank(rank, sizes, rendezvous, body, arguments):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=math.prod(sizes),
        timeout=datetime.timedelta(seconds=60),
    )
    body(init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :]), *arguments)
    dist.destroy_process_group()


def on_ranks(sizes, body, *arguments):
    """Calls body(mesh, *arguments) in a process for each rank of a mesh."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            run_rank,
            (sizes, f"{folder}/rendezvous", body, arguments),
            nprocs=math.prod(sizes),
            start_method="fork",
        )


class Checks:
    def __init__(self):
        self.failures = {}

    @contextlib.contextmanager
    def check(self, name):
        try:
            yield
            self.failures[name] = ""
        except (Exception, SystemExit):
            self.failures[name] = traceback.format_exc()


def expect_values(tensors, expected):
    """Two dicts of tensors have the same names, dtypes, shapes and bits."""
    assert set(tensors) == set(expected), f"names {sorted(tensors)}, expected {sorted(expected)}"
    for name, tensor in expected.items():
        ours = tensors[name]
        assert ours.dtype == tensor.dtype and ours.shape == tensor.shape, (
            f"{name}: {ours.dtype} {ours.shape}, expected {tensor.dtype} {tensor.shape}"
        )
        assert torch.equal(ours, tensor), f"{name}: {ours}, expected {tensor}"


def expect_close(tensors, expected):
    assert set(tensors) == set(expected), f"names {sorted(tensors)}, expected {sorted(expected)}"
    for name, tensor in expected.items():
        difference = (tensors[name] - tensor).abs().max().item()
        assert difference <= 1e-6, f"{name} differs by {difference}, expected at most 1e-6"


def closed_values():
    return {name: closed_form(name, tensor) for name, tensor in Values().state_dict().items()}


# ---- the model ----


def load_shards(mesh, folder):
    for writers in ("mesh_4", "mesh_2x2"):
        model = sharded(Values(), mesh, ["linear"])
        state = model.state_dict()
        dcp.load(state, storage_reader=HuggingFaceStorageReader(f"{folder}/{writers}/step-1"))
        model.load_state_dict(state)
        expect_values({name: whole(tensor) for name, tensor in model.state_dict().items()}, closed_values())


def write_shards(mesh, folder):
    model = sharded(Values(), mesh, ["linear"])
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            values = closed_form(name, torch.empty(tensor.shape, dtype=tensor.dtype))
            if isinstance(tensor, DTensor):
                rows = tensor.to_local().shape[0]
                offset = values.chunk(mesh.size())[: mesh.get_local_rank()]
                begin = sum(chunk.shape[0] for chunk in offset)
                tensor.to_local().copy_(values[begin : begin + rows])
            else:
                tensor.copy_(values)
    dcp.save(model.state_dict(), storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True))


def check_whole_files(folder, files):
    """A Hugging Face folder of our making: `files` of them, and an index where they are several."""
    expected = closed_values()
    names = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    loaded = {}
    for name in names:
        with safe_open(f"{folder}/{name}", framework="pt") as file:
            assert (file.metadata() or {}).get("format") == "pt", file.metadata()
        loaded |= load_file(f"{folder}/{name}")
    expect_values(loaded, expected)
    if files == 1:
        assert sorted(os.listdir(folder)) == ["model.safetensors"], os.listdir(folder)
        return
    assert names == [f"model-{i + 1:05d}-of-{len(names):05d}.safetensors" for i in range(len(names))], names
    assert len(names) >= files, f"{len(names)} files, expected at least {files}"
    with open(f"{folder}/model.safetensors.index.json") as file:
        index = json.load(file)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values()), index["metadata"]
    assert set(index["weight_map"]) == set(expected), index["weight_map"]
    for name, file_name in index["weight_map"].items():
        with safe_open(f"{folder}/{file_name}", framework="pt") as file:
            assert name in file.keys(), f"{name} is not in {file_name}"


def write_whole_files(folder):
    values = closed_values()
    save_file(values, f"{folder}/whole.safetensors")
    os.mkdir(f"{folder}/two_files")
    names = sorted(values)
    parts = {
        "model-00001-of-00002.safetensors": names[: len(names) // 2],
        "model-00002-of-00002.safetensors": names[len(names) // 2 :],
    }
    for file_name, part in parts.items():
        save_file({name: values[name] for name in part}, f"{folder}/two_files/{file_name}", metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in values.values())},
        "weight_map": {name: file_name for file_name, part in parts.items() for name in part},
    }
    with open(f"{folder}/two_files/model.safetensors.index.json", "w") as file:
        json.dump(index, file)


# ---- model and optimizer ----

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def saved_parameters(model, path):
    values = {name: whole(parameter) for name, parameter in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save(values, path)
    return values


def continue_in_python(mesh, folder, expected):
    """Ours, after two steps and an export, takes the third."""
    model = sharded(Net(), mesh, ["second"])
    optimizer = adamw(model)
    for group in optimizer.param_groups:
        group["lr"], group["betas"], group["weight_decay"] = 0.5, (0.1, 0.1), 0.9  # the checkpoint's replace them
    model_state, optimizer_state = get_state_dict(model, optimizer, options=FLAT)
    progress = {"step": 0, "ntokens_seen": 0}
    dcp.load({**model_state, "optimizer": optimizer_state, "train_state": progress}, checkpoint_id=folder)
    assert progress == {"step": 2, "ntokens_seen": 288}, progress
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=FLAT)
    for group, weight_decay in zip(optimizer.param_groups, (0.1, 0.0)):
        assert (group["lr"], group["betas"], group["weight_decay"]) == (0.01, (0.8, 0.95), weight_decay), group
    train_step(model, optimizer, 2)
    expect_close(
        {name: whole(parameter) for name, parameter in model.named_parameters()},
        load_file(expected),
    )


def train_in_python(mesh, folder):
    """Two steps, saved as torchtitan does and as most others do, and the third."""
    model = sharded(Net(), mesh, ["second"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = start_value(name, torch.empty(parameter.shape))
            parameter.copy_(DTensor.from_local(values, mesh).redistribute(placements=parameter.placements))
    optimizer = adamw(model)
    for step in range(2):
        train_step(model, optimizer, step)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=FLAT)
    dcp.save(
        {
            **model_state,
            "optimizer": optimizer_state,
            "train_state": {"step": 2, "ntokens_seen": 288},
            "lr_scheduler": {"last_epoch": 2},
            "dataloader": {"dp_rank_0": io.BytesIO(b"something of its own")},
        },
        checkpoint_id=f"{folder}/python_flat",
    )
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=f"{folder}/python_nested")
    train_step(model, optimizer, 2)
    saved_parameters(model, f"{folder}/python_third.pt")


def run_tool(tool, *arguments):
    result = subprocess.run([sys.executable, tool, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{arguments}: {result.returncode}\n{result.stdout}{result.stderr}"
    return result.stderr


def convert_kind(folder, kind, convert):
    """To a folder of ours and back, without ranks."""

    def parts():
        model = Net()
        optimizer = KINDS[kind](model.parameters())
        return model, optimizer

    model, optimizer = parts()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(start_value(name, parameter))
    for step in range(2):
        train_step(model, optimizer, step)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=FLAT)
    dcp.save({**model_state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/python_{kind}", no_dist=True)
    convert(["import", f"{folder}/python_{kind}", f"{folder}/imported_{kind}"])
    convert(["export", f"{folder}/imported_{kind}", f"{folder}/back_{kind}"])
    train_step(model, optimizer, 2)
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    torch.save(expected, f"{folder}/{kind}_third.pt")

    model, optimizer = parts()
    model_state, optimizer_state = get_state_dict(model, optimizer, options=FLAT)
    dcp.load({**model_state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/back_{kind}", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=FLAT)
    train_step(model, optimizer, 2)
    expect_values({name: parameter.detach() for name, parameter in model.named_parameters()}, expected)


class Evil:
    """Unpickling it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def write_evil_payload(folder):
    state = {"weight": torch.zeros(2), "optimizer": {"param_groups.weight.lr": Evil(f"{folder}/evil_ran")}}
    dcp.save(state, checkpoint_id=f"{folder}/evil_payload", no_dist=True)


def main():
    folder, tool = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    checks = Checks()
    for sizes in ((2,), (2, 2)):
        with checks.check(f"ShardsOnto{'x'.join(map(str, sizes))}"):
            on_ranks(sizes, load_shards, folder)
    with checks.check("ShardsForOurs"):
        on_ranks((2,), write_shards, f"{folder}/python_shards")
    with checks.check("ToPython"):
        listed = run_tool(tool, "export", f"{folder}/trained/step-2", f"{folder}/exported_dcp")
        assert "data_position 24" in listed and "seed" in listed, listed
        on_ranks((2,), continue_in_python, f"{folder}/exported_dcp", f"{folder}/ours_third/model.safetensors")
    with checks.check("TrainedInPython"):
        on_ranks((2,), train_in_python, folder)
    # No processes from here on: threads may run that a fork would lose.
    with checks.check("ToOneFile"):
        dcp_to_torch_save(f"{folder}/exported_dcp", f"{folder}/exported_dcp.pt")
        state = torch.load(f"{folder}/exported_dcp.pt", weights_only=True)
        names = [name for name, _ in Net().named_parameters()]
        assert set(names) < set(state) and state["train_state"]["step"] == 2, state.keys()
        for name in names:
            assert state["optimizer"][f"state.{name}.step"].item() == 2
            assert state["optimizer"][f"state.{name}.exp_avg"].shape == state[name].shape
    for name, files in (("consolidated", 1), ("consolidated_small", 3), ("exported", 1), ("exported_small", 3)):
        with checks.check(name.title().replace("_", "")):
            check_whole_files(f"{folder}/{name}", files)
    with checks.check("WholeFilesForOurs"):
        write_whole_files(folder)
    sys.path.insert(0, os.path.dirname(tool))
    convert = importlib.import_module("dcp").main
    with checks.check("FromPython"):
        with contextlib.redirect_stderr(io.StringIO()) as listed:
            convert(["import", f"{folder}/python_flat", f"{folder}/imported_flat"])
        assert "dataloader.dp_rank_0" in listed.getvalue(), listed.getvalue()
        nested = ["--model-prefix", "model.", "--optimizer-prefix", "optim."]
        convert(["import", f"{folder}/python_nested", f"{folder}/imported_nested", *nested])
    for kind in KINDS:
        with checks.check(f"Kind{kind}"):
            convert_kind(folder, kind, convert)
    with checks.check("EvilPayload"):
        write_evil_payload(folder)
    with open(f"{folder}/checks.json", "w") as file:
        json.dump(checks.failures, file)


if __name__ == "__main__":
    main()
