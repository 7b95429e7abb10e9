// What Python passes, checked and turned into what the kernels take. A wrong value is an error that says what was
// expected and what came, with the operator's name.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#include <initializer_list>
#include <optional>

#include "arguments.cuh"

namespace echo {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline Dtype dtype_of(const Tensor& x) {
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

inline uint8_t* bytes_of(const Tensor& tensor) { return static_cast<uint8_t*>(tensor.data_ptr()); }
inline uint8_t* bytes_of(const OptionalTensor& tensor) { return tensor.has_value() ? bytes_of(*tensor) : nullptr; }

inline void check_buffer(const char* op, const char* name, const OptionalTensor& tensor, int64_t num_bytes) {
  TORCH_CHECK(tensor.has_value() && tensor->is_contiguous() && tensor->is_cuda(), op, ": expected ", name,
              " to be a contiguous CUDA tensor");
  const int64_t got = tensor->numel() * static_cast<int64_t>(tensor->element_size());
  TORCH_CHECK(got >= num_bytes, op, ": expected ", name, " of at least ", num_bytes, " bytes, got ", got);
}

inline void check_input(const char* op, const Tensor& x, const Tensor& y, int64_t output_values) {
  TORCH_CHECK(x.is_cuda() && x.is_contiguous(), op, ": expected x to be a contiguous CUDA tensor");
  TORCH_CHECK(
      y.is_contiguous() && y.device() == x.device() && y.scalar_type() == x.scalar_type() && y.numel() == output_values,
      op, ": expected y of ", output_values, " values of ", x.scalar_type(), " on x's device, got ", y.numel(), " of ",
      y.scalar_type());
  TORCH_CHECK(x.numel() > 0, op, ": expected at least one value");
}

inline bool is_aligned(const Tensor& x, const Tensor& y, int64_t stride_bytes = 0) {
  return ((reinterpret_cast<uintptr_t>(x.data_ptr()) | reinterpret_cast<uintptr_t>(y.data_ptr()) |
           static_cast<uintptr_t>(stride_bytes)) &
          15u) == 0;
}

// Where the first rank's share would be if the tensor, which holds this rank's alone, held all.
inline uint8_t* before_shares(const Tensor& own, int64_t rank) {
  const int64_t num_bytes = rank * own.numel() * static_cast<int64_t>(own.element_size());
  return reinterpret_cast<uint8_t*>(reinterpret_cast<uintptr_t>(own.data_ptr()) - static_cast<uintptr_t>(num_bytes));
}

inline void check_launch(const char* op, cudaError_t error) {
  TORCH_CHECK(error == cudaSuccess, op, ": CUDA error at launch: ", cudaGetErrorString(error));
}

template <typename Enum>
Enum to_enum(const char* op, const char* name, int64_t value, int64_t lowest, int64_t highest) {
  TORCH_CHECK(value >= lowest && value <= highest, op, ": expected ", name, " of ", lowest, " to ", highest, ", got ",
              value);
  return static_cast<Enum>(value);
}

inline int group_shift_of(const char* op, int64_t group_size) {
  for (int shift = 0; shift < 4; ++shift)
    if (group_size == kBlockValues << shift) return shift;
  TORCH_CHECK(false, op, ": expected group_size of 32, 64, 128 or 256, got ", group_size);
}

inline bool rotates(Policy policy) { return policy == Policy::rotated || policy == Policy::rotated_asymmetric; }

inline int64_t basis_values(int64_t num_values, Policy policy) {
  return rotates(policy) ? round_up(num_values, kBlockValues) : num_values;
}

// FNV-1a over what the ranks must agree on; travels in every record's header. Never 0.
inline uint32_t signature_of(std::initializer_list<int64_t> parts, at::IntArrayRef site) {
  uint32_t hash = 2166136261u;
  auto add = [&hash](int64_t part) {
    for (int i = 0; i < 8; ++i) hash = (hash ^ static_cast<uint32_t>(part >> (8 * i) & 0xff)) * 16777619u;
  };
  for (const int64_t part : parts) add(part);
  for (const int64_t part : site) add(part);
  return hash | 1u;
}

inline Signals signals_of(const char* op, const Tensor& workspace, const Tensor& failure, at::IntArrayRef peers,
                          int64_t rank, at::IntArrayRef site, double timeout_s) {
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

inline WorkspaceLayout workspace_of(const char* op, const Tensor& workspace, int64_t world, int64_t num_teams,
                                    int64_t ring, int64_t slot_bytes) {
  TORCH_CHECK(ring > 0 && (ring & (ring - 1)) == 0, op, ": expected ring to be a power of two, got ", ring);
  const WorkspaceLayout layout{static_cast<int>(world), static_cast<int>(num_teams), static_cast<int>(ring),
                               slot_bytes};
  check_buffer(op, "workspace", workspace, layout.bytes());
  return layout;
}

inline int grid_of(const char* op, int64_t num_blocks, int64_t num_teams, int64_t num_tiles) {
  TORCH_CHECK(num_blocks >= 1 && num_blocks * kTeams <= num_teams, op, ": expected num_blocks of 1 to ",
              num_teams / kTeams, ", got ", num_blocks);
  return static_cast<int>(min64(num_blocks, num_tiles));
}

inline Coefficients coefficients_of(const char* op, at::ArrayRef<double> values) {
  TORCH_CHECK(values.size() == 5, op, ": expected 5 coefficients, got ", values.size());
  return {static_cast<float>(values[0]), static_cast<float>(values[1]), static_cast<float>(values[2]),
          static_cast<float>(values[3]), static_cast<float>(values[4])};
}

inline void check_bits(const char* op, int64_t bits) {
  TORCH_CHECK(bits == 4 || bits == 8, op, ": expected bits of 4 or 8, got ", bits);
}

}  // namespace echo
