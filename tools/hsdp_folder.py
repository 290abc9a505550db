"""Reads and writes hsdp's checkpoint folders (docs/checkpoints.md has the format), for the tools beside it.

torch is imported where tensors are handled, not above: that takes seconds, and most mistakes of a user show before.
"""

import contextlib
import json
import math
import os
import pathlib
import shutil
import tempfile

import xxhash
from safetensors import SafetensorError, safe_open

MANIFEST = "manifest.json"
TRAINING_STATE = "training_state.json"
OPTIMIZER_FOLDER = "optimizer"
BLOCK_BYTES = 1 << 20

# safetensors' names, and torch's.
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}


class Refused(Exception):
    """A mistake of the user, or a damaged file: one line for stderr."""


def safetensors_name(dtype):
    """Throws Refused for a torch.dtype that safetensors has no name for."""
    for name, torch_name in DTYPES.items():
        if str(dtype) == "torch." + torch_name:
            return name
    raise Refused(f"a tensor has dtype {dtype}, expected one of {', '.join(DTYPES.values())}")


def check_cover(what, size, boxes):
    """Throws Refused unless boxes, (offsets, sizes) pairs, cover a tensor of this size, each element once."""
    for offsets, sizes in boxes:
        if len(offsets) != len(size) or len(sizes) != len(size):
            raise Refused(f"{what} has a part of {len(sizes)} dims at {list(offsets)}, expected {len(size)} dims")
        for length, offset, part in zip(size, offsets, sizes):
            if offset < 0 or part < 0 or offset + part > length:
                raise Refused(
                    f"{what} of shape {list(size)} has a part of {list(sizes)} at {list(offsets)}, expected one within"
                )
    boxes = [box for box in boxes if math.prod(box[1]) > 0]
    if not boxes or not size:
        pairs = []
    else:
        # Only parts that meet along the dim that is cut most often are compared.
        dim = max(range(len(size)), key=lambda d: len({offsets[d] for offsets, _ in boxes}))
        boxes.sort(key=lambda box: box[0][dim])
        pairs, open_boxes = [], []
        for box in boxes:
            open_boxes = [other for other in open_boxes if other[0][dim] + other[1][dim] > box[0][dim]]
            pairs.extend((other, box) for other in open_boxes)
            open_boxes.append(box)
    for (first_offsets, first_sizes), (offsets, sizes) in pairs:
        if all(
            a < b + b_length and b < a + a_length
            for a, a_length, b, b_length in zip(first_offsets, first_sizes, offsets, sizes)
        ):
            raise Refused(
                f"{what} has parts at {list(first_offsets)} and {list(offsets)} that overlap, expected none to"
            )
    covered = sum(math.prod(sizes) for _, sizes in boxes)
    if covered != math.prod(size):
        raise Refused(f"{what} of shape {list(size)} has parts with {covered} elements, expected all {math.prod(size)}")


# ---- reading ----


def read_json(path, what, file_format):
    """An object of this format, in the one version that there is."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise Refused(f"{path} is no JSON ({error}), expected {what}") from error
    if not isinstance(value, dict):
        raise Refused(f"{path} is no JSON object, expected {what}")
    if value.get("format") != file_format or value.get("version") != 1:
        raise Refused(
            f"{path} has format {value.get('format')!r}, version {value.get('version')!r}, expected {file_format!r}, "
            "version 1"
        )
    return value


def read_manifest(folder):
    """The manifest as a dict, of which the parts that are used are checked."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise Refused(f"{folder} is {'no folder' if folder.exists() else 'missing'}, expected a checkpoint of hsdp")
    if not path.is_file():
        raise Refused(f"{folder} has no {MANIFEST}, expected a complete checkpoint of hsdp")
    manifest = read_json(path, "the manifest of a checkpoint", "hsdp-checkpoint")
    try:
        for record in manifest["files"]:
            name = pathlib.PurePosixPath(record["path"])
            if name.is_absolute() or ".." in name.parts or record["bytes"] < 0 or len(record["xxh3"]) != 16:
                raise Refused(f"{path} lists the file {record}, expected a path within the folder, a size, a checksum")
        for kind in ("model", "optimizer"):
            for name, facts in manifest[kind].items():
                if facts["dtype"] not in DTYPES or any(size < 0 for size in facts["shape"]):
                    raise Refused(f"{path} has {facts} for {name!r}, expected a dtype of safetensors and a shape")
    except (AttributeError, KeyError, TypeError) as error:
        raise Refused(f"{path} is no complete manifest ({type(error).__name__}: {error})") from error
    return manifest


def verify_files(folder, manifest):
    """Compares sizes and checksums of all files with the manifest."""
    for record in manifest["files"]:
        path = folder / record["path"]
        total = xxhash.xxh3_64()
        size = 0
        try:
            with open(path, "rb") as file:
                while block := file.read(BLOCK_BYTES):
                    total.update(block)
                    size += len(block)
        except OSError as error:
            raise Refused(f"cannot read {path}: {error.strerror}, expected {record['bytes']} bytes") from error
        if size != record["bytes"]:
            raise Refused(f"{path} has {size} bytes, expected {record['bytes']} by the manifest")
        if total.hexdigest() != record["xxh3"]:
            raise Refused(
                f"{path} has checksum {total.hexdigest()}, expected {record['xxh3']} by the manifest; it was "
                "changed or damaged"
            )


class StoredTensors:
    """The model's or the optimizer's tensors of a checkpoint, whose files hold boxes of them."""

    def __init__(self, folder, manifest, kind):
        self.facts = manifest[kind]
        within = OPTIMIZER_FOLDER if kind == "optimizer" else "."
        self._parts = {name: [] for name in self.facts}
        for record in manifest["files"]:
            name = pathlib.PurePosixPath(record["path"])
            if str(name.parent) == within and name.suffix == ".safetensors":
                self._add_file(folder / name)
        for name, parts in self._parts.items():
            boxes = [(offsets, sizes) for _, offsets, sizes in parts]
            check_cover(f"{kind} tensor {name!r} of {folder}", self.facts[name]["shape"], boxes)

    def _add_file(self, path):
        try:
            with safe_open(path, framework="pt") as file:
                sharding = json.loads((file.metadata() or {}).get("DCP_SHARDING_INFO", "null"))
                for name in file.keys():
                    part = file.get_slice(name)
                    sizes, dtype = part.get_shape(), part.get_dtype()
                    offsets = [0] * len(sizes) if sharding is None else sharding[name]["saved_offsets"]
                    if name not in self.facts or dtype != self.facts[name]["dtype"]:
                        raise Refused(
                            f"{path} has {name!r} of dtype {dtype}, expected {self.facts.get(name)} by the manifest"
                        )
                    self._parts[name].append((path, offsets, sizes))
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise Refused(f"{path} is no safetensors file of a checkpoint ({error})") from error

    def read(self, name):
        """The whole tensor, with memory of its own."""
        import torch

        facts = self.facts[name]
        tensor = torch.empty(facts["shape"], dtype=getattr(torch, DTYPES[facts["dtype"]]))
        for path, offsets, sizes in self._parts[name]:
            with safe_open(path, framework="pt") as file:
                # A mapped file, from which values come as they are copied.
                tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes))] = file.get_tensor(name)
        return tensor


# ---- writing ----


@contextlib.contextmanager
def folder_appearing_at(out):
    """A temporary folder beside `out` that is renamed to it when all went well, and removed when not."""
    if out.exists() or out.is_symlink():
        raise Refused(f"{out} exists, expected a path for a new folder")
    temporary = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = pathlib.Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
        yield temporary
        # mkdtemp keeps others out.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o777 & ~mask)
        sync_folder(temporary)
        if out.exists():
            raise Refused(f"{out} has appeared meanwhile, expected a path for a new folder")
        temporary.rename(out)
        temporary = None
        sync_folder(out.parent)
    except OSError as error:
        raise Refused(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def sync_folder(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FolderWriter:
    """Files of a checkpoint, with their checksums; the manifest comes last."""

    def __init__(self, folder):
        self._folder = folder
        self._records = []

    def write(self, path, chunks):
        """A file of these bytes-like objects."""
        target = self._folder / path
        target.parent.mkdir(exist_ok=True)
        total, block, blocks, size, in_block = xxhash.xxh3_64(), xxhash.xxh3_64(), [], 0, 0
        with open(target, "wb") as file:
            for chunk in chunks:
                rest = memoryview(chunk).cast("B")
                file.write(rest)
                total.update(rest)
                size += len(rest)
                while len(rest) > 0:
                    part = rest[: BLOCK_BYTES - in_block]
                    block.update(part)
                    in_block += len(part)
                    rest = rest[len(part) :]
                    if in_block == BLOCK_BYTES:
                        blocks.append(block.hexdigest())
                        block, in_block = xxhash.xxh3_64(), 0
            file.flush()
            os.fsync(file.fileno())
        if in_block > 0:
            blocks.append(block.hexdigest())
        if target.parent != self._folder:
            sync_folder(target.parent)
        self._records.append({"path": path, "bytes": size, "xxh3": total.hexdigest(), "blocks": "".join(blocks)})

    def write_json(self, path, value):
        self.write(path, [json.dumps(value, separators=(",", ":")).encode() + b"\n"])

    def write_tensors(self, path, facts, read):
        """A file of whole tensors, {name: {"dtype", "shape"}}; `read(name)` is called once each, when it is written."""

        def item_bytes(name):
            import torch

            return getattr(torch, DTYPES[facts[name]["dtype"]]).itemsize

        order = sorted(facts, key=lambda name: (-item_bytes(name), name))
        sharding = {name: {"saved_offsets": [0] * len(facts[name]["shape"])} for name in order}
        header = {"__metadata__": {"DCP_SHARDING_INFO": json.dumps(sharding), "DCP_VERSION": "1.0", "format": "pt"}}
        end = 0
        for name in order:
            begin, end = end, end + item_bytes(name) * math.prod(facts[name]["shape"])
            header[name] = {**facts[name], "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)

        def chunks():
            import torch

            yield len(text).to_bytes(8, "little")
            yield text
            for name in order:
                yield read(name).contiguous().reshape(-1).view(torch.uint8).numpy()

        self.write(path, chunks())

    def complete(self, manifest):
        """Adds what every manifest has, and writes it."""
        manifest = {
            "format": "hsdp-checkpoint",
            "version": 1,
            "block_bytes": BLOCK_BYTES,
            "files": self._records,
            **manifest,
        }
        self.write_json(MANIFEST, manifest)
