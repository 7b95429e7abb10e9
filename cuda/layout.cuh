// Sizes and places that host, kernel and tests share: tiles, segments, slots, the workspace, epochs.
//
// A tile is 4,096 values of the working basis. A team of 128 threads handles it, each thread a block of 32 consecutive
// values. A record travels in a slot of the receiver's workspace. Slots do not move with the shape of the call: team g
// counts its tiles from call to call (its epoch, in device memory) and writes tile number k into slot k % ring of the
// ring that belongs to (stage, source, g).
//
//   workspace  = control (4 KiB) | epochs u32 [num_teams] | flags u64 [2 stages][world - 1 sources][num_teams][ring]
//                | slots, in the order of the flags
//   slot       = codes | params, all groups of a tile | header 16 B {i16 exponent, u16 0, u32 signature, u64 0}
//                the parts of the wire record, codes first so that a warp's stores fall on whole 128-byte lines;
//                at 8 bits the two halves of a block lie 2,048 B apart, for the same reason
//   flag       = once the record of tile number k is there: k + 1 | i16 exponent << 32 | low half of the signature <<
//   48
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define ECHO_HD __host__ __device__ __forceinline__
#else
#define ECHO_HD inline
#endif

namespace echo {

constexpr int kTileShift = 12;
constexpr int kTileValues = 1 << kTileShift;
constexpr int kBlockValues = 32;
constexpr int kTeamThreads = kTileValues / kBlockValues;
constexpr int kTeamWarps = kTeamThreads / 32;
constexpr int kTeams = 4;  // teams a thread block: with two warps for signals, 96 registers a thread
constexpr int kBlockThreads = kTeams * kTeamThreads;
constexpr int kMaxRanks = 8;
constexpr int kHeaderBytes = 16;
constexpr int kSlotAlignment = 128;
constexpr int kControlBytes = 4096;
constexpr int kNumStages = 2;
constexpr int kExactBytes = 2048;  // payload of a slot in an exact call: 16 B a thread

// The order of these is that of the enums in config.py. The collectives of sequence parallelism are phases of two-shot,
// and for the kernels two more algorithms.
enum class Policy : int { symmetric, naive, zero_aware, rotated, rotated_asymmetric };
enum class Algorithm : int { one_shot = 1, two_shot, reduce_scatter, all_gather };
enum class Residual : int { local, consensus, none };
enum class Rescale : int { tile, group, none };
enum class StateDtype : int { bf16, fp32, compact };
enum class Dtype : int { bf16, fp16, fp32 };
enum class Stage : int { push, gather, rescale };

ECHO_HD int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
ECHO_HD int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
ECHO_HD int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

ECHO_HD int param_bytes(Policy policy) {
  const bool rotates = policy == Policy::rotated || policy == Policy::rotated_asymmetric;
  const bool symmetric = policy == Policy::symmetric || policy == Policy::rotated;
  return (rotates ? 1 : 2) * (symmetric ? 1 : 2);
}

// Offsets in a slot, bytes.
struct SlotLayout {
  int params, header, bytes;
  ECHO_HD SlotLayout(int bits, Policy policy, int group_size) {
    params = kTileValues * bits / 8;
    header = params + static_cast<int>(round_up(kTileValues / group_size * param_bytes(policy), 16));
    bytes = static_cast<int>(round_up(header + kHeaderBytes, kSlotAlignment));
  }
};

ECHO_HD constexpr bool in_shares(Algorithm algorithm) {
  return algorithm == Algorithm::reduce_scatter || algorithm == Algorithm::all_gather;
}

// Two-shot's split of the stream (reference.Segments); one-shot has one segment. A call in shares has a segment a rank,
// each a stream of its own, whose groups and tiles begin with it; in the working basis its last block is filled up.
struct Segments {
  int64_t num_values, length;
  int64_t share;  // values of the tensor in each share
  bool shares;
  // `values`: of the working basis; in shares, of one of them.
  ECHO_HD Segments(int64_t values, int world, int group_size, Algorithm algorithm, int64_t share_values = 0)
      : num_values(values), share(share_values), shares(in_shares(algorithm)) {
    length = algorithm == Algorithm::two_shot ? ceil_div(ceil_div(values, group_size), world) * group_size : values;
  }
  // Places in the tensor, in shares in the one that holds all of them. The end is that of the working basis.
  ECHO_HD int64_t begin(int rank) const { return shares ? rank * share : min64(rank * length, num_values); }
  ECHO_HD int64_t end(int rank) const {
    return shares ? rank * share + length : min64((rank + 1) * length, num_values);
  }
  // Where a segment's values in the tensor end; `tensor_values`: where it is not in shares.
  ECHO_HD int64_t values_end(int rank, int64_t tensor_values) const {
    return shares ? (rank + 1) * share : min64(end(rank), tensor_values);
  }
  ECHO_HD int64_t tiles(int rank) const {
    return shares ? max_tiles() : (end(rank) - begin(rank) + kTileValues - 1) >> kTileShift;
  }
  ECHO_HD int64_t max_tiles() const { return (length + kTileValues - 1) >> kTileShift; }
};

// Segments that a rank of the call keeps state for: in a reduce-scatter it rounds nothing of its own share, in an
// all-gather nothing is fed back.
ECHO_HD int state_segments(Algorithm algorithm, int world) {
  switch (algorithm) {
    case Algorithm::one_shot:
      return 1;
    case Algorithm::two_shot:
      return world;
    case Algorithm::reduce_scatter:
      return world - 1;
    case Algorithm::all_gather:
      return 0;
  }
  return 0;
}
ECHO_HD int state_segment(Algorithm algorithm, int rank, int segment) {
  return algorithm == Algorithm::reduce_scatter ? segment - (segment > rank) : segment;
}

// Bytes of the compensator's state for one tile: c, then m2; compact: the codes of c, then its scales.
ECHO_HD constexpr int state_value_bytes(StateDtype dtype) {
  return dtype == StateDtype::fp32 ? 4 : dtype == StateDtype::bf16 ? 2 : 1;
}
ECHO_HD constexpr int state_correction_bytes(StateDtype dtype) { return kTileValues * state_value_bytes(dtype); }
ECHO_HD constexpr int state_tile_bytes(StateDtype dtype) {
  return dtype == StateDtype::compact ? state_correction_bytes(dtype) + kTeamThreads * 4
                                      : 2 * state_correction_bytes(dtype);
}

// The words of the control region that ranks and thread blocks share.
struct Control {
  uint32_t amax_epoch;     // calls with `rescale: group` so far
  uint32_t amax_arrivals;  // thread blocks of the running call whose amax is in
  uint32_t amax;           // largest finite |x| of this rank, its bits
  uint32_t claim;          // 1 once a failure is being reported
  uint32_t abort;          // 1 + the rank that reported a failure, written by any rank
  uint32_t unused[27];
  uint64_t rank_amax[kMaxRanks][2];  // (amax_epoch + 1) << 32 | amax, from each rank, by parity of the epoch
};
static_assert(sizeof(Control) <= kControlBytes, "the control region is full");

// A ring holds what a rank may send before it knows that the slot was read: at least 3 depth + 2 tiles (all_reduce.cuh,
// "Why no barrier"), and a power of two, so that k % ring goes on smoothly where k wraps.
ECHO_HD int ring_for(int depth) {
  int ring = 1;
  while (ring < 3 * depth + 2) ring *= 2;
  return ring;
}

struct WorkspaceLayout {
  int world, num_teams, ring;
  int64_t slot_bytes;
  ECHO_HD int source_idx(int receiver, int source) const { return source - (source > receiver); }
  ECHO_HD int64_t slot_idx(Stage stage, int receiver, int source, int team, uint32_t k) const {
    const int64_t row = (static_cast<int64_t>(stage) * (world - 1) + source_idx(receiver, source)) * num_teams + team;
    return row * ring + (k & static_cast<uint32_t>(ring - 1));  // a power of two
  }
  ECHO_HD int64_t num_slots() const { return static_cast<int64_t>(kNumStages) * (world - 1) * num_teams * ring; }
  ECHO_HD int64_t epoch_offset(int team) const { return kControlBytes + 4 * static_cast<int64_t>(team); }
  ECHO_HD int64_t flags_offset() const {
    return kControlBytes + round_up(4 * static_cast<int64_t>(num_teams), kSlotAlignment);
  }
  ECHO_HD int64_t flag_offset(int64_t slot) const { return flags_offset() + 8 * slot; }
  ECHO_HD int64_t slots_offset() const { return flags_offset() + round_up(8 * num_slots(), kSlotAlignment); }
  ECHO_HD int64_t slot_offset(int64_t slot) const { return slots_offset() + slot * slot_bytes; }
  ECHO_HD int64_t bytes() const { return slots_offset() + num_slots() * slot_bytes; }
};

// Tile numbers are modulo 2^32 and flags are compared for equality, so they may wrap: a slot is never ahead of its
// reader (the ring holds it back), and a stale flag would have to be exactly 2^32 tiles old to be mistaken.
ECHO_HD uint32_t flag_value(uint32_t tile_number) { return tile_number + 1; }

ECHO_HD uint64_t make_flag(uint32_t tile_number, int exponent, uint32_t signature) {
  return static_cast<uint64_t>(flag_value(tile_number)) | static_cast<uint64_t>(exponent & 0xffff) << 32 |
         static_cast<uint64_t>(signature & 0xffffu) << 48;
}
// A flag that nobody wrote is 0, which no written one is, as a signature's low half is not: else it would be taken for
// that of tile 2^32 - 1.
ECHO_HD bool flag_is_of(uint64_t flag, uint32_t tile_number) {
  return static_cast<uint32_t>(flag) == flag_value(tile_number) && flag != 0;
}
ECHO_HD uint32_t flag_epoch(uint64_t flag) { return static_cast<uint32_t>(flag); }
ECHO_HD int flag_exponent(uint64_t flag) { return static_cast<int16_t>(flag >> 32 & 0xffffu); }
ECHO_HD uint32_t flag_signature(uint64_t flag) { return static_cast<uint32_t>(flag >> 48); }

}  // namespace echo
