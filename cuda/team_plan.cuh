// What the warps of a thread block share: a team's shared memory, its part in the call, where its slots and flags are.
#pragma once

#include "arguments.cuh"
#include "block.cuh"

namespace echo {

// -- shared memory of a thread block: one part a team

constexpr int kMaxRing = 16;
constexpr int kMaxEvents = 16;  // released records that the send warp may be behind
constexpr int kAllPeers = 15;

// A team's tiles of one segment. Row k starts at value first + k * stride.
struct SegmentRows {
  int64_t first, end;
  uint8_t* state;
  int rows;   // that exist
  int whole;  // whose tile x fills

  __device__ __forceinline__ int64_t value(int k, int stride) const { return first + static_cast<int64_t>(k) * stride; }
};

// What a team looks up once; shared memory keeps it out of registers.
struct TeamConstants {
  SegmentRows own, peer;
  uint8_t *push_ring, *pushed_ring, *gather_ring, *gathered_ring;
};

struct TeamScratch {
  float warp_amax[2][kTeamWarps];
  uint32_t issued[kTeamWarps];  // events whose stores this warp has done
  uint32_t sent;                // events that the send warp has announced
  uint32_t finished;            // the team makes no more events
  uint32_t events[kMaxEvents];  // stage, peer and row of the last events
  int event_exponent[kMaxEvents];
  uint32_t ready[2][kMaxRanks];              // rows received, by stage and source
  int16_t exponent[2][kMaxRanks][kMaxRing];  // of the rows received last
  uint32_t epoch;
  TeamConstants constants;
};
constexpr int kTeamScratchBytes = 1024;
static_assert(sizeof(TeamScratch) <= kTeamScratchBytes, "the team's scratch is full");

__host__ __device__ __forceinline__ int stage_bytes(Dtype dtype) { return kTeamWarps * 32 * row_bytes(dtype); }
__host__ __device__ __forceinline__ int received_record_bytes(int bits) { return kTeamThreads * (4 * bits + 4); }
__host__ __device__ __forceinline__ int own_record_bytes(int bits) { return kTeamThreads * (4 * bits + 8); }
// FP32 state, and any beside an FP32 tensor, is read where it lies: a copy would not fit beside the rest.
__host__ __device__ __forceinline__ int staged_state_bytes(Residual residual, StateDtype state, Dtype dtype) {
  if (residual == Residual::none || state == StateDtype::fp32 || dtype == Dtype::fp32) return 0;
  return state_tile_bytes(state);
}

// Byte offsets in a team's shared memory.
struct TeamLayout {
  int received, own_records, state, bytes;
  __host__ __device__ __forceinline__ TeamLayout(int bits, Algorithm algorithm, Residual residual,
                                                 StateDtype state_dtype, Dtype dtype, int depth) {
    received = kTeamScratchBytes + 2 * stage_bytes(dtype);
    own_records = received + (algorithm == Algorithm::two_shot ? 2 : 1) * received_record_bytes(bits);
    state = own_records + (algorithm == Algorithm::one_shot ? (depth + 1) * own_record_bytes(bits) : 0);
    bytes = state + staged_state_bytes(residual, state_dtype, dtype);
  }
};

// What every warp of a thread block knows of one team's part in the call.
template <int kBits, Policy kPolicy, Algorithm kAlgorithm>
struct TeamPlan {
  static constexpr bool kOneStage = kAlgorithm != Algorithm::two_shot;  // no sum is handed on: all records are pushed
  const Arguments& a;
  Segments segments;
  int team, num_teams, num_rows;

  __device__ __forceinline__ TeamPlan(const Arguments& arguments, int team_in_block)
      : a(arguments),
        segments(arguments.num_basis_values, arguments.signals.world, arguments.group_size, kAlgorithm,
                 arguments.num_values) {
    // Neighbouring tiles go to different multiprocessors, so that small messages spread over the chip.
    team = team_in_block * gridDim.x + blockIdx.x;
    num_teams = gridDim.x * kTeams;
    num_rows = rows_of(segments.max_tiles());
  }
  // Rows of this team among the first `tiles` tiles of a segment.
  __device__ __forceinline__ int rows_of(int64_t tiles) const {
    return team < tiles ? static_cast<int>((tiles - team + num_teams - 1) / num_teams) : 0;
  }
  __device__ __forceinline__ int64_t tile_of_row(int k) const { return team + static_cast<int64_t>(k) * num_teams; }
  __device__ __forceinline__ bool has_tile(int segment, int k) const {
    return tile_of_row(k) < segments.tiles(segment);
  }
  // Rows that arrive from a source in a stage.
  __device__ __forceinline__ int rows_from(Stage stage, int source) const {
    if (kOneStage) return stage == Stage::push ? num_rows : 0;
    return rows_of(segments.tiles(stage == Stage::push ? a.signals.rank : source));
  }
  __device__ __forceinline__ int64_t slot_idx(Stage stage, int receiver, int source, uint32_t tile_number) const {
    return a.workspace.slot_idx(stage, receiver, source, team, tile_number);
  }
  __device__ __forceinline__ uint64_t* flag(Stage stage, int receiver, int source, uint32_t tile_number) const {
    return reinterpret_cast<uint64_t*>(a.signals.peers[receiver] +
                                       a.workspace.flag_offset(slot_idx(stage, receiver, source, tile_number)));
  }
  __device__ __forceinline__ uint8_t* slot(Stage stage, int receiver, int source, uint32_t tile_number) const {
    return a.signals.peers[receiver] + a.workspace.slot_offset(slot_idx(stage, receiver, source, tile_number));
  }
  __device__ __forceinline__ uint32_t* epoch_word() const {
    return reinterpret_cast<uint32_t*>(a.signals.peers[a.signals.rank] + a.workspace.epoch_offset(team));
  }
};

__device__ __forceinline__ TeamScratch* scratch_of(uint8_t* shared, int team_bytes, int team_in_block) {
  return reinterpret_cast<TeamScratch*>(shared + team_in_block * team_bytes);
}

}  // namespace echo
