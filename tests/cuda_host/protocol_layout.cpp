// cuda/layout.cuh behind a C interface for tests/protocol_model.py, which numbers and places tiles as the kernels do.
#include "layout.cuh"

using namespace echo;

extern "C" {

int protocol_ring_for(int depth) { return ring_for(depth); }
int64_t protocol_slot(int world, int ring, int stage, int receiver, int source, uint32_t tile_number) {
  const WorkspaceLayout layout{world, 1, ring, 128};
  return layout.slot_idx(static_cast<Stage>(stage), receiver, source, 0, tile_number);
}
// Offsets in the receiver's workspace: {slot, its flag, the team's epoch, bytes of all}.
void protocol_place(int world, int num_teams, int ring, int64_t slot_bytes, int stage, int receiver, int source, int team,
                    uint32_t tile_number, int64_t* out) {
  const WorkspaceLayout layout{world, num_teams, ring, slot_bytes};
  const int64_t slot = layout.slot_idx(static_cast<Stage>(stage), receiver, source, team, tile_number);
  out[0] = layout.slot_offset(slot);
  out[1] = layout.flag_offset(slot);
  out[2] = layout.epoch_offset(team);
  out[3] = layout.bytes();
}
uint64_t protocol_flag(uint32_t tile_number, int exponent, uint32_t signature) {
  return make_flag(tile_number, exponent, signature);
}
uint32_t protocol_flag_value(uint32_t tile_number) { return flag_value(tile_number); }
uint32_t protocol_flag_epoch(uint64_t flag) { return flag_epoch(flag); }
int protocol_flag_is_of(uint64_t flag, uint32_t tile_number) { return flag_is_of(flag, tile_number); }
int64_t protocol_tiles(int64_t num_values, int world, int group_size, int algorithm, int rank) {
  const Segments segments(num_values, world, group_size, static_cast<Algorithm>(algorithm), num_values);
  return rank < 0 ? segments.max_tiles() : segments.tiles(rank);
}

}  // extern "C"
