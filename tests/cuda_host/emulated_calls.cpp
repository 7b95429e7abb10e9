// Calls of P ranks, one after the other, by the kernels of cuda/all_reduce.cuh on emulated thread blocks: -DECHO_POLICY
// and -DECHO_BITS say which. tests/test_cuda_emulated.py calls this.
#include "emulator.h"

#include "all_reduce.cuh"

namespace {

using namespace echo;
using Kernel = void (*)(Arguments);

struct Call {  // as in tests/emulated_ranks.py
  int32_t algorithm, residual, state_dtype, dtype, rescale, group_size, depth, num_blocks, fresh, aligned;
  int64_t num_values, num_basis_values;
  float coefficients[5];
  uint32_t signature;
  uint8_t *x[kMaxRanks], *y[kMaxRanks], *state[kMaxRanks];
};

template <Algorithm kAlgorithm, Residual kResidual, StateDtype kState>
Kernel kernel(bool pair) {
  if (kState == StateDtype::fp32) pair = false;
  return pair ? all_reduce_kernel<ECHO_BITS, Policy::ECHO_POLICY, kAlgorithm, kResidual, kState, true>
              : all_reduce_kernel<ECHO_BITS, Policy::ECHO_POLICY, kAlgorithm, kResidual, kState, false>;
}

Kernel select(const Call& call, bool pair) {
  const auto algorithm = static_cast<Algorithm>(call.algorithm);
  const auto state = static_cast<StateDtype>(call.state_dtype);
  const bool compensates = static_cast<Residual>(call.residual) == Residual::local;
  if (algorithm == Algorithm::all_gather) return kernel<Algorithm::all_gather, Residual::none, StateDtype::bf16>(pair);
  if (algorithm == Algorithm::one_shot && state == StateDtype::compact && compensates)
    return kernel<Algorithm::one_shot, Residual::local, StateDtype::compact>(pair);
  if (algorithm == Algorithm::two_shot && state == StateDtype::compact && compensates)
    return kernel<Algorithm::two_shot, Residual::local, StateDtype::compact>(pair);
  if (algorithm != Algorithm::reduce_scatter) emulator::fail("an all-reduce that is not compiled in");
  if (!compensates) return kernel<Algorithm::reduce_scatter, Residual::none, StateDtype::bf16>(pair);
  if (state == StateDtype::bf16) return kernel<Algorithm::reduce_scatter, Residual::local, StateDtype::bf16>(pair);
  if (state == StateDtype::fp32) return kernel<Algorithm::reduce_scatter, Residual::local, StateDtype::fp32>(pair);
  return kernel<Algorithm::reduce_scatter, Residual::local, StateDtype::compact>(pair);
}

struct Launch {
  Kernel kernel;
  int grid, shared_bytes;
  std::vector<Arguments> arguments;  // by rank
};

std::vector<Launch> launches;
std::vector<emulator::Barrier> calls_end;  // by rank
int fibers_a_rank;

Launch prepare(const Call& call, int world, const WorkspaceLayout& workspace, uint8_t** workspaces, int64_t* failures) {
  const auto algorithm = static_cast<Algorithm>(call.algorithm);
  const auto dtype = static_cast<Dtype>(call.dtype);
  const Segments segments(call.num_basis_values, world, call.group_size, algorithm, call.num_values);
  const int64_t share_bytes = call.num_values * (dtype == Dtype::fp32 ? 4 : 2);
  Launch launch;
  launch.kernel = select(call, world == 2 && dtype == Dtype::bf16 && call.aligned);
  launch.grid = static_cast<int>(min64(call.num_blocks, segments.max_tiles()));
  launch.shared_bytes = kTeams * TeamLayout(ECHO_BITS, algorithm, static_cast<Residual>(call.residual),
                                            static_cast<StateDtype>(call.state_dtype), dtype, call.depth)
                                     .bytes;
  for (int rank = 0; rank < world; ++rank) {
    Arguments a{};
    for (int peer = 0; peer < world; ++peer) a.signals.peers[peer] = workspaces[peer];
    a.signals.failure = failures + rank * kFailureFields;
    a.signals.timeout_ns = 10'000'000;  // a round of the scheduler counts 1,000
    a.signals.rank = rank;
    a.signals.world = world;
    a.x = call.x[rank] - (algorithm == Algorithm::all_gather ? rank * share_bytes : 0);
    a.y = call.y[rank] - (algorithm == Algorithm::reduce_scatter ? rank * share_bytes : 0);
    a.state = call.state[rank];
    a.num_values = call.num_values;
    a.num_basis_values = call.num_basis_values;
    a.dtype = dtype;
    a.rescale = static_cast<Rescale>(call.rescale);
    a.group_size = call.group_size;
    while ((kBlockValues << a.group_shift) < a.group_size) ++a.group_shift;
    a.depth = call.depth;
    a.fresh = call.fresh != 0;
    a.aligned = call.aligned != 0;
    a.signature = call.signature | 1u;
    a.workspace = workspace;
    std::memcpy(&a.coefficients, call.coefficients, sizeof a.coefficients);
    launch.arguments.push_back(a);
  }
  return launch;
}

// One thread of one block of one rank, through all calls; a call begins when the rank's last one has ended.
void run_fiber() {
  emulator::Fiber* fiber = emulator::current;
  for (const Launch& launch : launches) {
    if (fiber->block->idx < launch.grid) {
      if (fiber->thread == 0) fiber->block->begin(launch.shared_bytes);
      fiber->grid = gridDim.x = launch.grid;
      emulator::wait_named(0, emulator::kThreads);
      launch.kernel(launch.arguments[fiber->rank]);
    }
    for (const auto& group : fiber->groups)
      if (!group.empty()) emulator::fail("copies are in flight at the kernel's end");
    fiber->groups.clear();
    emulator::wait(calls_end[fiber->rank], fibers_a_rank);
  }
  fiber->done = true;
  emulator::yield();
}

}  // namespace

extern "C" {

int64_t emulated_workspace_bytes(int world, int num_teams, int ring, int64_t slot_bytes) {
  return WorkspaceLayout{world, num_teams, ring, slot_bytes}.bytes();
}
int64_t emulated_slot_bytes(int group_size) { return SlotLayout(ECHO_BITS, Policy::ECHO_POLICY, group_size).bytes; }
int64_t emulated_state_tiles(const Call* call, int world) {
  const auto algorithm = static_cast<Algorithm>(call->algorithm);
  const Segments segments(call->num_basis_values, world, call->group_size, algorithm, call->num_values);
  return segments.max_tiles() * state_segments(algorithm, world);
}
int emulated_state_tile_bytes(int state_dtype) { return state_tile_bytes(static_cast<StateDtype>(state_dtype)); }

// False where a rank gets nowhere any more. `seed` 0: all ranks advance alike, else at random.
int emulate(int world, int num_blocks, int ring, int64_t slot_bytes, uint8_t** workspaces, int64_t* failures,
            int num_calls, const Call* calls, int copies_at_once, unsigned seed) {
  const WorkspaceLayout workspace{world, num_blocks * kTeams, ring, slot_bytes};
  launches.clear();
  for (int i = 0; i < num_calls; ++i)
    launches.push_back(prepare(calls[i], world, workspace, workspaces, failures));
  emulator::copies_at_once = copies_at_once != 0;
  calls_end.assign(world, {});
  fibers_a_rank = num_blocks * emulator::kThreads;
  std::vector<emulator::Block> blocks(world * num_blocks);
  std::vector<emulator::Fiber> fibers(world * fibers_a_rank);
  for (size_t i = 0; i < fibers.size(); ++i) {
    emulator::Fiber& fiber = fibers[i];
    fiber.block = &blocks[i / emulator::kThreads];
    fiber.block->idx = static_cast<int>(i / emulator::kThreads) % num_blocks;
    fiber.rank = static_cast<int>(i) / fibers_a_rank;
    fiber.thread = static_cast<int>(i) % emulator::kThreads;
    fiber.stack.resize(emulator::kStackBytes);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    makecontext(&fiber.context, run_fiber, 0);
  }
  std::mt19937 random(seed);
  size_t left = fibers.size();
  for (int64_t round = 0; left > 0; ++round) {
    if (round > 2'000'000) return 0;
    emulator::now += 1000;
    for (int rank = 0; rank < world; ++rank) {
      if (seed != 0 && random() % 3 == 0) continue;
      for (int i = rank * fibers_a_rank; i < (rank + 1) * fibers_a_rank; ++i) {
        emulator::Fiber& fiber = fibers[i];
        if (fiber.done) continue;
        emulator::current = &fiber;
        threadIdx.x = fiber.thread;
        blockIdx.x = fiber.block->idx;
        gridDim.x = fiber.grid;
        swapcontext(&emulator::scheduler, &fiber.context);
        left -= fiber.done;
      }
    }
  }
  return 1;
}

}  // extern "C"
