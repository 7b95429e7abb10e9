"""The operators' schemas and fake kernels, and when they are loaded. The CUDA kernels themselves: tests/gpu."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from echo_megatron import ops
from echo_megatron.config import Policy, StateDtype
from echo_megatron.kernel_build import Builder
from echo_megatron.kernel_sources import HOST_FLAGS, read_sources, source_hash, units
from echo_megatron.kernel_tools import KernelsUnavailable
from echo_megatron.quantizer import TILE_VALUES, Quantizer

ROOT = Path(__file__).resolve().parent.parent
# What each operator writes.
WRITTEN = {
    "all_reduce": {"y", "workspace", "state", "codes", "kept_x", "failure"},
    "all_reduce_": {"x", "workspace", "state", "codes", "kept_x", "failure"},
    "reduce_scatter": {"y", "workspace", "state", "failure"},
    "all_gather": {"y", "workspace", "failure"},
    "exact_all_reduce": {"y", "workspace", "failure"},
    "exact_all_reduce_": {"x", "workspace", "failure"},
    "decode": {"y"},
    "consensus_update": {"state"},
}


def test_an_import_neither_builds_nor_loads() -> None:
    code = """
import sys
started = []
sys.addaudithook(lambda event, args: started.append(args) if event in ("subprocess.Popen", "ctypes.dlopen") else None)
import torch
started.clear()
import echo_megatron, echo_megatron.communicator, echo_megatron.ops, torch
assert not started, started
assert not echo_megatron.ops.is_loaded() and not hasattr(torch.ops.echo_megatron, "all_reduce")
"""
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0, shown.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_loaded", False)
    with pytest.raises(KernelsUnavailable, match=r"expected a CUDA GPU, PyTorch .* sees none; look at nvidia-smi"):
        ops.load()


# What binding.cpp is linked with where there is no GPU: nothing here launches a kernel, and all of them take minutes.
NO_KERNELS = """
#include "launch.cuh"
namespace echo {
template <int kBits, Policy kPolicy>
cudaError_t AllReduce<kBits, kPolicy>::launch(const Arguments&, Algorithm, Residual, StateDtype, int, cudaStream_t) {
  return cudaErrorNotSupported;
}
template <int kBits, Policy kPolicy>
cudaError_t AllReduce<kBits, kPolicy>::max_blocks(Algorithm, Residual, StateDtype, Dtype, int, int*) {
  return cudaErrorNotSupported;
}
#define ECHO_POLICY(name) \\
  template struct AllReduce<4, Policy::name>; \\
  template struct AllReduce<8, Policy::name>;
ECHO_POLICY(symmetric) ECHO_POLICY(naive) ECHO_POLICY(zero_aware) ECHO_POLICY(rotated) ECHO_POLICY(rotated_asymmetric)
cudaError_t launch_exact(const ExactArguments&, int, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t launch_decode(const RecordArguments&, int, Policy, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t launch_update(const RecordArguments&, int, Policy, StateDtype, cudaStream_t) {
  return cudaErrorNotSupported;
}
}  // namespace echo
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> None:
    if torch.cuda.is_available():
        ops.load()
        return
    folder, sources = tmp_path_factory.mktemp("binding"), read_sources()
    try:
        builder = Builder(sources, ["90"], lambda line: None)
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    included = builder.write_sources()
    [binding] = [unit for unit in units(sources) if unit.source == "binding.cpp"]
    (folder / "no_kernels.cpp").write_text(NO_KERNELS)
    stub = [str(folder / "no_kernels.cpp"), f"-I{included}", "-c", "-o", str(folder / "no_kernels.o")]
    subprocess.run([str(builder.nvcc), *HOST_FLAGS, *stub], check=True, timeout=120)
    builder.link([builder.compile(binding, included), folder / "no_kernels.o"], folder / "library.so")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ECHO_KERNEL_LIBRARY", str(folder / "library.so"))
        ops.load("90")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.usefixtures("library")
class TestLoaded:
    """With the binding, which loads without a GPU."""

    def test_loads_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.ops, "load_library", lambda path: pytest.fail("loaded again"))
        ops.load()
        assert ops.is_loaded()

    def test_is_of_these_sources(self) -> None:
        assert torch.ops.echo_megatron.source_hash() == source_hash()

    @pytest.mark.parametrize("name", WRITTEN)
    def test_what_an_operator_writes_is_in_its_schema(self, name: str) -> None:
        schema = getattr(torch.ops.echo_megatron, name).default._schema
        written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        assert written == WRITTEN[name]
        assert not schema.returns

    @pytest.mark.parametrize("name", WRITTEN)
    def test_traces_without_a_gpu(self, name: str) -> None:
        with FakeTensorMode():
            num_values = {"reduce_scatter": 1024, "all_gather": 4096}.get(name, 2048)
            call(name, torch.empty(64, 32, dtype=torch.bfloat16), torch.empty(num_values, dtype=torch.bfloat16))

    @pytest.mark.parametrize(("name", "share", "whole"), [("reduce_scatter", 512, 2048), ("all_gather", 2048, 3072)])
    def test_tracing_refuses_a_share_of_another_size(self, name: str, share: int, whole: int) -> None:
        num_values = share if name == "reduce_scatter" else whole
        with (
            FakeTensorMode(),
            pytest.raises(RuntimeError, match=rf"{name}: expected one of 2 shares of {whole} of .*, got {share} of"),
        ):
            call(name, torch.empty(64, 32, dtype=torch.bfloat16), torch.empty(num_values, dtype=torch.bfloat16))

    @pytest.mark.parametrize("name", ["all_reduce", "exact_all_reduce"])
    @pytest.mark.parametrize("y", [{"size": 2047, "dtype": torch.bfloat16}, {"size": 2048, "dtype": torch.float32}])
    def test_tracing_refuses_an_output_that_is_not_like_the_input(self, name: str, y: dict) -> None:
        with (
            FakeTensorMode(),
            pytest.raises(RuntimeError, match=rf"{name}: expected y like x, 2048 of torch\.bfloat16"),
        ):
            call(name, torch.empty(64, 32, dtype=torch.bfloat16), torch.empty(y["size"], dtype=y["dtype"]))

    @pytest.mark.parametrize("policy", Policy)
    @pytest.mark.parametrize("bits", [4, 8])
    def test_sizes_are_the_definitions(self, bits: int, policy: Policy) -> None:
        kernels, index = torch.ops.echo_megatron, list(Policy).index(policy)
        num_bytes = Quantizer(bits, policy, 32).num_bytes(TILE_VALUES)
        assert kernels.slot_bytes(bits, index, 32) == -(-num_bytes // 128) * 128
        assert kernels.call_tiles(100 * TILE_VALUES + 1, 4, index, 32, 1) == 101
        assert kernels.call_tiles(100 * TILE_VALUES + 1, 4, index, 32, 2) == 4 * 26
        assert kernels.scatter_state_tiles(25 * TILE_VALUES + 1, 4, index, 32) == 3 * 26

    def test_bytes_of_a_states_tile(self) -> None:
        bits_a_value = {StateDtype.bf16: 32, StateDtype.fp32: 64, StateDtype.compact: 9}
        for index, dtype in enumerate(StateDtype):
            assert torch.ops.echo_megatron.state_tile_bytes(index) == TILE_VALUES * bits_a_value[dtype] // 8


def call(name: str, x: torch.Tensor, y: torch.Tensor) -> None:
    """Calls the operator with tensors and numbers of the right kinds."""
    buffer, failure = torch.empty(4096, dtype=torch.uint8), torch.empty(16, dtype=torch.int64)
    geometry = {"num_blocks": 1, "num_teams": 4, "ring": 8, "slot_bytes": 2304, "timeout_s": 1.0}
    place = {"rank": 0, "site": [0, 0, 0]}
    quantizer = {"bits": 4, "policy": 3, "group_size": 32}
    code = {**quantizer, "algorithm": 1}
    recurrence = {"state_dtype": 0, "fresh": True, "coefficients": [0.0] * 5}
    outputs = () if name.endswith("_") else (y,)
    operator = getattr(torch.ops.echo_megatron, name)
    match name.removesuffix("_"):
        case "all_reduce":
            options = {**place, **code, **recurrence, **geometry, "residual": 0, "rescale": 0, "depth": 2}
            operator(x, *outputs, buffer, None, buffer, None, failure, [0, 1], **options)
        case "reduce_scatter":
            options = {**place, **quantizer, **recurrence, **geometry, "residual": 0, "rescale": 0, "depth": 2}
            operator(x, y, buffer, None, failure, [0, 1], **options)
        case "all_gather":
            options = {**place, **quantizer, **geometry, "rescale": 0, "depth": 2}
            operator(x, y, buffer, failure, [0, 1], **options)
        case "exact_all_reduce":
            operator(x, *outputs, buffer, failure, [0, 1], **place, **geometry)
        case "decode":
            operator(buffer, y, world_size=2, **code)
        case "consensus_update":
            operator(x, buffer, buffer, world_size=2, **code, **recurrence)
