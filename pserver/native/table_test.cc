// The table without Paddle, used by many threads at once: built with -fsanitize=thread and =address,undefined by a test.
// Says what it did and exits 0, or says what is wrong and exits 1.
#include "table.h"
#include <sys/stat.h>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

using wheel::Options;
using wheel::Table;

namespace {

void must(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::exit(1);
}

constexpr int kKeys = 20000, kAlways = 300, kBatch = 1500, kThreads = 4, kRounds = 40;

Options options(const std::string& kind, const std::string& folder) {
  Options o;
  o.shards = 8, o.threads = 3, o.width = 6;
  o.log_removed = true;
  if (kind == "half") o.half = true, o.l2 = 0.01f, o.initial_range = 0.1f;
  if (kind == "evicting") o.max_rows = 12000;
  if (kind == "spilling") o.spill = folder, o.memory = 600 << 10;
  return o;
}

void make(const std::string& folder) { mkdir(folder.c_str(), 0777); }

std::vector<uint64_t> some_keys() {
  std::mt19937_64 random(1);
  std::vector<uint64_t> keys(kKeys);
  for (uint64_t& key : keys) key = random();
  return keys;
}

void run(const std::string& kind, const std::string& folder) {
  const Options o = options(kind, folder);
  Table table(o);
  const auto keys = some_keys();
  const size_t stride = table.pushed_floats(), floats = table.pulled_floats();
  std::vector<std::thread> threads;
  for (int id = 0; id < kThreads; ++id) threads.emplace_back([&, id] {
    std::mt19937_64 random(uint64_t(id) + 9);
    std::vector<uint64_t> asked(kBatch);
    std::vector<float> values(kBatch * stride, 0.1f), out(kBatch * floats);
    std::vector<char> rows(kBatch * table.layout().row_bytes);
    for (int i = 0; i < kBatch; ++i) values[size_t(i) * stride] = 0, values[size_t(i) * stride + 1] = 1, values[size_t(i) * stride + 2] = 0;
    for (int round = 0; round < kRounds; ++round) {
      const auto at = int(random() % (kKeys - kBatch));
      for (int i = 0; i < kBatch; ++i) asked[size_t(i)] = keys[size_t(i < kAlways ? i : std::max(kAlways, at + i))];
      table.push(asked.data(), values.data(), kBatch, 0.5f);
      table.pull(asked.data(), kBatch, out.data());
      for (const float each : out) must(std::isfinite(each), "a pulled value");
      if (round % 8 == 3) table.get_rows(asked.data(), kBatch, rows.data());
      if (id == 0 && round % 10 == 5) {  // a save of everything, and one of what changed since
        table.mark("whole", round % 20 == 5);
        make(folder + "/whole");
        table.save("whole", folder + "/whole");
        table.mark("changes", false);
        make(folder + "/changes");
        table.save("changes", folder + "/changes", "whole");
      }
      if (id == 1 && round % 16 == 7) table.end_day();
      if (id == 2 && round % 16 == 9) {
        table.statistics();
        table.drop("none of this name");
      }
    }
  });
  for (auto& thread : threads) thread.join();

  make(folder + "/last");
  table.mark("last", false);
  table.save("last", folder + "/last");
  Options other = o;
  other.shards = 5, other.spill.clear(), other.max_rows = 0;
  Table loaded(other);
  loaded.load(folder + "/last", "last");
  must(loaded.rows() == table.rows(), "rows after a load");
  std::vector<char> was(kKeys * table.layout().row_bytes), is(was.size());
  table.get_rows(keys.data(), kKeys, was.data());
  loaded.get_rows(keys.data(), kKeys, is.data());
  must(was == is, "bits after a load");
  if (kind != "evicting") {
    std::vector<float> out(kAlways * floats);
    table.pull(keys.data(), kAlways, out.data());
    for (int i = 0; i < kAlways; ++i) must(out[size_t(i) * floats] == kThreads * kRounds, "shows of a key that all threads pushed");
  } else {
    must(table.statistics().evicted > 0 && table.rows() <= o.max_rows, "eviction");
  }
  std::printf("%s: %llu rows\n", kind.c_str(), static_cast<unsigned long long>(table.rows()));
}

}  // namespace

int main(int, char** argument) {
  const std::string folder = argument[1];
  for (const char* kind : {"plain", "half", "evicting", "spilling"}) {
    make(folder + "/" + kind);
    run(kind, folder + "/" + kind);
  }
  return 0;
}
