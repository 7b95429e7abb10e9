// Readiness between ranks, and waits that end.
//
// A sender writes a record with plain stores; its send warp, once all of the team's warps have stored, fences the
// system and sets the slot's flag in the receiver's memory. The receiver's receive warp polls the flag, acquires, and
// tells its team through shared memory. Fences and polls take microseconds; the teams' own warps do neither. Records
// are read past L1 (.cg), which is not coherent with a peer's stores; the copy of 4 bytes of parameters, which has no
// such form, comes after the acquire, and that empties L1.
//
// A wait that takes longer than the limit, or meets a record of another call, reports to the host's failure record and
// raises the abort word on every rank; all waits look at it, so every rank's kernel ends soon after.
#pragma once

#include "arguments.cuh"

namespace echo {

__device__ __forceinline__ void store_release(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
__device__ __forceinline__ void store_relaxed(uint64_t* flag, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
// Between the warps of a thread block, through shared memory.
__device__ __forceinline__ void store_release_shared(uint32_t* word, uint32_t value) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(word))),
               "r"(value)
               : "memory");
}
__device__ __forceinline__ uint32_t load_acquire_shared(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];"
               : "=r"(value)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(word)))
               : "memory");
  return value;
}
__device__ __forceinline__ void store_release(uint64_t* flag, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t load_acquire(const uint64_t* flag) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}
__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__device__ __forceinline__ Control* control_of(uint8_t* workspace) { return reinterpret_cast<Control*>(workspace); }

// Only the first reporter of a rank writes the record; everybody is told.
static __device__ __noinline__ void report(const Signals& signals, Failure code, int peer, Stage stage, int64_t row,
                                           uint32_t expected, uint32_t seen) {
  Control* control = control_of(signals.peers[signals.rank]);
  if (atomicCAS(&control->claim, 0u, 1u) != 0u) return;
  volatile int64_t* record = signals.failure;
  record[kPeer] = peer;
  record[kStage] = static_cast<int>(stage);
  record[kRow] = row;
  record[kExpected] = expected;
  record[kSeen] = seen;
  record[kSiteIdx] = signals.site_idx;
  record[kDirection] = signals.direction;
  record[kChunk] = signals.chunk;
  __threadfence_system();
  record[kCode] = static_cast<int>(code);
  __threadfence_system();
  for (int rank = 0; rank < signals.world; ++rank)
    store_release(&control_of(signals.peers[rank])->abort, static_cast<uint32_t>(signals.rank + 1));
}

// Counts polls; true once the wait must end. Looks at the abort word and the clock every 64 polls.
class Patience {
 public:
  __device__ __forceinline__ explicit Patience(const Signals& signals)
      : signals_(signals), polls_(0), start_(0), grace_(0) {}

  // Something arrived: the wait for the next begins.
  __device__ __forceinline__ void renew() { start_ = 0; }
  __device__ __forceinline__ void set_grace(uint64_t nanoseconds) { grace_ = nanoseconds; }

  __device__ __forceinline__ bool is_over(int peer, Stage stage, int64_t row, uint32_t expected, uint32_t seen) {
    if (++polls_ & 63u) return false;
    return look(peer, stage, row, expected, seen);
  }

 private:
  __device__ __noinline__ bool look(int peer, Stage stage, int64_t row, uint32_t expected, uint32_t seen) {
    const uint32_t aborted_by = load_acquire(&control_of(signals_.peers[signals_.rank])->abort);
    if (aborted_by != 0u) {
      report(signals_, Failure::peer, static_cast<int>(aborted_by) - 1, stage, row, expected, seen);
      return true;
    }
    const uint64_t now = nanoseconds();
    if (start_ == 0) start_ = now;
    if (now - start_ < signals_.timeout_ns + grace_) return false;
    report(signals_, Failure::timeout, peer, stage, row, expected, seen);
    return true;
  }

  const Signals& signals_;
  uint32_t polls_;
  uint64_t start_, grace_;
};

}  // namespace echo
