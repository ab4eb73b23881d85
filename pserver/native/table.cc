#include "table.h"
#include <dirent.h>
#include <sys/stat.h>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <thread>

namespace wheel {
namespace {

constexpr size_t kBlock = 32;            // keys whose waits for memory overlap
constexpr size_t kSpillBlock = 512;      // the same for a disk
constexpr uint32_t kLeastSlots = 8;      // for hot rows of a shard
constexpr uint32_t kLeastCold = 16;      // rows of a chunk for which it is written, if there are other chunks
constexpr size_t kPage = 4096;
constexpr size_t kKeysPerThread = 4096;  // a request of fewer is not worth waking a thread
constexpr uint32_t kEvictionWindow = 16; // chunks of which the least valuable rows go, at most
constexpr uint32_t kMaxUnseen = 4000;    // days; the meta word counts them round
constexpr size_t kMaxMarks = 64;

unsigned num_threads(const Options& o) { return o.threads ? o.threads : std::max(1u, std::thread::hardware_concurrency()); }

uint64_t random_bits(uint64_t key, uint32_t shows) {  // for rounding: from what is saved, so that a restored table goes on alike
  return splitmix64(key ^ (uint64_t(shows) << 32 | shows) * 0x9E3779B97F4A7C15ull);
}

}  // namespace

class Table::Hashes {  // of the rows of a shard, for its index
 public:
  Hashes(const Table& table, const Shard& shard) : table_(table), shard_(shard) {}
  uint64_t operator()(uint32_t r) const {
    if (table_.spills_ && !(word(shard_, r) & Hot::kIs)) return Hot::hash(word(shard_, r));
    return mix(key_of(table_.row(shard_, r)));
  }
  void prefetch(uint32_t r) const { __builtin_prefetch(table_.row(shard_, r)); }

 private:
  const Table& table_;
  const Shard& shard_;
};

Table::Table(const Options& options)
    : o_(options),
      layout_(options),
      first_rule_(options.first, 1),
      rule_(options.embedding, options.width),
      spills_(!options.spill.empty()),
      workers_(Workers::shared(num_threads(options) - 1)) {
  if (o_.admission.empty() || o_.admission.size() > Meta::kMaxClasses)
    throw std::runtime_error("a table has 1 to 64 admission scores");
  if (!o_.shards || !o_.servers || o_.server >= o_.servers || !o_.width) throw std::runtime_error("a table without shards");
  const uint32_t each = (o_.shards + o_.servers - 1) / o_.servers;
  first_ = std::min(o_.shards, each * o_.server);
  num_ = std::min(each, o_.shards - first_);
  row_memory_.set(size_t(layout_.row_bytes) * kChunkRows, o_.spill);
  index_memory_.set(Index::kSegmentBytes, "");
  hot_memory_.set(size_t(layout_.row_bytes) * kChunkRows, "");
  word_memory_.set(kChunkRows * sizeof(uint32_t), "");
  for (uint32_t i = 0; i < num_; ++i) shards_.push_back(std::make_unique<Shard>(index_memory_));
  if (o_.max_rows && num_) max_live_ = uint32_t(std::min<uint64_t>(Index::kMaxRows, std::max<uint64_t>(1, o_.max_rows / num_)));
}

Table::~Table() = default;

// ---- requests

// Sorts the keys of a request by shard and visits each shard once, under its lock: f(shard, positions in the request,
// how many). Keys of shards that live elsewhere are refused.
template <class F>
void Table::visit(const uint64_t* keys, size_t n, F&& f) {
  if (!n) return;
  std::vector<uint32_t> order(n), starts(num_ + 1, 0);
  std::vector<uint16_t> shard_of_key(n);
  for (size_t i = 0; i < n; ++i) {
    const uint32_t s = shard_of(keys[i]) - first_;
    if (s >= num_) throw std::runtime_error("a key belongs to another server: are the numbers of shards or servers different?");
    shard_of_key[i] = uint16_t(s);
    ++starts[s + 1];
  }
  for (uint32_t s = 0; s < num_; ++s) starts[s + 1] += starts[s];
  {
    std::vector<uint32_t> at(starts.begin(), starts.end() - 1);
    for (size_t i = 0; i < n; ++i) order[at[shard_of_key[i]]++] = uint32_t(i);
  }
  // Shares are shards. Requests begin at different ones; a thread passes over a shard that another one has, once.
  const uint32_t begin = turn_.fetch_add(1, std::memory_order_relaxed) * 7;
  std::vector<std::atomic<uint8_t>> taken(num_);
  std::atomic<uint32_t> next{0}, again{0};
  std::exception_ptr error;
  std::mutex error_mutex;
  const std::function<void()> work = [&] {
    const auto share = [&](uint32_t step, bool wait) {
      const uint32_t s = (begin + step) % num_;
      const size_t count = starts[s + 1] - starts[s];
      if (!count) return;
      std::unique_lock<std::mutex> hold(shards_[s]->mutex, std::defer_lock);
      if (wait) {
        if (taken[s].exchange(1)) return;
        hold.lock();
      } else {
        if (!hold.try_lock()) return;
        if (taken[s].exchange(1)) return;
      }
      try {
        f(*shards_[s], order.data() + starts[s], count);
      } catch (...) {
        std::lock_guard<std::mutex> one(error_mutex);
        if (!error) error = std::current_exception();
      }
    };
    for (uint32_t step; (step = next.fetch_add(1)) < num_;) share(step, false);
    for (uint32_t step; (step = again.fetch_add(1)) < num_;) share(step, true);
  };
  const unsigned busy = requests_.fetch_add(1) + 1;
  const unsigned threads = workers_->size() + 1;
  const unsigned helpers = busy >= threads ? 0 : unsigned(std::min<size_t>(threads - busy, n / kKeysPerThread));
  if (helpers) {
    workers_->run(helpers, work);
  } else {
    work();
  }
  requests_.fetch_sub(1);
  if (error) std::rethrow_exception(error);
}

// Looks keys up in blocks, so that waits for memory overlap: f(position in the request, row's number or kNone). With kAdd,
// unknown keys get a row, whose number is then marked with kNew.
template <bool kAdd, class F>
void Table::walk(Shard& s, const uint64_t* keys, const uint32_t* order, size_t count, F&& f) {
  uint64_t hash[kSpillBlock];
  uint32_t guess[kSpillBlock];
  const size_t block = spills_ ? kSpillBlock : kBlock;
  for (size_t b = 0; b < count; b += block) {
    const size_t m = std::min(block, count - b);
    for (size_t j = 0; j < m; ++j) {
      hash[j] = mix(keys[order[b + j]]);
      __builtin_prefetch(s.index.home(hash[j]));
    }
    for (size_t j = 0; j < m; ++j) {
      guess[j] = s.index.find(hash[j], [](uint32_t) { return true; });
      if (guess[j] == Index::kNone) continue;
      if (spills_) {
        __builtin_prefetch(&word(s, guess[j]));
        continue;
      }
      const char* p = row(s, guess[j]);
      for (size_t at = 0; at < layout_.row_bytes; at += 64) __builtin_prefetch(p + at, kAdd);
      __builtin_prefetch(p + layout_.row_bytes - 1, kAdd);
    }
    for (size_t j = 0; spills_ && j < m; ++j) {
      if (guess[j] == Index::kNone) continue;
      if (!fits(s, guess[j], hash[j])) guess[j] = s.index.find(hash[j], [&](uint32_t other) { return fits(s, other, hash[j]); });
      if (guess[j] != Index::kNone) fetch(s, guess[j]);
    }
    for (size_t j = 0; j < m; ++j) {
      const uint64_t key = keys[order[b + j]];
      uint32_t r = guess[j];
      if (spills_ && r != Index::kNone) touch<kAdd>(s, r);
      if (r == Index::kNone ? kAdd : !is_row(row(s, r), key)) {
        r = s.index.find(hash[j], [&](uint32_t other) { return fits(s, other, hash[j]) && is_row(row(s, other), key); });
        if (spills_ && r != Index::kNone) touch<kAdd>(s, r);
      }
      if (kAdd && r == Index::kNone) r = add(s, key, hash[j]) | kNew;
      f(order[b + j], r);
    }
  }
}

void Table::pull(const uint64_t* keys, size_t n, float* out) {
  const size_t floats = pulled_floats();
  visit(keys, n, [&](Shard& s, const uint32_t* order, size_t count) {
    walk<false>(s, keys, order, count, [&](uint32_t i, uint32_t r) {
      float* to = out + size_t(i) * floats;
      if (r == Index::kNone) {
        std::memset(to, 0, floats * 4);
        return;
      }
      const char* p = row(s, r);
      std::memcpy(to, p + Layout::kShows, 8);
      std::memcpy(to + 2, p + Layout::kFirst, 4);
      if (layout_.half) {
        for (uint32_t k = 0; k < o_.width; ++k) to[3 + k] = from_half(peek<uint16_t>(p + layout_.embedding_at + 2 * k));
      } else {
        std::memcpy(to + 3, p + layout_.embedding_at, 4 * size_t(o_.width));  // zeros while there is none
      }
    });
  });
  pulled_ += n;
}

std::shared_lock<std::shared_mutex> Table::pushing() {
  std::lock_guard<std::mutex> turn(gate_);
  return std::shared_lock<std::shared_mutex>(moment_);
}

uint32_t Table::now() const { return Meta::kUsed | (uint32_t(mark_) << Meta::kMarkShift & Meta::kMarkMask) | (today_ & Meta::kDayMask); }

// A row from outside, whose unseen days count from today.
void Table::put_row(char* p, const char* from) const {
  std::memcpy(p, from, layout_.row_bytes);
  const uint32_t meta = peek<uint32_t>(p + Layout::kMeta);
  uint32_t kept = meta & (Meta::kHas | Meta::kClassMask);
  if ((kept & Meta::kClassMask) >> Meta::kClassShift >= o_.admission.size()) kept &= ~Meta::kClassMask;
  poke(p + Layout::kMeta, (now() & ~Meta::kDayMask) | kept | ((today_ - meta) & Meta::kDayMask));
}

// One pushed row. now: the meta word of rows that are trained now.
template <int W, bool kPlain>
void Table::update(char* p, uint32_t now, const float* values, float rate, float* scratch) const {
  auto* counts = reinterpret_cast<float*>(p + Layout::kShows);
  counts[0] += values[1], counts[1] += values[2];
  const uint32_t meta = peek<uint32_t>(p + Layout::kMeta);
  uint32_t kept = meta & (Meta::kHas | Meta::kClassMask);
  const bool had = kept & Meta::kHas;
  const bool created = !had && score(counts[0], counts[1]) >= o_.admission[(kept & Meta::kClassMask) >> Meta::kClassShift];
  if (created) kept |= Meta::kHas;
  poke(p + Layout::kMeta, now | kept);
  const uint64_t key = kPlain ? 0 : key_of(p);

  auto* first = reinterpret_cast<float*>(p + Layout::kFirst);
  if (had || o_.train_unadmitted || (created && o_.train_created)) {
    if (kPlain) {
      first_rule_.step<1>(first, first + 1, values + 3, rate);
    } else {
      const float g = values[3] + o_.l2 * first[0];
      first_rule_.step<1>(first, first + 1, &g, rate);
    }
  }
  auto* state = reinterpret_cast<float*>(p + layout_.embedding_state_at);
  if (created) rule_.begin(state);  // the embedding is zeros until here
  if (!had && !(created && o_.train_created)) return;
  if (kPlain) {
    rule_.step<W>(reinterpret_cast<float*>(p + layout_.embedding_at), state, values + 4, rate);
    return;
  }
  float *w = scratch, *g = scratch + o_.width;
  char* at = p + layout_.embedding_at;
  for (uint32_t k = 0; k < o_.width; ++k) w[k] = o_.half ? from_half(peek<uint16_t>(at + 2 * k)) : peek<float>(at + 4 * k);
  std::memcpy(g, values + 4, 4 * size_t(o_.width));
  if (o_.l2 != 0)
    for (uint32_t k = 0; k < o_.width; ++k) g[k] += o_.l2 * (w[k] + initial_value(o_, key, k));
  rule_.step<W>(w, state, g, rate);
  if (!o_.half) {
    std::memcpy(at, w, 4 * size_t(o_.width));
    return;
  }
  uint64_t random = random_bits(key, peek<uint32_t>(p + Layout::kShows));
  for (uint32_t k = 0; k < o_.width; ++k) {
    if (k % 4 == 0) random = splitmix64(random + 0x9E3779B97F4A7C15ull);
    poke(at + 2 * k, to_half(w[k], uint32_t(random >> (k % 4 * 16))));
  }
}

template <int W, bool kPlain>
void Table::push_all(const uint64_t* keys, const float* values, size_t n, float rate) {
  const size_t stride = pushed_floats();
  const uint32_t now = this->now();
  const bool saving = snapshot_ != nullptr;
  const size_t classes = o_.admission.size();
  visit(keys, n, [&](Shard& s, const uint32_t* order, size_t count) {
    std::vector<float> scratch(kPlain ? 0 : 2 * size_t(o_.width));
    walk<true>(s, keys, order, count, [&](uint32_t i, uint32_t r) {
      const float* pushed = values + size_t(i) * stride;
      const bool fresh = r & kNew;
      r &= ~kNew;
      if (saving && !fresh) keep(s, r);
      char* p = row(s, r);
      if (fresh) {
        const float c = pushed[0];
        const uint32_t cls = c > 0 && c < float(classes) ? uint32_t(c) : 0;
        poke(p + Layout::kMeta, Meta::kUsed | cls << Meta::kClassShift);
        first_rule_.begin(reinterpret_cast<float*>(p + Layout::kFirstState));
      }
      update<W, kPlain>(p, now, pushed, rate, scratch.data());
    });
  });
}

void Table::push(const uint64_t* keys, const float* values, size_t n, float rate) {
  const auto together = pushing();
  if (layout_.half || o_.l2 != 0) {
    push_all<0, false>(keys, values, n, rate);
  } else if (o_.width == 16) {
    push_all<16, true>(keys, values, n, rate);
  } else if (o_.width == 8) {
    push_all<8, true>(keys, values, n, rate);
  } else {
    push_all<0, true>(keys, values, n, rate);
  }
  pushed_ += n;
}

void Table::get_rows(const uint64_t* keys, size_t n, char* out) {
  const auto together = pushing();
  visit(keys, n, [&](Shard& s, const uint32_t* order, size_t count) {
    walk<false>(s, keys, order, count, [&](uint32_t i, uint32_t r) {
      char* to = out + size_t(i) * layout_.row_bytes;
      if (r == Index::kNone) {
        std::memset(to, 0, layout_.row_bytes);
        return;
      }
      std::memcpy(to, row(s, r), layout_.row_bytes);
      const uint32_t meta = peek<uint32_t>(to + Layout::kMeta);
      poke(to + Layout::kMeta, (meta & ~(Meta::kMarkMask | Meta::kDayMask)) | Meta::unseen_days(meta, today_));
    });
  });
}

void Table::set_rows(const char* rows, size_t n) {
  const auto together = pushing();
  std::vector<uint64_t> keys(n);
  for (size_t i = 0; i < n; ++i) keys[i] = key_of(rows + i * layout_.row_bytes);
  const bool saving = snapshot_ != nullptr;
  visit(keys.data(), n, [&](Shard& s, const uint32_t* order, size_t count) {
    walk<true>(s, keys.data(), order, count, [&](uint32_t i, uint32_t r) {
      const bool fresh = r & kNew;
      r &= ~kNew;
      if (saving && !fresh) keep(s, r);
      put_row(row(s, r), rows + size_t(i) * layout_.row_bytes);
    });
  });
}

// ---- rows and places

void Table::add_chunk(Shard& s) {
  s.chunks.reserve(s.chunks.size() + 1);
  Chunk c;
  c.rows = row_memory_.get();
  if (spills_) {
    try {
      c.words = reinterpret_cast<uint32_t*>(word_memory_.get());
    } catch (...) {
      row_memory_.put(c.rows);
      throw;
    }
    c.offset = row_memory_.offset(c.rows);
  }
  s.chunks.push_back(std::move(c));
}

// The first rows of a chunk as they are now.
void Table::copy_rows(const Shard& s, const Chunk& c, uint32_t count, char* to) const {
  const size_t row_bytes = layout_.row_bytes;
  if (!spills_) {
    std::memcpy(to, c.rows, count * row_bytes);
    return;
  }
  row_memory_.read(to, count * row_bytes, c.offset);
  for (uint32_t i = 0; i < count; ++i)
    if (c.words[i] & Hot::kDirty && c.words[i] & Hot::kIs) std::memcpy(to + i * row_bytes, slot(s, c.words[i] & Hot::kSlot), row_bytes);
}

uint32_t Table::add(Shard& s, uint64_t key, uint64_t hash) {
  if (max_live_ && s.live >= max_live_) evict(s);
  uint32_t r = s.free;
  if (r == Index::kNone) {
    r = s.used;
    if (r >= Index::kMaxRows) throw std::runtime_error("a shard is full: give the table more shards");
    if (r / kChunkRows == s.chunks.size()) add_chunk(s);
  }
  const bool cold = spills_ && !(word(s, r) & Hot::kIs);
  const uint32_t slot = cold ? take_slot(s) : 0;
  try {
    s.index.insert(hash, r, Hashes(*this, s));
  } catch (...) {
    if (cold) free_slot(s, slot);
    throw;
  }
  if (r == s.used) {
    ++s.used;
  } else {
    if (snapshot_) keep(s, r);
    s.free = peek<uint32_t>(row(s, r) + Layout::kShows);
  }
  if (cold) word(s, r) = Hot::kIs | slot;
  char* p = changed_row(s, r);
  std::memset(p, 0, layout_.row_bytes);
  poke(p, key);
  poke(p + Layout::kMeta, Meta::kUsed);
  ++s.live;
  total_.fetch_add(1, std::memory_order_relaxed);
  return r;
}

void Table::remove(Shard& s, uint32_t r) {
  if (snapshot_) keep(s, r);
  char* p = changed_row(s, r);
  const uint64_t key = key_of(p);
  if (o_.log_removed) s.removed.push_back({key, mark_});
  s.index.erase(mix(key), r);
  std::memset(p, 0, layout_.row_bytes);
  poke(p + Layout::kShows, s.free);
  s.free = r;
  --s.live;
  total_.fetch_sub(1, std::memory_order_relaxed);
}

// Makes room: of some thousand rows, in turn, those with the lowest score go, and of equal ones the oldest.
void Table::evict(Shard& s) {
  struct Candidate {
    float score;
    uint32_t age, row;
  };
  std::vector<Candidate> candidates;
  const auto chunks = uint32_t(s.chunks.size());
  for (uint32_t c = 0; c < std::min(chunks, kEvictionWindow); ++c, ++s.hand) {
    const uint32_t begin = s.hand % chunks * kChunkRows, end = std::min(begin + kChunkRows, s.used);
    if (c == 0) advise(s.chunks[s.hand % chunks]);
    if (c + 1 < std::min(chunks, kEvictionWindow)) advise(s.chunks[(s.hand + 1) % chunks]);
    for (uint32_t r = begin; r < end; ++r) {
      const char* p = row(s, r);
      const uint32_t meta = peek<uint32_t>(p + Layout::kMeta);
      if (!(meta & Meta::kUsed)) continue;
      const uint32_t age = Meta::unseen_days(meta, today_) << 12 | Meta::marks_ago(meta, uint32_t(mark_));
      candidates.push_back({score(peek<float>(p + Layout::kShows), peek<float>(p + Layout::kClicks)), age, r});
    }
  }
  const size_t going = std::max<size_t>(1, candidates.size() / 16);
  if (going > candidates.size()) return;
  std::nth_element(candidates.begin(), candidates.begin() + long(going - 1), candidates.end(),
                   [](const Candidate& a, const Candidate& b) {
                     return a.score != b.score ? a.score < b.score : a.age != b.age ? a.age > b.age : a.row < b.row;
                   });
  for (size_t i = 0; i < going; ++i) remove(s, candidates[i].row);
  evicted_ += going;
}

void Table::keep(Shard& s, uint32_t r) {
  if (r >= s.marked_used) return;
  Chunk& c = s.chunks[r / kChunkRows];
  if (c.saved == uint32_t(snapshot_->mark)) return;
  if (!c.kept) c.kept = std::make_unique<Kept>();
  const uint32_t at = r % kChunkRows;
  if (c.kept->has[at]) return;
  const char* p = row(s, r);
  c.kept->rows.insert(c.kept->rows.end(), p, p + layout_.row_bytes);
  c.kept->which.push_back(uint16_t(at));
  c.kept->has[at] = true;
  kept_bytes_.fetch_add(layout_.row_bytes, std::memory_order_relaxed);
}

// ---- hot rows of a table that spills

// Rows that are asked for become hot: they are copied into a slot of memory. A hand as of CLOCK (Corbato, 1968) finds which
// ones go cold for them. It moves in the order of the file, a chunk at a time, so that rows that go cold are written
// together. It passes a popular row over for fifteen rounds after the row was last asked for; others go when it comes by.
// Popular are those with more shows than the lowest sixth of the hot ones: if fewer went in a round, they would lie far apart.

// Of the memory that the table may take, what index and words leave.
uint32_t Table::hot_limit(const Shard& s) const {
  const uint64_t share = o_.memory / num_, taken = s.index.bytes() + s.chunks.size() * kChunkRows * sizeof(uint32_t);
  const uint64_t slots = std::min<uint64_t>((share > taken ? share - taken : 0) / layout_.row_bytes, Hot::kSlot);
  return std::max(kLeastSlots, uint32_t(slots < kChunkRows ? slots : slots / kChunkRows * kChunkRows));
}

uint32_t Table::take_slot(Shard& s) {
  const uint32_t limit = hot_limit(s);
  if (s.slots > limit && s.slots - limit >= kChunkRows) shrink(s, limit);
  if (s.free_slots.empty() && s.slots < limit) {
    if (s.slots == s.hot.size() * kChunkRows) {
      s.hot.reserve(s.hot.size() + 1);
      s.free_slots.reserve((s.hot.size() + 1) * kChunkRows);
      s.hot.push_back(hot_memory_.get());
    }
    return s.slots++;
  }
  while (s.free_slots.empty()) cool(s);
  const uint32_t n = s.free_slots.back();
  s.free_slots.pop_back();
  return n;
}

// Makes a row hot that is about to be read, or changed (kAdd).
template <bool kAdd>
void Table::touch(Shard& s, uint32_t r) {
  uint32_t& w = word(s, r);
  if (!(w & Hot::kIs)) {
    uint32_t n = 0;
    try {
      n = take_slot(s);
      try {
        const Chunk& c = s.chunks[r / kChunkRows];
        row_memory_.read(slot(s, n), layout_.row_bytes, c.offset + (r % kChunkRows) * off_t(layout_.row_bytes));
      } catch (...) {
        free_slot(s, n);
        throw;
      }
    } catch (...) {
      if (kAdd) throw;
      return;  // it can be read where it is
    }
    w = Hot::kIs | n;
  }
  if (peek<float>(slot(s, w & Hot::kSlot) + Layout::kShows) > s.popular) w |= Hot::kPasses;
  if (kAdd) w |= Hot::kDirty;
}

// Has memory, or the disk, begin to bring a row that will be touched.
void Table::fetch(const Shard& s, uint32_t r) const {
  if (word(s, r) & Hot::kIs) {
    const char* p = row(s, r);
    for (size_t at = 0; at < layout_.row_bytes; at += 64) __builtin_prefetch(p + at, 1);
    __builtin_prefetch(p + layout_.row_bytes - 1, 1);
  } else {
    row_memory_.advise(s.chunks[r / kChunkRows].offset + (r % kChunkRows) * off_t(layout_.row_bytes), layout_.row_bytes);
  }
}

// Has the disk begin to bring a chunk whose rows will be read where they are.
void Table::advise(const Chunk& c) const {
  if (spills_) row_memory_.advise(c.offset, kChunkRows * size_t(layout_.row_bytes));
}

// Some rows go cold: those of a chunk that were not pulled since the hand came by last, or since they became hot.
void Table::cool(Shard& s) {
  const size_t row_bytes = layout_.row_bytes, chunks = s.chunks.size();
  std::vector<uint16_t> going;
  std::vector<float> shows;
  shows.reserve(kChunkRows);
  going.reserve(kChunkRows);
  for (size_t step = 0;; ++step) {
    if (s.sweep >= chunks) s.sweep = 0;
    Chunk& c = s.chunks[s.sweep];
    const uint32_t begin = s.sweep * kChunkRows, count = std::min(kChunkRows, s.used - std::min(s.used, begin));
    ++s.sweep;
    uint32_t first = kChunkRows, last = 0;
    going.clear(), shows.clear();
    for (uint32_t i = 0; i < count; ++i) {
      uint32_t& w = c.words[i];
      if (!(w & Hot::kIs)) continue;
      shows.push_back(peek<float>(slot(s, w & Hot::kSlot) + Layout::kShows));
      if (w & Hot::kPasses) {
        w -= Hot::kPass;
        continue;
      }
      going.push_back(uint16_t(i));
      if (w & Hot::kDirty) first = std::min(first, i), last = i;
    }
    if (shows.empty()) continue;
    std::nth_element(shows.begin(), shows.begin() + long(shows.size() / 6), shows.end());
    s.popular += (shows[shows.size() / 6] - s.popular) / 16;
    if (going.size() < (step < chunks ? kLeastCold : 1)) continue;
    if (first <= last) {
      const size_t from = first * row_bytes / kPage * kPage, to = ((last + 1) * row_bytes + kPage - 1) / kPage * kPage;
      std::vector<char> buffer(to - from);
      row_memory_.read(buffer.data(), buffer.size(), c.offset + off_t(from));
      for (const uint16_t i : going)
        if (c.words[i] & Hot::kDirty) std::memcpy(buffer.data() + i * row_bytes - from, slot(s, c.words[i] & Hot::kSlot), row_bytes);
      row_memory_.write(buffer.data(), buffer.size(), c.offset + off_t(from));
    }
    for (const uint16_t i : going) {
      const uint32_t n = c.words[i] & Hot::kSlot;
      c.words[i] = Hot::print(mix(key_of(slot(s, n))));
      free_slot(s, n);
    }
    advise(s.chunks[s.sweep < chunks ? s.sweep : 0]);
    return;
  }
}

// The index has grown: hot rows get less memory.
void Table::shrink(Shard& s, uint32_t limit) {
  const auto low = [&](uint32_t n) { return n < limit; };
  while (s.slots - s.free_slots.size() > limit) cool(s);
  s.free_slots.erase(std::partition(s.free_slots.begin(), s.free_slots.end(), low), s.free_slots.end());
  for (Chunk& c : s.chunks)
    for (uint32_t i = 0; i < kChunkRows; ++i) {
      uint32_t& w = c.words[i];
      if (!(w & Hot::kIs) || low(w & Hot::kSlot)) continue;
      const uint32_t n = s.free_slots.back();
      s.free_slots.pop_back();
      std::memcpy(slot(s, n), slot(s, w & Hot::kSlot), layout_.row_bytes);
      w = (w & ~Hot::kSlot) | n;
    }
  s.slots = limit;
  for (; s.hot.size() * kChunkRows >= limit + kChunkRows; s.hot.pop_back()) hot_memory_.put(s.hot.back());
}

// Closes the gaps that deleted rows left, and gives the memory back. No save may be under way.
void Table::compact(Shard& s) {
  if (s.used == s.live) return;
  uint32_t hole = 0, end = s.used;
  for (;;) {
    while (hole < end && (peek<uint32_t>(row(s, hole) + Layout::kMeta) & Meta::kUsed)) ++hole;
    while (end > hole && !(peek<uint32_t>(row(s, end - 1) + Layout::kMeta) & Meta::kUsed)) --end;
    if (hole >= end) break;
    std::memcpy(changed_row(s, hole), row(s, end - 1), layout_.row_bytes);
    if (spills_ && !(word(s, hole) & Hot::kIs)) word(s, hole) = Hot::print(mix(key_of(row(s, hole))));
    --end;
  }
  for (uint32_t r = s.live; spills_ && r < s.used; ++r)
    if (word(s, r) & Hot::kIs) free_slot(s, word(s, r) & Hot::kSlot), word(s, r) = 0;
  const size_t chunks = (size_t(s.live) + kChunkRows - 1) / kChunkRows;
  for (size_t c = chunks; c < s.chunks.size(); ++c) {
    row_memory_.put(s.chunks[c].rows);
    if (spills_) word_memory_.put(reinterpret_cast<char*>(s.chunks[c].words));
  }
  s.chunks.resize(chunks);
  s.used = s.live, s.free = Index::kNone, s.hand = s.sweep = 0;
  if (s.live % kChunkRows)  // the rest of the last chunk is zeros, as of a new one
    std::memset(row(s, s.live), 0, (kChunkRows - s.live % kChunkRows) * size_t(layout_.row_bytes));
  Index fresh(index_memory_);
  const Hashes hashes(*this, s);
  for (uint32_t r = 0; r < s.live; ++r) fresh.insert(mix(key_of(row(s, r))), r, hashes);
  s.index = std::move(fresh);
}

// ---- the table as a whole

template <class F>
void Table::for_all_shards(F&& f) {
  std::atomic<uint32_t> next{0};
  std::exception_ptr error;
  std::mutex error_mutex;
  workers_->run(workers_->size(), [&] {
    for (uint32_t i; (i = next.fetch_add(1)) < num_;) try {
        f(i);
      } catch (...) {
        std::lock_guard<std::mutex> one(error_mutex);
        if (!error) error = std::current_exception();
      }
  });
  if (error) std::rethrow_exception(error);
}

void Table::end_day() {
  std::lock_guard<std::mutex> one(admin_);
  std::lock_guard<std::mutex> turn(gate_);
  std::unique_lock<std::shared_mutex> alone(moment_);
  const uint32_t now = this->now() & Meta::kMarkMask;
  for_all_shards([&](uint32_t i) {
    Shard& s = *shards_[i];
    std::lock_guard<std::mutex> hold(s.mutex);
    for (uint32_t r = 0; r < s.used; ++r) {
      if (r % kChunkRows == 0) advise(s.chunks[r / kChunkRows]);
      char* p = row(s, r);
      uint32_t meta = peek<uint32_t>(p + Layout::kMeta);
      if (!(meta & Meta::kUsed)) continue;
      uint32_t unseen = Meta::unseen_days(meta, today_);
      const float shows = peek<float>(p + Layout::kShows) * o_.decay, clicks = peek<float>(p + Layout::kClicks) * o_.decay;
      if (score(shows, clicks) < o_.delete_below || float(unseen) > o_.delete_unseen) {
        remove(s, r);
        ++deleted_;
        continue;
      }
      if (o_.decay == 1 && unseen <= kMaxUnseen) continue;
      if (snapshot_) keep(s, r);
      unseen = std::min(unseen, kMaxUnseen);
      meta = (meta & ~(Meta::kMarkMask | Meta::kDayMask)) | now | ((today_ - unseen) & Meta::kDayMask);
      p = changed_row(s, r);
      poke(p + Layout::kShows, shows), poke(p + Layout::kClicks, clicks), poke(p + Layout::kMeta, meta);
    }
    if (!snapshot_) compact(s);
  });
}

void Table::mark(const std::string& id, bool advance_day) {
  std::lock_guard<std::mutex> one(admin_);
  if (snapshot_ && snapshot_->writing) throw std::runtime_error("a save of this table is under way");
  if (snapshot_) end_snapshot();  // whoever made that mark never came back for it
  std::lock_guard<std::mutex> turn(gate_);
  std::unique_lock<std::shared_mutex> alone(moment_);
  auto snapshot = std::make_unique<Snapshot>();
  snapshot->id = id, snapshot->mark = mark_, snapshot->today = today_;
  for (auto& s : shards_) {
    std::lock_guard<std::mutex> hold(s->mutex);
    s->marked_used = s->used, s->marked_removed = s->removed.size();
  }
  marks_[id] = {mark_, today_};
  while (marks_.size() > kMaxMarks)
    marks_.erase(std::min_element(marks_.begin(), marks_.end(), [](auto& a, auto& b) { return a.second.number < b.second.number; }));
  ++mark_;
  if (advance_day) ++today_;
  snapshot_ = std::move(snapshot);
}

// Needs admin_.
void Table::end_snapshot() {
  {
    std::lock_guard<std::mutex> turn(gate_);
    std::unique_lock<std::shared_mutex> alone(moment_);
    snapshot_.reset();
  }
  for (auto& s : shards_) {
    std::lock_guard<std::mutex> hold(s->mutex);
    for (Chunk& c : s->chunks) c.kept.reset();
    if (s->used - s->live > s->used / 4 && s->used > 4 * kChunkRows && !max_live_) compact(*s);
  }
  kept_bytes_ = 0;
}

void Table::drop(const std::string& id) {
  std::lock_guard<std::mutex> one(admin_);
  if (snapshot_ && snapshot_->id == id && !snapshot_->writing) end_snapshot();
}

void Table::save(const std::string& id, const std::string& folder, const std::string& since) {
  Mark since_mark{};
  {
    std::lock_guard<std::mutex> one(admin_);
    if (!snapshot_ || snapshot_->id != id || snapshot_->writing) throw std::runtime_error("no mark " + id + " is waiting to be saved");
    const auto found = marks_.find(since);
    if (!since.empty() && (found == marks_.end() || snapshot_->mark - found->second.number > 4000 || !o_.log_removed)) {
      end_snapshot();
      throw std::runtime_error("nothing is known of changes since " + since);
    }
    if (!since.empty()) since_mark = found->second;
    snapshot_->writing = true;
  }
  std::exception_ptr error;
  try {
    // threads of its own, since it may take long: requests keep their helpers
    std::atomic<uint32_t> next{0};
    std::mutex error_mutex;
    const auto work = [&] {
      for (uint32_t i; (i = next.fetch_add(1)) < num_;) try {
          save_shard(i, folder, since.empty() ? nullptr : &since_mark);
        } catch (...) {
          std::lock_guard<std::mutex> one(error_mutex);
          if (!error) error = std::current_exception();
          next = num_;
        }
    };
    std::vector<std::thread> threads;
    const unsigned wanted = std::min(num_, num_threads(o_));
    for (unsigned t = 1; t < wanted; ++t) threads.emplace_back(work);
    work();
    for (auto& thread : threads) thread.join();
    if (!error) {  // the names have reached the disk, too
      File directory(folder, O_RDONLY | O_DIRECTORY);
      directory.finish();
    }
  } catch (...) {
    error = std::current_exception();
  }
  std::lock_guard<std::mutex> one(admin_);
  const uint64_t mark = snapshot_->mark;
  end_snapshot();
  if (error) std::rethrow_exception(error);
  if (!since.empty()) return;
  // Changes lead on from the newest whole save: what is older need not be remembered.
  for (auto at = marks_.begin(); at != marks_.end();) at = at->second.number < mark ? marks_.erase(at) : std::next(at);
  for (auto& s : shards_) {
    std::lock_guard<std::mutex> hold(s->mutex);
    const auto old = std::partition_point(s->removed.begin(), s->removed.end(), [&](const Removed& gone) { return gone.mark <= mark; });
    s->removed.erase(s->removed.begin(), old);
  }
}

void Table::save_shard(uint32_t i, const std::string& folder, const Mark* since) {
  Shard& s = *shards_[i];
  // Nothing of a snapshot changes while it is being written, so it is read without its lock.
  const uint64_t mark = snapshot_->mark;
  const uint32_t today = snapshot_->today, span = since ? uint32_t(mark - since->number) : 0;
  const bool changes = since != nullptr;
  char name[64];
  std::snprintf(name, sizeof name, "/part-%03u-%05u", o_.server, first_ + i);
  File file(folder + name, O_WRONLY | O_CREAT | O_TRUNC);
  PartHeader header;
  header.row_bytes = layout_.row_bytes, header.width = o_.width;
  header.first_state = layout_.first_state, header.embedding_state = layout_.embedding_state;
  header.flags = (layout_.half ? PartHeader::kHalf : 0) | (changes ? PartHeader::kChanges : 0);
  header.shard = first_ + i, header.shards = o_.shards;
  if (since) header.days = today - since->today;
  file.write(&header, sizeof header);
  Xxh64 hash;
  const size_t row_bytes = layout_.row_bytes;
  std::vector<char> buffer(kChunkRows * row_bytes);
  uint32_t used;
  std::vector<Removed> removed;
  {
    std::lock_guard<std::mutex> hold(s.mutex);
    used = s.marked_used;
    if (changes) removed.assign(s.removed.begin(), s.removed.begin() + long(s.marked_removed));
  }
  for (uint32_t begin = 0; begin < used; begin += kChunkRows) {
    const uint32_t count = std::min(kChunkRows, used - begin);
    std::unique_ptr<Kept> kept;
    {
      std::lock_guard<std::mutex> hold(s.mutex);
      Chunk& c = s.chunks[begin / kChunkRows];
      kept = std::move(c.kept);
      copy_rows(s, c, count, buffer.data());
      c.saved = uint32_t(mark);
    }
    if (kept) {
      for (size_t k = 0; k < kept->which.size(); ++k)
        std::memcpy(buffer.data() + kept->which[k] * row_bytes, kept->rows.data() + k * row_bytes, row_bytes);
      kept_bytes_.fetch_sub(kept->rows.size(), std::memory_order_relaxed);
    }
    char* to = buffer.data();
    for (uint32_t r = 0; r < count; ++r) {
      char* p = buffer.data() + r * row_bytes;
      const uint32_t meta = peek<uint32_t>(p + Layout::kMeta);
      if (!(meta & Meta::kUsed)) continue;
      header.keys += changes;
      if (changes && Meta::marks_ago(meta, uint32_t(mark)) >= span) continue;
      poke(p + Layout::kMeta, (meta & ~(Meta::kMarkMask | Meta::kDayMask)) | Meta::unseen_days(meta, today));
      if (to != p) std::memcpy(to, p, row_bytes);
      to += row_bytes;
    }
    const auto bytes = size_t(to - buffer.data());
    file.write(buffer.data(), bytes);
    hash.add(buffer.data(), bytes);
    header.rows += bytes / row_bytes;
    if (o_.save_pause_us) ::usleep(o_.save_pause_us);
  }
  for (const Removed& gone : removed) {
    if (gone.mark <= since->number) continue;
    file.write(&gone.key, 8);
    hash.add(&gone.key, 8);
    ++header.removed;
  }
  header.body_hash = hash.value();
  header.header_hash = header_hash(header);
  file.rewind();
  file.write(&header, sizeof header);
  file.finish();
}

void Table::load(const std::string& folder, const std::string& id) {
  std::lock_guard<std::mutex> one(admin_);
  if (snapshot_ && snapshot_->writing) throw std::runtime_error("a save of this table is under way");
  if (snapshot_) end_snapshot();
  std::vector<std::string> paths;
  DIR* directory = ::opendir(folder.c_str());
  if (!directory) throw std::runtime_error(folder + " cannot be read: " + std::strerror(errno));
  while (const dirent* entry = ::readdir(directory))
    if (!std::strncmp(entry->d_name, "part-", 5)) paths.push_back(folder + "/" + entry->d_name);
  ::closedir(directory);
  if (paths.empty()) throw std::runtime_error(folder + " holds no part of a table");
  std::sort(paths.begin(), paths.end());
  std::lock_guard<std::mutex> turn(gate_);
  std::unique_lock<std::shared_mutex> alone(moment_);
  {  // rows that did not change meanwhile have been unseen for longer, too
    PartHeader header;
    File(paths[0], O_RDONLY).read(&header, sizeof header);
    if (header.magic == PartHeader::kMagic && header.header_hash == header_hash(header)) today_ += header.days;
  }
  std::atomic<size_t> next{0};
  std::exception_ptr error;
  std::mutex error_mutex;
  const std::function<void()> work = [&] {
    for (size_t i; (i = next.fetch_add(1)) < paths.size();) try {
        load_part(paths[i]);
      } catch (...) {
        std::lock_guard<std::mutex> hold(error_mutex);
        if (!error) error = std::current_exception();
        next = paths.size();
      }
  };
  std::vector<std::thread> threads;  // the helpers are for requests, which `visit` below makes
  const unsigned wanted = unsigned(std::min<size_t>(paths.size(), num_threads(o_)));
  for (unsigned t = 1; t < wanted; ++t) threads.emplace_back(work);
  work();
  for (auto& thread : threads) thread.join();
  if (error) std::rethrow_exception(error);
  if (!id.empty()) marks_[id] = {mark_, today_};
  ++mark_;
}

void Table::load_part(const std::string& path) {
  File file(path, O_RDONLY);
  PartHeader header;
  file.read(&header, sizeof header);
  if (header.magic != PartHeader::kMagic || header.version != 1)
    throw std::runtime_error(path + " is not a part that this version reads");
  if (header.header_hash != header_hash(header)) throw std::runtime_error(path + " is damaged, or was never finished");
  if (header.row_bytes != layout_.row_bytes || header.width != o_.width || header.first_state != layout_.first_state ||
      header.embedding_state != layout_.embedding_state || bool(header.flags & PartHeader::kHalf) != layout_.half)
    throw std::runtime_error(path + " is of a table with another width, rule or dtype");
  if (header.shards == o_.shards && !is_own(header.shard)) return;
  const size_t row_bytes = layout_.row_bytes;
  Xxh64 hash;
  std::vector<uint64_t> keys;
  std::vector<char> buffer;
  const auto own_keys = [&](const char* at, size_t stride, size_t n) {  // their positions; fills `keys`
    std::vector<const char*> found;
    keys.clear();
    for (size_t i = 0; i < n; ++i) {
      const uint64_t key = peek<uint64_t>(at + i * stride);
      if (!is_own(shard_of(key))) continue;
      keys.push_back(key);
      found.push_back(at + i * stride);
    }
    return found;
  };
  constexpr size_t kRows = 8192;
  std::vector<std::vector<char>> waiting;  // the keys that are gone come last, but go first: some are there again
  const auto put = [&](const char* rows, size_t n) {
    const auto found = own_keys(rows, row_bytes, n);
    visit(keys.data(), keys.size(), [&](Shard& s, const uint32_t* order, size_t count) {
      walk<true>(s, keys.data(), order, count, [&](uint32_t i, uint32_t r) {
        put_row(row(s, r & ~kNew), found[i]);
      });
    });
  };
  for (uint64_t done = 0; done < header.rows;) {
    const size_t n = size_t(std::min<uint64_t>(kRows, header.rows - done));
    buffer.resize(n * row_bytes);
    file.read(buffer.data(), buffer.size());
    hash.add(buffer.data(), buffer.size());
    if (header.removed) {
      waiting.push_back(buffer);
    } else {
      put(buffer.data(), n);
    }
    done += n;
  }
  if (header.removed) {
    buffer.resize(size_t(header.removed) * 8);
    file.read(buffer.data(), buffer.size());
    hash.add(buffer.data(), buffer.size());
    own_keys(buffer.data(), 8, size_t(header.removed));
    const std::vector<uint64_t> gone = keys;
    visit(gone.data(), gone.size(), [&](Shard& s, const uint32_t* order, size_t count) {
      walk<false>(s, gone.data(), order, count, [&](uint32_t, uint32_t r) {
        if (r != Index::kNone) remove(s, r);
      });
    });
    for (const auto& rows : waiting) put(rows.data(), rows.size() / row_bytes);
  }
  if (hash.value() != header.body_hash) throw std::runtime_error(path + " is damaged: its hash does not fit");
}

Statistics Table::statistics() {
  const auto together = pushing();
  Statistics found;
  found.rows = total_.load();
  found.row_bytes = spills_ ? hot_memory_.bytes() : row_memory_.bytes();
  found.index_bytes = index_memory_.bytes() + word_memory_.bytes(), found.kept_bytes = kept_bytes_.load();
  found.evicted = evicted_.load(), found.deleted = deleted_.load();
  found.pushed = pushed_.load(), found.pulled = pulled_.load();
  found.max_rows = o_.max_rows;
  found.saving = snapshot_ != nullptr;
  return found;
}

}  // namespace wheel
