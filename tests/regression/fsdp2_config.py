"""The configuration of hsdp_train as fsdp2_train.py reads it: docs/configuration.md says what the keys mean."""

import torch
import yaml

DTYPES = {"default": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
# Sections and keys of docs/configuration.md with their defaults; a type where there is none.
DEFAULTS = {
    "model.vocab_size": int,
    "model.hidden_size": int,
    "model.intermediate_size": int,
    "model.n_layers": int,
    "model.n_heads": int,
    "model.n_kv_heads": 0,
    "model.max_sequence_length": int,
    "model.rope_theta": 10000.0,
    "model.norm_eps": 1e-5,
    "model.tie_embeddings": False,
    "data.path": str,
    "data.format": str,
    "training.steps": int,
    "training.global_batch_size": int,
    "training.gradient_accumulation": 1,
    "training.sequence_length": int,
    "training.seed": 0,
    "training.max_norm": 1.0,
    "parallelism.replicate": 1,
    "parallelism.shard": "auto",
    "parallelism.reshard_after_forward": "default",
    "mixed_precision.param_dtype": "default",
    "mixed_precision.reduce_dtype": "default",
    "mixed_precision.output_dtype": "float32",
    "optimizer.name": "adamw",
    "optimizer.lr": float,
    "optimizer.weight_decay": 0.01,
    "optimizer.no_decay": [],
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.999,
    "optimizer.eps": 1e-8,
    "optimizer.momentum": 0.0,
    "lr_schedule.warmup_steps": 0,
    "lr_schedule.decay": "cosine",
    "lr_schedule.min_lr_factor": 0.0,
    "metrics.folder": str,
    "metrics.log_every": 10,
    "comm.backend": "auto",
    "comm.timeout_seconds": 300,
}
CHOICES = {
    "data.format": ("bytes", "uint16", "llmc"),
    "mixed_precision.param_dtype": tuple(DTYPES),
    "mixed_precision.reduce_dtype": tuple(DTYPES),
    "mixed_precision.output_dtype": tuple(DTYPES),
    "optimizer.name": ("adamw", "fused_adamw", "sgd", "fused_sgd"),
    "lr_schedule.decay": ("constant", "cosine", "linear"),
    "comm.backend": ("auto", "gloo", "nccl"),
}
# What is not honoured, with the values that ask for nothing.
OFF = {
    "training.activation_checkpoint": ("none",),
    "training.sample_bytes": (0,),
    "parallelism.prefetch": (True,),
    "offload.to_host": (False,),
    "grad_scaler.enabled": ("auto", False),
    "metrics.count_memory": (False,),
    "checkpoint.folder": ("none",),
    "checkpoint.load": ("auto", "none"),
    "checkpoint.weights": ("none",),
    "profile.trace_folder": ("none",),
    "profile.nvtx": (False,),
    "profile.memory_snapshot_folder": ("none",),
}
# Says nothing while the keys above are off.
WITHOUT_EFFECT = {
    "training.sample_prompt", "training.sample_temperature", "offload.pin_memory", "grad_scaler.scale",
    "grad_scaler.growth_interval", "checkpoint.every", "checkpoint.keep_latest", "checkpoint.keep_every",
    "checkpoint.async", "profile.trace_first_step", "profile.trace_steps", "profile.trace_ranks",
    "profile.record_shapes", "profile.profile_memory", "profile.memory_snapshot_step",
}  # fmt: skip


class Mistake(Exception):
    """Of the user; all ranks find the same."""


def as_type(name, value):
    """`value` as the type that the key has. Raises ValueError."""
    default = DEFAULTS[name]
    kind = default if isinstance(default, type) else type(default)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if name == "parallelism.reshard_after_forward" and isinstance(value, int):
        return value
    if name == "parallelism.shard" and isinstance(value, int) and is_number:
        return value
    if kind is float and (is_number or isinstance(value, str)):
        return float(value)  # YAML 1.1 takes 1e-5 for text
    if not isinstance(value, kind) or (kind is int and not is_number):
        raise ValueError
    return value


def read_config(path, overrides):
    """`section.key` -> value, defaults included. Raises Mistake with a line for each problem."""
    with open(path, encoding="utf-8") as file:
        sections = yaml.safe_load(file)
    if not isinstance(sections, dict) or not all(isinstance(keys, dict) for keys in sections.values()):
        raise Mistake(f"[config] {path}: expected sections with keys below them")
    given = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
    for text in overrides:
        name, equals, value = text.partition("=")
        if not equals:
            raise Mistake(f"[config] --set: {text!r}, expected section.key=value")
        texts = DEFAULTS.get(name) is str or name == "checkpoint.load"
        given[name] = value if texts else yaml.safe_load(value)
    config, problems = {}, []
    for name, value in given.items():
        if name in OFF:
            if (type(value), value) not in [(type(each), each) for each in OFF[name]]:
                expected = " or ".join(str(each) for each in OFF[name])
                problems.append(f"{name} is {value!r}, expected {expected}: FSDP2 is not asked for that here")
        elif name in DEFAULTS:
            try:
                config[name] = as_type(name, value)
            except ValueError:
                problems.append(f"{name} is {value!r}, which is of another type")
            if name in CHOICES and config.get(name, value) not in CHOICES[name]:
                problems.append(f"{name} is {value!r}, expected {' or '.join(CHOICES[name])}")
        elif name not in WITHOUT_EFFECT:
            problems.append(f"{name} is not known")
    for name, default in DEFAULTS.items():
        if name not in given and isinstance(default, type):
            problems.append(f"{name} is missing")
        config.setdefault(name, default)
    if problems:
        raise Mistake("\n".join(f"[config] {path}: {problem}" for problem in problems))
    return config


def to_yaml(config):
    """The configuration, defaults included, without the values that ask for nothing."""
    sections = dict.fromkeys(name.split(".")[0] for name in config)
    return yaml.safe_dump({section: section_of(config, section) for section in sections}, sort_keys=False)


def section_of(config, section):
    return {name.split(".")[1]: value for name, value in config.items() if name.split(".")[0] == section}
