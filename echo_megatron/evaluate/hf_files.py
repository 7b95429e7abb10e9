"""The safetensors files of a checkpoint folder: read by slices, written by shards; no whole checkpoint is in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def has_safetensors(folder: Path) -> bool:
    """Whether there is a file for `CheckpointReader` to open, whole or not."""
    return (folder / INDEX).is_file() or any(folder.glob("*.safetensors"))


class CheckpointReader:
    """Opens `model.safetensors`, or the files that `model.safetensors.index.json` names; a context manager.

    Args:
        folder: holds the files.

    Raises:
        ValueError: there are no such files, one is missing, truncated or not a safetensors file, or the index and the
            files do not hold the same tensors. The message names file and tensor.
    """

    def __init__(self, folder: Path):
        self._files: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        with ExitStack() as stack:
            indexed = _index(folder)
            for path in sorted(set(indexed.values())) if indexed is not None else [_single(folder)]:
                try:
                    self._open[path] = stack.enter_context(safe_open(str(path), framework="pt"))
                except (SafetensorError, OSError) as error:
                    raise ValueError(f"{path}: {_what_is_wrong(path, error)}; copy the file again") from error
            for path, file in self._open.items():
                for name in file.keys():  # noqa: SIM118  # it is not a mapping
                    if indexed is not None and indexed.get(name) != path:
                        raise ValueError(f"{path}: has the tensor {name}, which {INDEX} does not say; copy both again")
                    self._files[name] = path
            for name, path in (indexed or {}).items():
                if name not in self._files:
                    raise ValueError(f"{path}: expected the tensor {name}, as {INDEX} says, got none; copy both again")
            self._stack = stack.pop_all()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def check(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype | None, allowed: Iterable[str]) -> None:
        """Refuse a checkpoint that does not hold exactly these tensors.

        Args:
            shapes: of every tensor, by name.
            dtype: of every tensor; None: any of float32, bfloat16, float16.
            allowed: names that may be there as well.

        Raises:
            ValueError: tensors missing, unexpected, of another shape or another type; names file and tensor.
        """
        folder = next(iter(self._open)).parent
        if missing := [name for name in shapes if name not in self._files]:
            raise ValueError(
                f"{folder}: expected the tensors {_some(missing)}, which no file has; copy the checkpoint again"
            )
        for name, path in self._files.items():
            if name not in shapes and name not in allowed:
                raise ValueError(f"{path}: unexpected tensor {name}; config.json is another model's, or not understood")
            view = self._open[path].get_slice(name)
            if name in shapes and tuple(view.get_shape()) != shapes[name]:
                raise ValueError(
                    f"{path}: {name}: expected shape {list(shapes[name])} by config.json, got {list(view.get_shape())}"
                )
            kind = view.get_dtype()
            if kind not in DTYPES:
                raise ValueError(
                    f"{path}: {name}: expected one of {', '.join(DTYPES)}, got {kind}, which is not converted"
                )
            if dtype is not None and DTYPES[kind] is not dtype:
                raise ValueError(
                    f"{path}: {name}: expected {dtype} by config.json, got {DTYPES[kind]}; give dtype= to convert"
                )

    def read(self, name: str, split: int | None = None, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """A tensor, or the part [start, stop) of its dimension `split` (0 or 1); nothing more is read."""
        path = self._files[name]
        try:
            view = self._open[path].get_slice(name)
            if split is None:
                tensor = view[:]
            else:
                tensor = view[start:stop] if split == 0 else view[:, start:stop]
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: {name}: cannot be read ({error}); copy the file again") from error
        assert isinstance(tensor, torch.Tensor)
        return tensor


class CheckpointWriter:
    """Writes tensors, given in the order of `shapes`, into one file, or into shards and an index.

    Args:
        folder: exists and is empty.
        shapes: of every tensor, by name.
        dtype: of every tensor.
        max_shard_bytes: a larger checkpoint is split; a file holds more only where a single tensor does.
    """

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_shard_bytes: int):
        self._folder = folder
        self._shards: list[list[str]] = [[]]
        size = self._total = 0
        for name, shape in shapes.items():
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            if self._shards[-1] and size + num_bytes > max_shard_bytes:
                self._shards.append([])
                size = 0
            self._shards[-1].append(name)
            size += num_bytes
            self._total += num_bytes
        self._num_written = 0
        self._pending: dict[str, torch.Tensor] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take the next tensor; the file is written once it has all of its own."""
        names = self._shards[self._num_written]
        assert name == names[len(self._pending)]
        # Its own memory: safetensors refuses views that share theirs.
        self._pending[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        if len(self._pending) == len(names):
            path = self._folder / self._file(self._num_written)
            save_file(self._pending, str(path), metadata={"format": "pt"})
            with path.open("rb") as file:
                os.fsync(file.fileno())
            self._num_written += 1
            self._pending = {}

    def finish(self) -> None:
        """Write the index, where there are several files."""
        assert self._num_written == len(self._shards)
        if len(self._shards) > 1:
            files = {name: self._file(number) for number, names in enumerate(self._shards) for name in names}
            index = {"metadata": {"total_size": self._total}, "weight_map": files}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _file(self, number: int) -> str:
        count = len(self._shards)
        return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _single(folder: Path) -> Path:
    """The one file of a folder without an index."""
    path = folder / SINGLE
    if path.is_file():
        return path
    found = sorted(entry.name for entry in folder.iterdir())
    if pickles := [name for name in found if name.endswith((".bin", ".pt", ".pth"))]:
        raise ValueError(
            f"{folder}: expected {SINGLE} or {INDEX}, got {_some(pickles)}; these are pickles, which run code when "
            "they are read, and are never opened: save the model with transformers' save_pretrained"
        )
    raise ValueError(f"{folder}: expected {SINGLE} or {INDEX}, got {_some(found) or 'nothing'}")


def _index(folder: Path) -> dict[str, Path] | None:
    """Tensor name -> file; None where the folder has the single file, or no index."""
    path = folder / INDEX
    if (folder / SINGLE).is_file() or not path.is_file():
        return None
    try:
        names = json.loads(path.read_text())["weight_map"]
        files = {str(name): str(file) for name, file in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: expected JSON with a weight_map of tensor names to files, got {error!r}") from error
    if not files:
        raise ValueError(f"{path}: expected a weight_map with tensors, got an empty one")
    for name, file in files.items():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(f"{path}: {name}: expected a .safetensors file of this folder, got {file!r}")
        if not (folder / file).is_file():
            raise ValueError(f"{folder / file}: is missing; {INDEX} expects the tensor {name} in it")
    return {name: folder / file for name, file in files.items()}


def _what_is_wrong(path: Path, error: Exception) -> str:
    """Which tensor a file lacks the end of; what safetensors said where that cannot be told."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            num_header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(num_header_bytes, size)))
        header.pop("__metadata__", None)
        ends = {name: 8 + num_header_bytes + entry["data_offsets"][1] for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return f"is truncated or not a safetensors file ({error})"
    cut = [name for name, end in sorted(ends.items(), key=lambda item: item[1]) if end > size]
    if not cut:
        return f"is not a safetensors file that can be read ({error})"
    return (
        f"is truncated: expected {max(ends.values())} bytes, got {size}; {cut[0]} is the first tensor that is not whole"
    )


def _some(names: list[str]) -> str:
    """The first few of many names."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
