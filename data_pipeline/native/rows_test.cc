// Many threads, right and damaged input; built with sanitizers by tests/unit/data_pipeline/test_native_encoder.py.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "rows.h"

namespace {

#define MUST(condition)                                                 \
  if (!(condition)) {                                                   \
    std::fprintf(stderr, "line %d: %s\n", __LINE__, #condition);        \
    std::abort();                                                       \
  }

// Numbers around the edges of what is there, and far beyond.
int64_t Wild(std::mt19937_64& random, int64_t size) {
  switch (random() % 8) {
    case 0: return -1;
    case 1: return size;
    case 2: return size + 1;
    case 3: return static_cast<int64_t>(random());
    case 4: return INT64_MIN;
    case 5: return INT64_MAX;
    default: return static_cast<int64_t>(random() % static_cast<uint64_t>(size + 1));
  }
}

void Fuzz(uint64_t seed) {
  std::mt19937_64 random(seed);
  const int64_t kinds[] = {0, 1, 2, 4, 8, -1, -2, -4, -8, -64, 132, 164, 3, -3, -1000, INT64_MIN, INT64_MAX};
  for (int round = 0; round < 3000; ++round) {
    const auto size = static_cast<int64_t>(random() % 40);
    std::vector<uint8_t> bytes(static_cast<size_t>(size)), bits(random() % 6);  // exactly so large: a step beyond shows
    for (auto& byte : bytes) byte = static_cast<uint8_t>(random() % 3 ? random() % 5 : random());
    for (auto& byte : bits) byte = static_cast<uint8_t>(random());
    const int64_t rows = static_cast<int64_t>(random() % 12);
    const int64_t kind = kinds[random() % 17];
    const PwColumn column = {bytes.data(), size, random() % 2 ? bits.data() : nullptr,
                             static_cast<int64_t>(bits.size()), random() % 3 ? 0 : Wild(random, 6), kind,
                             random(), random(), random(), 0};
    std::vector<uint64_t> out(static_cast<size_t>(rows) + 1);
    std::vector<float> numbers(static_cast<size_t>(rows) + 1);
    pw_integers(rows, &column, 1, out.data(), 1);
    pw_numbers(rows, &column, 1, numbers.data(), 1);
    const std::vector<uint64_t> words(random() % 5, 7);
    pw_picked(rows, &column, words.data(), static_cast<int64_t>(words.size()), out.data());

    std::vector<uint8_t> data(random() % 50);
    const PwText text = {data.data(), static_cast<int64_t>(data.size()), bytes.data(), size,
                         random() % 3 ? 0 : Wild(random, 4), kind, static_cast<int64_t>(random() % 6)};
    std::vector<uint64_t> hashed(6);
    pw_texts(&text, 5, hashed.data());
    pw_picked_texts(rows, &column, &text, 5, out.data());

    std::vector<int64_t> starts, lengths, offsets, at;
    for (int64_t row = 0; row < rows; ++row) {
      starts.push_back(Wild(random, 5));
      lengths.push_back(random() % 2 ? 1 : Wild(random, 5));
      offsets.push_back(Wild(random, 5));
      at.push_back(random() % 2 ? 0 : Wild(random, rows));
    }
    offsets.push_back(Wild(random, 5));
    const std::vector<uint64_t> ids = {3, 0, 9, 9, 0};
    std::vector<uint64_t> list(20);
    std::vector<int64_t> list_offsets(static_cast<size_t>(rows) + 1);
    pw_lists(rows, ids.data(), 5, starts.data(), lengths.data(), 1 + static_cast<int64_t>(random() % 3), random() % 2,
             random() % 2, list.data(), 20, list_offsets.data());
    const auto* items = reinterpret_cast<const uint8_t*>(ids.data());
    auto* to = reinterpret_cast<uint8_t*>(list.data());
    pw_gather(items, 5, 8, at.data(), rows, to);
    pw_gather_lists(items, 5, 8, offsets.data(), rows, at.data(), rows, to, 20);
    std::vector<uint32_t> padded(static_cast<size_t>(rows) * 3);
    const uint32_t flat[4] = {1, 2, 3, 4};
    pw_pad(flat, 4, lengths.data(), rows, 3, padded.data());
  }
}

void Unique(uint64_t seed) {
  std::mt19937_64 random(seed);
  for (int round = 0; round < 60; ++round) {
    std::vector<uint64_t> keys(random() % 3000);
    for (auto& key : keys) key = random() % (1 + random() % 2000);
    std::vector<uint64_t> unique(keys.size());
    std::vector<int32_t> positions(keys.size());
    const int64_t found = pw_unique(keys.data(), static_cast<int64_t>(keys.size()), unique.data(), positions.data());
    MUST(found >= 0);
    for (size_t i = 0; i < keys.size(); ++i) {
      MUST((positions[i] == 0) == (keys[i] == 0) && positions[i] <= found);
      if (positions[i]) MUST(unique[static_cast<size_t>(positions[i] - 1)] == keys[i]);
    }
  }
}

}  // namespace

int main() {
  std::vector<std::thread> threads;
  for (uint64_t seed = 0; seed < 4; ++seed)
    threads.emplace_back([seed] {
      Fuzz(seed);
      Unique(seed);
    });
  for (auto& thread : threads) thread.join();
  std::puts("done");
}
