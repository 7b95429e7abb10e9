// torch.library schemas and their CUDA implementations. Every tensor that a kernel writes is marked in the schema.
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <string>

#include "launch.cuh"

#ifndef ECHO_SOURCE_HASH
#define ECHO_SOURCE_HASH "unknown"
#endif

namespace echo {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Dtype dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case at::kBFloat16:
      return Dtype::bf16;
    case at::kHalf:
      return Dtype::fp16;
    case at::kFloat:
      return Dtype::fp32;
    default:
      TORCH_CHECK(false, "echo_megatron: expected a tensor of bfloat16, float16 or float32, got ", x.scalar_type());
  }
}

uint8_t* bytes_of(const Tensor& tensor) { return static_cast<uint8_t*>(tensor.data_ptr()); }
uint8_t* bytes_of(const OptionalTensor& tensor) { return tensor.has_value() ? bytes_of(*tensor) : nullptr; }

void check_buffer(const char* op, const char* name, const OptionalTensor& tensor, int64_t num_bytes) {
  TORCH_CHECK(tensor.has_value() && tensor->is_contiguous() && tensor->is_cuda(), op, ": expected ", name,
              " to be a contiguous CUDA tensor");
  const int64_t got = tensor->numel() * static_cast<int64_t>(tensor->element_size());
  TORCH_CHECK(got >= num_bytes, op, ": expected ", name, " of at least ", num_bytes, " bytes, got ", got);
}

void check_input(const char* op, const Tensor& x, const Tensor& y, int64_t output_values) {
  TORCH_CHECK(x.is_cuda() && x.is_contiguous(), op, ": expected x to be a contiguous CUDA tensor");
  TORCH_CHECK(
      y.is_contiguous() && y.device() == x.device() && y.scalar_type() == x.scalar_type() && y.numel() == output_values,
      op, ": expected y of ", output_values, " values of ", x.scalar_type(), " on x's device, got ", y.numel(), " of ",
      y.scalar_type());
  TORCH_CHECK(x.numel() > 0, op, ": expected at least one value");
}

bool is_aligned(const Tensor& x, const Tensor& y, int64_t stride_bytes = 0) {
  return ((reinterpret_cast<uintptr_t>(x.data_ptr()) | reinterpret_cast<uintptr_t>(y.data_ptr()) |
           static_cast<uintptr_t>(stride_bytes)) &
          15u) == 0;
}

// Where the first rank's share would be if the tensor, which holds this rank's alone, held all.
uint8_t* before_shares(const Tensor& own, int64_t rank) {
  const int64_t num_bytes = rank * own.numel() * static_cast<int64_t>(own.element_size());
  return reinterpret_cast<uint8_t*>(reinterpret_cast<uintptr_t>(own.data_ptr()) - static_cast<uintptr_t>(num_bytes));
}

void check_launch(const char* op, cudaError_t error) {
  TORCH_CHECK(error == cudaSuccess, op, ": CUDA error at launch: ", cudaGetErrorString(error));
}

template <typename Enum>
Enum to_enum(const char* op, const char* name, int64_t value, int64_t lowest, int64_t highest) {
  TORCH_CHECK(value >= lowest && value <= highest, op, ": expected ", name, " of ", lowest, " to ", highest, ", got ",
              value);
  return static_cast<Enum>(value);
}

int group_shift_of(const char* op, int64_t group_size) {
  for (int shift = 0; shift < 4; ++shift)
    if (group_size == kBlockValues << shift) return shift;
  TORCH_CHECK(false, op, ": expected group_size of 32, 64, 128 or 256, got ", group_size);
}

bool rotates(Policy policy) { return policy == Policy::rotated || policy == Policy::rotated_asymmetric; }

int64_t basis_values(int64_t num_values, Policy policy) {
  return rotates(policy) ? round_up(num_values, kBlockValues) : num_values;
}

// FNV-1a over what the ranks must agree on; travels in every record's header. Never 0.
uint32_t signature_of(std::initializer_list<int64_t> parts, at::IntArrayRef site) {
  uint32_t hash = 2166136261u;
  auto add = [&hash](int64_t part) {
    for (int i = 0; i < 8; ++i) hash = (hash ^ static_cast<uint32_t>(part >> (8 * i) & 0xff)) * 16777619u;
  };
  for (const int64_t part : parts) add(part);
  for (const int64_t part : site) add(part);
  return hash | 1u;
}

Signals signals_of(const char* op, const Tensor& workspace, const Tensor& failure, at::IntArrayRef peers, int64_t rank,
                   at::IntArrayRef site, double timeout_s) {
  const int64_t world = static_cast<int64_t>(peers.size());
  TORCH_CHECK(world >= 2 && world <= kMaxRanks && rank >= 0 && rank < world, op, ": expected a rank of 2 to ",
              kMaxRanks, " peers, got rank ", rank, " of ", world);
  TORCH_CHECK(peers[rank] == reinterpret_cast<int64_t>(workspace.data_ptr()), op, ": peers[", rank,
              "] is not this rank's workspace");
  TORCH_CHECK(site.size() == 3, op, ": expected site to be (index, direction, chunk), got ", site.size(), " numbers");
  TORCH_CHECK(failure.is_cpu() && failure.scalar_type() == at::kLong && failure.numel() >= kFailureFields, op,
              ": expected failure to be ", kFailureFields, " int64 in pinned memory");
  TORCH_CHECK(timeout_s > 0, op, ": expected timeout_s > 0, got ", timeout_s);
  Signals signals{};
  for (int64_t peer = 0; peer < world; ++peer) signals.peers[peer] = reinterpret_cast<uint8_t*>(peers[peer]);
  signals.failure = failure.data_ptr<int64_t>();
  signals.timeout_ns = static_cast<uint64_t>(timeout_s * 1e9);
  signals.rank = static_cast<int>(rank);
  signals.world = static_cast<int>(world);
  signals.site_idx = static_cast<int>(site[0]);
  signals.direction = static_cast<int>(site[1]);
  signals.chunk = static_cast<int>(site[2]);
  return signals;
}

WorkspaceLayout workspace_of(const char* op, const Tensor& workspace, int64_t world, int64_t num_teams, int64_t ring,
                             int64_t slot_bytes) {
  TORCH_CHECK(ring > 0 && (ring & (ring - 1)) == 0, op, ": expected ring to be a power of two, got ", ring);
  const WorkspaceLayout layout{static_cast<int>(world), static_cast<int>(num_teams), static_cast<int>(ring),
                               slot_bytes};
  check_buffer(op, "workspace", workspace, layout.bytes());
  return layout;
}

int grid_of(const char* op, int64_t num_blocks, int64_t num_teams, int64_t num_tiles) {
  TORCH_CHECK(num_blocks >= 1 && num_blocks * kTeams <= num_teams, op, ": expected num_blocks of 1 to ",
              num_teams / kTeams, ", got ", num_blocks);
  return static_cast<int>(min64(num_blocks, num_tiles));
}

Coefficients coefficients_of(const char* op, at::ArrayRef<double> values) {
  TORCH_CHECK(values.size() == 5, op, ": expected 5 coefficients, got ", values.size());
  return {static_cast<float>(values[0]), static_cast<float>(values[1]), static_cast<float>(values[2]),
          static_cast<float>(values[3]), static_cast<float>(values[4])};
}

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

void check_bits(const char* op, int64_t bits) {
  TORCH_CHECK(bits == 4 || bits == 8, op, ": expected bits of 4 or 8, got ", bits);
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
