// The compensated, quantized all-reduce and its halves: one persistent kernel a call (paper Secs. 4.1, 5.1).
//
// What is computed is echo_megatron/reference.py; phases of the kernel, tile by tile:
//   1 push    x' = basis(x) + c; quantize; one-shot: store the record to every peer and keep the own codes,
//             two-shot: store the record of a peer's segment to that peer
//   2 reduce  two-shot: own segment: own x' + received records in rank order; quantize the sum; store to every peer
//   3 tail    one-shot: sum of all records in rank order; two-shot: the sums of the peers' segments; inverse basis; y
//   residual local: the state of an element is read and written in the phase that quantizes it.
//   rescale group adds phase 0: the largest finite |x| over the ranks, through the same memory.
// Sequence parallelism's halves leave phases out, over shares in place of segments (layout.cuh):
//   reduce-scatter: 1 and 2 of two-shot; the sum is not quantized, and is y
//   all-gather: 1 of one-shot, which also decodes the own record, and 3 of two-shot, of records that were pushed
// Phases run staggered: while tile k is pushed, tile k - depth is reduced (or, one-shot, finished) and tile
// k - 2 depth finished, so a wait usually finds its record there.
//
// Why no barrier. Tile number k of a team goes to slot k % ring; numbers go on from call to call. When a rank pushes
// tile k of team g it has finished tile k - 1 - 2 depth, or all before it if a call lies between. Every other rank's
// team g had then pushed that tile, and before that, in program order, had reduced tile k - 2 - 3 depth and finished
// earlier ones. So a ring of 3 depth + 2 slots is never overwritten before it is read. A team is a fixed set of threads
// of the call's own grid, so between calls the end of the kernel takes the place of program order. Where a tile is
// finished `depth` tiles after it was pushed (one-shot, reduce-scatter, all-gather) 2 depth + 2 slots do.
#pragma once

#include "amax.cuh"
#include "signal_warps.cuh"
#include "team.cuh"
#include "team_phases.cuh"
#include "team_records.cuh"
#include "team_tiles.cuh"

namespace echo {

// A thread block: the teams, a send warp, a receive warp.
constexpr int kAllReduceThreads = kBlockThreads + 64;

template <int kBits, Policy kPolicy, Algorithm kAlgorithm, Residual kResidual, StateDtype kState, bool kPair>
__global__ void __launch_bounds__(kAllReduceThreads, 1) all_reduce_kernel(const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint32_t failed;
  using Plan = TeamPlan<kBits, kPolicy, kAlgorithm>;
  int exponent = 0;
  bool ok = true;
  if (arguments.rescale == Rescale::group)
    exponent = exchange_amax<kAlgorithm>(arguments, Quantizer<kBits, kPolicy>::kRotates, ok);
  const TeamLayout layout(kBits, kAlgorithm, kResidual, kState, arguments.dtype, arguments.depth);
  if (threadIdx.x < kTeams) {
    TeamScratch* scratch = scratch_of(shared, layout.bytes, threadIdx.x);
    for (int i = 0; i < kTeamWarps; ++i) scratch->issued[i] = 0;
    scratch->sent = 0;
    scratch->finished = 0;
    for (int i = 0; i < kMaxRanks; ++i) scratch->ready[0][i] = scratch->ready[1][i] = 0;
    const Plan plan(arguments, threadIdx.x);
    scratch->epoch = plan.num_rows > 0 ? *plan.epoch_word() : 0u;
  }
  if (threadIdx.x == 0) failed = ok ? 0u : 1u;
  __syncthreads();
  const int warp = threadIdx.x / 32;
  if (warp == kTeams * kTeamWarps) {
    run_send_warp<Plan>(arguments, shared, layout.bytes);
  } else if (warp == kTeams * kTeamWarps + 1) {
    run_receive_warp<Plan>(arguments, shared, layout.bytes, &failed);
  } else {
    Team<kBits, kPolicy, kAlgorithm, kResidual, kState, kPair>(arguments, shared, layout, exponent, &failed).run();
  }
}

}  // namespace echo
