// The group quantizers of echo_megatron/quantizer.py, one value at a time, the same on host and device.
//
// Compiled with -fmad=false and IEEE division: every operation is one FP32 rounding, in the order of the definition.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

#include "layout.cuh"

#ifndef __CUDA_ARCH__
#include <cmath>
#endif

namespace echo {

constexpr int kTileTargetExponent = 14;
constexpr int kGroupHeadroomBits = 12;
constexpr int kRotationHeadroomBits = 5;
constexpr float kFarthestZeroPoint = 1.0f / 1024;

ECHO_HD uint32_t bits_of(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
#endif
}

ECHO_HD float float_of(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
#endif
}

ECHO_HD float infinity() { return float_of(0x7f800000u); }
ECHO_HD float quiet_nan() { return float_of(0x7fc00000u); }
ECHO_HD float larger(float a, float b) { return a > b ? a : b; }  // of two finite values
ECHO_HD float smaller(float a, float b) { return a < b ? a : b; }
ECHO_HD float clamp(float value, float lowest, float highest) { return smaller(larger(value, lowest), highest); }

// floor(log2(amax)) - target, which brings amax * 2^-E into [2^target, 2^(target + 1)); 0 for amax 0.
ECHO_HD int exponent_for(float amax, int target) {
  const uint32_t bits = bits_of(amax);
  if (bits == 0) return 0;
  if (bits >> 23) return static_cast<int>(bits >> 23) - 127 - target;
#ifdef __CUDA_ARCH__
  const int lead = 31 - __clz(static_cast<int>(bits));
#else
  const int lead = 31 - __builtin_clz(bits);
#endif
  return lead - 149 - target;
}

ECHO_HD float power_of_two(int exponent) { return float_of(static_cast<uint32_t>(exponent + 127) << 23); }

// value * 2^exponent for |exponent| up to 252: exact, or one rounding.
ECHO_HD float times_power_of_two(float value, int exponent) {
  const int half = exponent >> 1;
  return value * power_of_two(half) * power_of_two(exponent - half);
}

// The 8-bit scale 2^(e - 19) * (1 + m/8); code 255 is NaN.
ECHO_HD int encode_scale8(float scale, bool round_up) {
  const uint32_t bits = bits_of(scale) & 0x7fffffffu;  // a range of zeros may come as -0
  const uint32_t bias = round_up ? (1u << 20) - 1 : (1u << 19) - 1 + ((bits >> 20) & 1u);
  const int code = static_cast<int>((bits + bias) >> 20) - ((127 - 19) << 3);
  return code < 0 ? 0 : (code > 255 ? 255 : code);
}
ECHO_HD float decode_scale8(int code) {
  return code == 255 ? quiet_nan() : float_of(static_cast<uint32_t>(code + ((127 - 19) << 3)) << 20);
}

ECHO_HD uint32_t half_bits(float value) { return __half_as_ushort(__float2half_rn(value)); }
ECHO_HD float half_value(uint32_t bits) { return __half2float(__ushort_as_half(static_cast<unsigned short>(bits))); }

// Parameters of a group: as used, and as they travel (scale in the low bits, zero-point above it).
struct Params {
  float scale, zero;
  uint32_t stored;
};

template <int kBits, Policy kPolicy>
struct Quantizer {
  static constexpr bool kRotates = kPolicy == Policy::rotated || kPolicy == Policy::rotated_asymmetric;
  static constexpr bool kSymmetric = kPolicy == Policy::symmetric || kPolicy == Policy::rotated;
  static constexpr int kScaleBits = kRotates ? 8 : 16;
  static constexpr int kParamBytes = (kRotates ? 1 : 2) * (kSymmetric ? 1 : 2);
  static constexpr int kHighest = kSymmetric ? (1 << (kBits - 1)) - 1 : (1 << kBits) - 1;
  static constexpr int kLowest = kSymmetric ? -kHighest : 0;
  static constexpr int kOffset = kSymmetric ? 1 << (kBits - 1) : 0;
  static constexpr float kZero8Step = kBits == 4 ? 0.125f : 1.0f;
  static constexpr float kZero8Lowest = kBits == 4 ? -8.0f : 0.0f;

  // `Quantizer._parameters` of a group with range [lo, hi] (finite; 0 where the group is not) in a tile of `exponent`.
  static ECHO_HD Params parameters(float lo, float hi, bool finite, int exponent) {
    lo = times_power_of_two(lo, -exponent);
    hi = times_power_of_two(hi, -exponent);
    const float amax = larger(-lo, hi);
    Params params;
    if (kSymmetric) {
      store_scale(amax / static_cast<float>(kHighest), finite, params);
      params.zero = static_cast<float>(kOffset);
    } else if (kRotates) {
      const float highest_zero = kZero8Lowest + 255 * kZero8Step;
      const float span = (hi - lo) / static_cast<float>(kHighest);
      if (-lo < span * kZero8Lowest || -lo > span * highest_zero || hi == lo) {  // too far from zero: reach it
        lo = smaller(lo, 0.0f);
        hi = larger(hi, 0.0f);
      }
      store_scale((hi - lo) / static_cast<float>(kHighest), finite, params);
      float stored = clamp(rintf((blended_zero(lo, hi, params.scale) - kZero8Lowest) / kZero8Step), 0.0f, 255.0f);
      if (!(stored == stored)) stored = 0.0f;
      params.zero = stored * kZero8Step + kZero8Lowest;
      params.stored |= static_cast<uint32_t>(stored) << 8;
    } else {
      float scale = larger((hi - lo) / static_cast<float>(kHighest), amax * kFarthestZeroPoint);
      if (hi == lo) scale = amax;
      store_scale(scale, finite, params);
      const bool has_scale = finite && params.scale == params.scale;
      const uint32_t zero = has_scale ? half_bits(blended_zero(lo, hi, params.scale)) : 0u;
      params.zero = half_value(zero);
      params.stored |= zero << 16;
    }
    return params;
  }

  static ECHO_HD Params read(uint32_t stored) {
    Params params;
    params.stored = stored;
    params.scale = kRotates ? decode_scale8(stored & 0xff) : half_value(stored & 0xffff);
    if (kSymmetric)
      params.zero = static_cast<float>(kOffset);
    else if (kRotates)
      params.zero = static_cast<float>(stored >> 8 & 0xff) * kZero8Step + kZero8Lowest;
    else
      params.zero = half_value(stored >> 16);
    return params;
  }

  // The unsigned code of a value, for any exponent.
  static ECHO_HD uint32_t code(float value, const Params& params, int exponent) {
    const int shift = -exponent;
    const int first = shift < -126 ? -126 : (shift > 127 ? 127 : shift);
    const float reciprocal = (1.0f / params.scale) * power_of_two(shift - first);
    float q = value * power_of_two(first) * reciprocal;
    if (!kSymmetric) q = q + params.zero;
    q = rintf(q);
    if (!(q == q)) q = static_cast<float>(kLowest);
    return static_cast<uint32_t>(static_cast<int>(clamp(q, kLowest, kHighest)) + kOffset);
  }

  static ECHO_HD float step(const Params& params, int exponent) { return times_power_of_two(params.scale, exponent); }

  static ECHO_HD float value(uint32_t code, const Params& params, float step) {
    return (static_cast<float>(code) - params.zero) * step;
  }

 private:
  static ECHO_HD void store_scale(float scale, bool finite, Params& params) {
    if (kRotates) {
      const int code = finite ? encode_scale8(scale, kBits == 8) : 255;
      params.scale = decode_scale8(code);
      params.stored = static_cast<uint32_t>(code);
      return;
    }
    uint32_t half = half_bits(larger(scale, 1.0f / (1 << 24)));
    if (!finite || (half & 0x7c00u) == 0x7c00u) half = 0x7e00u;
    params.scale = half_value(half);
    params.stored = half;
  }

  static ECHO_HD float blended_zero(float lo, float hi, float scale) {
    const float reciprocal = 1.0f / scale;
    const float zero = 0.0f - lo * reciprocal;  // never -0, whichever zero the minimum was
    if (kPolicy == Policy::naive) return zero;
    const float straddle = clamp(smaller(-lo, hi) * reciprocal, 0.0f, 1.0f);
    return zero + straddle * (rintf(zero) - zero);
  }
};

// The exponent of `rescale: group` (`Quantizer.call_exponent`).
ECHO_HD int call_exponent(float amax, bool rotates) {
  return exponent_for(amax, kTileTargetExponent - kGroupHeadroomBits - (rotates ? kRotationHeadroomBits : 0));
}

ECHO_HD uint32_t bf16_bits(float value) { return __bfloat16_as_ushort(__float2bfloat16_rn(value)); }
ECHO_HD float bf16_value(uint32_t bits) { return float_of(bits << 16); }

// Compact state (echo_megatron/state.py): a code times a scale, a BF16 number. `amax` may be NaN or Inf: the block then
// reads back NaN.
ECHO_HD float compact_highest_bound() { return power_of_two(119); }
ECHO_HD float compact_scale(float amax) {
  if (!(amax < infinity())) return float_of(0x7fc00000u);
  const float scale = amax < compact_highest_bound() ? larger(amax / 127.0f, power_of_two(-126)) : power_of_two(-126);
  return bf16_value(bf16_bits(scale));
}
ECHO_HD float compact_factor(float scale, float amax) { return amax < compact_highest_bound() ? 1.0f / scale : 0.0f; }

}  // namespace echo
