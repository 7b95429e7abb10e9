// The exact one-shot for messages too small to gain from quantization: values travel as they are, every rank adds them
// in FP32 in rank order and rounds once (reference.exact_sum). 16 bytes a thread; rings and flags as in all_reduce.cuh.
#include "block.cuh"
#include "launch.cuh"
#include "signal.cuh"

namespace echo {

template <Dtype kDtype>
struct Chunk {
  static constexpr int kValues = kDtype == Dtype::fp32 ? 4 : 8;
  static __device__ __forceinline__ void add(const uint4& chunk, bool first, float (&sum)[kValues]) {
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    ECHO_UNROLL
    for (int i = 0; i < kValues; ++i) {
      float value;
      if (kDtype == Dtype::fp32) {
        value = __uint_as_float(words[i]);
      } else {
        const uint32_t bits = words[i / 2] >> (16 * (i % 2)) & 0xffffu;
        value = kDtype == Dtype::bf16 ? bf16_value(bits) : half_value(bits);
      }
      sum[i] = first ? value : sum[i] + value;
    }
  }
  static __device__ __forceinline__ uint4 pack(const float (&sum)[kValues]) {
    uint32_t words[4];
    ECHO_UNROLL
    for (int i = 0; i < 4; ++i) {
      if constexpr (kDtype == Dtype::fp32)
        words[i] = __float_as_uint(sum[i]);
      else
        words[i] =
            kDtype == Dtype::bf16 ? pack_bf16(sum[2 * i], sum[2 * i + 1]) : pack_fp16(sum[2 * i], sum[2 * i + 1]);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
};

// 16 bytes of x from byte `at`; what lies beyond the end is zero.
__device__ __forceinline__ uint4 load_chunk(const uint8_t* x, int64_t at, int64_t num_bytes, bool aligned) {
  if (aligned && at + 16 <= num_bytes) return *reinterpret_cast<const uint4*>(x + at);
  uint32_t words[4] = {0u, 0u, 0u, 0u};
  ECHO_UNROLL
  for (int i = 0; i < 8; ++i) {
    const int64_t byte = at + 2 * i;
    if (byte < num_bytes)
      words[i / 2] |= static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(x + byte)) << (16 * (i % 2));
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void store_chunk(uint8_t* y, int64_t at, int64_t num_bytes, bool aligned,
                                            const uint4& chunk) {
  if (aligned && at + 16 <= num_bytes) {
    *reinterpret_cast<uint4*>(y + at) = chunk;
    return;
  }
  const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
  ECHO_UNROLL
  for (int i = 0; i < 8; ++i) {
    const int64_t byte = at + 2 * i;
    if (byte < num_bytes)
      *reinterpret_cast<uint16_t*>(y + byte) = static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
  }
}

template <Dtype kDtype>
__global__ void __launch_bounds__(kBlockThreads, 1) exact_kernel(const __grid_constant__ ExactArguments a) {
  __shared__ int failed[kTeams];
  const Signals& s = a.signals;
  const WorkspaceLayout& w = a.workspace;
  const int team_in_block = threadIdx.x / kTeamThreads, thread = threadIdx.x % kTeamThreads;
  const int team = team_in_block * gridDim.x + blockIdx.x, num_teams = gridDim.x * kTeams;
  const int64_t num_bytes = a.num_values * (kDtype == Dtype::fp32 ? 4 : 2);
  const int64_t tiles = ceil_div(num_bytes, kExactBytes);
  if (team >= tiles) return;
  const int num_rows = static_cast<int>((tiles - team + num_teams - 1) / num_teams);
  auto sync = [&] { asm volatile("bar.sync %0, %1;" ::"r"(team_in_block + 1), "n"(kTeamThreads) : "memory"); };
  auto offset = [&](int k) { return (team + static_cast<int64_t>(k) * num_teams) * kExactBytes + thread * 16; };
  uint32_t* epoch_word = reinterpret_cast<uint32_t*>(s.peers[s.rank] + w.epoch_offset(team));
  const uint32_t epoch = *epoch_word;
  if (thread == 0) failed[team_in_block] = 0;
  sync();
  uint4 own = make_uint4(0u, 0u, 0u, 0u);
  for (int k = 0; k <= num_rows; ++k) {
    uint4 next = own;
    if (k < num_rows) {
      next = load_chunk(a.x, offset(k), num_bytes, a.aligned);
      for (int i = 1; i < s.world; ++i) {
        const int peer = (s.rank + i) % s.world;
        uint8_t* slot = s.peers[peer] + w.slot_offset(w.slot_idx(Stage::push, peer, s.rank, team, epoch + k));
        reinterpret_cast<uint4*>(slot)[thread] = next;
      }
      sync();
      if (thread < s.world && thread != s.rank) {
        const int64_t idx = w.slot_idx(Stage::push, thread, s.rank, team, epoch + k);
        store_release(reinterpret_cast<uint64_t*>(s.peers[thread] + w.flag_offset(idx)),
                      make_flag(epoch + k, 0, a.signature));
      }
    }
    if (k > 0) {
      const int row = k - 1;
      if (thread < s.world && thread != s.rank) {
        const int64_t idx = w.slot_idx(Stage::push, s.rank, thread, team, epoch + row);
        const uint64_t* flag = reinterpret_cast<const uint64_t*>(s.peers[s.rank] + w.flag_offset(idx));
        const uint32_t expected = flag_value(epoch + row);
        Patience patience(s);
        bool ok = true;
        uint64_t seen;
        while (ok && !flag_is_of(seen = load_acquire(flag), epoch + row))
          ok = !patience.is_over(thread, Stage::push, row, expected, flag_epoch(seen));
        if (ok && flag_signature(seen) != (a.signature & 0xffffu)) {
          report(s, Failure::mismatch, thread, Stage::push, row, a.signature & 0xffffu, flag_signature(seen));
          ok = false;
        }
        if (!ok) failed[team_in_block] = 1;
      }
      sync();
      float sum[Chunk<kDtype>::kValues];
      for (int source = 0; source < s.world; ++source) {
        uint4 chunk = own;
        if (source != s.rank)
          chunk =
              __ldcg(reinterpret_cast<const uint4*>(
                         s.peers[s.rank] + w.slot_offset(w.slot_idx(Stage::push, s.rank, source, team, epoch + row))) +
                     thread);
        Chunk<kDtype>::add(chunk, source == 0, sum);
      }
      uint4 result = Chunk<kDtype>::pack(sum);
      if (failed[team_in_block])
        result = make_uint4(~0u, ~0u, ~0u, ~0u);  // NaN: a failed call must not look like a result
      store_chunk(a.y, offset(row), num_bytes, a.aligned, result);
    }
    own = next;
  }
  if (thread == 0) *epoch_word = epoch + static_cast<uint32_t>(num_rows);
}

cudaError_t launch_exact(const ExactArguments& arguments, int num_blocks, cudaStream_t stream) {
  switch (arguments.dtype) {
    case Dtype::bf16:
      exact_kernel<Dtype::bf16><<<num_blocks, kBlockThreads, 0, stream>>>(arguments);
      break;
    case Dtype::fp16:
      exact_kernel<Dtype::fp16><<<num_blocks, kBlockThreads, 0, stream>>>(arguments);
      break;
    case Dtype::fp32:
      exact_kernel<Dtype::fp32><<<num_blocks, kBlockThreads, 0, stream>>>(arguments);
      break;
  }
  return cudaGetLastError();
}

}  // namespace echo
