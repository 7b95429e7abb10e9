// Thread blocks on the host: every thread a fiber, which runs until it has to wait. What the kernels of cuda/ use of
// CUDA beyond cuda_host.h: barriers, exchanges within a warp, atomics, shared memory, asynchronous copies.
//
// Copies into shared memory are made as late as the kernel's waits allow, and their places hold garbage until then; or
// all of them at once. A kernel whose waits are wrong by one group gives other results in one of the two.
#pragma once

#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <random>

#include "cuda_host.h"

#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes)

struct uint2 {
  uint32_t x, y;
};
struct float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }

namespace emulator {

constexpr int kThreads = 576, kWarp = 32, kBarriers = 8, kStackBytes = 48 << 10;
constexpr int kStaticWords = 8;  // of shared variables that are no arrays

struct Barrier {
  int arrived = 0, generation = 0;
};

struct Block {
  std::vector<uint8_t> memory;
  uint8_t* shared = nullptr;
  int dynamic_bytes = 0, idx = 0;
  Barrier named[kBarriers], warps[kThreads / kWarp];
  uint32_t exchanged[kThreads / kWarp][kWarp];

  void begin(int bytes) {
    dynamic_bytes = bytes;
    memory.assign(bytes + 4 * kStaticWords + 128, 0xcd);
    shared = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 127) / 128 * 128);
  }
  uint32_t& variable(int number) { return reinterpret_cast<uint32_t*>(shared + dynamic_bytes)[number]; }
};

struct Copy {
  uint8_t* target;
  const uint8_t* source;
  int num_bytes;
};

struct Fiber {
  ucontext_t context;
  std::vector<uint8_t> stack;
  Block* block;
  int rank, thread;
  unsigned grid = 0;
  bool done = false;
  std::vector<Copy> begun;
  std::deque<std::vector<Copy>> groups;
};

inline Fiber* current = nullptr;
inline ucontext_t scheduler;
inline bool copies_at_once = false;
inline uint64_t now = 1;

inline void fail(const char* why) {
  std::fprintf(stderr, "emulator: %s\n", why);
  std::abort();
}

inline void yield() { swapcontext(&current->context, &scheduler); }

inline void wait(Barrier& barrier, int count) {
  const int generation = barrier.generation;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
  while (barrier.generation == generation) yield();
}
inline void wait_named(int number, int count) { wait(current->block->named[number], count); }
inline void wait_warp() { wait(current->block->warps[current->thread / kWarp], kWarp); }

template <typename Combine>
uint32_t combined(uint32_t value, Combine combine) {
  uint32_t* lanes = current->block->exchanged[current->thread / kWarp];
  lanes[current->thread % kWarp] = value;
  wait_warp();
  uint32_t result = lanes[0];
  for (int lane = 1; lane < kWarp; ++lane) result = combine(result, lanes[lane]);
  wait_warp();
  return result;
}

// -- what assembly becomes

inline void copy_async(uint32_t target, const void* source, int num_bytes) {
  if (target % num_bytes != 0 || reinterpret_cast<uintptr_t>(source) % num_bytes != 0) fail("a misaligned copy");
  const Copy copy{current->block->shared + target, static_cast<const uint8_t*>(source), num_bytes};
  if (copies_at_once) {
    std::memcpy(copy.target, copy.source, num_bytes);
  } else {
    std::memset(copy.target, 0xa5, num_bytes);
    current->begun.push_back(copy);
  }
}
inline void commit_group() {
  current->groups.push_back(std::move(current->begun));
  current->begun.clear();
}
inline void wait_group(int pending) {
  for (auto& groups = current->groups; static_cast<int>(groups.size()) > pending; groups.pop_front())
    for (const Copy& copy : groups.front()) std::memcpy(copy.target, copy.source, copy.num_bytes);
}
inline void store_shared(uint32_t address, uint32_t value) {
  *reinterpret_cast<uint32_t*>(current->block->shared + address) = value;
}
inline uint32_t load_shared(uint32_t address) {
  yield();
  return *reinterpret_cast<uint32_t*>(current->block->shared + address);
}
template <typename T>
T load_acquired(const T* address) {
  yield();
  return *address;
}

}  // namespace emulator

inline Index3 blockIdx{0, 0, 0}, gridDim{1, 1, 1}, blockDim{emulator::kThreads, 1, 1};

inline void __syncthreads() { emulator::wait_named(0, emulator::kThreads); }
inline void __syncwarp() { emulator::wait_warp(); }
inline void __nanosleep(unsigned) { emulator::yield(); }
inline void __threadfence() {}
inline void __threadfence_system() {}
inline uint32_t __reduce_max_sync(unsigned, uint32_t value) {
  return emulator::combined(value, [](uint32_t a, uint32_t b) { return std::max(a, b); });
}
inline uint32_t __reduce_min_sync(unsigned, uint32_t value) {
  return emulator::combined(value, [](uint32_t a, uint32_t b) { return std::min(a, b); });
}
inline bool __all_sync(unsigned, bool value) {
  return emulator::combined(value, [](uint32_t a, uint32_t b) { return a & b; }) != 0;
}
inline float __shfl_xor_sync(unsigned, float value, int lane_mask) {
  uint32_t* lanes = emulator::current->block->exchanged[emulator::current->thread / emulator::kWarp];
  const int lane = emulator::current->thread % emulator::kWarp;
  lanes[lane] = __float_as_uint(value);
  emulator::wait_warp();
  const float other = __uint_as_float(lanes[lane ^ lane_mask]);
  emulator::wait_warp();
  return other;
}
inline size_t __cvta_generic_to_shared(const void* pointer) {
  const size_t offset = static_cast<const uint8_t*>(pointer) - emulator::current->block->shared;
  if (offset >= emulator::current->block->memory.size()) emulator::fail("an address that is not in shared memory");
  return offset;
}
template <typename T>
T atomicAdd(T* place, T value) {
  const T before = *place;
  *place = before + value;
  return before;
}
template <typename T>
T atomicMax(T* place, T value) {
  const T before = *place;
  *place = std::max(before, value);
  return before;
}
template <typename T>
T atomicExch(T* place, T value) {
  const T before = *place;
  *place = value;
  return before;
}
template <typename T>
T atomicCAS(T* place, T expected, T value) {
  const T before = *place;
  if (before == expected) *place = value;
  return before;
}
template <typename T>
T __ldcg(const T* place) {
  return *place;
}
template <typename T>
T __ldg(const T* place) {
  return *place;
}
