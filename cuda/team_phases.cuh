// The phases of all_reduce.cuh, for one tile each: push, reduce, tail; and what a failed call leaves.
#pragma once

#include "team.cuh"

namespace echo {

// -- phase 1

ECHO_TEAM_TEMPLATE
__device__ __forceinline__ void ECHO_TEAM::push(int k) {
  if (kOneShot || kGather) {
    push_tile(kGather ? s_.rank : 0, k);
    return;
  }
  _Pragma("unroll 1") for (int i = 1; i < world(); ++i) if (has_tile(peer_at(i), k)) push_tile(peer_at(i), k);
}

ECHO_TEAM_TEMPLATE
__device__ __forceinline__ void ECHO_TEAM::push_tile(int segment, int k) {
  float v[kBlockValues];
  take_tile(segment, k, v);
  const BlockState<kState> state = state_of(segment, k);
  if (kCompensates) state.add_correction(v);
  Record record;
  encode<kLocal && !kLateUpdate>(v, valid_values(segment_rows(segment), segment, k), record);
  if (kOneShot) {
    _Pragma("unroll 1") for (int i = 1; i < world(); ++i) store(sent_slot(Stage::push, peer_at(i), k), record);
    release(Stage::push, k, kAllPeers, record.exponent);
    keep_own(k, record);
    if (a_.codes != nullptr) store(kept_record(s_.rank, 0, k), record);
  } else if (kGather) {
    _Pragma("unroll 1") for (int i = 1; i < world(); ++i) store(sent_slot(Stage::push, peer_at(i), k), record);
    release(Stage::push, k, kAllPeers, record.exponent);
    decode_output(record, v);
    write_output(segment, k, v);
  } else {
    store(sent_slot(Stage::push, segment, k), record);
    release(Stage::push, k, segment, record.exponent);
  }
  if (kLocal && !kLateUpdate) state.update(v, a_.coefficients);
  if (kScatter)
    prefetch_pushed_state(segment, k);
  else
    prefetch_state();
  commit_stage();
}

// -- phase 2

ECHO_TEAM_TEMPLATE
__device__ __forceinline__ void ECHO_TEAM::reduce(int k) {
  const int segment = s_.rank;
  float v[kBlockValues];
  take_tile(segment, k, v);
  if (!kShares && fetched_since_wait_) wait_stage<0>();  // nothing was pushed in this iteration
  const BlockState<kState> state = state_of(segment, k);
  if (kTwoShot && kCompensates) state.add_correction(v);
  Record received, record;
  if (kPair) take_fetched(kReducePlace, Stage::push, peer_at(1), k, received);
  if (kScatter && kCompensates && !a_.fresh && !(kPair && decodes_fast(received.exponent))) {
    // The correction is 0, which turns -0 into +0. It shows only beside decoded values that underflow to -0.
    ECHO_UNROLL
    for (int i = 0; i < kBlockValues; ++i) v[i] = v[i] + 0.0f;
  }
  if (kPair) {  // of two terms the order does not matter
    add(received, 1.0f, decodes_fast(received.exponent), v);
    finish_reduce(segment, k, state, v, record);
  } else {
    float sum[kBlockValues];
    ECHO_UNROLL
    for (int i = 0; i < kBlockValues; ++i) sum[i] = -0.0f;
    _Pragma("unroll 1") for (int source = 0; source < world(); ++source) {
      if (source == s_.rank) {
        ECHO_UNROLL
        for (int i = 0; i < kBlockValues; ++i) sum[i] = sum[i] + v[i];
      } else {
        if (source == peer_at(1))
          take_fetched(kReducePlace, Stage::push, source, k, received);
        else
          load_received(Stage::push, source, k, received);
        add(received, 1.0f, decodes_fast(received.exponent), sum);
      }
    }
    finish_reduce(segment, k, state, sum, record);
  }
  if (!kScatter) prefetch_state();
  commit_stage();
}

ECHO_TEAM_TEMPLATE
__device__ __forceinline__ void ECHO_TEAM::finish_reduce(int segment, int k, const BlockState<kState>& state,
                                                         float (&sum)[kBlockValues], Record& record) {
  if (kScatter) {
    if (Q::kRotates) {
      hadamard(sum);
      scale_back(sum);
    }
    write_output(segment, k, sum);
    return;
  }
  encode<kLocal && Q::kRotates>(sum, valid_values(segment_rows(segment), segment, k), record);
  _Pragma("unroll 1") for (int i = 1; i < world(); ++i) store(sent_slot(Stage::gather, peer_at(i), k), record);
  release(Stage::gather, k, kAllPeers, record.exponent);
  if (a_.codes != nullptr) store(kept_record(0, segment, k), record);
  if (kLocal && Q::kRotates) state.update(sum, a_.coefficients);
  float decoded[kBlockValues];
  decode_output(record, decoded);
  if (kLocal && !Q::kRotates) {  // the residual sees y in its dtype
    ECHO_UNROLL
    for (int i = 0; i < kBlockValues; ++i) sum[i] = sum[i] - rounded(decoded[i], dtype());
    state.update(sum, a_.coefficients);
  }
  write_output(segment, k, decoded);
}

// -- phase 3

ECHO_TEAM_TEMPLATE
__device__ __forceinline__ void ECHO_TEAM::tail(int k) {
  if (fetch_wanted()) {  // nothing was pushed or reduced in this iteration
    commit_stage();
    wait_stage<0>();
  } else if (kShares) {
    wait_stage<2>();  // X and S of the pushed tile
  } else if (fetched_since_wait_) {
    wait_stage<1>();  // all but the state of the next tile
  }
  Record received;
  if (fetches_tail(k)) take_fetched(0, kTailStage, peer_at(1), k, received);
  if (kOneShot) {
    tail_one_shot(k, received);
    return;
  }
  _Pragma("unroll 1") for (int i = 1; i < world(); ++i) {
    const int peer = peer_at(i);
    if (!has_tile(peer, k)) continue;
    if (i > 1) load_received(kTailStage, peer, k, received);
    if (kTwoShot && a_.codes != nullptr) store(kept_record(0, peer, k), received);
    float decoded[kBlockValues];
    decode_output(received, decoded);
    write_output(peer, k, decoded);
  }
}

ECHO_TEAM_TEMPLATE
__device__ __forceinline__ void ECHO_TEAM::tail_one_shot(int k, const Record& received) {
  Record own;
  recall_own(own);
  bool fast = decodes_fast(own.exponent);
  _Pragma("unroll 1") for (int i = 1; i < world(); ++i) fast =
      fast && decodes_fast(scratch_->exponent[0][peer_at(i)][k & (kMaxRing - 1)]);
  // The inverse basis' factor 2^-5 goes into the steps where nothing under- or overflows.
  const float fold = Q::kRotates && fast ? 1.0f / kBlockValues : 1.0f;
  float sum[kBlockValues];
  if (kPair) {  // of two terms the order does not matter
    if (a_.codes != nullptr) store(kept_record(peer_at(1), 0, k), received);
    const Params params = Q::read(own.params.stored);
    Codec::decode(own.words, Q::step(params, own.exponent) * fold, params.zero, fast, sum);
    add(received, fold, fast, sum);
  } else {
    ECHO_UNROLL
    for (int i = 0; i < kBlockValues; ++i) sum[i] = -0.0f;
    _Pragma("unroll 1") for (int source = 0; source < world(); ++source) {
      Record record = own;
      if (source != s_.rank) {
        if (source == peer_at(1))
          record = received;
        else
          load_received(Stage::push, source, k, record);
        if (a_.codes != nullptr) store(kept_record(source, 0, k), record);
      }
      add(record, fold, fast, sum);
    }
  }
  if (Q::kRotates) {
    hadamard(sum);
    if (!fast) scale_back(sum);
  }
  if (kLateUpdate) late_update(k, own, sum);
  write_output(0, k, sum);
}

// reference.rank_residual for one-shot without rotation: x' minus its code, plus the output's rounding where this
// rank would own the segment. x' is formed again: x is still there, also in place, and the state is not yet updated.
ECHO_TEAM_TEMPLATE
__device__ __forceinline__ void ECHO_TEAM::late_update(int k, const Record& own, const float (&reduced)[kBlockValues]) {
  float v[kBlockValues];
  copy_in(scratch_->constants.own, k, warp_rows(stage_));
  commit_stage();
  wait_stage<0>();
  read_row(own_row(stage_), dtype(), v);
  __syncwarp();
  const BlockState<kState> state(state_tile(scratch_->constants.own, k), state_tile(scratch_->constants.own, k),
                                 a_.fresh);
  state.add_correction(v);
  fill(v, valid_values(scratch_->constants.own, 0, k));
  const Params params = Q::read(own.params.stored);
  const Segments owners(a_.num_basis_values, world(), a_.group_size, Algorithm::two_shot);
  const int64_t first = scratch_->constants.own.value(k, row_stride_) + thread_ * kBlockValues;
  const bool owned = first >= owners.begin(s_.rank) && first < owners.end(s_.rank);
  const bool rounds = dtype() != Dtype::fp32;
  float d[kBlockValues];
  Codec::decode(own.words, Q::step(params, own.exponent), params.zero, decodes_fast(own.exponent), d);
  ECHO_UNROLL
  for (int i = 0; i < kBlockValues; ++i) {
    v[i] = v[i] - d[i];
    if (owned && rounds) v[i] = v[i] + (reduced[i] - rounded(reduced[i], dtype()));
  }
  state.update(v, a_.coefficients);
}

// -- after a failure

// A call that failed must not look like a result.
ECHO_TEAM_TEMPLATE
__device__ __forceinline__ void ECHO_TEAM::poison(int from) {
  const int shift = element_shift(dtype());
  _Pragma("unroll 1") for (int k = from; k < plan_.num_rows; ++k)
      _Pragma("unroll 1") for (int segment = 0; segment < (kOneShot ? 1 : world()); ++segment) {
    if (!has_tile(segment, k) || (kScatter && segment != s_.rank)) continue;
    const SegmentRows rows = segment_rows(segment);
    _Pragma("unroll 1") for (int i = thread_; i < kTileValues; i += kTeamThreads) {
      const int64_t idx = rows.value(k, row_stride_) + i;
      if (idx >= rows.end) break;
      if (shift == 2)
        reinterpret_cast<uint32_t*>(a_.y)[idx] = 0x7fc00000u;
      else
        reinterpret_cast<uint16_t*>(a_.y)[idx] = dtype() == Dtype::bf16 ? 0x7fc0u : 0x7e00u;
    }
  }
}

}  // namespace echo
