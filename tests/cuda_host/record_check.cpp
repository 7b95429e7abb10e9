// Decoding of whatever a record may hold, behind a C interface for tests/test_fuzz.py.
#include "block.cuh"
#include "layout.cuh"
#include "quantizer.cuh"

using namespace echo;

template <int kBits, Policy kPolicy>
static void decode(int blocks_per_group, int exponent, int num_blocks, const uint32_t* stored, const uint32_t* codes,
                   float* decoded, float* sum) {
  using Q = Quantizer<kBits, kPolicy>;
  using Codec = BlockCodec<kBits, kPolicy>;
  for (int block = 0; block < num_blocks; ++block) {
    const Params params = Q::read(stored[block / blocks_per_group]);
    const float step = Q::step(params, exponent);
    uint32_t words[kBits];
    float values[kBlockValues], acc[kBlockValues];
    std::copy_n(codes + block * kBits, kBits, words);
    std::copy_n(sum + block * kBlockValues, kBlockValues, acc);
    Codec::decode(words, step, params.zero, decodes_fast(exponent), values);
    Codec::add_decoded(words, step, params.zero, decodes_fast(exponent), acc);
    std::copy_n(values, kBlockValues, decoded + block * kBlockValues);
    std::copy_n(acc, kBlockValues, sum + block * kBlockValues);
  }
}

// `stored`: parameters of each group; `codes`: as they lie in a record; `sum`: is added to.
extern "C" void record_decode(int bits, int policy, int blocks_per_group, int exponent, int num_blocks,
                              const uint32_t* stored, const uint32_t* codes, float* decoded, float* sum) {
#define ECHO_CASE(NAME)                                                                                            \
  case static_cast<int>(Policy::NAME):                                                                             \
    if (bits == 4)                                                                                                 \
      return decode<4, Policy::NAME>(blocks_per_group, exponent, num_blocks, stored, codes, decoded, sum);         \
    return decode<8, Policy::NAME>(blocks_per_group, exponent, num_blocks, stored, codes, decoded, sum);
  switch (policy) {
    ECHO_CASE(symmetric)
    ECHO_CASE(naive)
    ECHO_CASE(zero_aware)
    ECHO_CASE(rotated)
    ECHO_CASE(rotated_asymmetric)
  }
#undef ECHO_CASE
}
