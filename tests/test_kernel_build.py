"""The builder: what is compiled and when, the cache, the lock, its errors; and the CUDA sources under the real nvcc."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from echo_megatron import kernel_build, kernel_sources, kernel_tools
from echo_megatron.config import QUANTIZED_BITS, Policy
from echo_megatron.kernel_build import Builder, build_library, find_library, library_info
from echo_megatron.kernel_cache import cache_folder
from echo_megatron.kernel_sources import read_sources, source_hash, units
from echo_megatron.kernel_tools import LIBRARY_NAME, KernelBuildError, KernelsUnavailable

ROOT = Path(__file__).resolve().parent.parent
NUM_VARIANTS = len(Policy) * len(QUANTIZED_BITS)
SOURCES = {
    "all_reduce.cu": '#include "shared.cuh"\n',
    "update.cu": '#include "other.cuh"\n',
    "binding.cpp": "int binding;\n",
    "shared.cuh": '#include "deep.cuh"\n',
    "deep.cuh": "// deep\n",
    "other.cuh": "// other\n",
}
# Says its version; notes its arguments; writes what -o names, for a library the note with the build's description.
FAKE_NVCC = """#!/bin/sh
case "$1" in --version) echo "Cuda compilation tools, release $VERSION, V$VERSION.88"; exit 0;; esac
echo "$@" >> "$LOG"
sleep "$SECONDS_EACH"
note=/dev/null; previous=
for argument in "$@"; do
  [ "$previous" = -o ] && target="$argument"
  case "$argument" in *build_info.cpp) note="$argument";; esac
  [ "$argument" = "$FAIL_AT" ] && { echo "$FAIL_AT(7): error: no such thing" >&2; exit 2; }
  previous="$argument"
done
cat "$note" > "$target"
"""


@dataclass
class Bench:
    """Toy sources, a fake nvcc and an empty cache."""

    folder: Path
    cache: Path
    log: Path

    def compiled(self) -> list[str]:
        """Source and defines of every compilation so far."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        words = [line.split() for line in lines if " -c " in line]
        return [
            " ".join([line[line.index("-c") + 1], *(word for word in line if word.startswith("-DECHO"))])
            for line in words
        ]

    def linked(self) -> int:
        return sum("-shared" in line for line in self.log.read_text().splitlines())


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    folder = tmp_path / "cuda"
    folder.mkdir()
    for name, text in SOURCES.items():
        (folder / name).write_text(text)
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(FAKE_NVCC)
    nvcc.chmod(0o755)
    result = Bench(folder, tmp_path / "cache", tmp_path / "log")
    environment = {
        "CUDA_HOME": str(tmp_path / "toolkit"),
        "ECHO_KERNEL_CACHE": str(result.cache),
        "LOG": str(result.log),
        "VERSION": "13.0",
        "SECONDS_EACH": "0",
        "FAIL_AT": "nothing",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ECHO_KERNEL_LIBRARY", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(kernel_sources, "source_folder", lambda: folder)
    return result


class TestWhatIsCompiled:
    def test_the_all_reduce_for_every_policy_and_width_all_else_once(self, bench: Bench) -> None:
        library = build_library(["90"])
        variants = [f"all_reduce.cu -DECHO_POLICY={p.name} -DECHO_BITS={b}" for p in Policy for b in QUANTIZED_BITS]
        assert sorted(bench.compiled()) == sorted([*variants, "update.cu", "binding.cpp"])
        assert bench.linked() == 1
        assert library.name == LIBRARY_NAME and library.is_relative_to(bench.cache)

    def test_kernels_round_every_operation_and_are_for_the_architectures_asked_for(self, bench: Bench) -> None:
        build_library(["90", "80", "90"])
        (line,) = [line for line in bench.log.read_text().splitlines() if "-c update.cu" in line]
        for flag in ("-fmad=false", "-prec-div=true", "-ftz=false", "-std=c++17"):
            assert flag in line.split()
        assert re.findall(r"-gencode=\S+", line) == [
            "-gencode=arch=compute_80,code=sm_80",
            "-gencode=arch=compute_90,code=sm_90",
        ]

    def test_a_second_build_compiles_nothing(self, bench: Bench) -> None:
        first = build_library(["90"])
        before = bench.log.read_text()
        assert build_library(["90"]) == first
        assert bench.log.read_text() == before

    @pytest.mark.parametrize(
        ("changed", "expected"), [("other.cuh", 1), ("update.cu", 1), ("deep.cuh", NUM_VARIANTS), ("binding.cpp", 1)]
    )
    def test_a_changed_file_compiles_what_includes_it(self, bench: Bench, changed: str, expected: int) -> None:
        first, before = build_library(["90"]), source_hash()
        num_compiled = len(bench.compiled())
        (bench.folder / changed).write_text("// changed\n" + SOURCES[changed])
        assert source_hash() != before
        assert build_library(["90"]) != first
        assert len(bench.compiled()) - num_compiled == expected

    def test_another_compiler_version_compiles_anew(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        build_library(["90"])
        num_compiled = len(bench.compiled())
        monkeypatch.setenv("VERSION", "13.1")
        (bench.folder / "deep.cuh").write_text("// changed\n")
        build_library(["90"])
        assert len(bench.compiled()) == 2 * num_compiled

    def test_what_is_compiled_is_what_was_hashed_though_the_checkout_changes(self, bench: Bench) -> None:
        builder = Builder(read_sources(), ["90"], lambda line: None)
        (bench.folder / "update.cu").write_text("// edited meanwhile\n")
        assert (builder.write_sources() / "update.cu").read_text() == SOURCES["update.cu"]

    def test_the_library_says_what_it_is(self, bench: Bench) -> None:
        info = library_info(build_library(["80", "90"]))
        assert (info.source, info.arches, info.torch) == (source_hash(), ("80", "90"), torch.__version__)

    @pytest.mark.parametrize("arches", [[], ["9.0"], ["sm_90"], ["90; rm"]])
    def test_refuses_what_is_no_architecture(self, bench: Bench, arches: list[str]) -> None:
        with pytest.raises(ValueError, match="expected compute capabilities such as '90', got"):
            build_library(arches)


class TestErrors:
    def test_nvccs_own_words_are_in_the_error_and_nothing_half_done_stays(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FAIL_AT", "update.cu")
        with pytest.raises(KernelBuildError, match=r"update: nvcc failed with exit status 2\n.*no such thing") as error:
            build_library(["90"])
        assert "-c update.cu" in str(error.value)
        left = [path for path in bench.cache.rglob("*") if path.name.startswith(".") or path.name == LIBRARY_NAME]
        assert left == []
        monkeypatch.setenv("FAIL_AT", "nothing")
        assert build_library(["90"]).is_file()

    def test_of_a_long_message_the_errors_are_shown(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        output = "\n".join(["a warning"] * 500 + ["update.cu(7): error: no such thing"] + ["detected during"] * 500)
        assert kernel_tools.shortened(output).splitlines() == [
            "update.cu(7): error: no such thing",
            "… of 1001 lines; run the command for all",
        ]

    def test_without_nvcc_says_what_to_do(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CUDA_HOME")
        monkeypatch.setenv("PATH", str(bench.folder))
        monkeypatch.setattr(kernel_tools, "DEFAULT_NVCC", bench.folder / "nvcc")
        with pytest.raises(KernelsUnavailable) as error:
            build_library(["90"])
        for part in ("expected the CUDA 13.0 toolkit's compiler, found none", "CUDA_HOME", "ECHO_KERNEL_LIBRARY"):
            assert part in str(error.value)

    def test_nvcc_of_another_major_version_is_refused(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VERSION", "12.8")
        with pytest.raises(KernelsUnavailable, match=r"expected CUDA 13\.x, .* got 12\.8; install the CUDA 13\.0"):
            build_library(["90"])

    def test_pytorch_without_cuda_is_refused(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", None)
        with pytest.raises(KernelsUnavailable, match="is built without CUDA; install a CUDA build"):
            build_library(["90"])

    def test_the_command_says_it_on_one_line(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("VERSION", "12.8")
        assert kernel_build.main(["--arch", "90"]) == 2
        assert capsys.readouterr().err.startswith("error: ")


class TestSeveralProcesses:
    SCRIPT = """
import sys
from pathlib import Path
import torch
from echo_megatron import kernel_build, kernel_sources
torch.version.cuda = "13.0"
kernel_sources.source_folder = lambda: Path(sys.argv[1])
print(kernel_build.build_library(["90"]))
"""

    def start(self, bench: Bench) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", self.SCRIPT, str(bench.folder)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def test_that_build_at_once_compile_once(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SECONDS_EACH", "0.3")
        outputs = [process.communicate(timeout=120) for process in [self.start(bench) for _ in range(3)]]
        assert len({out for out, _ in outputs}) == 1, outputs
        assert Path(outputs[0][0].strip()).is_file(), outputs
        assert len(bench.compiled()) == NUM_VARIANTS + 2
        assert bench.linked() == 1

    def test_one_that_was_killed_leaves_no_lock(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SECONDS_EACH", "60")
        process = self.start(bench)
        deadline = 60.0
        while not bench.compiled() and deadline > 0:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.1)
            deadline -= 0.1
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        monkeypatch.setenv("SECONDS_EACH", "0")
        assert build_library(["90"]).is_file()

    def test_the_wait_for_another_is_bounded(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        library = build_library(["90"])
        library.unlink()
        monkeypatch.setattr(kernel_build, "LOCK_TIMEOUT_S", 0.3)
        with library.with_name("lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.truncate(0)
            lock.write("4711")
            lock.flush()
            with pytest.raises(KernelBuildError, match=r"expected the lock within 0\.3 s, process 4711 still builds"):
                build_library(["90"])


class TestNamedLibrary:
    @pytest.fixture
    def library(self, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        path = tmp_path / "prebuilt.so"
        assert kernel_build.main(["--arch", "80", "90", "--out", str(path)]) == 0
        monkeypatch.setenv("ECHO_KERNEL_LIBRARY", str(path))
        monkeypatch.delenv("CUDA_HOME")
        return path

    def test_is_taken_without_nvcc_also_for_a_newer_minor_version(self, library: Path) -> None:
        assert [find_library(arch) for arch in ("80", "86", "90")] == [library] * 3

    @pytest.mark.parametrize("arch", ["75", "100"])
    def test_for_another_gpu_is_refused(self, library: Path, arch: str) -> None:
        with pytest.raises(KernelBuildError, match=f"expected one for sm_{arch}, got sm_80, sm_90; build it again"):
            find_library(arch)

    def test_of_other_sources_is_refused(self, library: Path, bench: Bench) -> None:
        built = source_hash()
        (bench.folder / "deep.cuh").write_text("// newer\n")
        with pytest.raises(KernelBuildError, match=f"expected a library of source hash {source_hash()}, got {built};"):
            find_library("90")

    def test_for_another_pytorch_is_refused(self, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        built = torch.__version__
        monkeypatch.setattr(torch, "__version__", "9.9.9")
        with pytest.raises(KernelBuildError, match=re.escape(f"expected one for PyTorch 9.9.9, got {built};")):
            find_library("90")

    @pytest.mark.parametrize("content", [None, b"\x7fELF something else"])
    def test_that_is_none_is_refused(self, library: Path, content: bytes | None) -> None:
        library.unlink()
        if content is not None:
            library.write_bytes(content)
        with pytest.raises(KernelBuildError, match="expected a library of the kernels"):
            find_library("90")


def test_resources_are_read_from_what_ptxas_prints() -> None:
    text = """ptxas info    : Compiling entry function '_Z1fPf' for 'sm_90'
ptxas info    : Function properties for _Z1fPf
    0 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers
ptxas info    : Function properties for helper
    64 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function '_Z1gPf' for 'sm_100'
ptxas info    : Function properties for _Z1gPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
"""
    found = [(kernel.arch, kernel.registers, kernel.spilled_bytes) for kernel in kernel_build.parse_ptxas(text)]
    assert found == [("90", 128, 20), ("100", 40, 0)]


# -- the real sources


@pytest.fixture(scope="module")
def nvcc() -> Path:
    try:
        return Builder(read_sources(), ["90"], lambda line: None).nvcc
    except KernelsUnavailable as error:
        pytest.skip(str(error))


# What the presets take, at one width and for one architecture each; all policies at both take many minutes on two
# cores. For the newest architecture the small kernels alone, unless the whole library is asked for.
VARIANTS = (
    (("ECHO_POLICY", "rotated"), ("ECHO_BITS", "4")),
    (("ECHO_POLICY", "zero_aware"), ("ECHO_BITS", "8")),
)
WHOLE = "ECHO_TEST_WHOLE_LIBRARY"
NEWEST = VARIANTS[:1] if WHOLE in os.environ else ()


@pytest.mark.slow
@pytest.mark.timeout(1500)
class TestSources:
    """Against a cache that stays: what has not changed since the last run is not compiled again."""

    @pytest.mark.parametrize(("arch", "variants"), [("90", VARIANTS[:1]), ("80", VARIANTS[1:]), ("100", NEWEST)])
    def test_compile(
        self,
        nvcc: Path,
        arch: str,
        variants: tuple[tuple[tuple[str, str], ...], ...],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Without ptxas's optimization, which takes half of the time; such objects have a cache of their own."""
        monkeypatch.setenv("NVCC_APPEND_FLAGS", "-Xptxas -O0")
        monkeypatch.setenv("ECHO_KERNEL_CACHE", str(cache_folder() / "not_optimized"))
        listed = subprocess.run([str(nvcc), "--list-gpu-arch"], capture_output=True, text=True, timeout=60).stdout
        if f"compute_{arch}" not in listed.split():
            pytest.skip(f"{nvcc} does not know compute_{arch}")
        sources = read_sources()
        builder = Builder(sources, [arch], lambda line: None)
        folder = builder.write_sources()
        chosen = [u for u in units(sources) if u.defines in ((), *variants) and (arch == "90" or u.name != "binding")]
        assert len(chosen) >= 2 + len(variants)
        with ThreadPoolExecutor(os.cpu_count()) as executor:
            objects = list(executor.map(lambda unit: builder.compile(unit, folder), chosen))
        assert all(path.stat().st_size > 0 for path in objects)

    @pytest.mark.skipif(WHOLE not in os.environ, reason=f"takes many minutes; {WHOLE}=1")
    def test_compile_and_link_for_hopper(self, nvcc: Path) -> None:
        info = library_info(build_library(["90"]))
        assert (info.source, info.arches) == (source_hash(), ("90",))
