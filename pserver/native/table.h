// A sparse table of one server: 64-bit key -> counts, first-order weight, embedding and the state of their update rules.
//
// Keys belong to shards (key % shards). A shard has a lock, an index and rows of one size in chunks of 1,024. Requests
// visit the shards of their keys one after the other, beginning at different ones, several threads at once.
//
// A save is of one moment, and goes on beside pushes: `mark` waits until no push is under way, notes how many rows each
// shard has, and lets pushes go on. From then on a push that changes a row which the saver has not read yet keeps the row
// as it was; the saver copies chunk by chunk and puts the kept rows back in its copy. Rows stay where they are until the
// saver is done: deleted ones leave free places.
#pragma once
#include <atomic>
#include <bitset>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>
#include "index.h"
#include "layout.h"
#include "memory.h"
#include "part_file.h"
#include "rules.h"
#include "workers.h"

namespace wheel {

struct Statistics {  // all since the start, unless it says otherwise
  uint64_t rows = 0;             // now
  uint64_t row_bytes = 0, index_bytes = 0, kept_bytes = 0;  // memory now: rows, index, rows kept for a save
  uint64_t evicted = 0, deleted = 0;
  uint64_t pushed = 0, pulled = 0;
  uint64_t max_rows = 0;
  uint64_t saving = 0;           // 1 from a mark until its save has ended
  static constexpr int kCount = 10;
};

class Table {
 public:
  explicit Table(const Options&);  // throws std::runtime_error, as everything here does, for what does not work
  ~Table();

  const Layout& layout() const { return layout_; }
  const Options& options() const { return o_; }
  size_t pulled_floats() const { return 3 + size_t(o_.width); }
  size_t pushed_floats() const { return 4 + size_t(o_.width); }

  // out [n, 3 + width]: shows, clicks, first-order weight, embedding; zeros for what is not there.
  void pull(const uint64_t* keys, size_t n, float* out);
  // values [n, 4 + width]: class, shows, clicks, gradient of the first-order weight, of the embedding.
  // rate: factor of the learning rate.
  void push(const uint64_t* keys, const float* values, size_t n, float rate = 1);
  // Whole rows, as they lie in memory [n, layout().row_bytes], whose unseen days count from today; zeros for unknown keys.
  void get_rows(const uint64_t* keys, size_t n, char* out);
  // Puts whole rows in place, created where need be.
  void set_rows(const char* rows, size_t n);

  void end_day();  // decays counts, deletes what the options say
  void mark(const std::string& id, bool advance_day);
  // Writes the state at a mark into the folder, a part for each shard. since: of an earlier mark or load; then only rows
  // that changed after it, and the keys that are gone. Whatever happens, the mark is used up.
  void save(const std::string& id, const std::string& folder, const std::string& since = "");
  void drop(const std::string& id);  // a mark that is not to be saved
  // Adds the rows of all parts in the folder that belong here, of a table with any number of shards; `id` becomes a mark.
  void load(const std::string& folder, const std::string& id);

  uint64_t rows() const { return total_.load(); }
  Statistics statistics();

 private:
  static constexpr uint32_t kChunkRows = 1024;
  static constexpr uint32_t kNew = 1u << 31;

  struct Kept {  // rows of a chunk as they were at the mark, for those that changed before the saver came by
    std::bitset<kChunkRows> has;
    std::vector<uint16_t> which;
    std::vector<char> rows;
  };
  struct Chunk {
    char* rows = nullptr;
    uint32_t saved = 0;  // number of the last mark whose saver has read this chunk
    std::unique_ptr<Kept> kept;
    uint32_t* words = nullptr;  // of a table that spills, one a row: see Hot
    off_t offset = 0;           // of the rows in the file
  };
  // Where a row of a table that spills is now. Hot: in a slot of memory, and the word has the slot, whether the row differs
  // from the file's, and how often the hand still passes it over (see `cool`). Cold: in the file alone, and the word has bits of
  // its hash, so that the file is read for no other key, nor when the index grows.
  struct Hot {
    static constexpr uint32_t kIs = 1u << 31, kDirty = 1u << 30, kPass = 1u << 26, kPasses = 15 * kPass, kSlot = (1u << 26) - 1;
    static uint32_t print(uint64_t hash) { return uint32_t(hash & 4095) | uint32_t(hash >> 20 & 0x7FFFF) << 12; }
    static uint64_t hash(uint32_t print) { return (print & 4095) | uint64_t(print >> 12) << 20; }
  };
  struct Removed {
    uint64_t key;
    uint64_t mark;
  };
  struct alignas(64) Shard {
    explicit Shard(Units& memory) : index(memory) {}
    std::mutex mutex;
    Index index;
    std::vector<Chunk> chunks;
    uint32_t used = 0;                 // places that have been used: rows and free ones
    uint32_t live = 0;
    uint32_t free = Index::kNone;      // first free place; the next is in its count of shows
    uint32_t marked_used = 0, hand = 0;
    std::vector<char*> hot;            // slots of hot rows, 1,024 a unit
    uint32_t slots = 0;                // that have been used
    std::vector<uint32_t> free_slots;  // of those
    uint32_t sweep = 0;                // the chunk from which rows go cold next
    float popular = 0;                 // shows from which a row is likely to be asked for again
    std::vector<Removed> removed;
    size_t marked_removed = 0;
  };
  struct Snapshot {
    std::string id;
    uint64_t mark = 0;
    uint32_t today = 0;
    bool writing = false;
  };
  struct Mark {
    uint64_t number;
    uint32_t today;
  };
  class Hashes;

  char* row(const Shard& s, uint32_t r) const {
    const Chunk& c = s.chunks[r / kChunkRows];
    if (spills_ && (c.words[r % kChunkRows] & Hot::kIs)) return slot(s, c.words[r % kChunkRows] & Hot::kSlot);
    return c.rows + (r % kChunkRows) * size_t(layout_.row_bytes);
  }
  char* changed_row(Shard& s, uint32_t r) {  // to write to
    if (spills_ && (word(s, r) & Hot::kIs)) word(s, r) |= Hot::kDirty;
    return row(s, r);
  }
  char* slot(const Shard& s, uint32_t n) const { return s.hot[n / kChunkRows] + (n % kChunkRows) * size_t(layout_.row_bytes); }
  static uint32_t& word(const Shard& s, uint32_t r) { return s.chunks[r / kChunkRows].words[r % kChunkRows]; }
  // Whether a row can be one with this hash, as far as can be told without the file.
  bool fits(const Shard& s, uint32_t r, uint64_t hash) const {
    return !spills_ || (word(s, r) & Hot::kIs) || word(s, r) == Hot::print(hash);
  }
  bool is_row(const char* p, uint64_t key) const { return key_of(p) == key && (peek<uint32_t>(p + Layout::kMeta) & Meta::kUsed); }
  float score(float shows, float clicks) const { return (shows - clicks) * o_.unclicked + clicks * o_.clicked; }
  uint32_t shard_of(uint64_t key) const { return uint32_t(key % o_.shards); }
  bool is_own(uint32_t shard) const { return shard >= first_ && shard < first_ + num_; }

  template <class F>
  void visit(const uint64_t* keys, size_t n, F&& f);
  template <bool kAdd, class F>
  void walk(Shard& s, const uint64_t* keys, const uint32_t* order, size_t count, F&& f);
  template <class F>
  void for_all_shards(F&& f);
  void add_chunk(Shard& s);
  void copy_rows(const Shard& s, const Chunk& c, uint32_t count, char* to) const;
  uint32_t add(Shard& s, uint64_t key, uint64_t hash);
  void remove(Shard& s, uint32_t r);
  void evict(Shard& s);
  void keep(Shard& s, uint32_t r);
  template <bool kAdd>
  void touch(Shard& s, uint32_t r);
  void fetch(const Shard& s, uint32_t r) const;
  uint32_t hot_limit(const Shard& s) const;
  uint32_t take_slot(Shard& s);
  void free_slot(Shard& s, uint32_t n) noexcept { s.free_slots.push_back(n); }  // there is room: `take_slot` reserves it
  void cool(Shard& s);
  void shrink(Shard& s, uint32_t limit);
  void advise(const Chunk& c) const;
  void compact(Shard& s);
  void end_snapshot();
  std::shared_lock<std::shared_mutex> pushing();
  uint32_t now() const;
  void put_row(char* p, const char* from) const;
  template <int W, bool kPlain>
  void push_all(const uint64_t* keys, const float* values, size_t n, float rate);
  template <int W, bool kPlain>
  void update(char* p, uint32_t now, const float* values, float rate, float* scratch) const;
  void save_shard(uint32_t i, const std::string& folder, const Mark* since);
  void load_part(const std::string& path);

  const Options o_;
  const Layout layout_;
  const Rule first_rule_, rule_;
  const bool spills_;
  uint32_t first_ = 0, num_ = 0;
  uint32_t max_live_ = 0;  // of one shard; 0: no bound
  Units row_memory_, index_memory_, hot_memory_, word_memory_;
  std::vector<std::unique_ptr<Shard>> shards_;
  std::shared_ptr<Workers> workers_;
  std::atomic<unsigned> requests_{0};
  std::atomic<uint32_t> turn_{0};

  std::mutex admin_;                     // a mark, a load, a day boundary, the end of a save: one at a time
  std::mutex gate_;                      // a mark that waits keeps new pushes out
  std::shared_mutex moment_;             // pushes together; a mark, a load, a day boundary alone
  std::unique_ptr<Snapshot> snapshot_;   // changes under moment_ alone
  uint64_t mark_ = 1;                    // rows that change now carry it
  uint32_t today_ = 0;
  std::map<std::string, Mark> marks_;
  std::atomic<uint64_t> total_{0}, evicted_{0}, deleted_{0}, pushed_{0}, pulled_{0}, kept_bytes_{0};
};

}  // namespace wheel
