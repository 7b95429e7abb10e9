// Host functions that launch the kernels; binding.cpp needs no more of them.
#pragma once

#include <cuda_runtime_api.h>

#include "arguments.cuh"

namespace echo {

// Each (policy, bits) is a translation unit of its own, compiled from all_reduce.cu.
template <int kBits, Policy kPolicy>
struct AllReduce {
  static cudaError_t launch(const Arguments&, Algorithm, Residual, StateDtype, int num_blocks, cudaStream_t);
  // Thread blocks that can be resident at once on the present device.
  static cudaError_t max_blocks(Algorithm, Residual, StateDtype, Dtype, int depth, int* num_blocks);
};

cudaError_t launch_exact(const ExactArguments&, int num_blocks, cudaStream_t);
cudaError_t launch_decode(const RecordArguments&, int bits, Policy, cudaStream_t);
cudaError_t launch_update(const RecordArguments&, int bits, Policy, StateDtype, cudaStream_t);

}  // namespace echo
