// A team's records: quantized, stored at the peers and announced; awaited, fetched and decoded.
#pragma once

#include "team.cuh"

namespace echo {

// -- quantize

// Values beyond the stream must not widen a group's range (rotated: they are zeros already).
ECHO_TEAM_TEMPLATE
__device__ __forceinline__ void ECHO_TEAM::fill(float (&v)[kBlockValues], int valid) const {
  if (Q::kRotates || valid == kBlockValues) return;
  ECHO_UNROLL
  for (int i = 1; i < kBlockValues; ++i)
    if (i >= valid) v[i] = v[0];
}

// Quantizes the team's tile. With kWantResidual, v becomes what was rounded away.
ECHO_TEAM_TEMPLATE template <bool kWantResidual>
__device__ __forceinline__ void ECHO_TEAM::encode(float (&v)[kBlockValues], int valid, Record& record) {
  fill(v, valid);
  float lo, hi;
  bool finite;
  group_range<Q::kSymmetric>(v, valid, a_.group_shift, lo, hi, finite);
  record.exponent = call_exponent_;
  if (a_.rescale == Rescale::tile) {
    // The largest is found among the bits, where -0, a whole group of it, would stand above every number.
    const uint32_t warp_amax = __reduce_max_sync(~0u, __float_as_uint(fabsf(larger(-lo, hi))));
    amax_parity_ ^= 1;
    if ((thread_ & 31) == 0) scratch_->warp_amax[amax_parity_][thread_ >> 5] = __uint_as_float(warp_amax);
    sync();
    const float4 all = *reinterpret_cast<const float4*>(scratch_->warp_amax[amax_parity_]);
    record.exponent = exponent_for(fmaxf(fmaxf(all.x, all.y), fmaxf(all.z, all.w)), kTileTargetExponent);
  }
  record.params = Q::parameters(lo, hi, finite, record.exponent);
  Codec::template encode<kWantResidual>(v, record.params, record.exponent, record.words);
}

// -- send

ECHO_TEAM_TEMPLATE
__device__ __forceinline__ void ECHO_TEAM::store(uint8_t* target, const Record& record) const {
  uint4* codes = reinterpret_cast<uint4*>(target) + thread_;
  ECHO_UNROLL
  for (int j = 0; j < kBits / 4; ++j)
    codes[j * kTeamThreads] =
        make_uint4(record.words[4 * j], record.words[4 * j + 1], record.words[4 * j + 2], record.words[4 * j + 3]);
  if ((thread_ & ((1 << a_.group_shift) - 1)) == 0) {
    uint8_t* params = target + slot_layout_.params + param_offset();
    if (Q::kParamBytes == 1)
      *params = static_cast<uint8_t>(record.params.stored);
    else if (Q::kParamBytes == 2)
      *reinterpret_cast<uint16_t*>(params) = static_cast<uint16_t>(record.params.stored);
    else
      *reinterpret_cast<uint32_t*>(params) = record.params.stored;
  }
  if (thread_ == 0)
    *reinterpret_cast<uint4*>(target + slot_layout_.header) =
        make_uint4(static_cast<uint32_t>(record.exponent) & 0xffffu, a_.signature, 0u, 0u);
}

// Hands the record to the send warp, once this warp's stores are done; it announces what all four warps have handed
// over.
ECHO_TEAM_TEMPLATE
__device__ __forceinline__ void ECHO_TEAM::release(Stage stage, int k, int peer, int exponent) {
  __syncwarp();
  if ((thread_ & 31) == 0) {
    if (thread_ == 0) {
      while (num_events_ - load_acquire_shared(&scratch_->sent) >= kMaxEvents) __nanosleep(20);
      scratch_->events[num_events_ % kMaxEvents] =
          static_cast<uint32_t>(k) << 5 | static_cast<uint32_t>(peer) << 1 | static_cast<uint32_t>(stage);
      scratch_->event_exponent[num_events_ % kMaxEvents] = exponent;
    }
    store_release_shared(&scratch_->issued[thread_ >> 5], num_events_ + 1);
  }
  ++num_events_;
}

// -- receive

// Waits until the receive warp has row k of every source that sends one. False once the call has failed.
ECHO_TEAM_TEMPLATE
__device__ __forceinline__ bool ECHO_TEAM::wait_ready(Stage stage, int k) const {
  _Pragma("unroll 1") for (int i = 1; i < world(); ++i) {
    const int source = peer_at(i);
    if (!kOneShot && !has_tile(stage == Stage::push ? s_.rank : source, k)) continue;
    const uint32_t* ready = &scratch_->ready[static_cast<int>(stage)][source];
    while (load_acquire_shared(ready) <= static_cast<uint32_t>(k)) {
      if (load_acquire_shared(failed_) != 0u) return false;
      __nanosleep(20);
    }
  }
  return true;
}

// This block's part of row k's record from a source; its exponent came through the receive warp.
ECHO_TEAM_TEMPLATE
__device__ __forceinline__ void ECHO_TEAM::load_received(Stage stage, int source, int k, Record& record) const {
  const uint8_t* from = received_slot(stage, source, k);
  const uint4* codes = reinterpret_cast<const uint4*>(from) + thread_;
  ECHO_UNROLL
  for (int j = 0; j < kBits / 4; ++j) {
    const uint4 chunk = __ldcg(codes + j * kTeamThreads);
    record.words[4 * j] = chunk.x;
    record.words[4 * j + 1] = chunk.y;
    record.words[4 * j + 2] = chunk.z;
    record.words[4 * j + 3] = chunk.w;
  }
  const uint8_t* params = from + slot_layout_.params + param_offset();
  if (Q::kParamBytes == 1)
    record.params.stored = __ldcg(params);
  else if (Q::kParamBytes == 2)
    record.params.stored = __ldcg(reinterpret_cast<const uint16_t*>(params));
  else
    record.params.stored = __ldcg(reinterpret_cast<const uint32_t*>(params));
  record.exponent = scratch_->exponent[static_cast<int>(stage)][source][k & (kMaxRing - 1)];
}

// The same in two steps, through shared memory: a copy that starts early and needs no registers. Each thread copies
// what it will read; of the parameters the word that holds its own.
ECHO_TEAM_TEMPLATE
__device__ __forceinline__ void ECHO_TEAM::fetch(int place, Stage stage, int source, int k) const {
  const uint8_t* from = received_slot(stage, source, k);
  const uint32_t to = shared_address(received_ + place * received_record_bytes(kBits));
  ECHO_UNROLL
  for (int j = 0; j < kBits / 4; ++j)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + (j * kTeamThreads + thread_) * 16),
                 "l"(from + (j * kTeamThreads + thread_) * 16)
                 : "memory");
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to + kTeamThreads * 4 * kBits + thread_ * 4),
               "l"(from + slot_layout_.params + (param_offset() & ~3))
               : "memory");
}

ECHO_TEAM_TEMPLATE
__device__ __forceinline__ void ECHO_TEAM::take_fetched(int place, Stage stage, int source, int k,
                                                        Record& record) const {
  const uint8_t* from = received_ + place * received_record_bytes(kBits);
  ECHO_UNROLL
  for (int j = 0; j < kBits / 4; ++j) {
    const uint4 chunk = reinterpret_cast<const uint4*>(from)[j * kTeamThreads + thread_];
    record.words[4 * j] = chunk.x;
    record.words[4 * j + 1] = chunk.y;
    record.words[4 * j + 2] = chunk.z;
    record.words[4 * j + 3] = chunk.w;
  }
  const uint32_t word = reinterpret_cast<const uint32_t*>(from + kTeamThreads * 4 * kBits)[thread_];
  record.params.stored = word >> ((param_offset() & 3) * 8);
  if (Q::kParamBytes < 4) record.params.stored &= (1u << (Q::kParamBytes * 8 % 32)) - 1;
  record.exponent = scratch_->exponent[static_cast<int>(stage)][source][k & (kMaxRing - 1)];
}

// The first source's record of the rows that this iteration will reduce and finish. False where there is none, or it
// is on its way.
ECHO_TEAM_TEMPLATE
__device__ __forceinline__ bool ECHO_TEAM::fetch_wanted() {
  if (wanted_tail_ < 0 && wanted_reduce_ < 0) return false;
  if (!kScatter && wanted_tail_ >= 0 && fetches_tail(wanted_tail_)) fetch(0, kTailStage, peer_at(1), wanted_tail_);
  if ((kTwoShot || kScatter) && wanted_reduce_ >= 0) fetch(kReducePlace, Stage::push, peer_at(1), wanted_reduce_);
  wanted_tail_ = wanted_reduce_ = -1;
  return true;
}

// -- one-shot: each thread keeps its own block's codes until the tail of the tile

ECHO_TEAM_TEMPLATE
__device__ __forceinline__ void ECHO_TEAM::keep_own(int, const Record& record) {
  uint4* codes = reinterpret_cast<uint4*>(own_record(keep_place_)) + thread_;
  ECHO_UNROLL
  for (int j = 0; j < kBits / 4; ++j)
    codes[j * kTeamThreads] =
        make_uint4(record.words[4 * j], record.words[4 * j + 1], record.words[4 * j + 2], record.words[4 * j + 3]);
  uint2* rest = reinterpret_cast<uint2*>(own_record(keep_place_) + kTeamThreads * 4 * kBits) + thread_;
  *rest = make_uint2(record.params.stored, static_cast<uint32_t>(record.exponent));
  keep_place_ = next_place(keep_place_);
}

ECHO_TEAM_TEMPLATE
__device__ __forceinline__ void ECHO_TEAM::recall_own(Record& record) {
  const uint4* codes = reinterpret_cast<const uint4*>(own_record(recall_place_)) + thread_;
  ECHO_UNROLL
  for (int j = 0; j < kBits / 4; ++j) {
    const uint4 chunk = codes[j * kTeamThreads];
    record.words[4 * j] = chunk.x;
    record.words[4 * j + 1] = chunk.y;
    record.words[4 * j + 2] = chunk.z;
    record.words[4 * j + 3] = chunk.w;
  }
  const uint2 rest = reinterpret_cast<const uint2*>(own_record(recall_place_) + kTeamThreads * 4 * kBits)[thread_];
  record.params.stored = rest.x;
  record.exponent = static_cast<int>(rest.y);
  recall_place_ = next_place(recall_place_);
}

// -- decode

ECHO_TEAM_TEMPLATE
__device__ __forceinline__ void ECHO_TEAM::add(const Record& record, float fold, bool fast,
                                               float (&sum)[kBlockValues]) {
  const Params params = Q::read(record.params.stored);
  Codec::add_decoded(record.words, Q::step(params, record.exponent) * fold, params.zero, fast, sum);
}

// The decoded sum, back in the basis of y.
ECHO_TEAM_TEMPLATE
__device__ __forceinline__ void ECHO_TEAM::decode_output(const Record& record, float (&decoded)[kBlockValues]) const {
  const Params params = Q::read(record.params.stored);
  const bool fast = decodes_fast(record.exponent);
  const float fold = Q::kRotates && fast ? 1.0f / kBlockValues : 1.0f;
  Codec::decode(record.words, Q::step(params, record.exponent) * fold, params.zero, fast, decoded);
  if (Q::kRotates) {
    hadamard(decoded);
    if (!fast) scale_back(decoded);
  }
}

ECHO_TEAM_TEMPLATE
__device__ __forceinline__ void ECHO_TEAM::scale_back(float (&v)[kBlockValues]) {
  ECHO_UNROLL
  for (int i = 0; i < kBlockValues; ++i) v[i] = v[i] * (1.0f / kBlockValues);
}

}  // namespace echo
