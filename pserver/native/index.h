// From a key's hash to its row's number: extendible hashing (Fagin and others, 1979) over segments of 4,096 entries with
// open addressing inside. A full segment is split in two, which takes some ten microseconds; nothing larger is ever moved,
// so no request waits for a table that grows.
//
// An entry is 4 bytes: 6 bits of the hash, and the row's number + 1 in 26 bits. Of the hash, bits 0 to 11 choose the
// place within a segment, bits from 20 on the segment, and the top 6 are in the entry: so few rows are looked at in vain.
// At 35 to 79 % load that is 5 to 9 bytes a key.
#pragma once
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>
#include "memory.h"

namespace wheel {

class Index {
 public:
  static constexpr uint32_t kNone = ~0u, kMaxRows = (1u << 26) - 2;
  static constexpr size_t kSegmentBytes = 4096 * 4;

  explicit Index(Units& memory) : memory_(&memory) {}
  Index(Index&&) = default;
  Index& operator=(Index&& other) {
    std::swap(directory_, other.directory_), std::swap(segments_, other.segments_), std::swap(memory_, other.memory_);
    return *this;
  }
  ~Index() {
    for (auto& segment : segments_)
      if (segment) memory_->put(reinterpret_cast<char*>(segment->entries));
  }

  const uint32_t* home(uint64_t hash) const {  // to prefetch
    return directory_.empty() ? nullptr : directory_[place(hash)]->entries + (hash & kMask);
  }

  // The first row for which is(row) holds, among those whose entry fits the hash.
  template <class Is>
  uint32_t find(uint64_t hash, Is&& is) const {
    if (directory_.empty()) return kNone;
    const uint32_t* entries = directory_[place(hash)]->entries;
    for (uint32_t at = hash & kMask;; at = (at + 1) & kMask) {
      const uint32_t entry = entries[at];
      if (!entry) return kNone;
      if ((entry & kTagMask) == tag(hash) && (entry & kRowMask) != kDead && is((entry & kRowMask) - 1))
        return (entry & kRowMask) - 1;
    }
  }

  // hash_of(row) tells the hash of a row that is in the index already; the bits that are in its entry may be 0. Strong
  // guarantee: if it throws, nothing changed.
  template <class HashOf>
  void insert(uint64_t hash, uint32_t row, HashOf&& hash_of) {
    if (directory_.empty()) directory_.push_back(add_segment(0));
    for (Segment* segment = directory_[place(hash)]; segment->filled >= kLimit; segment = directory_[place(hash)])
      segment->dead > kLimit / 8 ? clean(*segment, hash_of) : split(*segment, hash_of);
    put(*directory_[place(hash)], hash, row);
  }

  void erase(uint64_t hash, uint32_t row) {
    uint32_t* entry = entry_of(hash, row);
    *entry = (*entry & kTagMask) | kDead;
    ++directory_[place(hash)]->dead;
  }
  size_t bytes() const { return segments_.size() * kSegmentBytes; }
  void move(uint64_t hash, uint32_t from, uint32_t to) {
    uint32_t* entry = entry_of(hash, from);
    *entry = (*entry & kTagMask) | (to + 1);
  }

 private:
  static constexpr uint32_t kMask = 4095, kTagMask = 0xFC000000u, kRowMask = 0x3FFFFFFu, kDead = kRowMask;
  static constexpr uint32_t kLimit = 4096 * 4 / 5;
  static constexpr uint32_t kDirectoryShift = 20, kMaxDepth = 19;
  struct Segment {
    uint32_t* entries;
    uint32_t filled = 0, dead = 0, depth = 0;
  };

  static uint32_t tag(uint64_t hash) { return uint32_t(hash >> 58) << 26; }
  size_t place(uint64_t hash) const { return (hash >> kDirectoryShift) & (directory_.size() - 1); }

  Segment* add_segment(uint32_t depth) {
    segments_.reserve(segments_.size() + 1);
    auto segment = std::make_unique<Segment>();
    segment->entries = reinterpret_cast<uint32_t*>(memory_->get());
    segment->depth = depth;
    segments_.push_back(std::move(segment));
    return segments_.back().get();
  }

  uint32_t* entry_of(uint64_t hash, uint32_t row) {
    uint32_t* entries = directory_[place(hash)]->entries;
    uint32_t at = hash & kMask;
    while ((entries[at] & kRowMask) != row + 1) at = (at + 1) & kMask;
    return entries + at;
  }

  static void put(Segment& segment, uint64_t hash, uint32_t row) {
    uint32_t at = hash & kMask;
    while (segment.entries[at]) at = (at + 1) & kMask;
    segment.entries[at] = tag(hash) | (row + 1);
    ++segment.filled;
  }

  template <class HashOf>
  static std::vector<std::pair<uint64_t, uint32_t>> take_all(Segment& segment, HashOf&& hash_of) {
    std::vector<std::pair<uint64_t, uint32_t>> all;
    all.reserve(segment.filled);
    for (uint32_t at = 0; at <= kMask; ++at) {
      const uint32_t row = segment.entries[at] & kRowMask;
      if (row && row != kDead) all.emplace_back(uint64_t(segment.entries[at] & kTagMask) << 32, row - 1);
    }
    constexpr size_t kAhead = 16;
    for (size_t i = 0; i < all.size(); ++i) {
      if (i + kAhead < all.size()) hash_of.prefetch(all[i + kAhead].second);
      all[i].first |= hash_of(all[i].second);
    }
    std::memset(segment.entries, 0, kSegmentBytes);
    segment.filled = segment.dead = 0;
    return all;
  }

  template <class HashOf>
  void clean(Segment& segment, HashOf&& hash_of) {
    for (const auto& [hash, row] : take_all(segment, hash_of)) put(segment, hash, row);
  }

  template <class HashOf>
  void split(Segment& segment, HashOf&& hash_of) {
    const uint32_t depth = segment.depth;
    if (depth >= kMaxDepth) throw std::runtime_error("too many keys of one shard share their hash: keys must be mixed");
    if ((size_t(1) << depth) == directory_.size()) {
      const size_t old = directory_.size();
      directory_.reserve(2 * old);
      for (size_t i = 0; i < old; ++i) directory_.push_back(directory_[i]);
    }
    Segment* other = add_segment(depth + 1);
    auto all = take_all(segment, hash_of);
    segment.depth = depth + 1;
    const size_t bit = size_t(1) << depth;
    for (size_t i = 0; i < directory_.size(); ++i)
      if (directory_[i] == &segment && (i & bit)) directory_[i] = other;
    for (const auto& [hash, row] : all) put((hash >> kDirectoryShift) & bit ? *other : segment, hash, row);
  }

  std::vector<Segment*> directory_;
  std::vector<std::unique_ptr<Segment>> segments_;
  Units* memory_;
};

}  // namespace wheel
