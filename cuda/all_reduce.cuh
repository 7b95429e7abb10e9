// The compensated, quantized all-reduce: one persistent kernel a call (paper Secs. 4.1, 5.1; spec 2 to 6).
//
// What is computed is echo_megatron/reference.py; phases of the kernel, tile by tile:
//   1 push    x' = basis(x) + c; quantize; one-shot: store the record to every peer and keep the own codes,
//             two-shot: store the record of a peer's segment to that peer
//   2 reduce  two-shot: own segment: own x' + received records in rank order; quantize the sum; store to every peer
//   3 tail    one-shot: sum of all records in rank order; two-shot: the sums of the peers' segments; inverse basis; y
//   residual local: the state of an element is read and written in the phase that quantizes it.
//   rescale group adds phase 0: the largest finite |x| over the ranks, through the same memory.
// Phases run staggered: while tile k is pushed, tile k - depth is reduced (or, one-shot, finished) and tile
// k - 2 depth finished, so a wait usually finds its record there.
//
// Why no barrier. Tile number k of a team goes to slot k % ring; numbers go on from call to call. When a rank pushes
// tile k of team g it has finished tile k - 1 - 2 depth, or all before it if a call lies between. Every other rank's
// team g had then pushed that tile, and before that, in program order, had reduced tile k - 2 - 3 depth and finished
// earlier ones. So a ring of 3 depth + 2 slots is never overwritten before it is read. A team is a fixed set of threads
// of the call's own grid, so between calls the end of the kernel takes the place of program order.
#pragma once

#include "block.cuh"
#include "signal.cuh"
#include "state.cuh"

namespace echo {

// Shared memory of a team.
__host__ __device__ __forceinline__ int stage_bytes(Dtype dtype) {
  return kTeamWarps * 32 * (dtype == Dtype::fp32 ? Row<float>::kBytes : Row<uint16_t>::kBytes);
}
__host__ __device__ __forceinline__ int own_record_bytes(int bits) { return kTeamThreads * (4 * bits + 8); }
constexpr int kTeamScratchBytes = 256;
__host__ __device__ __forceinline__ int team_shared_bytes(Dtype dtype, int bits, Algorithm algorithm, int depth) {
  const int own = algorithm == Algorithm::one_shot ? (depth + 1) * own_record_bytes(bits) : 0;
  return 2 * stage_bytes(dtype) + own + kTeamScratchBytes;
}

struct TeamScratch {
  float warp_amax[2][kTeamWarps];
  int exponent[2][kMaxRanks];
  int failed;
};
static_assert(sizeof(TeamScratch) <= kTeamScratchBytes, "the team's scratch is full");

template <int kBits, Policy kPolicy, Algorithm kAlgorithm, Residual kResidual, StateDtype kState>
class Team {
  using Q = Quantizer<kBits, kPolicy>;
  using Codec = BlockCodec<kBits, kPolicy>;
  static constexpr bool kOneShot = kAlgorithm == Algorithm::one_shot;
  static constexpr bool kLocal = kResidual == Residual::local;
  static constexpr bool kCompensates = kResidual != Residual::none;
  // One-shot charges the output's rounding to the segment's would-be owner, who knows it only in the tail.
  static constexpr bool kLateUpdate = kLocal && kOneShot && !Q::kRotates;

 public:
  __device__ __forceinline__ Team(const Arguments& arguments, uint8_t* shared, int call_exponent)
      : a_(arguments),
        s_(arguments.signals),
        layout_(kBits, kPolicy, kBlockValues << arguments.group_shift),
        segments_(arguments.num_basis_values, arguments.signals.world, kBlockValues << arguments.group_shift, kAlgorithm),
        call_exponent_(call_exponent) {
    team_in_block_ = threadIdx.x / kTeamThreads;
    thread_ = threadIdx.x % kTeamThreads;
    // Neighbouring tiles go to different multiprocessors, so that small messages spread over the chip.
    team_ = team_in_block_ * gridDim.x + blockIdx.x;
    num_teams_ = gridDim.x * kTeams;
    shared_ = shared + team_in_block_ * team_shared_bytes(a_.dtype, kBits, kAlgorithm, a_.depth);
    scratch_ = reinterpret_cast<TeamScratch*>(shared_);
    stages_ = shared_ + kTeamScratchBytes;
    own_records_ = stages_ + 2 * stage_bytes(a_.dtype);
    const int64_t tiles = segments_.max_tiles();
    num_rows_ = team_ < tiles ? static_cast<int>((tiles - team_ + num_teams_ - 1) / num_teams_) : 0;
  }

  __device__ void run() {
    if (num_rows_ == 0) return;
    uint32_t* epoch = reinterpret_cast<uint32_t*>(s_.peers[s_.rank] + a_.workspace.epoch_offset(team_));
    epoch_ = *epoch;
    if (thread_ == 0) scratch_->failed = 0;
    sync();
    const int lag = kOneShot ? a_.depth : 2 * a_.depth;
    cursor_k_ = 0;
    cursor_i_ = 0;
    prefetch();
    int done = 0;
    for (int k = 0; k < num_rows_ + lag; ++k) {
      if (k < num_rows_) push(k);
      if (!kOneShot && k >= a_.depth && k - a_.depth < num_rows_ && !reduce(k - a_.depth)) break;
      if (k >= lag) {
        if (!tail(k - lag)) break;
        done = k - lag + 1;
      }
    }
    wait_stage<0>();
    if (done < num_rows_) poison(done);
    if (thread_ == 0) *epoch = epoch_ + static_cast<uint32_t>(num_rows_);
  }

 private:
  // -- where things are

  __device__ __forceinline__ void sync() const { asm volatile("bar.sync %0, %1;" ::"r"(team_in_block_ + 1), "n"(kTeamThreads) : "memory"); }
  __device__ __forceinline__ int64_t tile_of_row(int k) const { return team_ + static_cast<int64_t>(k) * num_teams_; }
  __device__ __forceinline__ bool has_tile(int segment, int k) const { return tile_of_row(k) < segments_.tiles(segment); }
  __device__ __forceinline__ int64_t first_value(int segment, int k) const { return segments_.begin(segment) + tile_of_row(k) * kTileValues; }
  __device__ __forceinline__ int64_t tile_idx(int segment, int k) const { return segment * segments_.max_tiles() + tile_of_row(k); }
  __device__ __forceinline__ int segment_of(int peer) const { return kOneShot ? 0 : peer; }
  // Warp's rows in the stage buffer that holds, or last held, the tile being encoded.
  __device__ __forceinline__ uint8_t* warp_rows(int stage) const {
    return stages_ + stage * stage_bytes(a_.dtype) + (thread_ >> 5) * 32 * row_bytes(a_.dtype);
  }
  __device__ __forceinline__ uint8_t* own_row(int stage) const { return warp_rows(stage) + (thread_ & 31) * row_bytes(a_.dtype); }
  __device__ __forceinline__ int64_t warp_first(int segment, int k) const { return first_value(segment, k) + (thread_ >> 5) * 32 * kBlockValues; }
  __device__ __forceinline__ int64_t x_end(int segment) const { return min64(segments_.end(segment), a_.num_values); }
  __device__ __forceinline__ int valid_values(int segment, int k) const {
    const int64_t left = segments_.end(segment) - (first_value(segment, k) + thread_ * kBlockValues);
    return left <= 0 ? 0 : (left < kBlockValues ? static_cast<int>(left) : kBlockValues);
  }
  __device__ __forceinline__ uint8_t* slot(Stage stage, int receiver, int source, int k) const {
    const int64_t idx = a_.workspace.slot_idx(stage, receiver, source, team_, epoch_ + k);
    return s_.peers[receiver] + a_.workspace.slot_offset(idx);
  }
  __device__ __forceinline__ uint32_t* flag(Stage stage, int receiver, int source, int k) const {
    const int64_t idx = a_.workspace.slot_idx(stage, receiver, source, team_, epoch_ + k);
    return reinterpret_cast<uint32_t*>(s_.peers[receiver] + a_.workspace.flag_offset(idx));
  }
  __device__ __forceinline__ uint8_t* kept_record(int source, int segment, int k) const {
    const int64_t idx = kOneShot ? source * segments_.max_tiles() + tile_of_row(k) : tile_idx(segment, k);
    return a_.codes + idx * layout_.bytes;
  }
  __device__ __forceinline__ uint8_t* state_tile(int segment, int k) const {
    return a_.state + tile_idx(segment, k) * state_tile_bytes(kState);
  }

  // -- the order in which tiles of x are read, one ahead of the encoder

  // The i-th tile of iteration k: 1 to world - 1 push (one-shot: 1 only), `world` is the own segment's tile of row k - depth.
  __device__ __forceinline__ bool tile_at(int k, int i, int& segment, int& row) const {
    if (kOneShot) {
      segment = 0;
      row = k;
      return i == 1 && k < num_rows_;
    }
    const bool own = i == s_.world;
    segment = own ? s_.rank : (s_.rank + i) % s_.world;
    row = own ? k - a_.depth : k;
    return row >= 0 && row < num_rows_ && has_tile(segment, row);
  }

  __device__ __forceinline__ void prefetch() {
    const int last = num_rows_ + (kOneShot ? 0 : a_.depth);
    const int steps = kOneShot ? 1 : s_.world;
    int segment = 0, row = 0;
    bool found = false;
    while (!found && cursor_k_ < last) {
      if (++cursor_i_ > steps) {
        cursor_i_ = 0;
        ++cursor_k_;
        continue;
      }
      found = tile_at(cursor_k_, cursor_i_, segment, row);
    }
    if (found) stage_in(warp_rows(next_stage_), a_.x, warp_first(segment, row), x_end(segment), a_.dtype, a_.aligned);
    commit_stage();
    next_stage_ ^= 1;
  }

  // Takes the prefetched tile into registers, in the basis, and starts the copy of the next one.
  __device__ __forceinline__ void take_tile(int segment, int k, float (&v)[kBlockValues]) {
    prefetch();
    wait_stage<1>();
    stage_ = next_stage_;  // two prefetches on, the tile lies in the stage that comes next
    read_row(own_row(stage_), a_.dtype, v);
    if (kResidual == Residual::consensus && a_.kept_x != nullptr)
      stage_out(warp_rows(stage_), a_.kept_x, warp_first(segment, k), x_end(segment), a_.dtype, true);
    __syncwarp();
    if (Q::kRotates) hadamard(v);
  }

  // Values beyond the stream must not widen a group's range (rotated: they are zeros already).
  __device__ __forceinline__ void fill(float (&v)[kBlockValues], int valid) const {
    if (Q::kRotates || valid == kBlockValues) return;
    ECHO_UNROLL for (int i = 1; i < kBlockValues; ++i)
      if (i >= valid) v[i] = v[0];
  }

  // -- quantizing and records

  struct Record {
    uint32_t words[kBits];
    Params params;
    int exponent;
  };

  // Quantizes the team's tile. With kWantResidual, v becomes what was rounded away.
  template <bool kWantResidual>
  __device__ __forceinline__ void encode(float (&v)[kBlockValues], int valid, Record& record) {
    fill(v, valid);
    float lo, hi;
    bool finite;
    group_range<Q::kSymmetric>(v, valid, a_.group_shift, lo, hi, finite);
    record.exponent = call_exponent_;
    if (a_.rescale == Rescale::tile) {
      const uint32_t warp_amax = __reduce_max_sync(~0u, __float_as_uint(larger(-lo, hi)));
      amax_parity_ ^= 1;
      if ((thread_ & 31) == 0) scratch_->warp_amax[amax_parity_][thread_ >> 5] = __uint_as_float(warp_amax);
      sync();
      const float4 all = *reinterpret_cast<const float4*>(scratch_->warp_amax[amax_parity_]);
      record.exponent = exponent_for(fmaxf(fmaxf(all.x, all.y), fmaxf(all.z, all.w)), kTileTargetExponent);
    }
    record.params = Q::parameters(lo, hi, finite, record.exponent);
    Codec::template encode<kWantResidual>(v, record.params, record.exponent, finite, record.words);
  }

  __device__ __forceinline__ void store(uint8_t* target, const Record& record) const {
    uint4* codes = reinterpret_cast<uint4*>(target) + thread_;
    ECHO_UNROLL for (int j = 0; j < kBits / 4; ++j)
      codes[j * kTeamThreads] = make_uint4(record.words[4 * j], record.words[4 * j + 1], record.words[4 * j + 2], record.words[4 * j + 3]);
    if ((thread_ & ((1 << a_.group_shift) - 1)) == 0) {
      uint8_t* params = target + layout_.params + (thread_ >> a_.group_shift) * Q::kParamBytes;
      if (Q::kParamBytes == 1) *params = static_cast<uint8_t>(record.params.stored);
      else if (Q::kParamBytes == 2) *reinterpret_cast<uint16_t*>(params) = static_cast<uint16_t>(record.params.stored);
      else *reinterpret_cast<uint32_t*>(params) = record.params.stored;
    }
    if (thread_ == 0)
      *reinterpret_cast<uint4*>(target + layout_.header) = make_uint4(static_cast<uint32_t>(record.exponent) & 0xffffu, a_.signature, 0u, 0u);
  }

  // All threads: this block's part of a received record. Stores of peers are seen past L1 only.
  __device__ __forceinline__ void load(const uint8_t* source, Record& record) const {
    const uint4* codes = reinterpret_cast<const uint4*>(source) + thread_;
    ECHO_UNROLL for (int j = 0; j < kBits / 4; ++j) {
      const uint4 chunk = __ldcg(codes + j * kTeamThreads);
      record.words[4 * j] = chunk.x;
      record.words[4 * j + 1] = chunk.y;
      record.words[4 * j + 2] = chunk.z;
      record.words[4 * j + 3] = chunk.w;
    }
    const uint8_t* params = source + layout_.params + (thread_ >> a_.group_shift) * Q::kParamBytes;
    uint32_t stored;
    if (Q::kParamBytes == 1) stored = __ldcg(params);
    else if (Q::kParamBytes == 2) stored = __ldcg(reinterpret_cast<const uint16_t*>(params));
    else stored = __ldcg(reinterpret_cast<const uint32_t*>(params));
    record.params = Q::read(stored);
  }

  // Stores are done; the receivers may read. The barrier makes the team's stores the releasing thread's own.
  __device__ __forceinline__ void release(Stage stage, int k, int only_peer) const {
    sync();
    if (thread_ < s_.world && thread_ != s_.rank && (only_peer < 0 || thread_ == only_peer))
      store_release(flag(stage, thread_, s_.rank, k), flag_value(epoch_ + k));
  }

  // Waits for the records of row k from every source (or one), checks that they are of this call, and hands their exponents to
  // the team. False: a wait was given up, here or by another thread of the team.
  __device__ __forceinline__ bool receive(Stage stage, int k, int segment) {
    exponent_parity_ ^= 1;
    const bool gather = stage == Stage::gather;
    const int source = thread_;
    if (source < s_.world && source != s_.rank && (!gather || has_tile(source, k))) {
      const uint32_t expected = flag_value(epoch_ + k);
      bool ok = wait_flag(s_, flag(stage, s_.rank, source, k), expected, source, stage, tile_of_row(k));
      if (ok) {
        const uint4 header = __ldcg(reinterpret_cast<const uint4*>(slot(stage, s_.rank, source, k) + layout_.header));
        if (header.y != a_.signature) {
          report(s_, Failure::mismatch, source, stage, tile_of_row(k), a_.signature, header.y);
          ok = false;
        }
        scratch_->exponent[exponent_parity_][source] = static_cast<int16_t>(header.x & 0xffffu);
      }
      if (!ok) scratch_->failed = 1;
    }
    sync();
    return scratch_->failed == 0;
  }

  // -- phase 1

  __device__ __forceinline__ void push(int k) {
    if (kOneShot) {
      push_tile(0, k);
      return;
    }
    for (int i = 1; i < s_.world; ++i) {
      const int peer = (s_.rank + i) % s_.world;
      if (has_tile(peer, k)) push_tile(peer, k);
    }
  }

  __device__ __forceinline__ void push_tile(int segment, int k) {
    float v[kBlockValues];
    BlockState<kState> state(kCompensates ? state_tile(segment, k) : nullptr, a_.fresh);
    if (kCompensates) state.load(kLocal);
    take_tile(segment, k, v);
    if (kCompensates) state.add_correction(v);
    const int valid = valid_values(segment, k);
    Record record;
    encode<kLocal && !kLateUpdate>(v, valid, record);
    if (kOneShot) {
      for (int i = 1; i < s_.world; ++i) {
        const int peer = (s_.rank + i) % s_.world;
        store(slot(Stage::push, peer, s_.rank, k), record);
      }
      release(Stage::push, k, -1);
      keep_own(k, record);
      if (a_.codes != nullptr) store(kept_record(s_.rank, 0, k), record);
    } else {
      store(slot(Stage::push, segment, s_.rank, k), record);
      release(Stage::push, k, segment);
    }
    if (kLocal && !kLateUpdate) state.update(v, a_.coefficients);
  }

  // One-shot: each thread keeps its own block's codes until the tail of the tile.
  __device__ __forceinline__ uint8_t* own_record(int k) const { return own_records_ + (k % (a_.depth + 1)) * own_record_bytes(kBits); }

  __device__ __forceinline__ void keep_own(int k, const Record& record) const {
    uint4* codes = reinterpret_cast<uint4*>(own_record(k)) + thread_;
    ECHO_UNROLL for (int j = 0; j < kBits / 4; ++j)
      codes[j * kTeamThreads] = make_uint4(record.words[4 * j], record.words[4 * j + 1], record.words[4 * j + 2], record.words[4 * j + 3]);
    uint2* rest = reinterpret_cast<uint2*>(own_record(k) + kTeamThreads * 4 * kBits) + thread_;
    *rest = make_uint2(record.params.stored, static_cast<uint32_t>(record.exponent));
  }

  __device__ __forceinline__ void recall_own(int k, Record& record) const {
    const uint4* codes = reinterpret_cast<const uint4*>(own_record(k)) + thread_;
    ECHO_UNROLL for (int j = 0; j < kBits / 4; ++j) {
      const uint4 chunk = codes[j * kTeamThreads];
      record.words[4 * j] = chunk.x;
      record.words[4 * j + 1] = chunk.y;
      record.words[4 * j + 2] = chunk.z;
      record.words[4 * j + 3] = chunk.w;
    }
    const uint2 rest = reinterpret_cast<const uint2*>(own_record(k) + kTeamThreads * 4 * kBits)[thread_];
    record.params = Q::read(rest.x);
    record.exponent = static_cast<int>(rest.y);
  }

  // -- phase 2

  __device__ __forceinline__ bool reduce(int k) {
    const int segment = s_.rank;
    if (!has_tile(segment, k)) return true;
    if (!receive(Stage::push, k, segment)) return false;
    float v[kBlockValues], sum[kBlockValues];
    BlockState<kState> state(kCompensates ? state_tile(segment, k) : nullptr, a_.fresh);
    if (kCompensates) state.load(kLocal);
    take_tile(segment, k, v);
    if (kCompensates) state.add_correction(v);
    for (int source = 0; source < s_.world; ++source) {
      if (source == s_.rank) {
        ECHO_UNROLL for (int i = 0; i < kBlockValues; ++i) sum[i] = source == 0 ? v[i] : sum[i] + v[i];
        continue;
      }
      Record received;
      load(slot(Stage::push, s_.rank, source, k), received);
      received.exponent = scratch_->exponent[exponent_parity_][source];
      add_decoded(received, source == 0, sum);
    }
    Record record;
    encode<kLocal && Q::kRotates>(sum, valid_values(segment, k), record);
    for (int i = 1; i < s_.world; ++i) {
      const int peer = (s_.rank + i) % s_.world;
      store(slot(Stage::gather, peer, s_.rank, k), record);
    }
    release(Stage::gather, k, -1);
    if (a_.codes != nullptr) store(kept_record(0, segment, k), record);
    if (kLocal && Q::kRotates) state.update(sum, a_.coefficients);
    float decoded[kBlockValues];
    decode_output(record, decoded);
    if (kLocal && !Q::kRotates) {  // the residual sees y in its dtype
      ECHO_UNROLL for (int i = 0; i < kBlockValues; ++i) sum[i] = sum[i] - rounded(decoded[i], a_.dtype);
      state.update(sum, a_.coefficients);
    }
    write_output(segment, k, decoded);
    return true;
  }

  __device__ __forceinline__ void add_decoded(const Record& record, bool first, float (&acc)[kBlockValues]) const {
    const float step = Q::step(record.params, record.exponent);
    if (is_fast(record.exponent)) Codec::template decode<true>(record.words, step, record.params.zero, first, acc);
    else Codec::template decode<false>(record.words, step, record.params.zero, first, acc);
  }

  static __device__ __forceinline__ bool is_fast(int exponent) {
    return exponent >= -kFastDecodeExponent && exponent <= kFastDecodeExponent;
  }

  // -- phase 3

  __device__ __forceinline__ bool tail(int k) {
    if (kOneShot) return tail_one_shot(k);
    if (!receive(Stage::gather, k, -1)) return false;
    for (int i = 1; i < s_.world; ++i) {
      const int peer = (s_.rank + i) % s_.world;
      if (!has_tile(peer, k)) continue;
      Record record;
      load(slot(Stage::gather, s_.rank, peer, k), record);
      record.exponent = scratch_->exponent[exponent_parity_][peer];
      if (a_.codes != nullptr) store(kept_record(0, peer, k), record);
      float decoded[kBlockValues];
      decode_output(record, decoded);
      write_output(peer, k, decoded);
    }
    return true;
  }

  __device__ __forceinline__ bool tail_one_shot(int k) {
    if (!receive(Stage::push, k, 0)) return false;
    bool fast = true;
    for (int source = 0; source < s_.world; ++source)
      if (source != s_.rank) fast = fast && is_fast(scratch_->exponent[exponent_parity_][source]);
    Record own;
    recall_own(k, own);
    fast = fast && is_fast(own.exponent);
    // The inverse basis' factor 2^-5 goes into the steps where nothing under- or overflows.
    const float fold = Q::kRotates && fast ? 1.0f / kBlockValues : 1.0f;
    float sum[kBlockValues];
    for (int source = 0; source < s_.world; ++source) {
      Record record;
      if (source == s_.rank) {
        record = own;
      } else {
        load(slot(Stage::push, s_.rank, source, k), record);
        record.exponent = scratch_->exponent[exponent_parity_][source];
        if (a_.codes != nullptr) store(kept_record(source, 0, k), record);
      }
      const float step = Q::step(record.params, record.exponent) * fold;
      if (fast) Codec::template decode<true>(record.words, step, record.params.zero, source == 0, sum);
      else Codec::template decode<false>(record.words, step, record.params.zero, source == 0, sum);
    }
    if (Q::kRotates) {
      hadamard(sum);
      if (!fast) scale_back(sum);
    }
    if (kLateUpdate) late_update(k, own, sum);
    write_output(0, k, sum);
    return true;
  }

  // The decoded sum, back in the basis of y.
  __device__ __forceinline__ void decode_output(const Record& record, float (&decoded)[kBlockValues]) const {
    const float step = Q::step(record.params, record.exponent);
    if (!Q::kRotates) {
      add_decoded(record, true, decoded);
    } else if (is_fast(record.exponent)) {
      Codec::template decode<true>(record.words, step * (1.0f / kBlockValues), record.params.zero, true, decoded);
      hadamard(decoded);
    } else {
      Codec::template decode<false>(record.words, step, record.params.zero, true, decoded);
      hadamard(decoded);
      scale_back(decoded);
    }
  }

  static __device__ __forceinline__ void scale_back(float (&v)[kBlockValues]) {
    ECHO_UNROLL for (int i = 0; i < kBlockValues; ++i) v[i] = v[i] * (1.0f / kBlockValues);
  }

  // y of this warp, through the stage that was read last: its tile is in registers or done.
  __device__ __forceinline__ void write_output(int segment, int k, const float (&v)[kBlockValues]) {
    write_row(own_row(stage_), a_.dtype, v);
    __syncwarp();
    stage_out(warp_rows(stage_), a_.y, warp_first(segment, k), x_end(segment), a_.dtype, a_.aligned);
    __syncwarp();
  }

  // reference.rank_residual for one-shot without rotation: x' minus its code, plus the output's rounding where this rank would own
  // the segment. x' is formed again: x is still there, also in place, and the state is not yet updated.
  __device__ __forceinline__ void late_update(int k, const Record& own, const float (&reduced)[kBlockValues]) {
    float v[kBlockValues], d[kBlockValues];
    stage_in(warp_rows(stage_), a_.x, warp_first(0, k), x_end(0), a_.dtype, a_.aligned);
    commit_stage();
    wait_stage<0>();
    read_row(own_row(stage_), a_.dtype, v);
    __syncwarp();
    BlockState<kState> state(state_tile(0, k), a_.fresh);
    state.load(true);
    state.add_correction(v);
    fill(v, valid_values(0, k));
    add_decoded(own, true, d);
    const Segments owners(a_.num_basis_values, s_.world, kBlockValues << a_.group_shift, Algorithm::two_shot);
    const int64_t first = first_value(0, k) + thread_ * kBlockValues;
    const bool owned = first >= owners.begin(s_.rank) && first < owners.end(s_.rank);
    ECHO_UNROLL for (int i = 0; i < kBlockValues; ++i) {
      v[i] = v[i] - d[i];
      if (owned) v[i] = v[i] + (reduced[i] - rounded(reduced[i], a_.dtype));
    }
    state.update(v, a_.coefficients);
  }

  // A call that failed must not look like a result.
  __device__ __forceinline__ void poison(int from) {
    const int shift = element_shift(a_.dtype);
    _Pragma("unroll 1") for (int k = from; k < num_rows_; ++k)
      for (int segment = 0; segment < (kOneShot ? 1 : s_.world); ++segment) {
        if (!has_tile(segment, k)) continue;
        _Pragma("unroll 1") for (int i = thread_; i < kTileValues; i += kTeamThreads) {
          const int64_t idx = first_value(segment, k) + i;
          if (idx >= x_end(segment)) break;
          if (shift == 2) reinterpret_cast<uint32_t*>(a_.y)[idx] = 0x7fc00000u;
          else reinterpret_cast<uint16_t*>(a_.y)[idx] = a_.dtype == Dtype::bf16 ? 0x7fc0u : 0x7e00u;
        }
      }
  }

  const Arguments& a_;
  const Signals& s_;
  const SlotLayout layout_;
  const Segments segments_;
  const int call_exponent_;
  int team_in_block_, thread_, team_, num_teams_, num_rows_;
  uint32_t epoch_;
  uint8_t *shared_, *stages_, *own_records_;
  TeamScratch* scratch_;
  int cursor_k_, cursor_i_;
  int next_stage_ = 0, stage_ = 0;
  int amax_parity_ = 0, exponent_parity_ = 0;
};

// Phase 0: the exponent of `rescale: group` from the largest finite |x| of all ranks. Every thread block of the grid
// takes part, so the grid must be resident as a whole. False in `ok` if the wait was given up.
static __device__ __noinline__ int exchange_amax(const Arguments& a, bool rotates, bool& ok) {
  __shared__ uint32_t block_amax, all_amax;
  __shared__ int failed;
  const Signals& s = a.signals;
  Control* control = control_of(s.peers[s.rank]);
  if (threadIdx.x == 0) {
    block_amax = 0;
    all_amax = 0;
    failed = 0;
  }
  __syncthreads();
  const uint32_t epoch = control->amax_epoch;
  uint32_t amax = 0;
  auto look = [&amax](float value) {
    const uint32_t magnitude = __float_as_uint(value) & 0x7fffffffu;
    if (magnitude < 0x7f800000u && magnitude > amax) amax = magnitude;
  };
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (a.dtype == Dtype::fp32) {
    for (int64_t i = thread; i < a.num_values; i += stride) look(reinterpret_cast<const float*>(a.x)[i]);
  } else {
    const bool bf16 = a.dtype == Dtype::bf16;
    auto look_at = [&](uint32_t bits) { look(bf16 ? bf16_value(bits) : half_value(bits)); };
    const int64_t num_chunks = a.aligned ? a.num_values / 8 : 0;
    for (int64_t i = thread; i < num_chunks; i += stride) {
      const uint4 chunk = __ldg(reinterpret_cast<const uint4*>(a.x) + i);
      const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
      ECHO_UNROLL for (int j = 0; j < 4; ++j) {
        look_at(words[j] & 0xffffu);
        look_at(words[j] >> 16);
      }
    }
    for (int64_t i = num_chunks * 8 + thread; i < a.num_values; i += stride) look_at(reinterpret_cast<const uint16_t*>(a.x)[i]);
  }
  amax = __reduce_max_sync(~0u, amax);
  if ((threadIdx.x & 31) == 0) atomicMax(&block_amax, amax);
  __syncthreads();
  if (threadIdx.x == 0) {
    atomicMax(&control->amax, block_amax);
    __threadfence();
    if (atomicAdd(&control->amax_arrivals, 1u) == gridDim.x - 1) {  // the last block speaks for the rank
      __threadfence();
      const uint32_t own = atomicExch(&control->amax, 0u);
      control->amax_arrivals = 0;
      control->amax_epoch = epoch + 1;
      const uint64_t message = static_cast<uint64_t>(epoch + 1) << 32 | own;
      for (int i = 0; i < s.world; ++i) {
        const int peer = (s.rank + i) % s.world;
        store_release(&control_of(s.peers[peer])->rank_amax[s.rank][epoch & 1], message);
      }
    }
  }
  if (threadIdx.x < s.world) {
    const uint64_t* word = &control->rank_amax[threadIdx.x][epoch & 1];
    Patience patience(s);
    uint64_t seen;
    while ((seen = load_acquire(word)) >> 32 != epoch + 1)
      if (patience.is_over(threadIdx.x, Stage::rescale, 0, epoch + 1, static_cast<uint32_t>(seen >> 32))) {
        failed = 1;
        break;
      }
    atomicMax(&all_amax, static_cast<uint32_t>(seen));
  }
  __syncthreads();
  ok = failed == 0;
  return call_exponent(__uint_as_float(all_amax), rotates);
}

template <int kBits, Policy kPolicy, Algorithm kAlgorithm, Residual kResidual, StateDtype kState>
__global__ void __launch_bounds__(kBlockThreads, 1) all_reduce_kernel(const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(128) uint8_t shared[];
  int exponent = 0;
  bool ok = true;
  if (arguments.rescale == Rescale::group) exponent = exchange_amax(arguments, Quantizer<kBits, kPolicy>::kRotates, ok);
  // After a failure the team's own waits end at the abort word, and the output is poisoned.
  Team<kBits, kPolicy, kAlgorithm, kResidual, kState>(arguments, shared, exponent).run();
}

}  // namespace echo
