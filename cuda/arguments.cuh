// What a launch is told; host code and kernels share it.
#pragma once

#include "layout.cuh"

namespace echo {

// The host's failure record (pinned memory, int64): what `workspace.py` turns into a CommunicationError.
enum class Failure : int { none, timeout, mismatch, peer };
enum FailureField : int { kCode, kPeer, kStage, kRow, kExpected, kSeen, kSiteIdx, kDirection, kChunk };
constexpr int kFailureFields = 16;

struct Signals {
  uint8_t* peers[kMaxRanks];  // workspace of every rank, this one's included
  int64_t* failure;
  uint64_t timeout_ns;
  int rank, world;
  int site_idx, direction, chunk;
};

struct Coefficients {  // of Compensator, in its order
  float correction_decay, correction_from_average, correction_from_residual, average_decay, average_from_residual;
  // c and m2 are of the last residual alone: the update reads nothing of the old state.
  ECHO_HD bool memoryless() const { return correction_decay == 0.0f && correction_from_average == 0.0f; }
};

struct Arguments {
  Signals signals;
  const uint8_t* x;  // in shares, x and y point to where the first rank's share is or would be: a rank has only its own
  uint8_t* y;        // of a reduce-scatter's output and of an all-gather's input
  uint8_t* state;    // or null
  uint8_t* codes;    // or null: records that the result was decoded from, kept for replay and for the consensus update
  uint8_t* kept_x;   // or null: a copy of x, for the consensus update of a call in place
  int64_t num_values, num_basis_values;  // in shares, of one of them
  Dtype dtype;
  Rescale rescale;
  int group_size;
  int group_shift;  // group_size = 32 << group_shift
  int depth;
  bool fresh;    // first site of a pass: the state is not read
  bool aligned;  // x and y start on 16 bytes, and so do all shares
  uint32_t signature;
  WorkspaceLayout workspace;
  Coefficients coefficients;
};

// What the kernels that work on kept records are told: restoring the output, and the update of the consensus residual.
struct RecordArguments {
  const uint8_t* x;      // update: the call's input
  uint8_t* y;            // decode: the output
  const uint8_t* codes;  // one-shot [world][tiles], two-shot [segments][tiles] slots
  uint8_t* state;
  int64_t num_values, num_basis_values;
  Dtype dtype;
  Algorithm algorithm;
  int group_size, group_shift, world;
  float reciprocal_world;  // 1 / world where world is a power of two, else 0
  bool fresh, aligned;
  Coefficients coefficients;
};

struct ExactArguments {
  Signals signals;
  const uint8_t* x;
  uint8_t* y;
  int64_t num_values;
  Dtype dtype;
  bool aligned;
  uint32_t signature;
  WorkspaceLayout workspace;
};

}  // namespace echo
