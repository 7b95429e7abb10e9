// Instantiates the all-reduce and its halves for one policy and bit width: -DECHO_POLICY=rotated -DECHO_BITS=4
#include "all_reduce.cuh"
#include "launch.cuh"

#ifndef ECHO_POLICY
#define ECHO_POLICY rotated
#define ECHO_BITS 4
#endif

namespace echo {

constexpr Policy kPolicy = Policy::ECHO_POLICY;
constexpr int kBits = ECHO_BITS;

using Kernel = void (*)(Arguments);

template <Algorithm kAlgorithm, bool kPair>
static Kernel select(Residual residual, StateDtype state) {
  if constexpr (kAlgorithm != Algorithm::all_gather) {
    if (residual == Residual::local) {
      if (state == StateDtype::bf16)
        return all_reduce_kernel<kBits, kPolicy, kAlgorithm, Residual::local, StateDtype::bf16, kPair>;
      if (state == StateDtype::fp32)
        return all_reduce_kernel<kBits, kPolicy, kAlgorithm, Residual::local, StateDtype::fp32, false>;
      return all_reduce_kernel<kBits, kPolicy, kAlgorithm, Residual::local, StateDtype::compact, kPair>;
    }
  }
  if constexpr (!in_shares(kAlgorithm)) {
    if (residual == Residual::consensus) {
      if (state == StateDtype::bf16)
        return all_reduce_kernel<kBits, kPolicy, kAlgorithm, Residual::consensus, StateDtype::bf16, kPair>;
      return all_reduce_kernel<kBits, kPolicy, kAlgorithm, Residual::consensus, StateDtype::fp32, false>;
    }
  }
  return all_reduce_kernel<kBits, kPolicy, kAlgorithm, Residual::none, StateDtype::bf16, kPair>;
}

template <Algorithm kAlgorithm>
static Kernel select(Residual residual, StateDtype state, bool pair) {
  return pair ? select<kAlgorithm, true>(residual, state) : select<kAlgorithm, false>(residual, state);
}

static Kernel select(Algorithm algorithm, Residual residual, StateDtype state, bool pair) {
  switch (algorithm) {
    case Algorithm::one_shot:
      return select<Algorithm::one_shot>(residual, state, pair);
    case Algorithm::two_shot:
      return select<Algorithm::two_shot>(residual, state, pair);
    case Algorithm::reduce_scatter:
      return select<Algorithm::reduce_scatter>(residual, state, pair);
    case Algorithm::all_gather:
      break;
  }
  return select<Algorithm::all_gather>(residual, state, pair);
}

static cudaError_t prepare(Kernel kernel, int shared_bytes) {
  const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                 cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) cudaGetLastError();  // reported here; it must not surface at somebody else's launch
  return error;
}

// Depth is a matter of speed alone: what does not fit into shared memory is taken off.
static cudaError_t fit_depth(Algorithm algorithm, Residual residual, StateDtype state, Dtype dtype, int* depth,
                             int* shared_bytes) {
  int device = 0, limit = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (const cudaError_t error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
      error != cudaSuccess)
    return error;
  limit -= 1024;  // static shared memory, and what the driver keeps
  while (true) {
    *shared_bytes = kTeams * TeamLayout(kBits, algorithm, residual, state, dtype, *depth).bytes;
    if (*shared_bytes <= limit || *depth == 1) return cudaSuccess;
    --*depth;
  }
}

template <>
cudaError_t AllReduce<kBits, kPolicy>::launch(const Arguments& asked, Algorithm algorithm, Residual residual,
                                              StateDtype state, int num_blocks, cudaStream_t stream) {
  Arguments arguments = asked;
  int shared_bytes = 0;
  if (const cudaError_t error = fit_depth(algorithm, residual, state, arguments.dtype, &arguments.depth, &shared_bytes);
      error != cudaSuccess)
    return error;
  const bool pair = arguments.signals.world == 2 && arguments.dtype == Dtype::bf16 && arguments.aligned;
  const Kernel kernel = select(algorithm, residual, state, pair);
  if (const cudaError_t error = prepare(kernel, shared_bytes); error != cudaSuccess) return error;
  kernel<<<num_blocks, kAllReduceThreads, shared_bytes, stream>>>(arguments);
  return cudaGetLastError();
}

template <>
cudaError_t AllReduce<kBits, kPolicy>::max_blocks(Algorithm algorithm, Residual residual, StateDtype state, Dtype dtype,
                                                  int depth, int* num_blocks) {
  const Kernel kernel = select(algorithm, residual, state, false);
  int shared_bytes = 0;
  if (const cudaError_t error = fit_depth(algorithm, residual, state, dtype, &depth, &shared_bytes);
      error != cudaSuccess)
    return error;
  if (const cudaError_t error = prepare(kernel, shared_bytes); error != cudaSuccess) return error;
  int device = 0, multiprocessors = 0, per_multiprocessor = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (const cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
      error != cudaSuccess)
    return error;
  const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &per_multiprocessor, reinterpret_cast<const void*>(kernel), kAllReduceThreads, shared_bytes);
  *num_blocks = multiprocessors * per_multiprocessor;
  return error;
}

}  // namespace echo
