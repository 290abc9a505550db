"""Reads and writes folders of PyTorch's distributed checkpoints (DCP), one tensor in memory at a time.

Files are read without running what they say: tensors and objects with torch.load(weights_only=True), and `.metadata`,
which is a pickle, with the few classes that DCP writes. torch is imported when it is needed: that takes seconds.
"""

import io
import math
import os
import pathlib
import pickle
import re
import warnings

from hsdp_folder import Refused, check_cover


def write_dcp(folder, name_in_metadata, state, readers):
    """Saves a nested state dict, whose tensors may be on meta; `readers` has for each flat key None, or a function that
    returns the tensor."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import StorageMeta
    from torch.distributed.checkpoint.planner import WriteItemType
    from torch.distributed.checkpoint.storage import WriteResult

    class ReadingPlanner(dcp.DefaultSavePlanner):
        """Tensors are read when they are written."""

        def lookup_object(self, index):
            read = readers[index.fqn]
            return super().lookup_object(index) if read is None else read()

    class StreamingWriter(dcp.FileSystemWriter):
        """FileSystemWriter keeps all tensors of a file until it is written."""

        def storage_meta(self):
            return StorageMeta(checkpoint_id=name_in_metadata, save_id=self.save_id)

        def write_data(self, plan, planner):
            name = "__0_0.distcp"
            results = []
            with open(folder / name, "wb") as file:
                for item in plan.items:
                    offset = file.tell()
                    data = planner.resolve_data(item)
                    if item.type == WriteItemType.BYTE_IO:
                        file.write(data.getbuffer())
                    else:
                        torch.save(data, file)
                    length = file.tell() - offset
                    results.append(WriteResult(item.index, length, _StorageInfo(name, offset, length)))
                file.flush()
                os.fsync(file.fileno())
            done = torch.futures.Future()
            done.set_result(results)
            return done

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, storage_writer=StreamingWriter(folder), planner=ReadingPlanner(), no_dist=True)


_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}


def _memory_format(encoding, name):
    """What Python 3.11.2 writes getattr() for: a member of the one enumeration that metadata has."""
    from torch.distributed.checkpoint import metadata

    if encoding is not metadata._MEM_FORMAT_ENCODING or name not in encoding.__members__:
        raise Refused("it asks builtins.getattr for more than a memory format; do not load this file with PyTorch")
    return encoding[name]


class MetadataUnpickler(pickle.Unpickler):
    """Finds what DCP's `.metadata` consists of, and nothing else."""

    def find_class(self, module, name):
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath"):
            return pathlib.PurePath
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch":
            import torch

            if isinstance(getattr(torch, name, None), torch.dtype):
                return getattr(torch, name)
        raise Refused(
            f"it names {module}.{name}, which is no part of DCP's metadata; do not load this file with PyTorch"
        )


class DcpReader:
    """The items of a folder that dcp.save wrote."""

    def __init__(self, folder):
        self._folder = folder
        path = folder / ".metadata"
        if not folder.is_dir():
            raise Refused(f"{folder} is {'no folder' if folder.exists() else 'missing'}, expected one of dcp.save")
        try:
            with open(path, "rb") as file:
                metadata = MetadataUnpickler(file).load()
            self._check(metadata)
        except Refused as error:
            raise Refused(f"{path} is refused: {error}") from error
        except FileNotFoundError as error:
            raise Refused(f"{folder} has no .metadata, expected a complete checkpoint of dcp.save") from error
        except OSError as error:
            raise Refused(f"cannot read {path}: {error.strerror}") from error
        # Whatever a damaged pickle runs into.
        except Exception as error:
            raise Refused(f"{path} is no metadata of dcp.save ({type(error).__name__}: {error})") from error

    def _check(self, metadata):
        import torch
        from torch.distributed.checkpoint.filesystem import _StorageInfo
        from torch.distributed.checkpoint.metadata import (
            BytesStorageMetadata,
            Metadata,
            MetadataIndex,
            TensorStorageMetadata,
        )

        def check(fits, what):
            if not fits:
                raise Refused(f"{what} is not as dcp.save writes it")

        check(isinstance(metadata, Metadata) and isinstance(metadata.state_dict_metadata, dict), "the metadata")
        check(isinstance(metadata.storage_data, dict), "the list of stored items")
        self.tensors, self.objects = {}, set()
        for key, item in metadata.state_dict_metadata.items():
            check(isinstance(key, str), f"the key {key!r}")
            if isinstance(item, BytesStorageMetadata):
                self.objects.add(key)
                continue
            check(isinstance(item, TensorStorageMetadata) and isinstance(item.properties.dtype, torch.dtype), repr(key))
            boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in item.chunks]
            for number in [*item.size, *(number for box in boxes for part in box for number in part)]:
                check(isinstance(number, int) and number >= 0, f"the shape of {key!r}")
            check_cover(repr(key), tuple(item.size), boxes)
            self.tensors[key] = (item.properties.dtype, tuple(item.size), boxes)
        self._places = {}
        for index, info in metadata.storage_data.items():
            check(isinstance(index, MetadataIndex) and isinstance(info, _StorageInfo), "the list of stored items")
            name = pathlib.PurePosixPath(info.relative_path)
            check(not name.is_absolute() and ".." not in name.parts, f"the path {info.relative_path!r}")
            check(min(info.offset, info.length) >= 0, f"the place of {index.fqn!r} in {info.relative_path!r}")
            offsets = None if index.offset is None else tuple(index.offset)
            self._places[index.fqn, offsets] = info
        # How dcp.save has flattened nested state dicts.
        paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        self.paths = {key: tuple(map(str, paths.get(key, (key,)))) for key in metadata.state_dict_metadata}
        for key, path in self.paths.items():
            check(".".join(path) == key, f"the path {path} of {key!r}")

    def _load(self, key, offsets):
        import torch

        info = self._places.get((key, offsets))
        if info is None:
            raise Refused(f"{self._folder} has no place for {key!r} at {offsets}, expected one in its .metadata")
        if getattr(info, "transform_descriptors", None):
            raise Refused(
                f"{key!r} of {self._folder} is encoded as {', '.join(info.transform_descriptors)}, expected plain files"
            )
        path = self._folder / info.relative_path
        try:
            with open(path, "rb") as file:
                if info.offset + info.length > os.fstat(file.fileno()).st_size:
                    raise Refused(f"{path} ends before {key!r}, which is {info.length} bytes at {info.offset}")
                file.seek(info.offset)
                return torch.load(io.BytesIO(file.read(info.length)), map_location="cpu", weights_only=True)
        except OSError as error:
            raise Refused(f"cannot read {path}: {error.strerror}") from error
        except pickle.UnpicklingError as error:
            # The rest of the message advises to load without weights_only.
            found = re.search(r"GLOBAL (\S+)", str(error))
            reason = f"it names {found[1]}" if found else "it is damaged or holds more than tensors and plain objects"
            raise Refused(f"{path} has {key!r} at byte {info.offset}, which is refused: {reason}") from error
        # torch.load has no list of what else it throws.
        except (RuntimeError, ValueError, EOFError, KeyError, AttributeError, TypeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise Refused(
                f"{path} has {key!r} at byte {info.offset}, which torch.load cannot read: {reason}"
            ) from error

    def read(self, key):
        """The value of a key: a whole tensor, or an object of plain types."""
        import torch

        if key in self.objects:
            return self._load(key, None)
        dtype, size, boxes = self.tensors[key]
        tensor = torch.empty(size, dtype=dtype)
        for offsets, sizes in boxes:
            if math.prod(sizes) == 0:
                continue
            part = self._load(key, offsets)
            if not isinstance(part, torch.Tensor) or tuple(part.shape) != sizes or part.dtype != dtype:
                raise Refused(
                    f"{key!r} of {self._folder} has another part at {offsets} than .metadata says, expected {dtype} of "
                    f"shape {list(sizes)}"
                )
            tensor[tuple(slice(offset, offset + length) for offset, length in zip(offsets, sizes))] = part
        return tensor

    def number(self, key):
        """An int, float, bool or None, which may lie in a tensor of one element."""
        import torch

        value = self.read(key)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if value is not None and not isinstance(value, (int, float)):
            raise Refused(f"{key!r} of {self._folder} is a {type(value).__name__}, expected a number")
        return value
