// Matrix products by oneDNN over plain row-major memory, in float32 or bfloat16 with float32 sums.
//
// Any number of threads may call `run` at once: a product is prepared once, and each thread brings its own scratch memory.
// (oneDNN's own would belong to the thread that prepared the product, and threads that share it give wrong numbers.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>

#include "onednn.h"

namespace paddlewheel {

using bfloat16 = std::uint16_t;  // the upper half of a float32

template <typename T>
constexpr int dnnl_type() {
  return sizeof(T) == 2 ? DNNL_BF16 : DNNL_F32;
}

inline void check(dnnl_status_t status, const char* what) {
  if (status != 0) throw std::runtime_error(std::string("oneDNN: ") + what + " failed with status " + std::to_string(status));
}

class MatMul {
 public:
  // C[m, n] = op(A)[m, k] op(B)[k, n] (+ bias[n]) (then ReLU). A transposed operand lies in memory as [k, m] or [n, k].
  template <typename In, typename Out>
  static void run(std::int64_t m, std::int64_t k, std::int64_t n, const In* a, bool a_transposed, const In* b,
                  bool b_transposed, const float* bias, bool relu, Out* c) {
    const Key key{m, k, n, dnnl_type<In>(), dnnl_type<Out>(), a_transposed, b_transposed, bias != nullptr, relu};
    const std::shared_ptr<const Prepared> held = instance().prepare(key);  // another thread may drop it meanwhile
    const Prepared& prepared = *held;
    dnnl_exec_arg_t args[5];
    int count = 0;
    const auto add = [&](int name, const dnnl_memory_desc_t layout, const void* data) {
      args[count].arg = name;
      check(dnnl_memory_create(&args[count].memory, layout, instance().engine_, const_cast<void*>(data)), "memory");
      ++count;
    };
    add(DNNL_ARG_SRC, prepared.a, a);
    add(DNNL_ARG_WEIGHTS, prepared.b, b);
    add(DNNL_ARG_DST, prepared.c, c);
    if (bias != nullptr) add(DNNL_ARG_BIAS, prepared.bias, bias);
    thread_local Scratch scratch;
    if (prepared.scratch != nullptr)
      add(DNNL_ARG_SCRATCHPAD, prepared.scratch, scratch.at_least(dnnl_memory_desc_get_size(prepared.scratch)));
    thread_local Stream stream(instance().engine_);
    const dnnl_status_t status = dnnl_primitive_execute(prepared.primitive, stream.handle, count, args);
    dnnl_stream_wait(stream.handle);
    for (int i = 0; i < count; ++i) dnnl_memory_destroy(args[i].memory);
    check(status, "matmul");
  }

 private:
  using Key = std::tuple<std::int64_t, std::int64_t, std::int64_t, int, int, bool, bool, bool, bool>;

  struct Prepared {
    dnnl_memory_desc_t a = nullptr, b = nullptr, c = nullptr, bias = nullptr;
    dnnl_memory_desc_t scratch = nullptr;  // null when the product needs none
    dnnl_primitive_t primitive = nullptr;

    Prepared() = default;
    Prepared(const Prepared&) = delete;
    Prepared& operator=(const Prepared&) = delete;
    ~Prepared() {
      if (primitive != nullptr) dnnl_primitive_destroy(primitive);
      for (dnnl_memory_desc_t each : {a, b, c, bias, scratch})
        if (each != nullptr) dnnl_memory_desc_destroy(each);
    }
  };

  class Scratch {
   public:
    void* at_least(std::size_t bytes) {
      constexpr std::size_t line = 64;
      if (size_ < bytes) {
        memory_.reset(new std::byte[bytes + line]);
        size_ = bytes;
      }
      const auto address = reinterpret_cast<std::uintptr_t>(memory_.get());
      return reinterpret_cast<void*>((address + line - 1) / line * line);
    }

   private:
    std::unique_ptr<std::byte[]> memory_;
    std::size_t size_ = 0;
  };

  struct Stream {
    explicit Stream(dnnl_engine_t engine) { check(dnnl_stream_create(&handle, engine, DNNL_STREAM_DEFAULT), "stream"); }
    dnnl_stream_t handle;
  };

  MatMul() {
    if (dnnl_version()->major != 3) throw std::runtime_error("the tower's operators need oneDNN 3");
    check(dnnl_engine_create(&engine_, DNNL_CPU, 0), "engine");
    check(dnnl_set_primitive_cache_capacity(0), "cache");
  }

  static MatMul& instance() {
    static MatMul only;
    return only;
  }

  static dnnl_memory_desc_t layout(std::int64_t rows, std::int64_t columns, int type, bool transposed) {
    const std::int64_t dims[2] = {rows, columns};
    const std::int64_t strides[2] = {transposed ? 1 : columns, transposed ? rows : 1};
    dnnl_memory_desc_t result;
    check(dnnl_memory_desc_create_with_strides(&result, 2, dims, type, strides), "layout");
    return result;
  }

  // The products used last are kept, here alone: oneDNN would keep a thousand more of them. Most jobs have a handful of row counts, one for full batches and one for the last of
  // each epoch; were every batch to have its own, there would be no end to them, of half a megabyte each.
  std::shared_ptr<const Prepared> prepare(const Key& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = prepared_.find(key);
    if (found != prepared_.end()) {
      recent_.splice(recent_.begin(), recent_, found->second.place);
      return found->second.prepared;
    }
    const auto made = make(key);
    recent_.push_front(key);
    prepared_.emplace(key, Kept{made, recent_.begin()});
    while (prepared_.size() > kMostKept) {
      prepared_.erase(recent_.back());
      recent_.pop_back();
    }
    return made;
  }

  std::shared_ptr<const Prepared> make(const Key& key) {
    const auto [m, k, n, in, out, a_transposed, b_transposed, has_bias, relu] = key;
    auto result = std::make_shared<Prepared>();
    Prepared& made = *result;
    made.a = layout(m, k, in, a_transposed);
    made.b = layout(k, n, in, b_transposed);
    made.c = layout(m, n, out, false);
    if (has_bias) made.bias = layout(1, n, DNNL_F32, false);
    dnnl_primitive_attr_t attributes;
    check(dnnl_primitive_attr_create(&attributes), "attributes");
    check(dnnl_primitive_attr_set_scratchpad_mode(attributes, DNNL_SCRATCHPAD_USER), "scratch memory");
    if (relu) {
      dnnl_post_ops_t after;
      check(dnnl_post_ops_create(&after), "post-ops");
      check(dnnl_post_ops_append_eltwise(after, DNNL_ELTWISE_RELU, 0.0f, 0.0f), "ReLU");
      check(dnnl_primitive_attr_set_post_ops(attributes, after), "post-ops");
      dnnl_post_ops_destroy(after);
    }
    dnnl_primitive_desc_t description;
    check(dnnl_matmul_primitive_desc_create(&description, engine_, made.a, made.b, made.bias, made.c, attributes),
          "a matrix product of this kind");
    check(dnnl_primitive_create(&made.primitive, description), "matmul");
    const dnnl_memory_desc* needed = dnnl_primitive_desc_query_md(description, DNNL_QUERY_SCRATCHPAD, 0);
    if (needed != nullptr && dnnl_memory_desc_get_size(needed) > 0)
      check(dnnl_memory_desc_clone(&made.scratch, needed), "scratch memory");
    dnnl_primitive_desc_destroy(description);
    dnnl_primitive_attr_destroy(attributes);
    return result;
  }

  struct Kept {
    std::shared_ptr<const Prepared> prepared;
    std::list<Key>::iterator place;  // in recent_
  };

  // More than the largest model has in a step: with fewer, every step would make all of its products anew.
  static constexpr std::size_t kMostKept = 512;

  dnnl_engine_t engine_;
  std::mutex mutex_;
  std::map<Key, Kept> prepared_;
  std::list<Key> recent_;  // newest first
};

}  // namespace paddlewheel
