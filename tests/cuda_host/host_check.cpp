// The headers in cuda/ behind a C interface that tests/test_cuda_host.py calls.
#include "block.cuh"
#include "layout.cuh"
#include "quantizer.cuh"
#include "state.cuh"

namespace {

using namespace echo;

struct Range {
  float lo = 0.0f, hi = 0.0f;
  bool finite = true;
};

// The range of a group; of a group of one block by `group_range` itself, which else needs a warp.
template <bool kSymmetric>
Range group_range_of(const float* values, int num_values) {
  Range range{values[0], values[0], true};
  if (num_values == kBlockValues) {
    float v[kBlockValues];
    std::copy_n(values, kBlockValues, v);
    group_range<kSymmetric>(v, kBlockValues, 0, range.lo, range.hi, range.finite);
    return range;
  }
  for (int i = 0; i < num_values; ++i) {
    if (!std::isfinite(values[i])) return {0.0f, 0.0f, false};
    range.lo = std::min(range.lo, values[i]);
    range.hi = std::max(range.hi, values[i]);
  }
  if (kSymmetric) {
    range.hi = std::fabs(std::max(-range.lo, range.hi));
    range.lo = -range.hi;
  }
  return range;
}

template <int kBits>
uint8_t code_of(const uint32_t* words, int i) {
  constexpr int kPerWord = 32 / kBits;
  return static_cast<uint8_t>(words[i / kPerWord] >> (i % kPerWord * kBits) & ((1u << kBits) - 1));
}

// Calls `function` with the quantizer's type.
template <typename Function>
void dispatch(int bits, int policy, Function function) {
#define ECHO_CASE(NAME)                                                                 \
  case static_cast<int>(Policy::NAME):                                                  \
    if (bits == 4) return function(BlockCodec<4, Policy::NAME>{});                      \
    return function(BlockCodec<8, Policy::NAME>{});
  switch (policy) {
    ECHO_CASE(symmetric)
    ECHO_CASE(naive)
    ECHO_CASE(zero_aware)
    ECHO_CASE(rotated)
    ECHO_CASE(rotated_asymmetric)
  }
#undef ECHO_CASE
}

// A site of one tile: x' = x + c, then the update with u. The old state is read from a copy, made by each thread for
// itself, or from the state.
template <StateDtype kDtype>
void state_site(bool fresh, bool by_copy, const Coefficients& k, uint8_t* state, const float* x, const float* u,
                float* compensated) {
  using State = BlockState<kDtype>;
  for (threadIdx.x = 0; threadIdx.x < kTeamThreads; ++threadIdx.x) {
    std::vector<uint8_t> copy(State::kTileBytes, 0xff);
    if (by_copy) State::copy_async(copy.data(), state, true);
    const State block(by_copy ? copy.data() : state, state, fresh);
    float v[kBlockValues], residual[kBlockValues];
    const unsigned at = threadIdx.x * kBlockValues;
    std::copy_n(x + at, kBlockValues, v);
    std::copy_n(u + at, kBlockValues, residual);
    block.add_correction(v);
    block.update(residual, k);
    std::copy_n(v, kBlockValues, compensated + at);
  }
}

}  // namespace

extern "C" {

// Groups of `values`, all in tiles of one exponent, value by value.
void check_quantize(int bits, int policy, int group_size, int exponent, int64_t num_groups, const float* values,
                    uint32_t* stored, float* scale, float* zero, uint8_t* codes, float* decoded) {
  dispatch(bits, policy, [&](auto codec) {
    using Q = typename decltype(codec)::Q;
    for (int64_t g = 0; g < num_groups; ++g) {
      const float* group = values + g * group_size;
      const Range range = group_range_of<Q::kSymmetric>(group, group_size);
      const Params params = Q::parameters(range.lo, range.hi, range.finite, exponent);
      const Params read = Q::read(params.stored);
      stored[g] = params.stored;
      scale[g] = read.scale;
      zero[g] = read.zero;
      const float step = Q::step(read, exponent);
      for (int i = 0; i < group_size; ++i) {
        const uint32_t code = Q::code(group[i], params, exponent);
        codes[g * group_size + i] = static_cast<uint8_t>(code);
        decoded[g * group_size + i] = Q::value(code, read, step);
      }
    }
  });
}

// The same as blocks in registers: codes, v - v^, and v^ through the decoder (first, then added to `acc`).
void check_block(int bits, int policy, int group_size, int exponent, int64_t num_groups, const float* values,
                 uint8_t* codes, uint8_t* codes_with_residual, float* residual, float* decoded, float* acc) {
  dispatch(bits, policy, [&](auto codec) {
    using Codec = decltype(codec);
    using Q = typename Codec::Q;
    constexpr int kBits = 32 / Codec::kPerWord;
    for (int64_t g = 0; g < num_groups; ++g) {
      const Range range = group_range_of<Q::kSymmetric>(values + g * group_size, group_size);
      const Params params = Q::parameters(range.lo, range.hi, range.finite, exponent);
      const float step = Q::step(params, exponent);
      const bool fast = exponent >= -kFastDecodeExponent && exponent <= kFastDecodeExponent;
      for (int64_t at = g * group_size; at < (g + 1) * group_size; at += kBlockValues) {
        float v[kBlockValues], first[kBlockValues], sum[kBlockValues];
        uint32_t words[kBits];
        std::copy_n(values + at, kBlockValues, v);
        Codec::template encode<false>(v, params, exponent, words);
        for (int i = 0; i < kBlockValues; ++i) codes[at + i] = code_of<kBits>(words, i);
        Codec::template encode<true>(v, params, exponent, words);
        for (int i = 0; i < kBlockValues; ++i) codes_with_residual[at + i] = code_of<kBits>(words, i);
        std::copy_n(v, kBlockValues, residual + at);
        std::copy_n(acc + at, kBlockValues, sum);
        Codec::decode(words, step, params.zero, fast, first);
        Codec::add_decoded(words, step, params.zero, fast, sum);
        std::copy_n(first, kBlockValues, decoded + at);
        std::copy_n(sum, kBlockValues, acc + at);
      }
    }
  });
}

void check_hadamard(int64_t num_blocks, float* values) {
  for (int64_t b = 0; b < num_blocks; ++b) {
    float v[kBlockValues];
    std::copy_n(values + b * kBlockValues, kBlockValues, v);
    hadamard(v);
    std::copy_n(v, kBlockValues, values + b * kBlockValues);
  }
}

int check_exponent_for(float amax, int target) { return exponent_for(amax, target); }
int check_call_exponent(float amax, int rotates) { return call_exponent(amax, rotates != 0); }
uint32_t check_half_bits(float value) { return half_bits(value); }
float check_half_value(uint32_t bits) { return half_value(bits); }
float check_compact_scale(float amax) { return compact_scale(amax); }

int check_param_bytes(int policy) { return param_bytes(static_cast<Policy>(policy)); }
void check_slot(int bits, int policy, int group_size, int* offsets) {
  const SlotLayout slot(bits, static_cast<Policy>(policy), group_size);
  offsets[0] = slot.params;
  offsets[1] = slot.header;
  offsets[2] = slot.bytes;
}
void check_segment(int64_t num_values, int world, int group_size, int algorithm, int rank, int64_t* out) {
  const Segments segments(num_values, world, group_size, static_cast<Algorithm>(algorithm));
  out[0] = segments.begin(rank);
  out[1] = segments.end(rank);
  out[2] = segments.tiles(rank);
  out[3] = segments.max_tiles();
}
void check_share(int64_t num_values, int64_t num_basis_values, int world, int group_size, int algorithm_idx, int rank,
                 int64_t* out) {
  const auto algorithm = static_cast<Algorithm>(algorithm_idx);
  const Segments segments(num_basis_values, world, group_size, algorithm, num_values);
  out[0] = segments.begin(rank);
  out[1] = segments.values_end(rank, num_values);
  out[2] = segments.end(rank);
  out[3] = segments.tiles(rank);
  out[4] = segments.max_tiles();
  out[5] = state_segments(algorithm, world);
}
int check_state_segment(int algorithm, int rank, int segment) {
  return state_segment(static_cast<Algorithm>(algorithm), rank, segment);
}
void check_state(int dtype, int* out) {
  out[0] = state_correction_bytes(static_cast<StateDtype>(dtype));
  out[1] = state_tile_bytes(static_cast<StateDtype>(dtype));
  out[2] = dtype == static_cast<int>(StateDtype::bf16)   ? BlockState<StateDtype::bf16>::kTileBytes
           : dtype == static_cast<int>(StateDtype::fp32) ? BlockState<StateDtype::fp32>::kTileBytes
                                                         : BlockState<StateDtype::compact>::kTileBytes;
}
int64_t check_slot_offset(int world, int num_teams, int ring, int64_t slot_bytes, int stage, int receiver, int source,
                          int team, uint32_t k, int64_t* flag_offset, int64_t* bytes) {
  const WorkspaceLayout layout{world, num_teams, ring, slot_bytes};
  const int64_t slot = layout.slot_idx(static_cast<Stage>(stage), receiver, source, team, k);
  *flag_offset = layout.flag_offset(slot);
  *bytes = layout.bytes();
  return layout.slot_offset(slot);
}
uint32_t check_flag_value(uint32_t tile_number) { return flag_value(tile_number); }
uint64_t check_flag(uint32_t tile_number, int exponent, uint32_t signature, int64_t* parts) {
  const uint64_t flag = make_flag(tile_number, exponent, signature);
  parts[0] = flag_epoch(flag);
  parts[1] = flag_exponent(flag);
  parts[2] = flag_signature(flag);
  return flag;
}
int check_ring_for(int depth) { return ring_for(depth); }

void check_state_site(int dtype, int fresh, int by_copy, const float* coefficients, uint8_t* state, const float* x,
                      const float* u, float* compensated) {
  const Coefficients k{coefficients[0], coefficients[1], coefficients[2], coefficients[3], coefficients[4]};
  switch (static_cast<StateDtype>(dtype)) {
    case StateDtype::bf16: return state_site<StateDtype::bf16>(fresh != 0, by_copy != 0, k, state, x, u, compensated);
    case StateDtype::fp32: return state_site<StateDtype::fp32>(fresh != 0, by_copy != 0, k, state, x, u, compensated);
    case StateDtype::compact: return state_site<StateDtype::compact>(fresh != 0, by_copy != 0, k, state, x, u, compensated);
  }
}

}  // extern "C"
