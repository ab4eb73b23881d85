// The few entry points of oneDNN's C interface that the tower needs.
//
// Paddle's wheel brings libdnnl.so.3 but only stubs of its headers, so they are declared here: names, values and
// meaning as in the oneDNN 3.x developer guide (https://oneapi-src.github.io/oneDNN/). oneDNN promises that a major
// version keeps them; the constructor of `MatMul` holds the library to 3.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

typedef struct dnnl_engine* dnnl_engine_t;
typedef struct dnnl_stream* dnnl_stream_t;
typedef struct dnnl_memory* dnnl_memory_t;
typedef struct dnnl_memory_desc* dnnl_memory_desc_t;
typedef struct dnnl_primitive* dnnl_primitive_t;
typedef struct dnnl_primitive_desc* dnnl_primitive_desc_t;
typedef struct dnnl_primitive_attr* dnnl_primitive_attr_t;
typedef struct dnnl_post_ops* dnnl_post_ops_t;
typedef int dnnl_status_t;  // 0 is success

struct dnnl_exec_arg_t {
  int arg;
  dnnl_memory_t memory;
};

struct dnnl_version_t {
  int major, minor, patch;
  const char* hash;
  unsigned cpu_runtime, gpu_runtime;
};

enum { DNNL_CPU = 1, DNNL_STREAM_DEFAULT = 1 };
enum { DNNL_BF16 = 2, DNNL_F32 = 3 };
enum { DNNL_ELTWISE_RELU = 0x20 };
enum { DNNL_ARG_SRC = 1, DNNL_ARG_DST = 17, DNNL_ARG_WEIGHTS = 33, DNNL_ARG_BIAS = 41, DNNL_ARG_SCRATCHPAD = 80 };
enum { DNNL_SCRATCHPAD_USER = 1 };
enum { DNNL_QUERY_SCRATCHPAD = 136 };

const dnnl_version_t* dnnl_version();
dnnl_status_t dnnl_engine_create(dnnl_engine_t*, int kind, std::size_t index);
dnnl_status_t dnnl_stream_create(dnnl_stream_t*, dnnl_engine_t, unsigned flags);
dnnl_status_t dnnl_stream_wait(dnnl_stream_t);
dnnl_status_t dnnl_memory_desc_create_with_strides(dnnl_memory_desc_t*, int ndims, const std::int64_t* dims,
                                                   int data_type, const std::int64_t* strides);
dnnl_status_t dnnl_memory_desc_destroy(dnnl_memory_desc_t);
dnnl_status_t dnnl_memory_desc_clone(dnnl_memory_desc_t*, const dnnl_memory_desc*);
std::size_t dnnl_memory_desc_get_size(const dnnl_memory_desc*);
dnnl_status_t dnnl_memory_create(dnnl_memory_t*, const dnnl_memory_desc*, dnnl_engine_t, void* data);
dnnl_status_t dnnl_memory_destroy(dnnl_memory_t);
dnnl_status_t dnnl_post_ops_create(dnnl_post_ops_t*);
dnnl_status_t dnnl_post_ops_append_eltwise(dnnl_post_ops_t, int algorithm, float alpha, float beta);
dnnl_status_t dnnl_post_ops_destroy(dnnl_post_ops_t);
dnnl_status_t dnnl_primitive_attr_create(dnnl_primitive_attr_t*);
dnnl_status_t dnnl_primitive_attr_set_post_ops(dnnl_primitive_attr_t, const dnnl_post_ops*);
dnnl_status_t dnnl_primitive_attr_destroy(dnnl_primitive_attr_t);
dnnl_status_t dnnl_primitive_attr_set_scratchpad_mode(dnnl_primitive_attr_t, int mode);
dnnl_status_t dnnl_matmul_primitive_desc_create(dnnl_primitive_desc_t*, dnnl_engine_t, const dnnl_memory_desc* src,
                                                const dnnl_memory_desc* weights, const dnnl_memory_desc* bias,
                                                const dnnl_memory_desc* dst, const dnnl_primitive_attr*);
const dnnl_memory_desc* dnnl_primitive_desc_query_md(const dnnl_primitive_desc*, int what, int index);
dnnl_status_t dnnl_primitive_desc_destroy(dnnl_primitive_desc_t);
dnnl_status_t dnnl_primitive_create(dnnl_primitive_t*, const dnnl_primitive_desc*);
dnnl_status_t dnnl_primitive_destroy(dnnl_primitive_t);
dnnl_status_t dnnl_set_primitive_cache_capacity(int);
dnnl_status_t dnnl_primitive_execute(const dnnl_primitive*, dnnl_stream_t, int nargs, const dnnl_exec_arg_t*);

}  // extern "C"
