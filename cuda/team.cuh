// A team of 128 threads: the phases push, reduce and tail of all_reduce.cuh, tile by tile.
//
// Here are the order of a team's steps (run), what it knows of the call, and where everything lies. Its members are
// defined in team_tiles.cuh (x, state and y), team_records.cuh (what travels) and team_phases.cuh.
//
// Copies into shared memory are in flight while a tile is worked on; waits count the groups that may stay so. In shares
// every tile commits three, empty ones included: received records (F), the tile of x after this one (X), and state (S),
// which in a reduce-scatter is that of the next pushed tile, over the reduced one in between.
#pragma once

#include "signal.cuh"
#include "state.cuh"
#include "team_plan.cuh"

namespace echo {

// The head of a member that is defined outside of the class, and the class there.
#define ECHO_TEAM_TEMPLATE \
  template <int kBits, Policy kPolicy, Algorithm kAlgorithm, Residual kResidual, StateDtype kState, bool kPair>
#define ECHO_TEAM Team<kBits, kPolicy, kAlgorithm, kResidual, kState, kPair>

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

  // -- tiles: team_tiles.cuh

  __device__ __forceinline__ bool stages_state() const { return kStagesState && dtype() != Dtype::fp32; }
  __device__ __forceinline__ bool reads_average() const { return kLocal && !a_.coefficients.memoryless(); }
  __device__ void copy_in(const SegmentRows& rows, int k, uint8_t* target) const;
  __device__ void copy_out(const SegmentRows& rows, int k, const uint8_t* source, uint8_t* y, bool is_aligned) const;
  __device__ bool tile_at(int k, int i, int& segment, int& row) const;
  __device__ void prefetch();
  __device__ void prefetch_state();
  __device__ void prefetch_pushed_state(int segment, int k);
  __device__ BlockState<kState> state_of(int segment, int k) const;
  __device__ void take_tile(int segment, int k, float (&v)[kBlockValues]);
  __device__ void write_output(int segment, int k, const float (&v)[kBlockValues]);

  // -- records: team_records.cuh

  struct Record {
    uint32_t words[kBits];
    Params params;
    int exponent;
  };

  // Of this thread's group, in a record's parameters.
  __device__ __forceinline__ int param_offset() const { return (thread_ >> a_.group_shift) * Q::kParamBytes; }
  __device__ __forceinline__ bool fetches_tail(int k) const { return kOneShot || has_tile(peer_at(1), k); }
  __device__ __forceinline__ uint8_t* own_record(int place) const {
    return own_records_ + place * own_record_bytes(kBits);
  }
  __device__ __forceinline__ int next_place(int place) const { return place == a_.depth ? 0 : place + 1; }
  __device__ void fill(float (&v)[kBlockValues], int valid) const;
  template <bool kWantResidual>
  __device__ void encode(float (&v)[kBlockValues], int valid, Record& record);
  __device__ void store(uint8_t* target, const Record& record) const;
  __device__ void release(Stage stage, int k, int peer, int exponent);
  __device__ bool wait_ready(Stage stage, int k) const;
  __device__ void load_received(Stage stage, int source, int k, Record& record) const;
  __device__ void fetch(int place, Stage stage, int source, int k) const;
  __device__ void take_fetched(int place, Stage stage, int source, int k, Record& record) const;
  __device__ bool fetch_wanted();
  __device__ void keep_own(int, const Record& record);
  __device__ void recall_own(Record& record);
  static __device__ void add(const Record& record, float fold, bool fast, float (&sum)[kBlockValues]);
  __device__ void decode_output(const Record& record, float (&decoded)[kBlockValues]) const;
  static __device__ void scale_back(float (&v)[kBlockValues]);

  // -- phases: team_phases.cuh

  __device__ void push(int k);
  __device__ void push_tile(int segment, int k);
  __device__ void reduce(int k);
  __device__ void finish_reduce(int segment, int k, const BlockState<kState>& state, float (&sum)[kBlockValues],
                                Record& record);
  __device__ void tail(int k);
  __device__ void tail_one_shot(int k, const Record& received);
  __device__ void late_update(int k, const Record& own, const float (&reduced)[kBlockValues]);
  __device__ void poison(int from);

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
