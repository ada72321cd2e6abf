"""What `torch.save` wrote: a zip archive of `data.pkl`, a pickle, and beside it the bytes of every storage."""

from __future__ import annotations

import mmap
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

from .pickles import Foreign, PickleReader, plain_dict

DTYPES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, then the lengths of the name and of the extra field
_LOCAL_SIGNATURE = b"PK\x03\x04"


class Archive:
    """A zip archive of `torch.save`, mapped into memory: a storage is read when its tensor is used.

    Args:
        path: the file.

    Raises:
        ValueError: it is no such archive, or one of TorchScript, which holds a program, or a part is cut off.
    """

    def __init__(self, path: Path):
        self.storages: dict[str, torch.Tensor] = {}
        with open(path, "rb") as file:
            self.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        with zipfile.ZipFile(path) as archive:
            self.records = {info.filename: info for info in archive.infolist()}
        if self.memory[:4] != _LOCAL_SIGNATURE:  # readers would differ on what such a file is
            raise ValueError("it does not begin as an archive")
        names = [name for name in self.records if name.endswith("data.pkl")]
        if len(names) != 1:
            raise ValueError(f"it holds {len(names)} files data.pkl, where torch.save writes one")
        self.folder = names[0].removesuffix("data.pkl")
        # What torch.jit would load has its constants and its code beside the data.
        if any(name.removeprefix(self.folder).startswith(("constants.pkl", "code/")) for name in self.records):
            raise ValueError("it is a TorchScript archive, which holds a program, not weights alone")

    def __contains__(self, name: str) -> bool:
        return self.folder + name in self.records

    def read(self, name: str) -> memoryview:
        """The bytes of a file in the archive, without a copy.

        Raises:
            ValueError: there is no such file, or it is compressed, cut off, or its checksum is another.
        """
        info = self.records.get(self.folder + name)
        if info is None:
            raise ValueError(f"{name} is missing")
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{name} is compressed, which torch.save never does")
        header = self.memory[info.header_offset : info.header_offset + _LOCAL_HEADER.size]
        if len(header) < _LOCAL_HEADER.size or not header.startswith(_LOCAL_SIGNATURE):
            raise ValueError(f"{name} does not begin where it should")
        _, name_length, extra_length = _LOCAL_HEADER.unpack(header)
        start = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        if info.file_size > len(self.memory) - start:
            raise ValueError(f"{name} is cut off")
        content = memoryview(self.memory)[start : start + info.file_size]
        if info.CRC and zlib.crc32(content) != info.CRC:  # torch can be told to write none, which is 0
            raise ValueError(f"{name} has another checksum than when it was written")
        return content

    def storage(self, reference: tuple) -> torch.Tensor:
        """The storage that a pickle refers to, as a tensor of one dimension."""
        kind, type_, key, _, _ = reference
        dtype = DTYPES.get(type_.name.removeprefix("torch ")) if isinstance(type_, Foreign) else None
        if kind != "storage" or dtype is None or not isinstance(key, str):
            raise ValueError("it refers to a storage of an unknown kind")
        if key not in self.storages:
            content = self.read(f"data/{key}")
            self.storages[key] = torch.frombuffer(content or bytearray(1), dtype=torch.uint8)[: len(content)]
        return self.storages[key].view(dtype)


def load_archive(path: Path) -> Any:
    """What `torch.save` wrote, with `Foreign` objects in place of all that is neither tensor, container nor value.

    Raises:
        ValueError: the file is damaged, no archive of `torch.save`, or one of TorchScript.
    """
    try:
        archive = Archive(path)
        if "byteorder" in archive and bytes(archive.read("byteorder")) != b"little":
            raise ValueError("it was written by a big-endian machine")
        builders = {
            "collections OrderedDict": plain_dict,
            "torch Size": lambda sizes: tuple(sizes),
            "torch._utils _rebuild_tensor": _tensor,
            "torch._utils _rebuild_tensor_v2": _tensor,
            "torch._utils _rebuild_parameter": lambda data, requires_grad, hooks: data,
        }
        return PickleReader(archive.storage, builders).read(bytes(archive.read("data.pkl")))
    # A damaged archive or pickle fails in any step with the error of that step.
    except (zipfile.BadZipFile, NotImplementedError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from error
    except (struct.error, RuntimeError, MemoryError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from error


def _tensor(storage: torch.Tensor, offset: int, size: tuple, stride: tuple, *unused) -> torch.Tensor:
    """A view of a storage, after a look at whether it lies inside."""
    numbers = (offset, *size, *stride)
    if any(type(n) is not int or n < 0 for n in numbers) or len(size) != len(stride):
        raise ValueError("a tensor has a shape that cannot be")
    count = last = 1
    for n, step in zip(size, stride, strict=True):
        count, last = count * n, last + (n - 1) * step
    if count and (offset + last > len(storage) or count > len(storage)):
        raise ValueError(f"a tensor of shape {size} does not fit into its storage of {len(storage)} values")
    return storage.as_strided(size, stride, offset) if count else storage.new_empty(size)
