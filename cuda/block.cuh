// One thread's block of 32 values: rotation, quantizing and decoding in registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "quantizer.cuh"
#include "staging.cuh"

namespace echo {

// Fast paths fold power-of-two factors into one multiplier. They give the definition's bits while nothing on the way
// over- or underflows FP32, which these limits ensure; tiles beyond them take the value-by-value path.
constexpr int kFastEncodeExponent = 100;
constexpr int kFastDecodeExponent = 90;

// -- rows and registers

static __device__ __forceinline__ void read_row(const uint8_t* row, Dtype dtype, float (&v)[kBlockValues]) {
  const uint4* chunks = reinterpret_cast<const uint4*>(row);
  if (dtype == Dtype::bf16) {
    ECHO_UNROLL
    for (int j = 0; j < 4; ++j) {
      const uint4 chunk = chunks[j];
      const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
      ECHO_UNROLL
      for (int i = 0; i < 4; ++i) {
        v[8 * j + 2 * i] = __uint_as_float(words[i] << 16);
        v[8 * j + 2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
      }
    }
  } else if (dtype == Dtype::fp16) {
    ECHO_UNROLL
    for (int j = 0; j < 4; ++j) {
      const uint4 chunk = chunks[j];
      const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
      ECHO_UNROLL
      for (int i = 0; i < 4; ++i) {
        v[8 * j + 2 * i] = half_value(words[i] & 0xffffu);
        v[8 * j + 2 * i + 1] = half_value(words[i] >> 16);
      }
    }
  } else {
    ECHO_UNROLL
    for (int j = 0; j < 8; ++j) {
      const uint4 chunk = chunks[j];
      v[4 * j] = __uint_as_float(chunk.x);
      v[4 * j + 1] = __uint_as_float(chunk.y);
      v[4 * j + 2] = __uint_as_float(chunk.z);
      v[4 * j + 3] = __uint_as_float(chunk.w);
    }
  }
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t pack_fp16(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

static __device__ __forceinline__ void write_row(uint8_t* row, Dtype dtype, const float (&v)[kBlockValues]) {
  uint4* chunks = reinterpret_cast<uint4*>(row);
  if (dtype == Dtype::bf16) {
    ECHO_UNROLL
    for (int j = 0; j < 4; ++j)
      chunks[j] = make_uint4(pack_bf16(v[8 * j], v[8 * j + 1]), pack_bf16(v[8 * j + 2], v[8 * j + 3]),
                             pack_bf16(v[8 * j + 4], v[8 * j + 5]), pack_bf16(v[8 * j + 6], v[8 * j + 7]));
  } else if (dtype == Dtype::fp16) {
    ECHO_UNROLL
    for (int j = 0; j < 4; ++j)
      chunks[j] = make_uint4(pack_fp16(v[8 * j], v[8 * j + 1]), pack_fp16(v[8 * j + 2], v[8 * j + 3]),
                             pack_fp16(v[8 * j + 4], v[8 * j + 5]), pack_fp16(v[8 * j + 6], v[8 * j + 7]));
  } else {
    ECHO_UNROLL
    for (int j = 0; j < 8; ++j)
      chunks[j] = make_uint4(__float_as_uint(v[4 * j]), __float_as_uint(v[4 * j + 1]), __float_as_uint(v[4 * j + 2]),
                             __float_as_uint(v[4 * j + 3]));
  }
}

__device__ __forceinline__ bool decodes_fast(int exponent) {
  return exponent >= -kFastDecodeExponent && exponent <= kFastDecodeExponent;
}

// A value as the output's dtype holds it.
__device__ __forceinline__ float rounded(float value, Dtype dtype) {
  if (dtype == Dtype::bf16) return bf16_value(bf16_bits(value));
  if (dtype == Dtype::fp16) return half_value(half_bits(value));
  return value;
}

// -- rotation (quantizer.hadamard): butterflies of stride 1 to 16, its own inverse up to a factor 32

__device__ __forceinline__ void hadamard(float (&v)[kBlockValues]) {
  ECHO_UNROLL
  for (int stride = 1; stride < kBlockValues; stride *= 2) {
    ECHO_UNROLL
    for (int i = 0; i < kBlockValues; ++i) {
      if (i & stride) continue;
      const float a = v[i], b = v[i + stride];
      v[i] = a + b;
      v[i + stride] = a - b;
    }
  }
}

// -- range of a group

__device__ __forceinline__ float max_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
__device__ __forceinline__ float min_nan(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// The range of this thread's group of (32 << group_shift) values; threads of a group are neighbours. Only the first
// `valid` values count; [0, 0] and not finite where the group holds NaN or Inf.
template <bool kSymmetric>
__device__ __forceinline__ void group_range(const float (&v)[kBlockValues], int valid, int group_shift, float& lo,
                                            float& hi, bool& finite) {
  float low, high;
  if (kSymmetric) {
    high = fabsf(v[0]);
    ECHO_UNROLL
    for (int i = 1; i < kBlockValues; ++i) high = max_nan(high, fabsf(v[i]));
    if (valid == 0) high = 0.0f;
    for (int o = 1; o < (1 << group_shift); o <<= 1) high = max_nan(high, __shfl_xor_sync(~0u, high, o));
    low = -high;
  } else {
    low = high = v[0];
    ECHO_UNROLL
    for (int i = 1; i < kBlockValues; ++i) {
      low = min_nan(low, v[i]);
      high = max_nan(high, v[i]);
    }
    if (valid == 0) {
      low = infinity();
      high = -infinity();
    }
    for (int o = 1; o < (1 << group_shift); o <<= 1) {
      low = min_nan(low, __shfl_xor_sync(~0u, low, o));
      high = max_nan(high, __shfl_xor_sync(~0u, high, o));
    }
  }
  finite = max_nan(-low, high) < infinity() && high >= low;
  lo = finite ? low : 0.0f;
  hi = finite ? high : 0.0f;
}

// (a & mask) | bits in one instruction; the compiler makes two of it when both are constants.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(mask), "r"(bits));
  return r;
}

// -- codes. words[i] holds values 8i … (4 bits, low nibble first) or 4i … (8 bits).

constexpr float kRound =
    12582912.0f;  // 1.5 * 2^23: adding it rounds half-to-even and leaves the integer in the low bits

template <int kBits, Policy kPolicy>
struct BlockCodec {
  using Q = Quantizer<kBits, kPolicy>;
  static constexpr int kPerWord = 32 / kBits;
  // The 8-bit scale clips the ends of the grid by less than half a step, so rotated codes need no clamp; a 16-bit scale
  // below 2^-14 is subnormal and clips more, a zero-point moves the ends.
  static constexpr bool kClamps = kPolicy != Policy::rotated;

  // Codes of a block. With kWantResidual v becomes v minus its decoded code.
  template <bool kWantResidual>
  static __device__ __forceinline__ void encode(float (&v)[kBlockValues], const Params& params, int exponent,
                                                uint32_t (&words)[kBits]) {
    if (exponent >= -kFastEncodeExponent && exponent <= kFastEncodeExponent)
      encode_block<kWantResidual, true>(v, params, exponent, words);
    else
      encode_block<kWantResidual, false>(v, params, exponent, words);
    if (!(params.scale == params.scale)) {
      const uint32_t lowest = static_cast<uint32_t>(Q::kLowest + Q::kOffset) * (kBits == 4 ? 0x11111111u : 0x01010101u);
      ECHO_UNROLL
      for (int i = 0; i < kBits; ++i) words[i] = lowest;
    }
  }

  // acc += decoded values, one rounding a value for the decoded value and one for the sum. Sums start at -0, which
  // leaves every first term as it is. `fast`: the exponent is within kFastDecodeExponent.
  static __device__ __forceinline__ void add_decoded(const uint32_t (&words)[kBits], float step, float zero, bool fast,
                                                     float (&acc)[kBlockValues]) {
    if (Q::kSymmetric && fast)
      put_block<false, true>(words, step, zero, acc);
    else
      put_block<false, false>(words, step, zero, acc);
  }
  static __device__ __forceinline__ void decode(const uint32_t (&words)[kBits], float step, float zero, bool fast,
                                                float (&values)[kBlockValues]) {
    if (Q::kSymmetric && fast)
      put_block<true, true>(words, step, zero, values);
    else
      put_block<true, false>(words, step, zero, values);
  }

 private:
  // kFast: 2^-E goes into the reciprocal, and the product of code and step is exact.
  template <bool kWantResidual, bool kFast>
  static __device__ __forceinline__ void encode_block(float (&v)[kBlockValues], const Params& params, int exponent,
                                                      uint32_t (&words)[kBits]) {
    const int first = -exponent < -126 ? -126 : (-exponent > 127 ? 127 : -exponent);
    const float factor = power_of_two(first);
    const float multiplier = (1.0f / params.scale) * power_of_two(kFast ? -exponent : -exponent - first);
    const float step = Q::step(params, exponent);
    constexpr float kMagic = kRound + Q::kOffset;
    constexpr float kLow = Q::kLowest, kHigh = Q::kHighest;
    ECHO_UNROLL
    for (int w = 0; w < kBits; ++w) {
      uint32_t b[kPerWord];
      ECHO_UNROLL
      for (int i = 0; i < kPerWord; ++i) {
        float& value = v[w * kPerWord + i];
        float t = (kFast ? value : value * factor) * multiplier;
        if (!Q::kSymmetric) t = t + params.zero;
        if (!kFast || (kClamps && (kWantResidual || Q::kSymmetric))) t = fminf(fmaxf(t, kLow), kHigh);
        const float sum = t + kMagic;
        b[i] = __float_as_uint(sum);
        if (kWantResidual) {
          const float q = sum - kMagic;
          // q * step has at most 19 bits: the product is exact, and one fused rounding is the definition's subtraction.
          if (kFast && Q::kSymmetric)
            value = __fmaf_rn(-q, step, value);
          else
            value = value - (q - (Q::kSymmetric ? 0.0f : params.zero)) * step;
        }
      }
      words[w] = kFast && !Q::kSymmetric && !kWantResidual ? pack_clamped(b) : pack(b);
    }
  }

  // Horner's rule on whole words: what the magic number adds is the same for every code and is taken off at the end.
  static __device__ __forceinline__ uint32_t pack(const uint32_t (&b)[kPerWord]) {
    constexpr uint32_t kMagicBits = 0x4b400000u;
    constexpr uint32_t kCopies = kBits == 4 ? 0x11111111u : 0x01010101u;
    uint32_t word = b[kPerWord - 1];
    ECHO_UNROLL
    for (int i = kPerWord - 2; i >= 0; --i) word = word * (1u << kBits) + b[i];
    return word - kMagicBits * kCopies;
  }

  // Two codes a word in 16 bits each are clamped at once.
  static __device__ __forceinline__ uint32_t pack_clamped(const uint32_t (&b)[kPerWord]) {
    constexpr uint32_t kHighest2 = Q::kHighest * 0x00010001u;
    uint32_t word = 0;
    ECHO_UNROLL
    for (int i = kPerWord / 2 - 1; i >= 0; --i) {
      const uint32_t pair = __byte_perm(b[i], b[i + kPerWord / 2], 0x5410);
      word = word * (1u << kBits) + __vimin_s16x2_relu(pair, kHighest2);
    }
    return word;
  }

  template <bool kSet>
  static __device__ __forceinline__ void put(float value, float& acc) {
    acc = kSet ? value : acc + value;
  }

  // The code is placed into the mantissa of 2^e where it counts units: b = 2^e + code. For symmetric policies
  // (2^e + offset) * step has at most 24 bits, so b * step - (2^e + offset) * step fuses into one exact rounding.
  // kFused needs a fast exponent, too: (2^e + offset) * step must not overflow.
  template <bool kSet, bool kFused>
  static __device__ __forceinline__ void put_block(const uint32_t (&words)[kBits], float step, float zero,
                                                   float (&acc)[kBlockValues]) {
    if (kBits == 4) {
      const float at8 = -(32768.0f + Q::kOffset) * step, at12 = -(2048.0f + Q::kOffset) * step,
                  at16 = -(128.0f + Q::kOffset) * step;
      ECHO_UNROLL
      for (int w = 0; w < kBits; ++w) {
        const uint32_t word = words[w], up = word << 8, down = word >> 12;
        nibble<8, kSet, kFused>(up, step, zero, at8, acc[8 * w]);
        nibble<12, kSet, kFused>(up, step, zero, at12, acc[8 * w + 1]);
        nibble<8, kSet, kFused>(word, step, zero, at8, acc[8 * w + 2]);
        nibble<12, kSet, kFused>(word, step, zero, at12, acc[8 * w + 3]);
        nibble<16, kSet, kFused>(word, step, zero, at16, acc[8 * w + 4]);
        nibble<8, kSet, kFused>(down, step, zero, at8, acc[8 * w + 5]);
        nibble<12, kSet, kFused>(down, step, zero, at12, acc[8 * w + 6]);
        nibble<16, kSet, kFused>(down, step, zero, at16, acc[8 * w + 7]);
      }
    } else {
      const float at8 = -(32768.0f + Q::kOffset) * step;
      ECHO_UNROLL
      for (int i = 0; i < kBlockValues; ++i) {
        const float b = __uint_as_float(__byte_perm(words[i / 4], 0x47000000u, 0x7504 | (i % 4) << 4));
        if (kFused)
          put<kSet>(__fmaf_rn(b, step, at8), acc[i]);
        else
          put<kSet>(((b - 32768.0f) - zero) * step, acc[i]);
      }
    }
  }

  template <int kAt, bool kSet, bool kFused>
  static __device__ __forceinline__ void nibble(uint32_t word, float step, float zero, float offset, float& acc) {
    constexpr uint32_t kExponent = static_cast<uint32_t>(127 + 23 - kAt) << 23;
    const float b = __uint_as_float(and_or(word, 0xfu << kAt, kExponent));
    if (kFused)
      put<kSet>(__fmaf_rn(b, step, offset), acc);
    else
      put<kSet>(((b - static_cast<float>(1u << (23 - kAt))) - zero) * step, acc);
  }
};

}  // namespace echo
