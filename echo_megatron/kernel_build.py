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
import fcntl
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from echo_megatron.config import QUANTIZED_BITS, Policy

logger = logging.getLogger(__name__)

LIBRARY_NAME = "libecho_megatron.so"
LOCK_TIMEOUT_S = 1800.0
MAX_SHOWN_LINES = 40
DEFAULT_NVCC = Path("/usr/local/cuda/bin/nvcc")

# The quantizer's arithmetic is one FP32 rounding an operation: no contraction, no approximate division, no flush.
HOST_FLAGS = ("-O3", "-std=c++17", "-Xcompiler=-fPIC,-ffp-contract=off,-Wall,-Wno-unknown-pragmas")
CUDA_FLAGS = ("-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false", "-lineinfo", "-Xptxas=-v")
TORCH_FOLDER = Path(torch.__file__).parent
TORCH_LIBRARIES = ("c10", "c10_cuda", "torch_cpu", "torch_cuda", "torch")
LINK_FLAGS = ("-shared", "-cudart=shared", "-Xlinker=--no-undefined,--as-needed")

_INFO = re.compile(rb"echo_megatron kernels: source=([0-9a-f]{16}) arches=([0-9a-f,]+) torch=([0-9A-Za-z.+]+)")
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_ARCH = re.compile(r"[0-9]{2,3}[af]?")


class KernelsUnavailable(RuntimeError):
    """This machine cannot run or build the kernels; the message says why and what to do."""


class KernelBuildError(RuntimeError):
    """The sources did not compile, or a library is not of these sources; the message says what to do."""


@dataclass(frozen=True)
class Unit:
    """One object of the library: `source`, a name in the source folder, compiled with `defines`."""

    source: str
    defines: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return "-".join((Path(self.source).stem, *(value for _, value in self.defines)))


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


# -- sources


def source_folder() -> Path:
    """The CUDA sources: inside the installed package, or beside it in a checkout.

    Raises:
        FileNotFoundError: they are in neither place.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "cuda", package.parent / "cuda"):
        if (folder / "layout.cuh").is_file():
            return folder
    raise FileNotFoundError(f"cuda/layout.cuh: expected in {package} or {package.parent}; install the package again")


def read_sources(folder: Path | None = None) -> dict[str, str]:
    """Name and text of everything that the library is made of, headers included."""
    found = sorted(path for path in (folder or source_folder()).iterdir() if path.suffix in (".cu", ".cuh", ".cpp"))
    return {path.name: path.read_text() for path in found}


def source_hash(sources: dict[str, str] | None = None) -> str:
    """16 hexadecimal digits over names and texts of the sources: a library of another hash is of other sources."""
    return _key(sorted((sources or read_sources()).items()))[:16]


def units(sources: dict[str, str]) -> list[Unit]:
    """The objects of the library, the slow ones first."""
    variants = [
        Unit("all_reduce.cu", (("ECHO_POLICY", policy.name), ("ECHO_BITS", str(bits))))
        for policy in Policy
        for bits in QUANTIZED_BITS
    ]
    once = [Unit(name) for name in sources if name.endswith((".cu", ".cpp")) and name != "all_reduce.cu"]
    return [*(variants if "all_reduce.cu" in sources else []), *once]


def _with_headers(sources: dict[str, str], name: str) -> dict[str, str]:
    """`name` and the headers among the sources that it includes, directly or through others."""
    found: dict[str, str] = {}
    pending = [name]
    while pending:
        name = pending.pop()
        if name in sources and name not in found:
            found[name] = sources[name]
            pending += _INCLUDE.findall(found[name])
    return found


def _key(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


# -- tools


def find_nvcc() -> Path:
    """nvcc of CUDA_HOME, PATH or /usr/local/cuda, the first that there is.

    Raises:
        KernelsUnavailable: there is none.
    """
    home, on_path = os.environ.get("CUDA_HOME"), shutil.which("nvcc")
    candidates = [Path(home, "bin", "nvcc")] if home else []
    candidates += [Path(on_path)] if on_path else []
    candidates += [DEFAULT_NVCC]
    for path in candidates:
        if os.access(path, os.X_OK) and path.is_file():
            return path
    looked = ", ".join(map(str, candidates)) + ("" if on_path else " and PATH")
    raise KernelsUnavailable(
        f"nvcc: expected the CUDA {torch.version.cuda} toolkit's compiler, found none (looked at {looked}); "
        f"install the toolkit and set CUDA_HOME, or set ECHO_KERNEL_LIBRARY to a library built on another machine with "
        f"`python -m echo_megatron.kernel_build --out {LIBRARY_NAME}`"
    )


def _nvcc_version(nvcc: Path) -> str:
    """All that nvcc says about its version; one of another CUDA major version than PyTorch's is refused."""
    text = _run([str(nvcc), "--version"], "nvcc --version")
    found = re.search(r"release (\d+)\.(\d+)", text)
    expected = (torch.version.cuda or "").split(".")[0]
    if not found or found[1] != expected:
        got = f"{found[1]}.{found[2]}" if found else repr(text.strip())
        raise KernelsUnavailable(
            f"{nvcc}: expected CUDA {expected}.x, as this PyTorch ({torch.__version__}), got {got}; "
            f"install the CUDA {torch.version.cuda} toolkit and set CUDA_HOME to it"
        )
    return text


def _run(command: Sequence[str], what: str, folder: Path | None = None) -> str:
    """Output of `command`, standard output and error together."""
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as error:
        raise KernelBuildError(f"{what}: {command[0]} did not start: {error}") from error
    if done.returncode:
        raise KernelBuildError(
            f"{what}: {Path(command[0]).name} failed with exit status {done.returncode}\n{_shortened(done.stdout)}\n"
            f"the command was, in {folder or Path.cwd()}: {' '.join(command)}"
        )
    return done.stdout


def _shortened(output: str) -> str:
    """A compiler's output; of a long one, which templates make, only the lines that name an error."""
    lines = output.strip().splitlines()
    if len(lines) <= MAX_SHOWN_LINES:
        return "\n".join(lines)
    errors = [line for line in lines if "error" in line][:MAX_SHOWN_LINES] or lines[-MAX_SHOWN_LINES:]
    return "\n".join([*errors, f"… of {len(lines)} lines; run the command for all"])


# -- cache


def cache_folder() -> Path:
    """ECHO_KERNEL_CACHE, or ~/.cache/echo_megatron."""
    named = os.environ.get("ECHO_KERNEL_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "echo_megatron"


@contextmanager
def _locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Holds the lock file `path`; the kernel releases it when its holder ends, however that ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as lock:
        deadline, waits = time.monotonic() + timeout_s, False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                lock.seek(0)
                holder = lock.read().strip() or "unknown"
            if time.monotonic() > deadline:
                raise KernelBuildError(
                    f"{path}: expected the lock within {timeout_s:g} s, process {holder} still builds; "
                    f"see whether it makes progress, or set ECHO_KERNEL_CACHE to another folder"
                )
            if not waits:
                logger.info("process %s builds the kernels: waiting for it", holder)
                waits = True
            time.sleep(0.1)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


@contextmanager
def _written_whole(path: Path) -> Iterator[Path]:
    """A path to write to that becomes `path` at the end, or goes away where the writer failed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644 if path.suffix != ".so" else 0o755)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


# -- build


def _flags(unit: Unit, sources: dict[str, str], arches: Sequence[str]) -> list[str]:
    defines = [f"-D{name}={value}" for name, value in unit.defines]
    if unit.source.endswith(".cu"):
        code = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in arches]
        return [*HOST_FLAGS, *CUDA_FLAGS, *code, *defines]
    if "ECHO_SOURCE_HASH" in sources[unit.source]:
        defines.append(f'-DECHO_SOURCE_HASH="{source_hash(sources)}"')
    return [*HOST_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", *defines]


class Builder:
    """One build: nvcc, the sources as they were when it began, and the architectures."""

    def __init__(self, sources: dict[str, str], arches: Sequence[str], report: Callable[[str], None]) -> None:
        self.sources = sources
        self.arches = arches
        self.report = report
        self.nvcc = find_nvcc()
        self.version = _nvcc_version(self.nvcc)

    def write_sources(self) -> Path:
        """A copy of the sources in the cache: what is compiled is what was hashed, whoever edits the checkout."""
        folder = cache_folder() / "sources" / source_hash(self.sources)
        for name, text in self.sources.items():
            with _written_whole(folder / name) as temporary:
                temporary.write_text(text)
        return folder

    def compile(self, unit: Unit, folder: Path) -> Path:
        """The unit's object, from the cache where it is there; beside it lies what nvcc printed."""
        flags, is_host = _flags(unit, self.sources, self.arches), unit.source.endswith(".cpp")
        texts = sorted(_with_headers(self.sources, unit.source).items())
        key = _key(texts, flags, self.version, platform.machine(), torch.__version__ if is_host else "")
        target = cache_folder() / "objects" / f"{unit.name}-{key}.o"
        if target.exists():
            self.report(f"{unit.name}: cached")
            return target
        start = time.monotonic()
        includes = [f"-isystem={TORCH_FOLDER / 'include'}"] if is_host else []
        with _written_whole(target) as temporary:
            command = [str(self.nvcc), *flags, *includes, "-c", unit.source, "-o", str(temporary)]
            output = _run(command, unit.name, folder)
            with _written_whole(target.with_suffix(".log")) as log:
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
        with tempfile.TemporaryDirectory() as scratch, _written_whole(target) as temporary:
            note = Path(scratch) / "build_info.cpp"
            note.write_text(f'extern "C" const char echo_megatron_build_info[] = "echo_megatron kernels: {info}";\n')
            inputs = [str(note), *map(str, objects)]
            _run([str(self.nvcc), *HOST_FLAGS, *LINK_FLAGS, *inputs, *libraries, "-o", str(temporary)], LIBRARY_NAME)


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
    flags = [_flags(unit, sources, arches) for unit in units(sources)]
    key = _key(source_hash(sources), flags, LINK_FLAGS, torch.__version__, torch.version.cuda, platform.machine())
    library = cache_folder() / key / LIBRARY_NAME
    if library.exists():
        report(f"{library}: cached")
        return library
    with _locked(library.with_name("lock"), LOCK_TIMEOUT_S):
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
        names = _run(["c++filt", *names], "c++filt").splitlines()
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
        with _written_whole(options.out) as temporary:
            shutil.copyfile(library, temporary)
        print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
