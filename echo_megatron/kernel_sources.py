"""What the kernels' library is made of: the CUDA sources, the objects compiled from them, and each object's flags."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from echo_megatron.config import QUANTIZED_BITS, Policy
from echo_megatron.package_folders import package_folder

LOWEST_CAPABILITY = (8, 0)  # of a GPU: the kernels copy into shared memory asynchronously
# The quantizer's arithmetic is one FP32 rounding an operation: no contraction, no approximate division, no flush.
HOST_FLAGS = ("-O3", "-std=c++17", "-Xcompiler=-fPIC,-ffp-contract=off,-Wall,-Wno-unknown-pragmas")
CUDA_FLAGS = ("-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false", "-lineinfo", "-Xptxas=-v")

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Unit:
    """One object of the library: `source`, a name in the source folder, compiled with `defines`."""

    source: str
    defines: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return "-".join((Path(self.source).stem, *(value for _, value in self.defines)))


def source_folder() -> Path:
    """The CUDA sources: inside the installed package, or beside it in a checkout.

    Raises:
        FileNotFoundError: they are in neither place.
    """
    return package_folder("cuda", "cuda", ("layout.cuh",))


def read_sources(folder: Path | None = None) -> dict[str, str]:
    """Name and text of everything that the library is made of, headers included."""
    found = sorted(path for path in (folder or source_folder()).iterdir() if path.suffix in (".cu", ".cuh", ".cpp"))
    return {path.name: path.read_text() for path in found}


def source_hash(sources: dict[str, str] | None = None) -> str:
    """16 hexadecimal digits over names and texts of the sources: a library of another hash is of other sources."""
    return content_key(sorted((sources or read_sources()).items()))[:16]


def units(sources: dict[str, str]) -> list[Unit]:
    """The objects of the library, the slow ones first."""
    variants = [
        Unit("all_reduce.cu", (("ECHO_POLICY", policy.name), ("ECHO_BITS", str(bits))))
        for policy in Policy
        for bits in QUANTIZED_BITS
    ]
    once = [Unit(name) for name in sources if name.endswith((".cu", ".cpp")) and name != "all_reduce.cu"]
    return [*(variants if "all_reduce.cu" in sources else []), *once]


def with_headers(sources: dict[str, str], name: str) -> dict[str, str]:
    """`name` and the headers among the sources that it includes, directly or through others."""
    found: dict[str, str] = {}
    pending = [name]
    while pending:
        name = pending.pop()
        if name in sources and name not in found:
            found[name] = sources[name]
            pending += _INCLUDE.findall(found[name])
    return found


def content_key(*parts: object) -> str:
    """24 hexadecimal digits over the parts; in the names of what is cached."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def compile_flags(unit: Unit, sources: dict[str, str], arches: Sequence[str]) -> list[str]:
    """What nvcc is called with for `unit`; `arches` concern the kernels alone."""
    defines = [f"-D{name}={value}" for name, value in unit.defines]
    if unit.source.endswith(".cu"):
        code = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in arches]
        return [*HOST_FLAGS, *CUDA_FLAGS, *code, *defines]
    if "ECHO_SOURCE_HASH" in sources[unit.source]:
        defines.append(f'-DECHO_SOURCE_HASH="{source_hash(sources)}"')
    return [*HOST_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", *defines]
