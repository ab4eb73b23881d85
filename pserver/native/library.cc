// What Python calls through ctypes: tables on their own, for tests and tools, and the plug-in for Paddle's server.
// Functions that can fail return 0 when they did not; `wheel_error` has the words, per thread.
#include <algorithm>
#include <exception>
#include <random>
#include <string>
#include "options.h"
#include "paddle_abi.h"
#include "plugin.h"
#include "rules.h"
#include "table.h"

#define WHEEL_API extern "C" __attribute__((visibility("default")))

namespace {
thread_local std::string error_text;

template <class F>
int guarded(F&& f) {
  try {
    f();
    return 0;
  } catch (const std::exception& error) {
    error_text = error.what();
  } catch (...) {
    error_text = "an unknown error";
  }
  return -1;
}
wheel::Table& table(void* at) { return *static_cast<wheel::Table*>(at); }
}  // namespace

WHEEL_API const char* wheel_error() { return error_text.c_str(); }

WHEEL_API void* wheel_table(const char* options) {
  void* made = nullptr;
  guarded([&] { made = new wheel::Table(wheel::parse_options(options)); });
  return made;
}
WHEEL_API void wheel_free(void* t) { delete &table(t); }
WHEEL_API int wheel_pull(void* t, const uint64_t* keys, size_t n, float* out) {
  return guarded([&] { table(t).pull(keys, n, out); });
}
WHEEL_API int wheel_push(void* t, const uint64_t* keys, const float* values, size_t n, float rate) {
  return guarded([&] { table(t).push(keys, values, n, rate); });
}
WHEEL_API size_t wheel_row_bytes(void* t) { return table(t).layout().row_bytes; }
WHEEL_API int wheel_get_rows(void* t, const uint64_t* keys, size_t n, char* out) {
  return guarded([&] { table(t).get_rows(keys, n, out); });
}
WHEEL_API int wheel_set_rows(void* t, const char* rows, size_t n) {
  return guarded([&] { table(t).set_rows(rows, n); });
}
WHEEL_API int wheel_end_day(void* t) {
  return guarded([&] { table(t).end_day(); });
}
WHEEL_API int wheel_mark(void* t, const char* id, int advance_day) {
  return guarded([&] { table(t).mark(id, advance_day); });
}
WHEEL_API int wheel_save(void* t, const char* id, const char* folder, const char* since) {
  return guarded([&] { table(t).save(id, folder, since); });
}
WHEEL_API int wheel_drop(void* t, const char* id) {
  return guarded([&] { table(t).drop(id); });
}
WHEEL_API int wheel_load(void* t, const char* folder, const char* id) {
  return guarded([&] { table(t).load(folder, id); });
}
WHEEL_API int wheel_statistics(void* t, uint64_t* out) {
  return guarded([&] {
    const wheel::Statistics found = table(t).statistics();
    std::memcpy(out, &found, sizeof found);
  });
}

// ---- Paddle

WHEEL_API int wheel_open(const char* libpaddle) {
  return guarded([&] { wheel::abi::open(libpaddle); });
}

// Compares 200 updates of weights of some widths by Paddle's rule of this name and description (the bytes of a
// SparseCommonSGDRuleParameter) with ours, bit for bit; the sign of a new zero aside, which Paddle draws at random.
WHEEL_API int wheel_check_rule(const char* options, const char* name, const char* bytes, size_t num_bytes) {
  return guarded([&] {
    const wheel::Options o = wheel::parse_options(options);
    const auto parameter = wheel::abi::rule_parameter(std::string(bytes, num_bytes));
    std::mt19937_64 random(7);
    for (const uint32_t width : {1u, 3u, o.width}) {
      auto* theirs = wheel::abi::make<wheel::abi::SgdRule>("SparseValueSGDRule", name);  // lives as long as the process
      theirs->LoadConfig(*parameter, width);
      const wheel::Rule ours(o.embedding, width);
      const size_t n = ours.state_size();
      if (theirs->Dim() != n) throw std::runtime_error(std::string("Paddle's rule ") + name + " keeps another state");
      std::vector<float> w(width), state(n + 1), w2(width), state2(n + 1), g(width);
      theirs->InitValueWork(w.data(), state.data(), true);
      ours.begin(state2.data());
      for (int step = 0; step < 200; ++step) {
        const float scale = step % 20 == 19 ? 1000.0f : step % 3 == 0 ? 1e-3f : 1.0f;  // now and then into the bounds
        for (float& each : g) each = std::normal_distribution<float>(0, scale)(random);
        theirs->UpdateValueWork(w.data(), state.data(), g.data(), 1.0f);
        ours.step<0>(w2.data(), state2.data(), g.data(), 1.0f);
        for (size_t i = 0; i < width + n; ++i) {
          const float a = (i < width ? w[i] : state[i - width]) + 0.0f, b = (i < width ? w2[i] : state2[i - width]) + 0.0f;
          if (std::memcmp(&a, &b, 4))
            throw std::runtime_error(std::string("the rule ") + name + " differs from Paddle's on this machine: " +
                                     std::to_string(b) + " instead of " + std::to_string(a) + " after update " +
                                     std::to_string(step + 1));
        }
      }
    }
  });
}

// Tables that Paddle's server makes from now on under the class "PaddlewheelTable" get these options, by their number.
WHEEL_API int wheel_register(const char* options) {
  return guarded([&] { wheel::register_table(wheel::parse_options(options)); });
}
// What went wrong when Paddle's server made a table; empty when nothing did, or when no registered table was made.
WHEEL_API const char* wheel_start_error() {
  static std::string text;
  text = wheel::start_error();
  return text.c_str();
}
