// A team of 128 threads: the phases push, reduce and tail of all_reduce.cuh, tile by tile.
//
// Copies into shared memory are in flight while a tile is worked on; waits count the groups that may stay so. In shares
// every tile commits three, empty ones included: received records (F), the tile of x after this one (X), and state (S),
// which in a reduce-scatter is that of the next pushed tile, over the reduced one in between.
#pragma once

#include "signal.cuh"
#include "state.cuh"
#include "team_plan.cuh"

namespace echo {

// kPair: two ranks, BF16, aligned tensors, known when the kernel is compiled. Anything else runs with kPair false.
template <int kBits, Policy kPolicy, Algorithm kAlgorithm, Residual kResidual, StateDtype kState, bool kPair>
class Team {
  using Q = Quantizer<kBits, kPolicy>;
  using Codec = BlockCodec<kBits, kPolicy>;
  static constexpr bool kOneShot = kAlgorithm == Algorithm::one_shot;
  static constexpr bool kTwoShot = kAlgorithm == Algorithm::two_shot;
  static constexpr bool kScatter = kAlgorithm == Algorithm::reduce_scatter;
  static constexpr bool kGather = kAlgorithm == Algorithm::all_gather;
  static constexpr bool kShares = in_shares(kAlgorithm);
  static constexpr Stage kTailStage = kTwoShot ? Stage::gather : Stage::push;
  static constexpr int kReducePlace = kScatter ? 0 : 1;  // of received records
  static constexpr bool kLocal = kResidual == Residual::local;
  static constexpr bool kCompensates = kResidual != Residual::none;
  static constexpr bool kStagesState = kCompensates && kState != StateDtype::fp32;
  // One-shot charges the output's rounding to the segment's would-be owner, who knows it only in the tail.
  static constexpr bool kLateUpdate = kLocal && kOneShot && !Q::kRotates;

 public:
  __device__ __forceinline__ Team(const Arguments& arguments, uint8_t* shared, const TeamLayout& layout,
                                  int call_exponent, const uint32_t* failed)
      : a_(arguments),
        s_(arguments.signals),
        plan_(arguments, threadIdx.x / kTeamThreads),
        slot_layout_(kBits, kPolicy, arguments.group_size),
        call_exponent_(call_exponent),
        failed_(failed),
        thread_(threadIdx.x % kTeamThreads) {
    uint8_t* own = shared + threadIdx.x / kTeamThreads * layout.bytes;
    scratch_ = reinterpret_cast<TeamScratch*>(own);
    stages_ = own + kTeamScratchBytes;
    received_ = own + layout.received;
    own_records_ = own + layout.own_records;
    staged_state_ = own + layout.state;
    row_stride_ = plan_.num_teams * kTileValues;
    if (thread_ == 0) {
      TeamConstants& constants = scratch_->constants;
      if (kOneShot || kPair) constants.own = rows_of(kOneShot ? 0 : s_.rank);
      if (kPair) {
        const int peer = 1 - s_.rank;
        constants.push_ring = plan_.slot(Stage::push, peer, s_.rank, 0);
        constants.pushed_ring = plan_.slot(Stage::push, s_.rank, peer, 0);
        if (!kOneShot) constants.peer = rows_of(peer);
        if (kTwoShot) {
          constants.gather_ring = plan_.slot(Stage::gather, peer, s_.rank, 0);
          constants.gathered_ring = plan_.slot(Stage::gather, s_.rank, peer, 0);
        }
      }
    }
    sync();
  }

  __device__ __forceinline__ void run() {
    const int num_rows = plan_.num_rows;
    const int lag = kTwoShot ? 2 * a_.depth : a_.depth;
    if (kGather) next_segment_ = s_.rank;
    prefetch();
    prefetch_state();
    commit_stage();
    int done = 0;
    _Pragma("unroll 1") for (int k = 0; k < num_rows + lag; ++k) {
      // Received codes start on their way before the work that hides it.
      wanted_tail_ = !kScatter && k >= lag ? k - lag : -1;
      wanted_reduce_ =
          (kTwoShot || kScatter) && k >= a_.depth && k - a_.depth < num_rows && has_tile(s_.rank, k - a_.depth)
              ? k - a_.depth
              : -1;
      const int tail_row = wanted_tail_, reduce_row = wanted_reduce_;
      if (tail_row >= 0 && !wait_ready(kTailStage, tail_row)) break;
      if (reduce_row >= 0 && !wait_ready(Stage::push, reduce_row)) break;
      if (k < num_rows) push(k);
      if (reduce_row >= 0) {
        reduce(reduce_row);
        if (kScatter) done = reduce_row + 1;
      }
      if (tail_row >= 0) {
        tail(tail_row);
        done = tail_row + 1;
      }
    }
    wait_stage<0>();
    if (done < num_rows) poison(done);
    __syncwarp();
    if ((thread_ & 31) == 0) atomicAdd(&scratch_->finished, 1u);
    sync();
    if (thread_ == 0 && num_rows > 0) *plan_.epoch_word() = scratch_->epoch + static_cast<uint32_t>(num_rows);
  }

 private:
  // -- the call, as far as it is known when the kernel is compiled

  __device__ __forceinline__ int world() const { return kPair ? 2 : s_.world; }
  __device__ __forceinline__ Dtype dtype() const { return kPair ? Dtype::bf16 : a_.dtype; }
  __device__ __forceinline__ bool aligned() const { return kPair || a_.aligned; }
  // The i-th rank after this one, i from 1.
  __device__ __forceinline__ int peer_at(int i) const {
    if (kPair) return 1 - s_.rank;
    const int peer = s_.rank + i;
    return peer >= s_.world ? peer - s_.world : peer;
  }

  // -- where things are

  __device__ __forceinline__ void sync() const {
    asm volatile("bar.sync %0, %1;" ::"r"(static_cast<int>(threadIdx.x / kTeamThreads) + 1), "n"(kTeamThreads)
                 : "memory");
  }
  __device__ __forceinline__ int64_t tile_idx(int segment, int k) const {
    if (kScatter) segment = state_segment(kAlgorithm, s_.rank, segment);
    return (kOneShot ? 0 : segment * plan_.segments.max_tiles()) + plan_.tile_of_row(k);
  }
  __device__ __forceinline__ SegmentRows rows_of(int segment) const {
    SegmentRows rows;
    rows.first = plan_.segments.begin(segment) + static_cast<int64_t>(plan_.team) * kTileValues;
    rows.end = plan_.segments.values_end(segment, a_.num_values);
    rows.rows = plan_.rows_of(plan_.segments.tiles(segment));
    rows.whole = rows.rows;
    if (rows.rows > 0 && rows.value(rows.rows - 1, row_stride_) + kTileValues > rows.end) --rows.whole;
    rows.state = kCompensates ? a_.state + tile_idx(segment, 0) * state_tile_bytes(kState) : nullptr;
    return rows;
  }
  // Known beforehand for one-shot and for two ranks; otherwise worked out where it is needed.
  __device__ __forceinline__ SegmentRows segment_rows(int segment) const {
    if (kOneShot) return scratch_->constants.own;
    if (kPair) return segment == s_.rank ? scratch_->constants.own : scratch_->constants.peer;
    return rows_of(segment);
  }
  __device__ __forceinline__ bool has_tile(int segment, int k) const {
    if (kOneShot || kShares) return k < plan_.num_rows;
    return kPair ? k < (segment == s_.rank ? scratch_->constants.own.rows : scratch_->constants.peer.rows)
                 : plan_.has_tile(segment, k);
  }
  __device__ __forceinline__ int warp_values() const { return (thread_ >> 5) * 32 * kBlockValues; }
  __device__ __forceinline__ uint8_t* warp_rows(int stage) const {
    return stages_ + stage * stage_bytes(dtype()) + (thread_ >> 5) * 32 * row_bytes(dtype());
  }
  __device__ __forceinline__ uint8_t* own_row(int stage) const {
    return stages_ + stage * stage_bytes(dtype()) + thread_ * row_bytes(dtype());
  }
  __device__ __forceinline__ int valid_values(const SegmentRows& rows, int segment, int k) const {
    if (k < rows.whole) return kBlockValues;
    const int64_t end = Q::kRotates ? plan_.segments.end(segment) : rows.end;
    const int64_t left = end - (rows.value(k, row_stride_) + thread_ * kBlockValues);
    return left <= 0 ? 0 : (left < kBlockValues ? static_cast<int>(left) : kBlockValues);
  }
  // Slots of the first peer's rings are used most: their places are worked out once.
  __device__ __forceinline__ uint8_t* in_ring(uint8_t* ring, int k) const {
    return ring + ((scratch_->epoch + k) & static_cast<uint32_t>(a_.workspace.ring - 1)) *
                      static_cast<uint32_t>(a_.workspace.slot_bytes);
  }
  __device__ __forceinline__ uint8_t* sent_slot(Stage stage, int peer, int k) const {
    if (kPair)
      return in_ring(stage == Stage::push ? scratch_->constants.push_ring : scratch_->constants.gather_ring, k);
    return plan_.slot(stage, peer, s_.rank, scratch_->epoch + k);
  }
  __device__ __forceinline__ const uint8_t* received_slot(Stage stage, int source, int k) const {
    if (kPair)
      return in_ring(stage == Stage::push ? scratch_->constants.pushed_ring : scratch_->constants.gathered_ring, k);
    return plan_.slot(stage, s_.rank, source, scratch_->epoch + k);
  }
  __device__ __forceinline__ uint8_t* kept_record(int source, int segment, int k) const {
    const int64_t idx = kOneShot ? source * plan_.segments.max_tiles() + plan_.tile_of_row(k) : tile_idx(segment, k);
    return a_.codes + idx * slot_layout_.bytes;
  }
  __device__ __forceinline__ uint8_t* state_tile(const SegmentRows& rows, int k) const {
    return rows.state + static_cast<int64_t>(k) * (num_teams() * state_tile_bytes(kState));
  }
  __device__ __forceinline__ int num_teams() const { return plan_.num_teams; }

  __device__ __forceinline__ void copy_in(const SegmentRows& rows, int k, uint8_t* target) const {
    const int64_t first = rows.value(k, row_stride_) + warp_values();
    if (kPair && k < rows.whole)
      stage_in_whole<1>(target, a_.x + (first << 1));
    else
      stage_in(target, a_.x, first, rows.end, dtype(), aligned());
  }
  __device__ __forceinline__ void copy_out(const SegmentRows& rows, int k, const uint8_t* source, uint8_t* y,
                                           bool is_aligned) const {
    const int64_t first = rows.value(k, row_stride_) + warp_values();
    if (kPair && k < rows.whole)
      stage_out_whole<1>(source, y + (first << 1));
    else
      stage_out(source, y, first, rows.end, dtype(), is_aligned);
  }

  // -- tiles of x are read one ahead of the encoder, in its order

  // The i-th tile of iteration k: 1 to world - 1 are pushed, `world` is the own segment's tile of row k - depth.
  __device__ __forceinline__ bool tile_at(int k, int i, int& segment, int& row) const {
    const bool own = i == world();
    segment = own ? s_.rank : peer_at(i);
    row = own ? k - a_.depth : k;
    return row >= 0 && row < plan_.num_rows && has_tile(segment, row);
  }

  __device__ __forceinline__ void prefetch() {
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

  __device__ __forceinline__ bool stages_state() const { return kStagesState && dtype() != Dtype::fp32; }
  __device__ __forceinline__ bool reads_average() const { return kLocal && !a_.coefficients.memoryless(); }

  // The state of the tile that comes next, once this tile's is used. Each thread copies what it will read.
  __device__ __forceinline__ void prefetch_state() {
    if (!stages_state() || a_.fresh || !next_valid_) return;
    BlockState<kState>::copy_async(staged_state_, state_tile(segment_rows(next_segment_), next_row_), reads_average());
  }
  // Reduce-scatter: of the tile that is pushed after this one.
  __device__ __forceinline__ void prefetch_pushed_state(int segment, int k) {
    if (!stages_state() || a_.fresh) return;
    if (kPair || segment == peer_at(world() - 1)) {
      segment = peer_at(1);
      ++k;
    } else {
      segment = segment + 1 == world() ? 0 : segment + 1;
    }
    if (k < plan_.num_rows) BlockState<kState>::copy_async(staged_state_, state_tile(segment_rows(segment), k), reads_average());
  }
  __device__ __forceinline__ BlockState<kState> state_of(int segment, int k) const {
    uint8_t* tile = kCompensates ? state_tile(segment_rows(segment), k) : nullptr;
    return BlockState<kState>(stages_state() ? staged_state_ : tile, tile, a_.fresh);
  }

  // Takes the prefetched tile into registers, in the basis, and starts the copy of the next one.
  __device__ __forceinline__ void take_tile(int segment, int k, float (&v)[kBlockValues]) {
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

  // Values beyond the stream must not widen a group's range (rotated: they are zeros already).
  __device__ __forceinline__ void fill(float (&v)[kBlockValues], int valid) const {
    if (Q::kRotates || valid == kBlockValues) return;
    ECHO_UNROLL
    for (int i = 1; i < kBlockValues; ++i)
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

  // Of this thread's group, in a record's parameters.
  __device__ __forceinline__ int param_offset() const { return (thread_ >> a_.group_shift) * Q::kParamBytes; }

  __device__ __forceinline__ void store(uint8_t* target, const Record& record) const {
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

  // This block's part of row k's record from a source; its exponent came through the receive warp.
  __device__ __forceinline__ void load_received(Stage stage, int source, int k, Record& record) const {
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
  __device__ __forceinline__ void fetch(int place, Stage stage, int source, int k) const {
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
  __device__ __forceinline__ void take_fetched(int place, Stage stage, int source, int k, Record& record) const {
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
  __device__ __forceinline__ bool fetches_tail(int k) const { return kOneShot || has_tile(peer_at(1), k); }
  // The first source's record of the rows that this iteration will reduce and finish. False where there is none, or it
  // is on its way.
  __device__ __forceinline__ bool fetch_wanted() {
    if (wanted_tail_ < 0 && wanted_reduce_ < 0) return false;
    if (!kScatter && wanted_tail_ >= 0 && fetches_tail(wanted_tail_)) fetch(0, kTailStage, peer_at(1), wanted_tail_);
    if ((kTwoShot || kScatter) && wanted_reduce_ >= 0) fetch(kReducePlace, Stage::push, peer_at(1), wanted_reduce_);
    wanted_tail_ = wanted_reduce_ = -1;
    return true;
  }

  // Hands the record to the send warp, once this warp's stores are done; it announces what all four warps have handed
  // over.
  __device__ __forceinline__ void release(Stage stage, int k, int peer, int exponent) {
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

  // Waits until the receive warp has row k of every source that sends one. False once the call has failed.
  __device__ __forceinline__ bool wait_ready(Stage stage, int k) const {
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

  // -- phase 1

  __device__ __forceinline__ void push(int k) {
    if (kOneShot || kGather) {
      push_tile(kGather ? s_.rank : 0, k);
      return;
    }
    _Pragma("unroll 1") for (int i = 1; i < world(); ++i) if (has_tile(peer_at(i), k)) push_tile(peer_at(i), k);
  }

  __device__ __forceinline__ void push_tile(int segment, int k) {
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

  // One-shot: each thread keeps its own block's codes until the tail of the tile.
  __device__ __forceinline__ uint8_t* own_record(int place) const {
    return own_records_ + place * own_record_bytes(kBits);
  }
  __device__ __forceinline__ int next_place(int place) const { return place == a_.depth ? 0 : place + 1; }

  __device__ __forceinline__ void keep_own(int, const Record& record) {
    uint4* codes = reinterpret_cast<uint4*>(own_record(keep_place_)) + thread_;
    ECHO_UNROLL
    for (int j = 0; j < kBits / 4; ++j)
      codes[j * kTeamThreads] =
          make_uint4(record.words[4 * j], record.words[4 * j + 1], record.words[4 * j + 2], record.words[4 * j + 3]);
    uint2* rest = reinterpret_cast<uint2*>(own_record(keep_place_) + kTeamThreads * 4 * kBits) + thread_;
    *rest = make_uint2(record.params.stored, static_cast<uint32_t>(record.exponent));
    keep_place_ = next_place(keep_place_);
  }

  __device__ __forceinline__ void recall_own(Record& record) {
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

  // -- phase 2

  __device__ __forceinline__ void reduce(int k) {
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

  __device__ __forceinline__ void finish_reduce(int segment, int k, const BlockState<kState>& state,
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

  static __device__ __forceinline__ void add(const Record& record, float fold, bool fast, float (&sum)[kBlockValues]) {
    const Params params = Q::read(record.params.stored);
    Codec::add_decoded(record.words, Q::step(params, record.exponent) * fold, params.zero, fast, sum);
  }

  // -- phase 3

  __device__ __forceinline__ void tail(int k) {
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

  __device__ __forceinline__ void tail_one_shot(int k, const Record& received) {
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

  // The decoded sum, back in the basis of y.
  __device__ __forceinline__ void decode_output(const Record& record, float (&decoded)[kBlockValues]) const {
    const Params params = Q::read(record.params.stored);
    const bool fast = decodes_fast(record.exponent);
    const float fold = Q::kRotates && fast ? 1.0f / kBlockValues : 1.0f;
    Codec::decode(record.words, Q::step(params, record.exponent) * fold, params.zero, fast, decoded);
    if (Q::kRotates) {
      hadamard(decoded);
      if (!fast) scale_back(decoded);
    }
  }

  static __device__ __forceinline__ void scale_back(float (&v)[kBlockValues]) {
    ECHO_UNROLL
    for (int i = 0; i < kBlockValues; ++i) v[i] = v[i] * (1.0f / kBlockValues);
  }

  // y of this warp, through the stage that was read last: its tile is in registers or done.
  __device__ __forceinline__ void write_output(int segment, int k, const float (&v)[kBlockValues]) {
    write_row(own_row(stage_), dtype(), v);
    __syncwarp();
    copy_out(segment_rows(segment), k, warp_rows(stage_), a_.y, aligned());
    __syncwarp();
  }

  // reference.rank_residual for one-shot without rotation: x' minus its code, plus the output's rounding where this
  // rank would own the segment. x' is formed again: x is still there, also in place, and the state is not yet updated.
  __device__ __forceinline__ void late_update(int k, const Record& own, const float (&reduced)[kBlockValues]) {
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

  // A call that failed must not look like a result.
  __device__ __forceinline__ void poison(int from) {
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

  const Arguments& a_;
  const Signals& s_;
  const TeamPlan<kBits, kPolicy, kAlgorithm> plan_;
  const SlotLayout slot_layout_;
  const int call_exponent_;
  const uint32_t* failed_;
  const int thread_;
  uint32_t num_events_ = 0;
  int row_stride_;
  uint8_t *stages_, *received_, *own_records_, *staged_state_;
  TeamScratch* scratch_;
  int cursor_k_ = 0, cursor_i_ = 0, next_segment_ = 0, next_row_ = 0;
  bool next_valid_ = false;
  int next_stage_ = 0, stage_ = 0;
  int keep_place_ = 0, recall_place_ = 0;
  int amax_parity_ = 0;
  int wanted_tail_ = -1, wanted_reduce_ = -1;
  bool fetched_since_wait_ = false;
};

}  // namespace echo
