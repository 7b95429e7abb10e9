// Instantiates the all-reduce for one policy and bit width: -DECHO_POLICY=rotated -DECHO_BITS=4
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

template <Algorithm kAlgorithm>
static Kernel select(Residual residual, StateDtype state) {
  if (residual == Residual::none) return all_reduce_kernel<kBits, kPolicy, kAlgorithm, Residual::none, StateDtype::bf16>;
  if (residual == Residual::local) {
    if (state == StateDtype::bf16) return all_reduce_kernel<kBits, kPolicy, kAlgorithm, Residual::local, StateDtype::bf16>;
    if (state == StateDtype::fp32) return all_reduce_kernel<kBits, kPolicy, kAlgorithm, Residual::local, StateDtype::fp32>;
    return all_reduce_kernel<kBits, kPolicy, kAlgorithm, Residual::local, StateDtype::compact>;
  }
  if (state == StateDtype::bf16) return all_reduce_kernel<kBits, kPolicy, kAlgorithm, Residual::consensus, StateDtype::bf16>;
  return all_reduce_kernel<kBits, kPolicy, kAlgorithm, Residual::consensus, StateDtype::fp32>;
}

static Kernel select(Algorithm algorithm, Residual residual, StateDtype state) {
  return algorithm == Algorithm::one_shot ? select<Algorithm::one_shot>(residual, state)
                                          : select<Algorithm::two_shot>(residual, state);
}

static cudaError_t prepare(Kernel kernel, int shared_bytes) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
}

template <>
cudaError_t AllReduce<kBits, kPolicy>::launch(const Arguments& arguments, Algorithm algorithm, Residual residual,
                                              StateDtype state, int num_blocks, cudaStream_t stream) {
  const Kernel kernel = select(algorithm, residual, state);
  const int shared_bytes = kTeams * team_shared_bytes(arguments.dtype, kBits, algorithm, arguments.depth);
  if (const cudaError_t error = prepare(kernel, shared_bytes); error != cudaSuccess) return error;
  kernel<<<num_blocks, kBlockThreads, shared_bytes, stream>>>(arguments);
  return cudaGetLastError();
}

template <>
cudaError_t AllReduce<kBits, kPolicy>::max_blocks(Algorithm algorithm, Residual residual, StateDtype state, Dtype dtype,
                                                  int depth, int* num_blocks) {
  const Kernel kernel = select(algorithm, residual, state);
  const int shared_bytes = kTeams * team_shared_bytes(dtype, kBits, algorithm, depth);
  if (const cudaError_t error = prepare(kernel, shared_bytes); error != cudaSuccess) return error;
  int device = 0, multiprocessors = 0, per_multiprocessor = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (const cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device); error != cudaSuccess) return error;
  const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &per_multiprocessor, reinterpret_cast<const void*>(kernel), kBlockThreads, shared_bytes);
  *num_blocks = multiprocessors * per_multiprocessor;
  return error;
}

}  // namespace echo
