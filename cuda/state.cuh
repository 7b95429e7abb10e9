// The compensator's state of one thread's block: read before the call's values are compensated, written after.
//
// What a call reads of it comes from shared memory, where a copy was started a tile ahead, or from the state itself.
// A tile's state is laid out so that threads read and write 16 bytes side by side: chunk j of thread t lies at
// (j * 128 + t) * 16 in its region (c, then m2). Compact: c is 8-bit codes (+128) and a scale for a block, and there is
// no m2 (echo_megatron/state.py).
#pragma once

#include "arguments.cuh"
#include "block.cuh"

namespace echo {

__device__ __forceinline__ void unpack_bf16(const uint4& chunk, float (&v)[8]) {
  const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
  ECHO_UNROLL
  for (int i = 0; i < 4; ++i) {
    v[2 * i] = __uint_as_float(words[i] << 16);
    v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}
__device__ __forceinline__ uint4 pack_bf16(const float (&v)[8]) {
  return make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
}

template <StateDtype kDtype>
class BlockState {
 public:
  // `source` holds the tile's state as it was before the call; `tile` is where the new state goes.
  __device__ __forceinline__ BlockState(const uint8_t* source, uint8_t* tile, bool fresh)
      : source_(source), tile_(tile), thread_(threadIdx.x % kTeamThreads), fresh_(fresh) {}

  static constexpr bool kHasAverage = kDtype != StateDtype::compact;
  static constexpr int kCorrectionBytes = state_correction_bytes(kDtype);
  static constexpr int kTileBytes = state_tile_bytes(kDtype);

  // Starts the copy of this thread's part of a tile's state; nobody else reads it.
  static __device__ __forceinline__ void copy_async(uint8_t* target, const uint8_t* tile, bool with_average) {
    const int thread = threadIdx.x % kTeamThreads;
    constexpr int kChunks = kCorrectionBytes / (16 * kTeamThreads);
    ECHO_UNROLL
    for (int j = 0; j < kChunks; ++j) copy16(target, tile, (j * kTeamThreads + thread) * 16);
    if (kHasAverage && with_average) {
      ECHO_UNROLL
      for (int j = 0; j < kChunks; ++j) copy16(target, tile, kCorrectionBytes + (j * kTeamThreads + thread) * 16);
    }
    if (kDtype == StateDtype::compact) {
      const int at = kCorrectionBytes + thread * 4;
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(target + at)), "l"(tile + at)
                   : "memory");
    }
  }

  // x' = x + c (paper Eqn. 10)
  __device__ __forceinline__ void add_correction(float (&v)[kBlockValues]) const {
    if (fresh_) return;
    ECHO_UNROLL
    for (int j = 0; j < 4; ++j) {
      float c[8];
      read_correction(j, c);
      ECHO_UNROLL
      for (int i = 0; i < 8; ++i) v[8 * j + i] = v[8 * j + i] + c[i];
    }
  }

  // Feeds the residual u back (paper Eqn. 11).
  __device__ __forceinline__ void update(const float (&u)[kBlockValues], const Coefficients& k) const {
    if constexpr (kDtype == StateDtype::compact) {
      update_compact(u, k);
    } else if (fresh_ || k.memoryless()) {
      update_plain<true>(u, k);
    } else {
      update_plain<false>(u, k);
    }
  }

 private:
  static __device__ __forceinline__ void copy16(uint8_t* target, const uint8_t* tile, int at) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(target + at)), "l"(tile + at)
                 : "memory");
  }
  __device__ __forceinline__ uint4 read(int region, int j) const {
    return reinterpret_cast<const uint4*>(source_ + region * kCorrectionBytes)[j * kTeamThreads + thread_];
  }
  __device__ __forceinline__ void write(int region, int j, const uint4& chunk) const {
    __stcs(reinterpret_cast<uint4*>(tile_ + region * kCorrectionBytes) + j * kTeamThreads + thread_, chunk);
  }
  static __device__ __forceinline__ uint4 as_chunk(const float* v) {
    return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
  }
  static __device__ __forceinline__ void as_floats(const uint4& chunk, float* v) {
    v[0] = __uint_as_float(chunk.x);
    v[1] = __uint_as_float(chunk.y);
    v[2] = __uint_as_float(chunk.z);
    v[3] = __uint_as_float(chunk.w);
  }

  __device__ __forceinline__ void read_correction(int j, float (&c)[8]) const {
    if (kDtype == StateDtype::bf16) {
      unpack_bf16(read(0, j), c);
    } else if (kDtype == StateDtype::fp32) {
      ECHO_UNROLL
      for (int h = 0; h < 2; ++h) as_floats(read(0, 2 * j + h), c + 4 * h);
    } else {
      const uint4 codes = read(0, j / 2);
      const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
      const float scale = reinterpret_cast<const float*>(source_ + kCorrectionBytes)[thread_];
      const float offset = -(32768.0f + 128.0f) * scale;  // exact: 9 bits times 8
      ECHO_UNROLL
      for (int i = 0; i < 8; ++i) {
        const float b = __uint_as_float(__byte_perm(words[j % 2 * 2 + i / 4], 0x47000000u, 0x7504 | (i % 4) << 4));
        c[i] = __fmaf_rn(b, scale, offset);
      }
    }
  }

  __device__ __forceinline__ void read_average(int j, float (&m)[8]) const {
    if (kDtype == StateDtype::bf16) {
      unpack_bf16(read(1, j), m);
    } else {
      ECHO_UNROLL
      for (int h = 0; h < 2; ++h) as_floats(read(1, 2 * j + h), m + 4 * h);
    }
  }

  template <bool kFresh>
  __device__ __forceinline__ void update_plain(const float (&u)[kBlockValues], const Coefficients& k) const {
    ECHO_UNROLL
    for (int j = 0; j < 4; ++j) {
      float c[8], m[8];
      next<kFresh>(j, u, k, c, m);
      if (kDtype == StateDtype::bf16) {
        write(0, j, pack_bf16(c));
        write(1, j, pack_bf16(m));
      } else {
        ECHO_UNROLL
        for (int h = 0; h < 2; ++h) {
          write(0, 2 * j + h, as_chunk(c + 4 * h));
          write(1, 2 * j + h, as_chunk(m + 4 * h));
        }
      }
    }
  }

  // The new c and m2 of values 8j to 8j + 7, FP32; one rounding an operation, in the definition's order.
  template <bool kFresh>
  __device__ __forceinline__ void next(int j, const float (&u)[kBlockValues], const Coefficients& k, float (&c)[8],
                                       float (&m)[8]) const {
    float old_c[8], old_m[8];
    if (!kFresh) {
      read_correction(j, old_c);
      read_average(j, old_m);
    }
    ECHO_UNROLL
    for (int i = 0; i < 8; ++i) {
      c[i] = u[8 * j + i] * k.correction_from_residual;
      m[i] = u[8 * j + i] * k.average_from_residual;
      if (kFresh) continue;
      c[i] = (old_c[i] * k.correction_decay + old_m[i] * k.correction_from_average) + c[i];
      m[i] = old_m[i] * k.average_decay + m[i];
    }
  }

  // Without memory of earlier sites: the old state is not read.
  __device__ __forceinline__ void update_compact(const float (&u)[kBlockValues], const Coefficients& k) const {
    float u_max = fabsf(u[0]);
    ECHO_UNROLL
    for (int i = 1; i < kBlockValues; ++i) u_max = max_nan(u_max, fabsf(u[i]));
    const float c_max = u_max * k.correction_from_residual;  // of the largest u: rounding keeps the order
    const float scale = compact_scale(c_max), factor = compact_factor(scale, c_max);
    uint32_t words[8];
    ECHO_UNROLL
    for (int j = 0; j < 8; ++j) words[j] = pack_codes(u + 4 * j, k.correction_from_residual, factor);
    write(0, 0, make_uint4(words[0], words[1], words[2], words[3]));
    write(0, 1, make_uint4(words[4], words[5], words[6], words[7]));
    __stcs(reinterpret_cast<float*>(tile_ + kCorrectionBytes) + thread_, scale);
  }

  // No clamp: the scale's rounding to BF16 lets a value exceed the grid's end by less than half a step.
  static __device__ __forceinline__ uint32_t pack_codes(const float* u, float gain, float factor) {
    uint32_t word = 0;
    ECHO_UNROLL
    for (int i = 3; i >= 0; --i) word = word * 256u + __float_as_uint(__fmaf_rn(u[i] * gain, factor, kRound + 128));
    return word - 0x4b400000u * 0x01010101u;
  }

  const uint8_t* source_;
  uint8_t* tile_;
  int thread_;
  bool fresh_;
};

}  // namespace echo
