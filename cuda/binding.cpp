// torch.library schemas and their CUDA implementations. Every tensor that a kernel writes is marked in the schema.
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <string>

#include "binding_checks.cuh"
#include "launch.cuh"

#ifndef ECHO_SOURCE_HASH
#define ECHO_SOURCE_HASH "unknown"
#endif

namespace echo {
namespace {

// One table from (policy, bits) to the compiled kernels.
template <typename Call>
auto with_kernels(Policy policy, int64_t bits, Call call) {
  switch (policy) {
    case Policy::symmetric:
      return bits == 4 ? call(AllReduce<4, Policy::symmetric>{}) : call(AllReduce<8, Policy::symmetric>{});
    case Policy::naive:
      return bits == 4 ? call(AllReduce<4, Policy::naive>{}) : call(AllReduce<8, Policy::naive>{});
    case Policy::zero_aware:
      return bits == 4 ? call(AllReduce<4, Policy::zero_aware>{}) : call(AllReduce<8, Policy::zero_aware>{});
    case Policy::rotated:
      return bits == 4 ? call(AllReduce<4, Policy::rotated>{}) : call(AllReduce<8, Policy::rotated>{});
    default:
      return bits == 4 ? call(AllReduce<4, Policy::rotated_asymmetric>{})
                       : call(AllReduce<8, Policy::rotated_asymmetric>{});
  }
}

void run_collective(const char* op, const Tensor& x, const Tensor& y, const Tensor& workspace,
                    const OptionalTensor& state, const OptionalTensor& codes, const OptionalTensor& kept_x,
                    const Tensor& failure, at::IntArrayRef peers, int64_t rank, int64_t bits, int64_t policy_idx,
                    int64_t group_size, Algorithm algorithm, int64_t residual_idx, int64_t rescale_idx,
                    int64_t state_dtype_idx, bool fresh, at::ArrayRef<double> coefficients, at::IntArrayRef site,
                    int64_t num_blocks, int64_t depth, int64_t num_teams, int64_t ring, int64_t slot_bytes,
                    double timeout_s) {
  const auto world = static_cast<int64_t>(peers.size());
  const bool scatters = algorithm == Algorithm::reduce_scatter, gathers = algorithm == Algorithm::all_gather;
  TORCH_CHECK(!scatters || (world > 0 && x.numel() % world == 0), op, ": expected x of ", world, " equal shares, got ",
              x.numel(), " values");
  check_input(op, x, y, scatters ? x.numel() / world : (gathers ? x.numel() * world : x.numel()));
  check_bits(op, bits);
  const auto policy = to_enum<Policy>(op, "policy", policy_idx, 0, 4);
  const auto rescale = to_enum<Rescale>(op, "rescale", rescale_idx, 0, 2);
  const auto state_dtype = to_enum<StateDtype>(op, "state_dtype", state_dtype_idx, 0, 2);
  const auto residual = state.has_value() ? to_enum<Residual>(op, "residual", residual_idx, 0, 1) : Residual::none;
  TORCH_CHECK(residual != Residual::consensus || (state_dtype != StateDtype::compact && !scatters), op,
              ": a reduce-scatter and the compact state have the local residual only");
  TORCH_CHECK(depth >= 1 && ring >= ring_for(static_cast<int>(depth)), op, ": expected a ring of at least ",
              ring_for(static_cast<int>(depth)), " slots for depth ", depth, ", got ", ring);

  Arguments a{};
  a.signals = signals_of(op, workspace, failure, peers, rank, site, timeout_s);
  a.group_size = static_cast<int>(group_size);
  a.group_shift = group_shift_of(op, group_size);
  const SlotLayout slot(static_cast<int>(bits), policy, a.group_size);
  TORCH_CHECK(slot_bytes >= slot.bytes, op, ": expected slots of at least ", slot.bytes, " bytes, got ", slot_bytes);
  a.workspace = workspace_of(op, workspace, a.signals.world, num_teams, ring, slot_bytes);
  a.num_values = scatters ? y.numel() : x.numel();
  a.num_basis_values = basis_values(a.num_values, policy);
  const Segments segments(a.num_basis_values, a.signals.world, a.group_size, algorithm, a.num_values);
  const int64_t tiles = segments.max_tiles();
  const int64_t state_tiles = tiles * state_segments(algorithm, a.signals.world);
  if (residual != Residual::none) check_buffer(op, "state", state, state_tiles * state_tile_bytes(state_dtype));
  if (codes.has_value()) check_buffer(op, "codes", codes, tiles * a.signals.world * slot.bytes);
  if (kept_x.has_value()) check_buffer(op, "kept_x", kept_x, a.num_values * static_cast<int64_t>(x.element_size()));
  a.x = gathers ? before_shares(x, rank) : bytes_of(x);
  a.y = scatters ? before_shares(y, rank) : bytes_of(y);
  a.state = bytes_of(state);
  a.codes = bytes_of(codes);
  a.kept_x = bytes_of(kept_x);
  a.dtype = dtype_of(x);
  a.rescale = rescale;
  a.depth = static_cast<int>(depth);
  a.fresh = fresh;
  a.aligned = is_aligned(x, y, in_shares(algorithm) ? a.num_values * static_cast<int64_t>(x.element_size()) : 0);
  a.coefficients = coefficients_of(op, coefficients);
  TORCH_CHECK(residual == Residual::none || state_dtype != StateDtype::compact || a.coefficients.memoryless(), op,
              ": the compact state keeps no average; expected coefficients of the last residual alone");
  const int grid = grid_of(op, num_blocks, num_teams, tiles);
  a.signature = signature_of({1, a.num_values, static_cast<int64_t>(a.dtype), bits, policy_idx, group_size,
                              static_cast<int64_t>(algorithm), rescale_idx, grid, depth, ring, slot_bytes},
                             site);
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  check_launch(op, with_kernels(policy, bits, [&](auto kernels) {
                 return decltype(kernels)::launch(a, algorithm, residual, state_dtype, grid, stream);
               }));
}

void all_reduce(const Tensor& x, const Tensor& y, const Tensor& workspace, const OptionalTensor& state,
                const OptionalTensor& codes, const OptionalTensor& kept_x, const Tensor& failure, at::IntArrayRef peers,
                int64_t rank, int64_t bits, int64_t policy, int64_t group_size, int64_t algorithm, int64_t residual,
                int64_t rescale, int64_t state_dtype, bool fresh, at::ArrayRef<double> coefficients,
                at::IntArrayRef site, int64_t num_blocks, int64_t depth, int64_t num_teams, int64_t ring,
                int64_t slot_bytes, double timeout_s) {
  run_collective("all_reduce", x, y, workspace, state, codes, kept_x, failure, peers, rank, bits, policy, group_size,
                 to_enum<Algorithm>("all_reduce", "algorithm", algorithm, 1, 2), residual, rescale, state_dtype, fresh,
                 coefficients, site, num_blocks, depth, num_teams, ring, slot_bytes, timeout_s);
}

void all_reduce_(const Tensor& x, const Tensor& workspace, const OptionalTensor& state, const OptionalTensor& codes,
                 const OptionalTensor& kept_x, const Tensor& failure, at::IntArrayRef peers, int64_t rank, int64_t bits,
                 int64_t policy, int64_t group_size, int64_t algorithm, int64_t residual, int64_t rescale,
                 int64_t state_dtype, bool fresh, at::ArrayRef<double> coefficients, at::IntArrayRef site,
                 int64_t num_blocks, int64_t depth, int64_t num_teams, int64_t ring, int64_t slot_bytes,
                 double timeout_s) {
  run_collective("all_reduce_", x, x, workspace, state, codes, kept_x, failure, peers, rank, bits, policy, group_size,
                 to_enum<Algorithm>("all_reduce_", "algorithm", algorithm, 1, 2), residual, rescale, state_dtype, fresh,
                 coefficients, site, num_blocks, depth, num_teams, ring, slot_bytes, timeout_s);
}

void reduce_scatter(const Tensor& x, const Tensor& y, const Tensor& workspace, const OptionalTensor& state,
                    const Tensor& failure, at::IntArrayRef peers, int64_t rank, int64_t bits, int64_t policy,
                    int64_t group_size, int64_t residual, int64_t rescale, int64_t state_dtype, bool fresh,
                    at::ArrayRef<double> coefficients, at::IntArrayRef site, int64_t num_blocks, int64_t depth,
                    int64_t num_teams, int64_t ring, int64_t slot_bytes, double timeout_s) {
  run_collective("reduce_scatter", x, y, workspace, state, {}, {}, failure, peers, rank, bits, policy, group_size,
                 Algorithm::reduce_scatter, residual, rescale, state_dtype, fresh, coefficients, site, num_blocks,
                 depth, num_teams, ring, slot_bytes, timeout_s);
}

void all_gather(const Tensor& x, const Tensor& y, const Tensor& workspace, const Tensor& failure, at::IntArrayRef peers,
                int64_t rank, int64_t bits, int64_t policy, int64_t group_size, int64_t rescale, at::IntArrayRef site,
                int64_t num_blocks, int64_t depth, int64_t num_teams, int64_t ring, int64_t slot_bytes,
                double timeout_s) {
  const double no_coefficients[5] = {};
  run_collective("all_gather", x, y, workspace, {}, {}, {}, failure, peers, rank, bits, policy, group_size,
                 Algorithm::all_gather, 0, rescale, 0, true, no_coefficients, site, num_blocks, depth, num_teams, ring,
                 slot_bytes, timeout_s);
}

void run_exact(const char* op, const Tensor& x, const Tensor& y, const Tensor& workspace, const Tensor& failure,
               at::IntArrayRef peers, int64_t rank, at::IntArrayRef site, int64_t num_blocks, int64_t num_teams,
               int64_t ring, int64_t slot_bytes, double timeout_s) {
  check_input(op, x, y, x.numel());
  TORCH_CHECK(slot_bytes >= kExactBytes && ring >= ring_for(1), op, ": expected slots of at least ", kExactBytes,
              " bytes in rings of ", ring_for(1), ", got ", slot_bytes, " in ", ring);
  ExactArguments a{};
  a.signals = signals_of(op, workspace, failure, peers, rank, site, timeout_s);
  a.workspace = workspace_of(op, workspace, a.signals.world, num_teams, ring, slot_bytes);
  a.x = bytes_of(x);
  a.y = bytes_of(y);
  a.num_values = x.numel();
  a.dtype = dtype_of(x);
  a.aligned = is_aligned(x, y);
  const int64_t tiles = ceil_div(a.num_values * static_cast<int64_t>(x.element_size()), kExactBytes);
  const int grid = grid_of(op, num_blocks, num_teams, tiles);
  a.signature = signature_of({2, a.num_values, static_cast<int64_t>(a.dtype), grid, ring, slot_bytes}, site);
  const c10::cuda::CUDAGuard guard(x.device());
  check_launch(op, launch_exact(a, grid, c10::cuda::getCurrentCUDAStream()));
}

void exact_all_reduce(const Tensor& x, const Tensor& y, const Tensor& workspace, const Tensor& failure,
                      at::IntArrayRef peers, int64_t rank, at::IntArrayRef site, int64_t num_blocks, int64_t num_teams,
                      int64_t ring, int64_t slot_bytes, double timeout_s) {
  run_exact("exact_all_reduce", x, y, workspace, failure, peers, rank, site, num_blocks, num_teams, ring, slot_bytes,
            timeout_s);
}

void exact_all_reduce_(const Tensor& x, const Tensor& workspace, const Tensor& failure, at::IntArrayRef peers,
                       int64_t rank, at::IntArrayRef site, int64_t num_blocks, int64_t num_teams, int64_t ring,
                       int64_t slot_bytes, double timeout_s) {
  run_exact("exact_all_reduce_", x, x, workspace, failure, peers, rank, site, num_blocks, num_teams, ring, slot_bytes,
            timeout_s);
}

RecordArguments record_arguments(const char* op, const Tensor& like, const Tensor& codes, int64_t world, int64_t bits,
                                 Policy policy, int64_t group_size, int64_t algorithm) {
  check_bits(op, bits);
  TORCH_CHECK(world >= 2 && world <= kMaxRanks, op, ": expected world_size of 2 to ", kMaxRanks, ", got ", world);
  TORCH_CHECK(like.is_cuda() && like.is_contiguous() && like.numel() > 0, op,
              ": expected a contiguous, non-empty CUDA tensor");
  RecordArguments a{};
  a.codes = bytes_of(codes);
  a.num_values = like.numel();
  a.num_basis_values = basis_values(a.num_values, policy);
  a.dtype = dtype_of(like);
  a.algorithm = to_enum<Algorithm>(op, "algorithm", algorithm, 1, 2);
  a.group_size = static_cast<int>(group_size);
  a.group_shift = group_shift_of(op, group_size);
  a.world = static_cast<int>(world);
  a.reciprocal_world = (world & (world - 1)) == 0 ? 1.0f / static_cast<float>(world) : 0.0f;
  a.aligned = is_aligned(like, like);
  const Segments segments(a.num_basis_values, a.world, a.group_size, a.algorithm);
  check_buffer(op, "codes", codes,
               segments.max_tiles() * world * SlotLayout(static_cast<int>(bits), policy, a.group_size).bytes);
  return a;
}

void decode(const Tensor& codes, const Tensor& y, int64_t world_size, int64_t bits, int64_t policy_idx,
            int64_t group_size, int64_t algorithm) {
  const auto policy = to_enum<Policy>("decode", "policy", policy_idx, 0, 4);
  RecordArguments a = record_arguments("decode", y, codes, world_size, bits, policy, group_size, algorithm);
  a.y = bytes_of(y);
  const c10::cuda::CUDAGuard guard(y.device());
  check_launch("decode", launch_decode(a, static_cast<int>(bits), policy, c10::cuda::getCurrentCUDAStream()));
}

void consensus_update(const Tensor& x, const Tensor& codes, const Tensor& state, int64_t world_size, int64_t bits,
                      int64_t policy_idx, int64_t group_size, int64_t algorithm, int64_t state_dtype_idx, bool fresh,
                      at::ArrayRef<double> coefficients) {
  const char* op = "consensus_update";
  const auto policy = to_enum<Policy>(op, "policy", policy_idx, 0, 4);
  const auto state_dtype = to_enum<StateDtype>(op, "state_dtype", state_dtype_idx, 0, 1);
  RecordArguments a = record_arguments(op, x, codes, world_size, bits, policy, group_size, algorithm);
  const Segments segments(a.num_basis_values, a.world, a.group_size, a.algorithm);
  const int64_t tiles = segments.max_tiles() * (a.algorithm == Algorithm::one_shot ? 1 : world_size);
  check_buffer(op, "state", state, tiles * state_tile_bytes(state_dtype));
  a.x = bytes_of(x);
  a.state = bytes_of(state);
  a.fresh = fresh;
  a.coefficients = coefficients_of(op, coefficients);
  const c10::cuda::CUDAGuard guard(x.device());
  check_launch(op, launch_update(a, static_cast<int>(bits), policy, state_dtype, c10::cuda::getCurrentCUDAStream()));
}

// -- sizes that Python asks for, so that they are written once

int64_t workspace_bytes(int64_t world, int64_t num_teams, int64_t ring, int64_t slot_bytes) {
  return WorkspaceLayout{static_cast<int>(world), static_cast<int>(num_teams), static_cast<int>(ring), slot_bytes}
      .bytes();
}
int64_t slot_bytes(int64_t bits, int64_t policy, int64_t group_size) {
  return SlotLayout(static_cast<int>(bits), static_cast<Policy>(policy), static_cast<int>(group_size)).bytes;
}
int64_t ring_size(int64_t depth) { return ring_for(static_cast<int>(depth)); }
int64_t call_tiles(int64_t num_values, int64_t world, int64_t policy, int64_t group_size, int64_t algorithm) {
  const auto kind = static_cast<Algorithm>(algorithm);
  const Segments segments(basis_values(num_values, static_cast<Policy>(policy)), static_cast<int>(world),
                          static_cast<int>(group_size), kind);
  return segments.max_tiles() * (kind == Algorithm::one_shot ? 1 : world);
}
// Tiles of the state that a rank keeps for a reduce-scatter whose shares have `num_values` values.
int64_t scatter_state_tiles(int64_t num_values, int64_t world, int64_t policy, int64_t group_size) {
  const Segments segments(basis_values(num_values, static_cast<Policy>(policy)), static_cast<int>(world),
                          static_cast<int>(group_size), Algorithm::reduce_scatter, num_values);
  return segments.max_tiles() * state_segments(Algorithm::reduce_scatter, static_cast<int>(world));
}
int64_t state_tile_size(int64_t state_dtype) { return state_tile_bytes(static_cast<StateDtype>(state_dtype)); }
int64_t max_blocks(int64_t bits, int64_t policy, int64_t algorithm, int64_t residual, int64_t state_dtype,
                   int64_t dtype, int64_t depth) {
  int blocks = 0;
  check_launch("max_blocks", with_kernels(static_cast<Policy>(policy), bits, [&](auto kernels) {
                 return decltype(kernels)::max_blocks(
                     static_cast<Algorithm>(algorithm), static_cast<Residual>(residual),
                     static_cast<StateDtype>(state_dtype), static_cast<Dtype>(dtype), static_cast<int>(depth), &blocks);
               }));
  return blocks;
}
std::string source_hash() { return ECHO_SOURCE_HASH; }

}  // namespace

#define ECHO_LAUNCH \
  "int[] site, int num_blocks, int depth, int num_teams, int ring, int slot_bytes, float timeout_s) -> ()"
#define ECHO_CALL                                                                                                     \
  "Tensor(c!) workspace, Tensor(d!)? state, Tensor(e!)? codes, Tensor(f!)? kept_x, Tensor(g!) failure, int[] peers, " \
  "*, "                                                                                                               \
  "int rank, int bits, int policy, int group_size, int algorithm, int residual, int rescale, int state_dtype, bool "  \
  "fresh, "                                                                                                           \
  "float[] coefficients, " ECHO_LAUNCH
#define ECHO_EXACT                                                                                                  \
  "Tensor(c!) workspace, Tensor(g!) failure, int[] peers, *, int rank, int[] site, int num_blocks, int num_teams, " \
  "int ring, "                                                                                                      \
  "int slot_bytes, float timeout_s) -> ()"

TORCH_LIBRARY(echo_megatron, m) {
  m.def("all_reduce(Tensor x, Tensor(b!) y, " ECHO_CALL);
  m.def("all_reduce_(Tensor(a!) x, " ECHO_CALL);
  m.def(
      "reduce_scatter(Tensor x, Tensor(b!) y, Tensor(c!) workspace, Tensor(d!)? state, Tensor(g!) failure, "
      "int[] peers, *, int rank, int bits, int policy, int group_size, int residual, int rescale, int state_dtype, "
      "bool fresh, float[] coefficients, " ECHO_LAUNCH);
  m.def(
      "all_gather(Tensor x, Tensor(b!) y, Tensor(c!) workspace, Tensor(g!) failure, int[] peers, *, int rank, "
      "int bits, int policy, int group_size, int rescale, " ECHO_LAUNCH);
  m.def("exact_all_reduce(Tensor x, Tensor(b!) y, " ECHO_EXACT);
  m.def("exact_all_reduce_(Tensor(a!) x, " ECHO_EXACT);
  m.def(
      "decode(Tensor codes, Tensor(a!) y, *, int world_size, int bits, int policy, int group_size, int algorithm) -> "
      "()");
  m.def(
      "consensus_update(Tensor x, Tensor codes, Tensor(a!) state, *, int world_size, int bits, int policy, int "
      "group_size, "
      "int algorithm, int state_dtype, bool fresh, float[] coefficients) -> ()");
  m.def("workspace_bytes(int world_size, int num_teams, int ring, int slot_bytes) -> int", &workspace_bytes);
  m.def("slot_bytes(int bits, int policy, int group_size) -> int", &slot_bytes);
  m.def("ring_size(int depth) -> int", &ring_size);
  m.def("call_tiles(int num_values, int world_size, int policy, int group_size, int algorithm) -> int", &call_tiles);
  m.def("scatter_state_tiles(int num_values, int world_size, int policy, int group_size) -> int", &scatter_state_tiles);
  m.def("state_tile_bytes(int state_dtype) -> int", &state_tile_size);
  m.def("max_blocks(int bits, int policy, int algorithm, int residual, int state_dtype, int dtype, int depth) -> int",
        &max_blocks);
  m.def("source_hash() -> str", &source_hash);
}

TORCH_LIBRARY_IMPL(echo_megatron, CUDA, m) {
  m.impl("all_reduce", &all_reduce);
  m.impl("all_reduce_", &all_reduce_);
  m.impl("reduce_scatter", &reduce_scatter);
  m.impl("all_gather", &all_gather);
  m.impl("exact_all_reduce", &exact_all_reduce);
  m.impl("exact_all_reduce_", &exact_all_reduce_);
  m.impl("decode", &decode);
  m.impl("consensus_update", &consensus_update);
}

}  // namespace echo
