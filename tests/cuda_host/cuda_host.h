// What the headers in cuda/ use of CUDA, in plain C++, each operation rounded as the device rounds it. With it the
// tests need a host compiler only: no nvcc, no GPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))

inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// -- 16-bit floating point, round to nearest even

struct __half {
  uint16_t bits;
};
struct __half2 {
  __half low, high;
};
struct __nv_bfloat16 {
  uint16_t bits;
};
struct __nv_bfloat162 {
  __nv_bfloat16 low, high;
};

inline float __half2float(__half half) {
  const float sign = half.bits & 0x8000u ? -1.0f : 1.0f;
  const int exponent = half.bits >> 10 & 31, mantissa = half.bits & 1023;
  if (exponent == 31) return __uint_as_float((half.bits & 0x8000u) << 16 | 0x7f800000u | static_cast<uint32_t>(mantissa) << 13);
  return sign * std::ldexp(static_cast<float>(exponent ? mantissa + 1024 : mantissa), std::max(exponent, 1) - 25);
}

inline __half __float2half_rn(float value) {
  const uint16_t sign = static_cast<uint16_t>(__float_as_uint(value) >> 16 & 0x8000u);
  const float magnitude = std::fabs(value);
  if (!(magnitude == magnitude)) return {0x7fffu};
  if (magnitude >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x1p-14f) return {static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(magnitude * 0x1p24f)))};
  uint32_t bits = __float_as_uint(magnitude);
  bits += 0xfffu + (bits >> 13 & 1u);
  return {static_cast<uint16_t>(sign | ((bits >> 13) - (112u << 10)))};
}

inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  const uint32_t bits = __float_as_uint(value);
  if (!(value == value)) return {0x7fffu};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

inline unsigned short __half_as_ushort(__half half) { return half.bits; }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  return {__float2bfloat16_rn(low), __float2bfloat16_rn(high)};
}
inline __half2 __floats2half2_rn(float low, float high) { return {__float2half_rn(low), __float2half_rn(high)}; }

// -- instructions

inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }

inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> (4 * i) & 15u;
    uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (nibble & 7u))) & 255u;
    if (nibble & 8u) byte = byte & 128u ? 255u : 0u;
    result |= byte << (8 * i);
  }
  return result;
}

inline uint32_t __vimin_s16x2_relu(uint32_t a, uint32_t b) {
  uint32_t result = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const int smallest = std::min(static_cast<int16_t>(a >> shift), static_cast<int16_t>(b >> shift));
    result |= static_cast<uint32_t>(std::max(smallest, 0)) << shift;
  }
  return result;
}

// Instructions that the headers write as assembly: tests/test_cuda_host.py puts a call `host_…` in the place of each.
inline float host_max_NaN_f32(float a, float b) {
  if (a != a || b != b) return std::nanf("");
  return a == b ? (std::signbit(a) ? b : a) : std::max(a, b);
}
inline float host_min_NaN_f32(float a, float b) { return -host_max_NaN_f32(-a, -b); }
inline uint32_t host_lop3_b32(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t result = 0;
  for (int i = 0; i < 8; ++i) {
    if (table >> i & 1u) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  }
  return result;
}
inline void host_copy(void* target, const void* source, int num_bytes) { std::memcpy(target, source, num_bytes); }

// -- threads run one after the other: host_check.cpp sets threadIdx

struct Index3 {
  unsigned x, y, z;
};
inline Index3 threadIdx{0, 0, 0};

struct uint4 {
  uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
template <typename T>
void __stcs(T* target, T value) {
  *target = value;
}

// -- declared for functions that the tests do not call

void __syncwarp();
size_t __cvta_generic_to_shared(const void* pointer);
float __shfl_xor_sync(unsigned mask, float value, int lane_mask);
