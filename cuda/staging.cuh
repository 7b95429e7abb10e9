// A warp's 1,024 values between global memory (coalesced) and one padded row a thread in shared memory.
#pragma once

#include "layout.cuh"

namespace echo {

#define ECHO_UNROLL _Pragma("unroll")

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 32 values a row; the padding makes 16-byte accesses of a quarter-warp fall on different banks.
__host__ __device__ constexpr int row_bytes_of(int element_shift) { return (kBlockValues << element_shift) + 16; }
__host__ __device__ __forceinline__ int row_bytes(Dtype dtype) {
  return dtype == Dtype::fp32 ? row_bytes_of(2) : row_bytes_of(1);
}
__device__ __forceinline__ int element_shift(Dtype dtype) { return dtype == Dtype::fp32 ? 2 : 1; }

// A warp's 16-byte chunk j of lane l: number j * 32 + l of the 64 << shift.
template <int kShift>
struct Chunks {
  static constexpr int kPerLane = 2 << kShift, kPerRow = 2 << kShift;
  static constexpr int kRowsAStep = 32 / kPerRow;
  static __host__ __device__ constexpr int in_rows(int lane, int j) {
    return (j * kRowsAStep + lane / kPerRow) * row_bytes_of(kShift) + lane % kPerRow * 16;
  }
  static __host__ __device__ constexpr int in_memory(int lane, int j) { return (j * 32 + lane) * 16; }
};

// Offsets are part of the instruction, so that one address is enough for all chunks of a lane.
template <int kShift, int kChunk = 0>
static __device__ __forceinline__ void copy_chunks_in(uint32_t target, const uint8_t* source) {
  using C = Chunks<kShift>;
  if constexpr (kChunk < C::kPerLane) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0 + %2], [%1 + %3], 16;" ::"r"(target), "l"(source),
                 "n"(kChunk * C::kRowsAStep * row_bytes_of(kShift)), "n"(kChunk * 512)
                 : "memory");
    copy_chunks_in<kShift, kChunk + 1>(target, source);
  }
}
template <int kShift, int kChunk = 0>
static __device__ __forceinline__ void copy_chunks_out(const uint8_t* source, uint8_t* target) {
  using C = Chunks<kShift>;
  if constexpr (kChunk < C::kPerLane) {
    const uint4 chunk = *reinterpret_cast<const uint4*>(source + kChunk * C::kRowsAStep * row_bytes_of(kShift));
    asm volatile("st.global.cs.v4.u32 [%0 + %5], {%1, %2, %3, %4};" ::"l"(target), "r"(chunk.x), "r"(chunk.y),
                 "r"(chunk.z), "r"(chunk.w), "n"(kChunk * 512)
                 : "memory");
    copy_chunks_out<kShift, kChunk + 1>(source, target);
  }
}

template <int kShift>
static __device__ __forceinline__ void stage_in_whole(uint8_t* rows, const uint8_t* source) {
  using C = Chunks<kShift>;
  const int lane = threadIdx.x & 31;
  copy_chunks_in<kShift>(shared_address(rows) + C::in_rows(lane, 0), source + C::in_memory(lane, 0));
}

template <int kShift>
static __device__ __forceinline__ void stage_value(uint8_t* target, const uint8_t* source, int i, bool there) {
  if (kShift == 1)
    *reinterpret_cast<uint16_t*>(target) = there ? reinterpret_cast<const uint16_t*>(source)[i] : uint16_t{0};
  else
    *reinterpret_cast<uint32_t*>(target) = there ? reinterpret_cast<const uint32_t*>(source)[i] : 0u;
}

template <int kShift>
static __device__ __noinline__ void stage_in_part(uint8_t* rows, const uint8_t* x, int64_t first, int64_t end,
                                                  bool aligned) {
  using C = Chunks<kShift>;
  const int lane = threadIdx.x & 31;
  const uint8_t* source = x + (first << kShift);
  const int64_t num_bytes = (end - first) << kShift;
  if (aligned) {
    for (int j = 0; j < C::kPerLane; ++j) {
      const int64_t left = num_bytes - C::in_memory(lane, j);
      uint8_t* target = rows + C::in_rows(lane, j);
      if (left > 0 && left < 16) {  // the last values: nothing beyond them is read, not even by the copy engine
        for (int i = 0; i < 16 >> kShift; ++i)
          stage_value<kShift>(target + (i << kShift), source + C::in_memory(lane, j), i, (i << kShift) < left);
        continue;
      }
      if (left <= 0)
        *reinterpret_cast<uint4*>(target) = make_uint4(0u, 0u, 0u, 0u);
      else
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(target)),
                     "l"(source + C::in_memory(lane, j))
                     : "memory");
    }
    return;
  }
  for (int i = lane; i < kBlockValues * 32; i += 32) {
    uint8_t* target = rows + (i >> 5) * row_bytes_of(kShift) + ((i & 31) << kShift);
    stage_value<kShift>(target, source, i, first + i < end);
  }
}

// Starts the copy of values [first, end) of x, at most 1,024, into `rows`; what lies beyond `end` becomes zero.
template <int kShift>
static __device__ __forceinline__ void stage_in(uint8_t* rows, const uint8_t* x, int64_t first, int64_t end,
                                                bool aligned) {
  if (aligned && end - first >= 32 * kBlockValues)
    stage_in_whole<kShift>(rows, x + (first << kShift));
  else
    stage_in_part<kShift>(rows, x, first, end, aligned);
}
static __device__ __forceinline__ void stage_in(uint8_t* rows, const uint8_t* x, int64_t first, int64_t end,
                                                Dtype dtype, bool aligned) {
  if (dtype == Dtype::fp32)
    stage_in<2>(rows, x, first, end, aligned);
  else
    stage_in<1>(rows, x, first, end, aligned);
}

__device__ __forceinline__ void commit_stage() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait_stage() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
  __syncwarp();
}

template <int kShift>
static __device__ __noinline__ void stage_out_part(const uint8_t* rows, uint8_t* target, int64_t num_values) {
  for (int i = threadIdx.x & 31; i < kBlockValues * 32 && i < num_values; i += 32) {
    const uint8_t* source = rows + (i >> 5) * row_bytes_of(kShift) + ((i & 31) << kShift);
    if (kShift == 1)
      reinterpret_cast<uint16_t*>(target)[i] = *reinterpret_cast<const uint16_t*>(source);
    else
      reinterpret_cast<uint32_t*>(target)[i] = *reinterpret_cast<const uint32_t*>(source);
  }
}

template <int kShift>
static __device__ __forceinline__ void stage_out_whole(const uint8_t* rows, uint8_t* target) {
  using C = Chunks<kShift>;
  const int lane = threadIdx.x & 31;
  copy_chunks_out<kShift>(rows + C::in_rows(lane, 0), target + C::in_memory(lane, 0));
}

// Copies the warp's rows to values [first, end) of y; the rows are complete after a __syncwarp.
template <int kShift>
static __device__ __forceinline__ void stage_out(const uint8_t* rows, uint8_t* y, int64_t first, int64_t end,
                                                 bool aligned) {
  uint8_t* target = y + (first << kShift);
  if (aligned && end - first >= 32 * kBlockValues)
    stage_out_whole<kShift>(rows, target);
  else
    stage_out_part<kShift>(rows, target, end - first);
}
static __device__ __forceinline__ void stage_out(const uint8_t* rows, uint8_t* y, int64_t first, int64_t end,
                                                 Dtype dtype, bool aligned) {
  if (dtype == Dtype::fp32)
    stage_out<2>(rows, y, first, end, aligned);
  else
    stage_out<1>(rows, y, first, end, aligned);
}

}  // namespace echo
