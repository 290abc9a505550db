#!/usr/bin/env python3
"""Converts checkpoints between hsdp's folders and PyTorch's native distributed checkpoints (DCP).

    dcp.py export STEP_FOLDER OUT    hsdp's `step-N` -> a folder for dcp.load and format_utils.dcp_to_torch_save
    dcp.py import DCP_FOLDER OUT     a folder of dcp.save -> one that hsdp::load accepts

Names in the DCP folder are torchtitan's: `layers.0.weight` for a model's tensor, `optimizer.state.<parameter>.exp_avg`
and `optimizer.param_groups.<parameter>.lr` as get_optimizer_state_dict gives them with flatten_optimizer_state_dict,
`train_state.step`, `train_state.ntokens_seen`, `lr_scheduler.last_epoch`. import reads param_groups that are lists,
too. What has no counterpart on the other side is listed on stderr.

One process, no process group, and one tensor in memory at a time; an import holds a part of it besides, as dcp.save
wrote it. OUT appears complete or not at all. An import runs nothing that the DCP folder says.
"""

import argparse
import importlib.util
import math
import pathlib
import re
import sys

MISSING = [name for name in ("torch", "numpy", "safetensors", "xxhash") if importlib.util.find_spec(name) is None]
if MISSING:
    print(
        f"[dcp] {sys.executable} has no {', '.join(MISSING)}; tools/setup.sh makes a .venv with them", file=sys.stderr
    )
    sys.exit(2)

from dcp_folder import DcpReader, write_dcp
from hsdp_folder import (
    DTYPES,
    OPTIMIZER_FOLDER,
    TRAINING_STATE,
    FolderWriter,
    Refused,
    StoredTensors,
    folder_appearing_at,
    read_json,
    read_manifest,
    safetensors_name,
    verify_files,
)

SHARD = "shard-00001-model-00001-of-00001.safetensors"
RANK = "ranks/rank-00001.safetensors"

# What hsdp keeps of each kind of optimizer: options that are numbers, options that are truth values, and tensors, of
# which the first ones must be there.
NUMBERS = {
    "Adam": ("lr", "beta1", "beta2", "eps", "weight_decay"),
    "AdamW": ("lr", "beta1", "beta2", "eps", "weight_decay"),
    "SGD": ("lr", "momentum", "dampening", "weight_decay"),
    "RMSprop": ("lr", "alpha", "eps", "weight_decay", "momentum"),
    "Adagrad": ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"),
}
FLAGS = {"Adam": ("amsgrad",), "AdamW": ("amsgrad",), "SGD": ("nesterov",), "RMSprop": ("centered",), "Adagrad": ()}
TENSORS = {
    "Adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "SGD": ("momentum_buffer",),
    "RMSprop": ("square_avg", "momentum_buffer", "grad_avg"),
    "Adagrad": ("sum",),
}
NEEDED = {"Adam": 2, "AdamW": 2, "SGD": 1, "RMSprop": 1, "Adagrad": 1}


def say(text):
    print(f"[dcp] {text}", file=sys.stderr)


class Leftovers:
    """What has no counterpart, for one line each of a kind."""

    def __init__(self, verb):
        self._verb = verb
        self._names = {}

    def add(self, kind, name):
        self._names.setdefault(kind, {})[name] = None

    def report(self):
        for kind, names in self._names.items():
            shown = list(names)[:10]
            more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
            say(f"not {self._verb}: {kind}: {', '.join(shown)}{more}")


def path_of(prefix):
    """("a", "b") of the prefix "a.b."; nested state dicts are joined with dots."""
    if prefix and not re.fullmatch(r"([^.]+\.)+", prefix):
        raise Refused(f"prefix {prefix!r}, expected none, or one that ends with a dot, such as 'model.'")
    return tuple(prefix.split(".")[:-1])


# ---- export ----


def number_of(value):
    """JSON has no words for what is not finite, and so the format has texts: "inf", or "nan" and its bits."""
    if isinstance(value, str):
        return float(re.sub(r"^nan\(.*\)$", "nan", value))
    return value


def default_options(kind):
    """What PyTorch's optimizer of a kind has in a parameter group."""
    import torch

    group = getattr(torch.optim, kind)([torch.zeros(1)], lr=0.1).param_groups[0]
    return {name: value for name, value in group.items() if name != "params"}


def python_options(entry, more, leftovers):
    """The options of a parameter as PyTorch's optimizer of that kind has them, all of them."""
    kind = entry["kind"]
    ours = {name: number_of(value) for name, value in entry["options"].items()}
    options = default_options(kind) | more
    if "beta1" in ours and "beta2" in ours:
        ours["betas"] = (ours.pop("beta1"), ours.pop("beta2"))
    for name, value in ours.items():
        if name in options:
            options[name] = value
        else:
            leftovers.add(f"options of {kind}", name)
    return options


def exported_state(arguments, manifest, scalars, model, optimizer, leftovers):
    """A nested state dict, whose tensors are on meta, and {key: function that reads it} for them."""
    import torch

    state, readers = {}, {}

    def put(prefix, name, value, read=None):
        if prefix + name in readers:
            raise Refused(f"the key {prefix + name!r} is needed twice; another prefix helps")
        target = state
        for part in path_of(prefix):
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise Refused(f"the key {prefix + name!r} is below a tensor {part!r}; another prefix helps")
        target[name] = value
        readers[prefix + name] = read

    def put_stored(prefix, name, stored):
        facts = stored.facts[name]
        dtype = getattr(torch, DTYPES[facts["dtype"]])
        put(prefix, name, torch.empty(facts["shape"], dtype=dtype, device="meta"), lambda: stored.read(name))

    for name in manifest["model"]:
        put_stored(arguments.model_prefix, name, model)
    for name in manifest["optimizer"]:
        put_stored(arguments.optimizer_prefix, name, optimizer)
    more = {} if arguments.initial_lr is None else {"initial_lr": arguments.initial_lr}
    for parameter, entry in scalars["optimizers"].items():
        if entry["kind"] not in NUMBERS:
            raise Refused(f"parameter {parameter!r} has an optimizer {entry['kind']!r}, expected {', '.join(NUMBERS)}")
        for name, value in python_options(entry, more, leftovers).items():
            put(arguments.optimizer_prefix, f"param_groups.{parameter}.{name}", value)
        for name, count in entry["counts"].items():
            # A tensor in PyTorch, and of floating point.
            tensor = torch.tensor(float(count))
            if int(tensor) != count:
                raise Refused(f"{name} of {parameter!r} is {count}, expected a number that float32 holds")
            put(arguments.optimizer_prefix, f"state.{parameter}.{name}", tensor, lambda tensor=tensor: tensor)
        if not entry["counts"] and not entry["tensors"] and entry["kind"] != "SGD":
            leftovers.add(
                "state of parameters that were never stepped, which PyTorch's optimizer may ask for", parameter
            )
    progress = scalars["progress"]
    put("train_state.", "step", progress["step"])
    put("train_state.", "ntokens_seen", progress["tokens"])
    put("lr_scheduler.", "last_epoch", progress["step"])
    if progress["data_position"] != 0:
        leftovers.add("progress", f"data_position {progress['data_position']}")
    for name in scalars["values"]:
        leftovers.add("values of the program", name)
    for index, _ in enumerate(scalars["lr_schedulers"]):
        leftovers.add("states of learning-rate schedules beyond their step", str(index))
    if scalars["grad_scaler"] is not None:
        leftovers.add("gradient scaler", f"scale {scalars['grad_scaler'].get('scale')}")
    for record in manifest["files"]:
        if record["path"].startswith("ranks/"):
            leftovers.add("random generators and own buffers of ranks", record["path"])
    return state, readers


def export_checkpoint(arguments):
    manifest = read_manifest(arguments.source)
    verify_files(arguments.source, manifest)
    scalars = read_json(arguments.source / TRAINING_STATE, "the scalars of a checkpoint", "hsdp-training-state")
    model = StoredTensors(arguments.source, manifest, "model")
    optimizer = StoredTensors(arguments.source, manifest, "optimizer")
    leftovers = Leftovers("exported")
    with folder_appearing_at(arguments.out) as folder:
        try:
            state, readers = exported_state(arguments, manifest, scalars, model, optimizer, leftovers)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Refused(
                f"{arguments.source / TRAINING_STATE} is not as expected ({type(error).__name__}: {error})"
            ) from error
        write_dcp(folder, str(arguments.out), state, readers)
    leftovers.report()
    print(
        f"{arguments.out}: step {scalars['progress']['step']}, {len(manifest['model'])} model tensors, "
        f"{len(manifest['optimizer'])} of the optimizer"
    )


# ---- import ----


class ImportedOptimizer:
    """Sorts the optimizer's keys of a DCP folder."""

    def __init__(self, reader, prefix, parameters, kind, leftovers):
        self._reader, self._parameters, self._leftovers = reader, parameters, leftovers
        self._kind = kind
        self.tensors = {}  # our name: key
        self.entries = {}  # by parameter
        keys = [] if kind == "none" else [key for key in reader.paths if key.startswith(prefix)]
        state_keys = [key for key in keys if key.startswith(prefix + "state.")]
        for parameter, options in self._groups(prefix, keys).items():
            self._add_options(parameter, options)
        for key in state_keys:
            self._add_state(key, key[len(prefix + "state.") :])
        for parameter, entry in self.entries.items():
            needed = TENSORS[entry["kind"]][: NEEDED[entry["kind"]]]
            stepped = entry["tensors"] or entry["counts"]
            missing = [name for name in needed if name not in entry["tensors"]] if stepped else []
            if stepped and entry["kind"] != "SGD" and "step" not in entry["counts"]:
                missing.append("step")
            if missing:
                raise Refused(
                    f"the {entry['kind']} state of {parameter!r} lacks {', '.join(missing)}, expected all or none"
                )

    def _groups(self, prefix, keys):
        """{parameter: {option: key}}, of groups by parameter or in a list."""
        prefix += "param_groups."
        found = {}
        for key in keys:
            if key.startswith(prefix):
                owner, _, name = key[len(prefix) :].rpartition(".")
                found.setdefault(owner, {})[name] = key
        groups = {}
        for owner, options in found.items():
            if owner.isdecimal() and "params" in options:
                names = self._reader.read(options.pop("params"))
                if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                    raise Refused(
                        f"{prefix}{owner}.params has {names!r:.80}, expected names of parameters: save what "
                        "get_optimizer_state_dict returns, not optimizer.state_dict()"
                    )
                groups.update({name: options for name in names})
            else:
                groups[owner] = options
        return groups

    def _kind_of(self, parameter, values):
        if self._kind != "auto":
            return self._kind
        if "betas" in values and "momentum_decay" not in values:
            if "decoupled_weight_decay" in values:
                return "AdamW" if values["decoupled_weight_decay"] else "Adam"
            raise Refused(
                f"parameter {parameter!r} was trained by Adam or AdamW, an older PyTorch does not say which, expected "
                "--optimizer to name it"
            )
        for name, kind in (("nesterov", "SGD"), ("centered", "RMSprop"), ("lr_decay", "Adagrad")):
            if name in values:
                return kind
        raise Refused(
            f"parameter {parameter!r} was trained with the options {', '.join(values)}, expected those of "
            f"{', '.join(NUMBERS)}; --optimizer none imports the model alone"
        )

    def _add_options(self, parameter, options):
        if parameter not in self._parameters:
            self._leftovers.add("optimizer state of names that are no model tensors", parameter)
            return
        values = {name: self._option(key) for name, key in options.items()}
        kind = self._kind_of(parameter, values)
        ours = {}
        if isinstance(values.get("betas"), (tuple, list)) and len(values["betas"]) == 2:
            values["beta1"], values["beta2"] = values.pop("betas")
        for names, convert in ((NUMBERS[kind], float), (FLAGS[kind], bool)):
            for name in names:
                if not isinstance(values.get(name), (int, float)):
                    raise Refused(
                        f"option {name} of {parameter!r} is {values.get(name)!r}, expected a number for {kind}"
                    )
                value = convert(values.pop(name))
                ours[name] = value if math.isfinite(value) else str(value)
        defaults = default_options(kind)
        for name, value in values.items():
            if name not in defaults or value != defaults[name]:
                self._leftovers.add(f"options of {kind} that hsdp has not", f"{name}={value!r:.40}")
        self.entries[parameter] = {"kind": kind, "options": ours, "counts": {}, "tensors": []}

    def _option(self, key):
        return self._reader.number(key) if key in self._reader.tensors else self._reader.read(key)

    def _add_state(self, key, rest):
        parameter, _, name = rest.rpartition(".")
        if parameter not in self._parameters:
            self._leftovers.add("optimizer state of names that are no model tensors", rest)
            return
        if parameter not in self.entries:
            raise Refused(f"{key!r} belongs to no parameter group, expected param_groups with {parameter!r}")
        entry = self.entries[parameter]
        if name == "step" and entry["kind"] != "SGD":
            step = self._reader.number(key)
            if step is None or step < 0 or step != int(step):
                raise Refused(f"{key!r} is {step}, expected a number of steps")
            entry["counts"]["step"] = int(step)
        elif name in TENSORS[entry["kind"]] and key in self._reader.tensors:
            if self._reader.tensors[key][1] != self._parameters[parameter]:
                raise Refused(
                    f"{key!r} has shape {list(self._reader.tensors[key][1])}, expected that of the parameter, "
                    f"{list(self._parameters[parameter])}"
                )
            entry["tensors"].append(name)
            self.tensors["state." + rest] = key
        elif key in self._reader.tensors or self._reader.number(key) is not None:
            self._leftovers.add(f"optimizer state that hsdp's {entry['kind']} has not", rest)


def import_checkpoint(arguments):
    model_path = path_of(arguments.model_prefix)
    path_of(arguments.optimizer_prefix)
    leftovers = Leftovers("imported")
    with folder_appearing_at(arguments.out) as folder:
        reader = DcpReader(arguments.source)
        known = {f"train_state.{name}" for name in ("step", "ntokens_seen")} | {"lr_scheduler.last_epoch"}
        model = {}  # our name: key
        for key, path in reader.paths.items():
            of_optimizer = key.startswith(arguments.optimizer_prefix + "state.") or key.startswith(
                arguments.optimizer_prefix + "param_groups."
            )
            if not of_optimizer and key in reader.tensors and path[:-1] == model_path:
                model[key[len(arguments.model_prefix) :]] = key
            elif key not in known and (not of_optimizer or arguments.optimizer == "none"):
                leftovers.add("keys", key)
        if not model:
            starts = sorted({path[0] for path in reader.paths.values()})
            raise Refused(
                f"{arguments.source} has no model tensors under the prefix {arguments.model_prefix!r}, expected "
                f"--model-prefix to say where they are; its state dict has {', '.join(map(repr, starts[:10]))}"
            )
        shapes = {name: reader.tensors[key][1] for name, key in model.items()}
        optimizer = ImportedOptimizer(reader, arguments.optimizer_prefix, shapes, arguments.optimizer, leftovers)

        present = known & set(reader.paths)
        numbers = {key: reader.number(key) for key in present}
        for key, value in numbers.items():
            if not isinstance(value, int) or value < 0:
                raise Refused(f"{key!r} is {value}, expected a whole number")
        counts = [entry["counts"].get("step", 0) for entry in optimizer.entries.values()]
        step = numbers.get("train_state.step", max(counts, default=0))
        if numbers.get("lr_scheduler.last_epoch", step) != step:
            leftovers.add("schedule at another step", f"lr_scheduler.last_epoch {numbers['lr_scheduler.last_epoch']}")

        import torch

        writer = FolderWriter(folder)
        facts = {}
        for kind, within, keys in (("model", "", model), ("optimizer", OPTIMIZER_FOLDER + "/", optimizer.tensors)):
            facts[kind] = {
                name: {"dtype": safetensors_name(reader.tensors[key][0]), "shape": list(reader.tensors[key][1])}
                for name, key in keys.items()
            }
            if keys:
                writer.write_tensors(within + SHARD, facts[kind], lambda name, keys=keys: reader.read(keys[name]))
        # Random numbers begin as in a program that has just started.
        generator = torch.Generator().get_state()
        writer.write_tensors(
            RANK, {"generator.host": {"dtype": "U8", "shape": list(generator.shape)}}, lambda name: generator
        )
        progress = {"step": step, "tokens": numbers.get("train_state.ntokens_seen", 0), "data_position": 0}
        writer.write_json(
            TRAINING_STATE,
            {
                "format": "hsdp-training-state",
                "version": 1,
                "progress": progress,
                "values": {},
                "lr_schedulers": [],
                "grad_scaler": None,
                "optimizers": optimizer.entries,
            },
        )
        writer.complete({"step": step, "world_size": 1, "mesh": "", "torch": torch.__version__, **facts})
    leftovers.report()
    print(f"{arguments.out}: step {step}, {len(model)} model tensors, {len(optimizer.tensors)} of the optimizer")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, source in (("export", "STEP_FOLDER"), ("import", "DCP_FOLDER")):
        command = commands.add_parser(name)
        command.add_argument("source", metavar=source, type=pathlib.Path)
        command.add_argument("out", metavar="OUT", type=pathlib.Path, help="a folder that does not exist yet")
        command.add_argument(
            "--model-prefix", default="", help="of model tensors in the DCP folder (default: none; 'model.' is usual)"
        )
        command.add_argument(
            "--optimizer-prefix", default="optimizer.", help="of the optimizer's (default: %(default)s)"
        )
    commands.choices["export"].add_argument(
        "--initial-lr", type=float, help="for schedules of PyTorch, which expect it in each parameter group"
    )
    commands.choices["import"].add_argument(
        "--optimizer", choices=["auto", "none", *NUMBERS], default="auto", help="its class (default: by its options)"
    )
    arguments = parser.parse_args(arguments)
    try:
        {"export": export_checkpoint, "import": import_checkpoint}[arguments.command](arguments)
    except Refused as error:
        say(" ".join(str(error).split()))
        sys.exit(2)


if __name__ == "__main__":
    main()
