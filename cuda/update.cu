// Kernels on kept records: the output once more, without communication (activation recompute), and the update of the
// consensus residual, u = x' - y / P (paper Sec. 5.1), beside the next matmul. A thread block is one team, a tile a
// turn.
#include "launch.cuh"
#include "state.cuh"

namespace echo {

template <int kBits, Policy kPolicy>
struct Records {
  using Q = Quantizer<kBits, kPolicy>;
  using Codec = BlockCodec<kBits, kPolicy>;

  // The decoded sum of this thread's block, in the basis.
  static __device__ __forceinline__ void sum(const RecordArguments& a, const Segments& segments, int segment,
                                             int64_t tile, float (&total)[kBlockValues]) {
    const SlotLayout layout(kBits, kPolicy, a.group_size);
    ECHO_UNROLL
    for (int i = 0; i < kBlockValues; ++i) total[i] = -0.0f;
    const int num_records = a.algorithm == Algorithm::one_shot ? a.world : 1;
    for (int i = 0; i < num_records; ++i) {
      const int64_t idx =
          a.algorithm == Algorithm::one_shot ? i * segments.max_tiles() + tile : segment * segments.max_tiles() + tile;
      const uint8_t* record = a.codes + idx * layout.bytes;
      uint32_t words[kBits];
      ECHO_UNROLL
      for (int j = 0; j < kBits / 4; ++j) {
        const uint4 chunk = reinterpret_cast<const uint4*>(record)[j * kTeamThreads + threadIdx.x];
        words[4 * j] = chunk.x;
        words[4 * j + 1] = chunk.y;
        words[4 * j + 2] = chunk.z;
        words[4 * j + 3] = chunk.w;
      }
      const uint8_t* params = record + layout.params + (threadIdx.x >> a.group_shift) * Q::kParamBytes;
      uint32_t stored = 0;
      if (Q::kParamBytes == 1)
        stored = *params;
      else if (Q::kParamBytes == 2)
        stored = *reinterpret_cast<const uint16_t*>(params);
      else
        stored = *reinterpret_cast<const uint32_t*>(params);
      const Params read = Q::read(stored);
      const int exponent = *reinterpret_cast<const int16_t*>(record + layout.header);
      const float step = Q::step(read, exponent);
      Codec::add_decoded(words, step, read.zero, decodes_fast(exponent), total);
    }
  }
};

struct Place {  // of a tile, from its number over all segments
  int segment;
  int64_t tile, first, end;
  __device__ __forceinline__ Place(const RecordArguments& a, const Segments& segments, int64_t number) {
    segment = static_cast<int>(number / segments.max_tiles());
    tile = number % segments.max_tiles();
    first = segments.begin(segment) + tile * kTileValues;
    end = min64(segments.end(segment), a.num_values);
  }
  __device__ __forceinline__ int64_t warp_first() const { return first + (threadIdx.x >> 5) * 32 * kBlockValues; }
};

__device__ __forceinline__ int64_t num_tiles(const RecordArguments& a, const Segments& segments) {
  return segments.max_tiles() * (a.algorithm == Algorithm::one_shot ? 1 : a.world);
}

template <int kBits, Policy kPolicy>
__global__ void __launch_bounds__(kTeamThreads) decode_kernel(const __grid_constant__ RecordArguments a) {
  __shared__ __align__(16) uint8_t rows[kTeamWarps * 32 * row_bytes_of(2)];
  const Segments segments(a.num_basis_values, a.world, a.group_size, a.algorithm);
  uint8_t* warp_rows = rows + (threadIdx.x >> 5) * 32 * row_bytes(a.dtype);
  for (int64_t number = blockIdx.x; number < num_tiles(a, segments); number += gridDim.x) {
    const Place place(a, segments, number);
    if (place.first >= place.end) continue;
    float sum[kBlockValues];
    Records<kBits, kPolicy>::sum(a, segments, place.segment, place.tile, sum);
    if (Quantizer<kBits, kPolicy>::kRotates) {
      hadamard(sum);
      ECHO_UNROLL
      for (int i = 0; i < kBlockValues; ++i) sum[i] = sum[i] * (1.0f / kBlockValues);
    }
    write_row(warp_rows + (threadIdx.x & 31) * row_bytes(a.dtype), a.dtype, sum);
    __syncwarp();
    stage_out(warp_rows, a.y, place.warp_first(), place.end, a.dtype, a.aligned);
    __syncwarp();
  }
}

// Everything that a tile needs is on its way before the first of it is used, and five thread blocks share a
// multiprocessor: the kernel is to be done when the matmul beside it is.
constexpr int kUpdateBlocks = 5;

template <int kBits, Policy kPolicy, StateDtype kState>
__global__ void __launch_bounds__(kTeamThreads, kUpdateBlocks)
    update_kernel(const __grid_constant__ RecordArguments a) {
  extern __shared__ __align__(16) uint8_t update_shared[];
  constexpr bool kRotates = Quantizer<kBits, kPolicy>::kRotates;
  const Segments segments(a.num_basis_values, a.world, a.group_size, a.algorithm);
  uint8_t* rows = update_shared + BlockState<kState>::kTileBytes;
  uint8_t* warp_rows = rows + (threadIdx.x >> 5) * 32 * row_bytes(a.dtype);
  for (int64_t number = blockIdx.x; number < num_tiles(a, segments); number += gridDim.x) {
    const Place place(a, segments, number);
    if (place.first >= place.end) continue;
    uint8_t* tile = a.state + number * BlockState<kState>::kTileBytes;
    stage_in(warp_rows, a.x, place.warp_first(), place.end, a.dtype, a.aligned);
    if (!a.fresh) BlockState<kState>::copy_async(update_shared, tile, !a.coefficients.memoryless());
    commit_stage();
    float sum[kBlockValues], v[kBlockValues];
    Records<kBits, kPolicy>::sum(a, segments, place.segment, place.tile, sum);
    wait_stage<0>();
    read_row(warp_rows + (threadIdx.x & 31) * row_bytes(a.dtype), a.dtype, v);
    __syncwarp();
    if (kRotates) hadamard(v);
    const BlockState<kState> state(update_shared, tile, a.fresh);
    state.add_correction(v);
    ECHO_UNROLL
    for (int i = 0; i < kBlockValues; ++i) {
      const float returned = kRotates ? sum[i] : rounded(sum[i], a.dtype);
      // A power of two is divided by exactly as its reciprocal multiplies.
      v[i] =
          v[i] - (a.reciprocal_world != 0.0f ? returned * a.reciprocal_world : returned / static_cast<float>(a.world));
    }
    state.update(v, a.coefficients);
  }
}

constexpr int kMaxRecordBlocks = 1 << 16;

template <int kBits, Policy kPolicy, StateDtype kState>
static cudaError_t launch_update_kernel(const RecordArguments& a, int blocks, cudaStream_t stream) {
  const auto kernel = update_kernel<kBits, kPolicy, kState>;
  const int shared_bytes = state_tile_bytes(kState) + kTeamWarps * 32 * row_bytes(a.dtype);
  const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                 cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return error;
  }
  kernel<<<blocks, kTeamThreads, shared_bytes, stream>>>(a);
  return cudaGetLastError();
}

template <int kBits, Policy kPolicy>
static cudaError_t launch_records(const RecordArguments& a, bool update, StateDtype state, cudaStream_t stream) {
  const Segments segments(a.num_basis_values, a.world, a.group_size, a.algorithm);
  const int64_t tiles = segments.max_tiles() * (a.algorithm == Algorithm::one_shot ? 1 : a.world);
  const int blocks = static_cast<int>(min64(tiles, kMaxRecordBlocks));
  if (!update)
    decode_kernel<kBits, kPolicy><<<blocks, kTeamThreads, 0, stream>>>(a);
  else if (state == StateDtype::bf16)
    return launch_update_kernel<kBits, kPolicy, StateDtype::bf16>(a, blocks, stream);
  else
    return launch_update_kernel<kBits, kPolicy, StateDtype::fp32>(a, blocks, stream);
  return cudaGetLastError();
}

template <int kBits>
static cudaError_t launch_policy(const RecordArguments& a, Policy policy, bool update, StateDtype state,
                                 cudaStream_t stream) {
  switch (policy) {
    case Policy::symmetric:
      return launch_records<kBits, Policy::symmetric>(a, update, state, stream);
    case Policy::naive:
      return launch_records<kBits, Policy::naive>(a, update, state, stream);
    case Policy::zero_aware:
      return launch_records<kBits, Policy::zero_aware>(a, update, state, stream);
    case Policy::rotated:
      return launch_records<kBits, Policy::rotated>(a, update, state, stream);
    case Policy::rotated_asymmetric:
      return launch_records<kBits, Policy::rotated_asymmetric>(a, update, state, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch_decode(const RecordArguments& a, int bits, Policy policy, cudaStream_t stream) {
  return bits == 4 ? launch_policy<4>(a, policy, false, StateDtype::bf16, stream)
                   : launch_policy<8>(a, policy, false, StateDtype::bf16, stream);
}

cudaError_t launch_update(const RecordArguments& a, int bits, Policy policy, StateDtype state, cudaStream_t stream) {
  return bits == 4 ? launch_policy<4>(a, policy, true, state, stream)
                   : launch_policy<8>(a, policy, true, state, stream);
}

}  // namespace echo
