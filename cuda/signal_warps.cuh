// The two warps of a thread block that speak with other ranks, so that no team waits for a fence or a poll.
#pragma once

#include "signal.cuh"
#include "team_plan.cuh"

namespace echo {

// The send warp: announces the records that teams have stored. One fence serves all that is ready.
template <typename Plan>
__device__ __forceinline__ void run_send_warp(const Arguments& a, uint8_t* shared, int team_bytes) {
  const int lane = threadIdx.x & 31;
  uint32_t sent[kTeams] = {};
  bool open[kTeams];
  ECHO_UNROLL
  for (int t = 0; t < kTeams; ++t) open[t] = Plan(a, t).num_rows > 0;
  while (true) {
    uint32_t complete[kTeams];
    bool any_new = false, any_open = false;
    ECHO_UNROLL
    for (int t = 0; t < kTeams; ++t) {
      complete[t] = sent[t];
      if (!open[t]) continue;
      const TeamScratch* scratch = scratch_of(shared, team_bytes, t);
      const bool finished =
          load_acquire_shared(&scratch->finished) == kTeamWarps;  // before the events, which are then the last
      const uint32_t behind = load_acquire_shared(&scratch->issued[lane % kTeamWarps]) - sent[t];
      complete[t] = sent[t] + __reduce_min_sync(~0u, behind);
      if (complete[t] != sent[t])
        any_new = true;
      else if (__all_sync(~0u, finished))
        open[t] = false;
      any_open = any_open || open[t];
    }
    if (!any_open) return;
    if (!any_new) {
      __nanosleep(40);
      continue;
    }
    fence_system();
    ECHO_UNROLL
    for (int t = 0; t < kTeams; ++t) {
      if (complete[t] == sent[t]) continue;
      const Plan plan(a, t);
      TeamScratch* scratch = scratch_of(shared, team_bytes, t);
      for (uint32_t event = sent[t]; event != complete[t]; ++event) {
        const uint32_t packed = scratch->events[event % kMaxEvents];
        const int exponent = scratch->event_exponent[event % kMaxEvents];
        const int peer = static_cast<int>(packed >> 1 & 15u);
        const uint32_t tile_number = scratch->epoch + (packed >> 5);
        if (lane < a.signals.world && lane != a.signals.rank && (peer == kAllPeers || peer == lane))
          store_relaxed(plan.flag(static_cast<Stage>(packed & 1u), lane, a.signals.rank, tile_number),
                        make_flag(tile_number, exponent, a.signature));
      }
      __syncwarp();
      sent[t] = complete[t];
      if (lane == 0) store_release_shared(&scratch->sent, sent[t]);
    }
  }
}

// The receive warp: lane 8 t + s waits for the records that source s sends to team t, in order, checks that they are of
// this call and hands on their exponents. A rank that waits for a sum may do so because of a third rank's missing push:
// it is a little more patient, so that the rank which waits for the culprit speaks first.
template <typename Plan>
__device__ __forceinline__ void run_receive_warp(const Arguments& a, uint8_t* shared, int team_bytes,
                                                 uint32_t* failed) {
  static_assert(kTeams * kMaxRanks <= 32, "a lane for every team and source");
  const int lane = threadIdx.x & 31;
  const int source = lane % kMaxRanks;
  if (lane >= kTeams * kMaxRanks) return;
  const Plan plan(a, lane / kMaxRanks);
  TeamScratch* scratch = scratch_of(shared, team_bytes, lane / kMaxRanks);
  const uint32_t epoch = scratch->epoch;
  const bool receives = source < a.signals.world && source != a.signals.rank && plan.num_rows > 0;
  const int rows[2] = {receives ? plan.rows_from(Stage::push, source) : 0,
                       receives ? plan.rows_from(Stage::gather, source) : 0};
  int next[2] = {0, 0};
  Patience patience(a.signals);
  constexpr uint64_t kGatherGraceNs = 200'000'000;
  while (next[0] < rows[0] || next[1] < rows[1]) {
    bool progress = false;
    ECHO_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (next[i] >= rows[i]) continue;
      const Stage stage = static_cast<Stage>(i);
      const uint32_t tile_number = epoch + static_cast<uint32_t>(next[i]);
      const uint32_t expected = flag_value(tile_number);
      const uint64_t seen = load_acquire(plan.flag(stage, a.signals.rank, source, tile_number));
      if (flag_is_of(seen, tile_number)) {
        if (flag_signature(seen) != (a.signature & 0xffffu)) {
          report(a.signals, Failure::mismatch, source, stage, plan.tile_of_row(next[i]), a.signature & 0xffffu,
                 flag_signature(seen));
          store_release_shared(failed, 1u);
          return;
        }
        scratch->exponent[i][source][next[i] & (kMaxRing - 1)] = static_cast<int16_t>(flag_exponent(seen));
        ++next[i];
        store_release_shared(&scratch->ready[i][source], static_cast<uint32_t>(next[i]));
        progress = true;
      } else if (i == 1 && next[0] < rows[0]) {
        // What is missing first is the push: it is what a failure is about.
      } else if (patience.is_over(source, stage, plan.tile_of_row(next[i]), expected, flag_epoch(seen))) {
        store_release_shared(failed, 1u);
        return;
      }
    }
    if (progress)
      patience.renew();
    else
      __nanosleep(200);  // leaves the issue slots to the teams
    patience.set_grace(next[0] < rows[0] ? 0 : kGatherGraceNs);
    if (load_acquire_shared(failed) != 0u) return;
  }
}

}  // namespace echo
