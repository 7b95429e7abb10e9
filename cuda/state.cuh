// The compensator's state of one thread's block: read before the call's values are compensated, written after.
//
// What a call reads of it comes from shared memory, where a copy was started a tile ahead, or from the state itself.
// A tile's state is laid out so that threads read and write 16 bytes side by side: chunk j of thread t lies at
// (j * 128 + t) * 16 in its region (c, then m2). Compact: c is 8-bit codes (+128), m2 4-bit codes (+8), one BF16 scale
// each for a block (echo_megatron/state.py).
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

  static constexpr int kAverageOffset = state_average_offset(kDtype);
  static constexpr int kTileBytes = state_tile_bytes(kDtype);

  // Starts the copy of this thread's part of a tile's state; nobody else reads it.
  static __device__ __forceinline__ void copy_async(uint8_t* target, const uint8_t* tile, bool with_average) {
    const int thread = threadIdx.x % kTeamThreads;
    constexpr int kCorrectionChunks = kAverageOffset / (16 * kTeamThreads);
    constexpr int kAverageChunks = kDtype == StateDtype::compact ? 1 : kCorrectionChunks;
    ECHO_UNROLL
    for (int j = 0; j < kCorrectionChunks; ++j) copy16(target, tile, (j * kTeamThreads + thread) * 16);
    if (with_average) {
      ECHO_UNROLL
      for (int j = 0; j < kAverageChunks; ++j) copy16(target, tile, kAverageOffset + (j * kTeamThreads + thread) * 16);
    }
    if (kDtype == StateDtype::compact) {
      const int at = kCompactScalesOffset + thread * 4;
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
    if (fresh_ || k.memoryless())
      update_from<true>(u, k);
    else
      update_from<false>(u, k);
  }

 private:
  static __device__ __forceinline__ void copy16(uint8_t* target, const uint8_t* tile, int at) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(target + at)), "l"(tile + at)
                 : "memory");
  }
  __device__ __forceinline__ uint4 read(int region, int j) const {
    return reinterpret_cast<const uint4*>(source_ + region * kAverageOffset)[j * kTeamThreads + thread_];
  }
  __device__ __forceinline__ uint32_t read_scales() const {
    return reinterpret_cast<const uint32_t*>(source_ + kCompactScalesOffset)[thread_];
  }
  __device__ __forceinline__ void write(int region, int j, const uint4& chunk) const {
    __stcs(reinterpret_cast<uint4*>(tile_ + region * kAverageOffset) + j * kTeamThreads + thread_, chunk);
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
      const float scale = bf16_value(read_scales() & 0xffffu);
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
    } else if (kDtype == StateDtype::fp32) {
      ECHO_UNROLL
      for (int h = 0; h < 2; ++h) as_floats(read(1, 2 * j + h), m + 4 * h);
    } else {
      const uint4 codes = read(1, 0);
      const uint32_t word = j == 0 ? codes.x : j == 1 ? codes.y : j == 2 ? codes.z : codes.w;
      const float scale = bf16_value(read_scales() >> 16);
      const float offset = -(128.0f + 8.0f) * scale;
      ECHO_UNROLL
      for (int i = 0; i < 8; ++i) {
        const uint32_t at16 = i < 4 ? word << (16 - 4 * i) : word >> (4 * i - 16);
        m[i] = __fmaf_rn(__uint_as_float(and_or(at16, 0xf0000u, 0x43000000u)), scale, offset);
      }
    }
  }

  template <bool kFresh>
  __device__ __forceinline__ void update_from(const float (&u)[kBlockValues], const Coefficients& k) const {
    if constexpr (kDtype == StateDtype::compact) {
      update_compact<kFresh>(u, k);
    } else {
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

  // The new scales follow from bounds (echo_megatron/state.py), so that every value is coded as soon as it is made.
  template <bool kFresh>
  __device__ __forceinline__ void update_compact(const float (&u)[kBlockValues], const Coefficients& k) const {
    float u_max = fabsf(u[0]);
    ECHO_UNROLL
    for (int i = 1; i < kBlockValues; ++i) u_max = max_nan(u_max, fabsf(u[i]));
    float c_bound = u_max * k.correction_from_residual, m_bound = u_max * k.average_from_residual;
    if (!kFresh) {
      const uint32_t scales = read_scales();
      const float old_c = bf16_value(scales & 0xffffu) * 127.0f, old_m = bf16_value(scales >> 16) * 7.0f;
      c_bound = (old_c * k.correction_decay + old_m * fabsf(k.correction_from_average)) + c_bound;
      m_bound = old_m * k.average_decay + m_bound;
    }
    const uint32_t c_bits = compact_scale_bits(c_bound, 127.0f), m_bits = compact_scale_bits(m_bound, 7.0f);
    const float c_factor = compact_factor(c_bits, c_bound), m_factor = compact_factor(m_bits, m_bound);
    uint32_t c_words[8], m_words[4];
    ECHO_UNROLL
    for (int j = 0; j < 4; ++j) {
      float c[8], m[8];
      next<kFresh>(j, u, k, c, m);
      m_words[j] = pack_codes<4>(m, m_factor);
      c_words[2 * j] = pack_codes<8>(c, c_factor);
      c_words[2 * j + 1] = pack_codes<8>(c + 4, c_factor);
    }
    write(0, 0, make_uint4(c_words[0], c_words[1], c_words[2], c_words[3]));
    write(0, 1, make_uint4(c_words[4], c_words[5], c_words[6], c_words[7]));
    write(1, 0, make_uint4(m_words[0], m_words[1], m_words[2], m_words[3]));
    __stcs(reinterpret_cast<uint32_t*>(tile_ + kCompactScalesOffset) + thread_, c_bits | m_bits << 16);
  }

  // No clamp: the scale's rounding to BF16 lets a value exceed the grid's end by less than half a step.
  template <int kBits>
  static __device__ __forceinline__ uint32_t pack_codes(const float* v, float factor) {
    constexpr int kPerWord = 32 / kBits, kOffset = 1 << (kBits - 1);
    uint32_t word = 0;
    ECHO_UNROLL
    for (int i = kPerWord - 1; i >= 0; --i)
      word = word * (1u << kBits) + __float_as_uint(__fmaf_rn(v[i], factor, kRound + kOffset));
    return word - 0x4b400000u * (kBits == 4 ? 0x11111111u : 0x01010101u);
  }

  const uint8_t* source_;
  uint8_t* tile_;
  int thread_;
  bool fresh_;
};

}  // namespace echo
