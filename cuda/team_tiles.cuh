// A team's tiles on their way: x and the state into registers, y out of them.
#pragma once

#include "team.cuh"

namespace echo {

// -- between global memory and the stages in shared memory

ECHO_TEAM_TEMPLATE
__device__ __forceinline__ void ECHO_TEAM::copy_in(const SegmentRows& rows, int k, uint8_t* target) const {
  const int64_t first = rows.value(k, row_stride_) + warp_values();
  if (kPair && k < rows.whole)
    stage_in_whole<1>(target, a_.x + (first << 1));
  else
    stage_in(target, a_.x, first, rows.end, dtype(), aligned());
}

ECHO_TEAM_TEMPLATE
__device__ __forceinline__ void ECHO_TEAM::copy_out(const SegmentRows& rows, int k, const uint8_t* source, uint8_t* y,
                                                    bool is_aligned) const {
  const int64_t first = rows.value(k, row_stride_) + warp_values();
  if (kPair && k < rows.whole)
    stage_out_whole<1>(source, y + (first << 1));
  else
    stage_out(source, y, first, rows.end, dtype(), is_aligned);
}

// -- tiles of x are read one ahead of the encoder, in its order

// The i-th tile of iteration k: 1 to world - 1 are pushed, `world` is the own segment's tile of row k - depth.
ECHO_TEAM_TEMPLATE
__device__ __forceinline__ bool ECHO_TEAM::tile_at(int k, int i, int& segment, int& row) const {
  const bool own = i == world();
  segment = own ? s_.rank : peer_at(i);
  row = own ? k - a_.depth : k;
  return row >= 0 && row < plan_.num_rows && has_tile(segment, row);
}

ECHO_TEAM_TEMPLATE
__device__ __forceinline__ void ECHO_TEAM::prefetch() {
  if (kOneShot || kGather) {
    next_row_ = cursor_k_++;
    next_valid_ = next_row_ < plan_.num_rows;
  } else {
    const int last = plan_.num_rows + a_.depth;
    next_valid_ = false;
    _Pragma("unroll 1") while (!next_valid_ && cursor_k_ < last) {
      if (++cursor_i_ > world()) {
        cursor_i_ = 0;
        ++cursor_k_;
        continue;
      }
      next_valid_ = tile_at(cursor_k_, cursor_i_, next_segment_, next_row_);
    }
  }
  if (next_valid_) copy_in(segment_rows(next_segment_), next_row_, warp_rows(next_stage_));
  commit_stage();
  next_stage_ ^= 1;
}

// The state of the tile that comes next, once this tile's is used. Each thread copies what it will read.
ECHO_TEAM_TEMPLATE
__device__ __forceinline__ void ECHO_TEAM::prefetch_state() {
  if (!stages_state() || a_.fresh || !next_valid_) return;
  BlockState<kState>::copy_async(staged_state_, state_tile(segment_rows(next_segment_), next_row_), reads_average());
}

// Reduce-scatter: of the tile that is pushed after this one.
ECHO_TEAM_TEMPLATE
__device__ __forceinline__ void ECHO_TEAM::prefetch_pushed_state(int segment, int k) {
  if (!stages_state() || a_.fresh) return;
  if (kPair || segment == peer_at(world() - 1)) {
    segment = peer_at(1);
    ++k;
  } else {
    segment = segment + 1 == world() ? 0 : segment + 1;
  }
  if (k < plan_.num_rows)
    BlockState<kState>::copy_async(staged_state_, state_tile(segment_rows(segment), k), reads_average());
}

ECHO_TEAM_TEMPLATE
__device__ __forceinline__ BlockState<kState> ECHO_TEAM::state_of(int segment, int k) const {
  uint8_t* tile = kCompensates ? state_tile(segment_rows(segment), k) : nullptr;
  return BlockState<kState>(stages_state() ? staged_state_ : tile, tile, a_.fresh);
}

// Takes the prefetched tile into registers, in the basis, and starts the copy of the next one.
ECHO_TEAM_TEMPLATE
__device__ __forceinline__ void ECHO_TEAM::take_tile(int segment, int k, float (&v)[kBlockValues]) {
  if (kShares) {
    const bool is_first = fetch_wanted();
    commit_stage();
    prefetch();
    if (!kScatter || segment != s_.rank)
      wait_stage<2>();  // F and X of this tile
    else if (is_first)
      wait_stage<1>();  // X: nothing is pushed in this iteration, and F is for this tile
    else
      wait_stage<3>();  // S of the tile before, and F and X
  } else {
    prefetch();
    wait_stage<1>();  // all but the copy that has just begun: this tile and its state
    fetched_since_wait_ = false;
    if (fetch_wanted()) {
      commit_stage();
      fetched_since_wait_ = true;
    }
  }
  stage_ = next_stage_;  // two prefetches on, the tile lies in the stage that comes next
  read_row(own_row(stage_), dtype(), v);
  if (kResidual == Residual::consensus && a_.kept_x != nullptr)
    copy_out(segment_rows(segment), k, warp_rows(stage_), a_.kept_x, true);
  __syncwarp();
  if (Q::kRotates) hadamard(v);
}

// y of this warp, through the stage that was read last: its tile is in registers or done.
ECHO_TEAM_TEMPLATE
__device__ __forceinline__ void ECHO_TEAM::write_output(int segment, int k, const float (&v)[kBlockValues]) {
  write_row(own_row(stage_), dtype(), v);
  __syncwarp();
  copy_out(segment_rows(segment), k, warp_rows(stage_), a_.y, aligned());
  __syncwarp();
}

}  // namespace echo
