// Phase 0 of all_reduce.cuh: the largest finite |x| of all ranks, through the same memory as the records.
#pragma once

#include "block.cuh"
#include "signal.cuh"

namespace echo {

// Phase 0: the exponent of `rescale: group` from the largest finite |x| of all ranks. Every thread block of the grid
// takes part, so the grid must be resident as a whole. False in `ok` if the wait was given up.
template <Algorithm kAlgorithm>
static __device__ __noinline__ int exchange_amax(const Arguments& a, bool rotates, bool& ok) {
  __shared__ uint32_t block_amax, all_amax;
  __shared__ int failed;
  const Signals& s = a.signals;
  // The rank's contribution: all shares, or its own.
  const int64_t num_values = kAlgorithm == Algorithm::reduce_scatter ? a.num_values * s.world : a.num_values;
  const uint8_t* x = a.x;
  if (kAlgorithm == Algorithm::all_gather) x += s.rank * a.num_values << element_shift(a.dtype);
  Control* control = control_of(s.peers[s.rank]);
  if (threadIdx.x == 0) {
    block_amax = 0;
    all_amax = 0;
    failed = 0;
  }
  __syncthreads();
  const uint32_t epoch = control->amax_epoch;
  uint32_t amax = 0;
  auto look = [&amax](float value) {
    const uint32_t magnitude = __float_as_uint(value) & 0x7fffffffu;
    if (magnitude < 0x7f800000u && magnitude > amax) amax = magnitude;
  };
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (a.dtype == Dtype::fp32) {
    for (int64_t i = thread; i < num_values; i += stride) look(reinterpret_cast<const float*>(x)[i]);
  } else {
    const bool bf16 = a.dtype == Dtype::bf16;
    auto look_at = [&](uint32_t bits) { look(bf16 ? bf16_value(bits) : half_value(bits)); };
    const int64_t num_chunks = a.aligned ? num_values / 8 : 0;
    for (int64_t i = thread; i < num_chunks; i += stride) {
      const uint4 chunk = __ldg(reinterpret_cast<const uint4*>(x) + i);
      const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
      ECHO_UNROLL
      for (int j = 0; j < 4; ++j) {
        look_at(words[j] & 0xffffu);
        look_at(words[j] >> 16);
      }
    }
    for (int64_t i = num_chunks * 8 + thread; i < num_values; i += stride)
      look_at(reinterpret_cast<const uint16_t*>(x)[i]);
  }
  amax = __reduce_max_sync(~0u, amax);
  if ((threadIdx.x & 31) == 0) atomicMax(&block_amax, amax);
  __syncthreads();
  if (threadIdx.x == 0) {
    atomicMax(&control->amax, block_amax);
    __threadfence();
    if (atomicAdd(&control->amax_arrivals, 1u) == gridDim.x - 1) {  // the last block speaks for the rank
      __threadfence();
      const uint32_t own = atomicExch(&control->amax, 0u);
      control->amax_arrivals = 0;
      control->amax_epoch = epoch + 1;
      const uint64_t message = static_cast<uint64_t>(epoch + 1) << 32 | own;
      for (int i = 0; i < s.world; ++i) {
        const int peer = (s.rank + i) % s.world;
        store_release(&control_of(s.peers[peer])->rank_amax[s.rank][epoch & 1], message);
      }
    }
  }
  if (threadIdx.x < s.world) {
    const uint64_t* word = &control->rank_amax[threadIdx.x][epoch & 1];
    Patience patience(s);
    uint64_t seen;
    while ((seen = load_acquire(word)) >> 32 != epoch + 1)
      if (patience.is_over(threadIdx.x, Stage::rescale, 0, epoch + 1, static_cast<uint32_t>(seen >> 32))) {
        failed = 1;
        break;
      }
    atomicMax(&all_amax, static_cast<uint32_t>(seen));
  }
  __syncthreads();
  ok = failed == 0;
  return call_exponent(__uint_as_float(all_amax), rotates);
}

}  // namespace echo
