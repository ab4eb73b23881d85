// How a row lies in memory and in a part of a checkpoint, and what a table is told about itself.
//
//   key 8 | shows 4 | clicks 4 | meta 4 | first-order weight 4 | its state | embedding | its state
//
// Everything is little-endian; weights, counts and state are float32, the embedding float32 or bfloat16. Rows are packed:
// a row's size is a multiple of 4, not of 8, so 64-bit fields are read with memcpy.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace wheel {

enum class RuleKind : uint32_t { kSgd = 0, kAdaGrad = 1, kAdaGradElementwise = 2, kAdam = 3, kAdamShared = 4 };

struct RuleOptions {
  RuleKind kind = RuleKind::kAdaGrad;
  float learning_rate = 0.05f, low = -10, high = 10;
  float initial_accumulator = 3, beta1 = 0.9f, beta2 = 0.999f, epsilon = 1e-8f;
};

struct Options {
  uint64_t table = 0;                    // its number, for messages and the folder of its parts
  uint32_t width = 16;                   // floats of an embedding
  uint32_t shards = 48;                  // of the whole table
  uint32_t server = 0, servers = 1;      // which of them these are
  RuleOptions first, embedding;
  float unclicked = 1, clicked = 1;      // score = unclicked * (shows - clicks) + clicked * clicks
  std::vector<float> admission{0};       // score from which a key has an embedding, by class of keys
  float decay = 1, delete_below = 0, delete_unseen = 1e30f;
  bool half = false;                     // embeddings in bfloat16
  bool train_created = false;            // the push that creates an embedding trains it, too
  bool train_unadmitted = true;          // keys without an embedding have a trained first-order weight
  float l2 = 0;                          // factor of the true value (initial + change) in the gradient
  uint64_t initial_state = 0;            // of the generator of initial embeddings; see initial_value
  float initial_range = 0;
  uint64_t max_rows = 0;                 // on this server; 0: no bound
  bool log_removed = false;              // remember deleted keys for incremental checkpoints
  uint32_t threads = 0;                  // that work on one request; 0: as many as the machine has processors
  std::string spill;                     // folder of the file that holds the rows that are not hot; empty: memory
  uint64_t memory = 0;                   // bytes of index and hot rows on this server, if rows are spilled
  uint32_t save_pause_us = 0;            // after each chunk of a save, for tests: a slow disk
};

inline uint32_t state_floats(RuleKind kind, uint32_t width) {
  switch (kind) {
    case RuleKind::kSgd: return 0;
    case RuleKind::kAdaGrad: return 1;
    case RuleKind::kAdaGradElementwise: return width;
    case RuleKind::kAdam: return 2 * width + 2;
    case RuleKind::kAdamShared: return 4;
  }
  return 0;
}

template <class T>
T peek(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}
template <class T>
void poke(char* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

struct Layout {
  static constexpr uint32_t kKey = 0, kShows = 8, kClicks = 12, kMeta = 16, kFirst = 20, kFirstState = 24;
  uint32_t width = 0, first_state = 0, embedding_state = 0;
  bool half = false;
  uint32_t embedding_at = 0, embedding_state_at = 0, row_bytes = 0;

  Layout() = default;
  explicit Layout(const Options& o)
      : width(o.width),
        first_state(state_floats(o.first.kind, 1)),
        embedding_state(state_floats(o.embedding.kind, o.width)),
        half(o.half) {
    embedding_at = kFirstState + 4 * first_state;
    embedding_state_at = embedding_at + (half ? (2 * width + 3) / 4 * 4 : 4 * width);
    row_bytes = embedding_state_at + 4 * embedding_state;
  }
};

// The meta word: what a row is, in which day it was last trained, and between which marks (both count round).
struct Meta {
  static constexpr uint32_t kUsed = 1u << 31, kHas = 1u << 30;  // a free place has neither; kHas: has an embedding
  static constexpr uint32_t kClassShift = 24, kClassMask = 63u << kClassShift, kMaxClasses = 64;
  static constexpr uint32_t kMarkShift = 12, kMarkMask = 4095u << kMarkShift, kDayMask = 4095u;
  static uint32_t unseen_days(uint32_t meta, uint32_t today) { return (today - meta) & kDayMask; }
  static uint32_t marks_ago(uint32_t meta, uint32_t mark) { return (mark - (meta >> kMarkShift)) & 4095u; }
};

inline uint64_t key_of(const char* row) { return peek<uint64_t>(row); }
inline uint64_t mix(uint64_t key) {  // of well mixed keys of one shard: all bits count again
  key ^= key >> 32;
  key *= 0x9E3779B97F4A7C15ull;
  return key ^ key >> 29;
}
inline uint64_t splitmix64(uint64_t z) {  // Steele, Lea, Flood 2014; the output function
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}
// Element i of the key's initial embedding, as pserver.initial computes it: a codebook of 65,536 rows.
inline float initial_value(const Options& o, uint64_t key, uint32_t i) {
  const uint64_t n = (key & 0xFFFF) * o.width + i + 1;
  const float fraction = float(splitmix64(o.initial_state + n * 0x9E3779B97F4A7C15ull) >> 40) * 0x1p-24f;
  return (fraction * 2 - 1) * o.initial_range;
}

inline float from_half(uint16_t h) {
  const uint32_t bits = uint32_t(h) << 16;
  return peek<float>(reinterpret_cast<const char*>(&bits));
}
// Rounds to one of the two neighbours, to the nearer one more often: so that small steps add up. `random`: 16 bits.
inline uint16_t to_half(float value, uint32_t random) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return uint16_t((bits + (random & 0xFFFF)) >> 16);
}

}  // namespace wheel
