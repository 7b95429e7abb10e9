"""Builds the CUDA sources into one shared library: nvcc called directly, once a machine, cached, locked among ranks.

`all_reduce.cu` is compiled once for every policy and bit width, everything else once. Objects and libraries are cached
by the content of their sources, so that one changed file recompiles little. The cache is `~/.cache/echo_megatron`
(ECHO_KERNEL_CACHE names another folder) and may be deleted at any time. A machine without nvcc takes a library built
elsewhere, which ECHO_KERNEL_LIBRARY names; the library carries the hash of its sources, and another hash is refused.

    python -m echo_megatron.kernel_build --arch 80 90 100 --out libecho_megatron.so
"""

from __future__ import annotations

import argparse
import concurrent.futures
import logging
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from echo_megatron.kernel_cache import cache_folder, locked, written_whole
from echo_megatron.kernel_sources import (
    HOST_FLAGS,
    Unit,
    compile_flags,
    content_key,
    read_sources,
    source_hash,
    units,
    with_headers,
)
from echo_megatron.kernel_tools import (
    LIBRARY_NAME,
    KernelBuildError,
    KernelsUnavailable,
    find_nvcc,
    nvcc_version,
    run_tool,
)

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 1800.0
TORCH_FOLDER = Path(torch.__file__).parent
TORCH_LIBRARIES = ("c10", "c10_cuda", "torch_cpu", "torch_cuda", "torch")
LINK_FLAGS = ("-shared", "-cudart=shared", "-Xlinker=--no-undefined,--as-needed")

_INFO = re.compile(rb"echo_megatron kernels: source=([0-9a-f]{16}) arches=([0-9a-f,]+) torch=([0-9A-Za-z.+]+)")
_ARCH = re.compile(r"[0-9]{2,3}[af]?")


@dataclass(frozen=True)
class BuildInfo:
    """What a library says about itself.

    Attributes:
        source: `source_hash` of its sources.
        arches: compute capabilities, such as "90".
        torch: version of PyTorch that it was built against.
    """

    source: str
    arches: tuple[str, ...]
    torch: str


@dataclass(frozen=True)
class KernelResources:
    """What ptxas says about one kernel: registers a thread, and bytes spilled to local memory (stores and loads)."""

    kernel: str
    arch: str
    registers: int
    spilled_bytes: int


class Builder:
    """One build: nvcc, the sources as they were when it began, and the architectures."""

    def __init__(self, sources: dict[str, str], arches: Sequence[str], report: Callable[[str], None]) -> None:
        self.sources = sources
        self.arches = arches
        self.report = report
        self.nvcc = find_nvcc()
        self.version = nvcc_version(self.nvcc)

    def write_sources(self) -> Path:
        """A copy of the sources in the cache: what is compiled is what was hashed, whoever edits the checkout."""
        folder = cache_folder() / "sources" / source_hash(self.sources)
        for name, text in self.sources.items():
            with written_whole(folder / name) as temporary:
                temporary.write_text(text)
        return folder

    def compile(self, unit: Unit, folder: Path) -> Path:
        """The unit's object, from the cache where it is there; beside it lies what nvcc printed."""
        flags, is_host = compile_flags(unit, self.sources, self.arches), unit.source.endswith(".cpp")
        texts = sorted(with_headers(self.sources, unit.source).items())
        key = content_key(texts, flags, self.version, platform.machine(), torch.__version__ if is_host else "")
        target = cache_folder() / "objects" / f"{unit.name}-{key}.o"
        if target.exists():
            self.report(f"{unit.name}: cached")
            return target
        start = time.monotonic()
        includes = [f"-isystem={TORCH_FOLDER / 'include'}"] if is_host else []
        with written_whole(target) as temporary:
            command = [str(self.nvcc), *flags, *includes, "-c", unit.source, "-o", str(temporary)]
            output = run_tool(command, unit.name, folder)
            with written_whole(target.with_suffix(".log")) as log:
                log.write_text(output)
        self.report(f"{unit.name}: {time.monotonic() - start:.1f} s")
        return target

    def compile_all(self) -> dict[Unit, Path]:
        wanted, folder = units(self.sources), self.write_sources()
        with concurrent.futures.ThreadPoolExecutor(min(os.cpu_count() or 1, len(wanted))) as executor:
            futures = {unit: executor.submit(self.compile, unit, folder) for unit in wanted}
            try:
                return {unit: future.result() for unit, future in futures.items()}
            except BaseException:
                executor.shutdown(wait=False, cancel_futures=True)
                raise

    def link(self, objects: Iterable[Path], target: Path) -> None:
        libraries = [f"-L{TORCH_FOLDER / 'lib'}", *(f"-l{name}" for name in TORCH_LIBRARIES)]
        info = f"source={source_hash(self.sources)} arches={','.join(self.arches)} torch={torch.__version__}"
        with tempfile.TemporaryDirectory() as scratch, written_whole(target) as temporary:
            note = Path(scratch) / "build_info.cpp"
            note.write_text(f'extern "C" const char echo_megatron_build_info[] = "echo_megatron kernels: {info}";\n')
            inputs = [str(note), *map(str, objects)]
            run_tool(
                [str(self.nvcc), *HOST_FLAGS, *LINK_FLAGS, *inputs, *libraries, "-o", str(temporary)], LIBRARY_NAME
            )


def _silent(line: str) -> None:
    logger.info("%s", line)


def build_library(arches: Sequence[str], *, report: Callable[[str], None] = _silent) -> Path:
    """The kernels' shared library, built where the cache does not have it.

    Args:
        arches: compute capabilities without the dot, such as "90".
        report: called with a line for every object.

    Raises:
        ValueError: an architecture is not one.
        KernelsUnavailable: PyTorch is without CUDA, or there is no nvcc of its major version.
        KernelBuildError: nvcc failed, or another process kept the lock for LOCK_TIMEOUT_S.
    """
    wrong = [arch for arch in arches if not _ARCH.fullmatch(arch)]
    if wrong or not arches:
        raise ValueError(
            f"arches: expected compute capabilities such as '90', got {', '.join(map(repr, wrong)) or 'none'}"
        )
    if torch.version.cuda is None:
        raise KernelsUnavailable(f"PyTorch {torch.__version__} is built without CUDA; install a CUDA build of it")
    arches = sorted(set(arches), key=lambda arch: (len(arch.rstrip("af")), arch))
    sources = read_sources()
    flags = [compile_flags(unit, sources, arches) for unit in units(sources)]
    key = content_key(
        source_hash(sources), flags, LINK_FLAGS, torch.__version__, torch.version.cuda, platform.machine()
    )
    library = cache_folder() / key / LIBRARY_NAME
    if library.exists():
        report(f"{library}: cached")
        return library
    with locked(library.with_name("lock"), LOCK_TIMEOUT_S):
        if library.exists():
            report(f"{library}: built by another process")
            return library
        start = time.monotonic()
        builder = Builder(sources, arches, report)
        logger.info("building the kernels for sm_%s", ", sm_".join(arches))
        builder.link(builder.compile_all().values(), library)
        report(f"{library}: {time.monotonic() - start:.1f} s")
    return library


def find_library(arch: str) -> Path:
    """The library for a GPU of compute capability `arch`: the one ECHO_KERNEL_LIBRARY names, or a built one.

    Raises:
        KernelsUnavailable, KernelBuildError: as `build_library`.
        KernelBuildError: the named library is not of these sources, of this PyTorch or for this GPU.
    """
    named = os.environ.get("ECHO_KERNEL_LIBRARY")
    if not named:
        return build_library([arch])
    path, what = Path(named).expanduser(), "build it again with `python -m echo_megatron.kernel_build --out FILE`"
    info, expected = library_info(path), source_hash()
    if info.source != expected:
        raise KernelBuildError(
            f"ECHO_KERNEL_LIBRARY={named}: expected a library of source hash {expected}, got {info.source}; {what}"
        )
    if info.torch != torch.__version__:
        raise KernelBuildError(
            f"ECHO_KERNEL_LIBRARY={named}: expected one for PyTorch {torch.__version__}, got {info.torch}; {what}"
        )
    if not any(_runs_on(built, arch) for built in info.arches):
        raise KernelBuildError(
            f"ECHO_KERNEL_LIBRARY={named}: expected one for sm_{arch}, got sm_{', sm_'.join(info.arches)}; {what}"
        )
    return path


def _runs_on(built: str, arch: str) -> bool:
    """Whether code for sm_`built` runs on sm_`arch`: same major version, no newer minor; `a` code on its own only."""
    if built.endswith("a"):
        return built[:-1] == arch
    built = built.rstrip("f")
    return built[:-1] == arch[:-1] and int(built[-1]) <= int(arch[-1])


def library_info(path: Path) -> BuildInfo:
    """What the library says about itself; reads the file, does not load it.

    Raises:
        KernelBuildError: there is no such file, or it is no library of these kernels.
    """
    try:
        found = _INFO.search(path.read_bytes())
    except OSError as error:
        raise KernelBuildError(f"{path}: expected a library of the kernels: {error}") from error
    if not found:
        raise KernelBuildError(f"{path}: expected a library of the kernels, this file is none; name another")
    source, arches, version = (part.decode() for part in found.groups())
    return BuildInfo(source, tuple(arches.split(",")), version)


# -- report


def kernel_resources(arches: Sequence[str]) -> list[KernelResources]:
    """Registers and spills of every kernel, from what ptxas printed when it was compiled; builds what is not cached."""
    compiled = Builder(read_sources(), arches, _silent).compile_all()
    logs = (path.with_suffix(".log").read_text() for unit, path in compiled.items() if unit.source.endswith(".cu"))
    return [kernel for log in logs for kernel in parse_ptxas(log)]


def parse_ptxas(text: str) -> list[KernelResources]:
    """The kernels of `ptxas -v`, names demangled where c++filt is there."""
    entry = re.compile(
        r"Compiling entry function '(\w+)' for 'sm_(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?"
        r"Used (\d+) registers",
        re.DOTALL,
    )
    found = entry.findall(text)
    names = [name for name, *_ in found]
    if names and shutil.which("c++filt"):
        names = run_tool(["c++filt", *names], "c++filt").splitlines()
    return [
        KernelResources(name, arch, int(registers), int(stores) + int(loads))
        for name, (_, arch, stores, loads, registers) in zip(names, found, strict=True)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the library and say where it is."""
    parser = argparse.ArgumentParser(prog="python -m echo_megatron.kernel_build", description=main.__doc__)
    parser.add_argument("--arch", nargs="+", default=["80", "90"], metavar="CC", help="compute capabilities: 80 90 100")
    parser.add_argument("--out", type=Path, help="copy the library to this file, for ECHO_KERNEL_LIBRARY")
    parser.add_argument("--verbose", action="store_true", help="registers and spills of every kernel")
    options = parser.parse_args(arguments)
    try:
        library = build_library(options.arch, report=lambda line: print(line, flush=True))
        if options.verbose:
            for kernel in kernel_resources(options.arch):
                print(
                    f"sm_{kernel.arch} {kernel.registers:3} registers {kernel.spilled_bytes:4} B spilled", kernel.kernel
                )
    except (ValueError, FileNotFoundError, KernelsUnavailable, KernelBuildError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.out:
        with written_whole(options.out) as temporary:
            shutil.copyfile(library, temporary)
        print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
