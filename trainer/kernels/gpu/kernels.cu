// Kernels of the dense part on an NVIDIA GPU, and the few calls around them: memory, streams, graphs, matrix products.
//
// Every function that launches takes one struct of plain numbers and addresses (see calls.py, which mirrors them) and a
// stream, and returns 0 or a negative CUDA/cuBLAS status. No function allocates while a graph is being captured.
//
// Legend: types 0 float32, 1 bfloat16, 2 float16, 3 int32. Element strides throughout; 0 repeats an element.
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))
constexpr int MAX_DIMS = 6;

namespace {

std::string last_error;

int failed(const char* what, const char* message) {
    last_error = std::string(what) + ": " + message;
    return -1;
}
int checked(cudaError_t status, const char* what) {
    return status == cudaSuccess ? 0 : failed(what, cudaGetErrorString(status));
}
int launched(const char* what) { return checked(cudaGetLastError(), what); }

__device__ __forceinline__ float load(const void* p, int64_t i, int type) {
    switch (type) {
        case 0: return static_cast<const float*>(p)[i];
        case 1: return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
        case 2: return __half2float(static_cast<const __half*>(p)[i]);
        default: return static_cast<float>(static_cast<const int*>(p)[i]);
    }
}
__device__ __forceinline__ void store(void* p, int64_t i, int type, float v) {
    switch (type) {
        case 0: static_cast<float*>(p)[i] = v; break;
        case 1: static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16(v); break;
        case 2: static_cast<__half*>(p)[i] = __float2half(v); break;
        default: static_cast<int*>(p)[i] = static_cast<int>(v); break;
    }
}
// Four elements at a place that is a multiple of four elements from 16-byte aligned memory; any type but int32.
__device__ __forceinline__ float4 load_four(const void* p, int64_t i, int type) {
    if (type == 0) return *reinterpret_cast<const float4*>(static_cast<const float*>(p) + i);
    const uint2 raw = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(p) + i);
    float2 low, high;
    if (type == 1) {
        low = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(raw.x));
        high = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(raw.y));
    } else {
        low = __half22float2(reinterpret_cast<const __half2&>(raw.x));
        high = __half22float2(reinterpret_cast<const __half2&>(raw.y));
    }
    return make_float4(low.x, low.y, high.x, high.y);
}
__device__ __forceinline__ void store_four(void* p, int64_t i, int type, float4 v) {
    if (type == 0) {
        *reinterpret_cast<float4*>(static_cast<float*>(p) + i) = v;
    } else if (type == 1) {
        __nv_bfloat162 pair[2] = {__floats2bfloat162_rn(v.x, v.y), __floats2bfloat162_rn(v.z, v.w)};
        *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p) + i) = *reinterpret_cast<uint2*>(pair);
    } else {
        __half2 pair[2] = {__floats2half2_rn(v.x, v.y), __floats2half2_rn(v.z, v.w)};
        *reinterpret_cast<uint2*>(static_cast<__half*>(p) + i) = *reinterpret_cast<uint2*>(pair);
    }
}
// Added to memory at 16 bytes: in one transaction where the GPU has that.
__device__ __forceinline__ void add_four(float* to, float4 v) {
#if __CUDA_ARCH__ >= 900
    atomicAdd(reinterpret_cast<float4*>(to), v);
#else
    atomicAdd(to, v.x), atomicAdd(to + 1, v.y), atomicAdd(to + 2, v.z), atomicAdd(to + 3, v.w);
#endif
}
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// The element-wise functions, by number; names in calls.py.
__device__ __forceinline__ float apply(int op, float a, float b, float c, float p, float q) {
    switch (op) {
        case 0: return a;
        case 1: return a + b;
        case 2: return a - b;
        case 3: return a * b;
        case 4: return a / b;
        case 5: return fmaxf(a, b);
        case 6: return a * p + q;
        case 7: return a > 0.0f ? a : (a <= 0.0f ? 0.0f : a);  // a NaN stays one
        case 8: return b > 0.0f ? a : 0.0f;
        case 9: return sigmoid(a);
        case 10: return a * b * (1.0f - b);
        case 11: return fmaxf(a, 0.0f) - a * b + log1pf(expf(-fabsf(a)));
        case 12: return a * (sigmoid(b) - c);
        case 13: return expf(a - b);
        case 14: return logf(a);
        case 15: return a > b ? 1.0f : 0.0f;
        case 16: return a == b ? 1.0f : 0.0f;
        case 17: return a != 0.0f ? b : c;
        case 18: return a > 20.0f ? a : log1pf(expf(a));
        case 19: return a * sigmoid(b);
        case 20: return a * b + c;
        case 21: return b + a * (c - b);  // the step of a GRU: between candidate b and state c
        case 22: return (a - b) * (a - b);
        case 23: return rsqrtf(a * p + q);
        case 24: return -a * b / c;
        case 25: return b >= c ? a : 0.0f;
        case 26: return b < c ? a : 0.0f;
        case 27: return a + b + c;
        case 28: return (a - b) * c;
        case 29: return sqrtf(a * p + q);
        case 30: return tanhf(a);
        case 31: return a * (1.0f - b * b);
        case 32: return a * expf(b - c);
        case 33: return -a;
        default: return 0.0f;
    }
}

}  // namespace

// ------------------------------------------------------------------------------------------------------- element-wise

struct Elementwise {
    void* out;
    const void* in[3];
    int32_t out_type, in_type[3];
    int32_t op, dims;
    int64_t count;
    int32_t shape[MAX_DIMS];
    int32_t out_stride[MAX_DIMS];
    int32_t stride[3][MAX_DIMS];
    float p, q;
    int32_t num_in;
};

template <int NUM_IN>
__global__ void elementwise_kernel(const Elementwise e) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < e.count; i += step) {
        int64_t at[3] = {0, 0, 0}, out = 0;
        uint32_t rest = static_cast<uint32_t>(i);
#pragma unroll
        for (int d = MAX_DIMS - 1; d >= 0; --d) {
            if (d < e.dims) {
                const uint32_t next = d == 0 ? 0 : rest / static_cast<uint32_t>(e.shape[d]);
                const uint32_t c = d == 0 ? rest : rest - next * static_cast<uint32_t>(e.shape[d]);
                rest = next;
                out += static_cast<int64_t>(c) * e.out_stride[d];
#pragma unroll
                for (int k = 0; k < NUM_IN; ++k) at[k] += static_cast<int64_t>(c) * e.stride[k][d];
            }
        }
        float v[3] = {0, 0, 0};
#pragma unroll
        for (int k = 0; k < NUM_IN; ++k) v[k] = load(e.in[k], at[k], e.in_type[k]);
        store(e.out, out, e.out_type, apply(e.op, v[0], v[1], v[2], e.p, e.q));
    }
}

// float32 arrays without gaps, four elements a thread
template <int NUM_IN>
__global__ void elementwise_flat_kernel(const Elementwise e) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < e.count / 4; i += step) {
        float4 v[3] = {};
#pragma unroll
        for (int k = 0; k < NUM_IN; ++k) v[k] = static_cast<const float4*>(e.in[k])[i];
        float4 o;
        o.x = apply(e.op, v[0].x, v[1].x, v[2].x, e.p, e.q);
        o.y = apply(e.op, v[0].y, v[1].y, v[2].y, e.p, e.q);
        o.z = apply(e.op, v[0].z, v[1].z, v[2].z, e.p, e.q);
        o.w = apply(e.op, v[0].w, v[1].w, v[2].w, e.p, e.q);
        static_cast<float4*>(e.out)[i] = o;
    }
}
static bool is_flat(const Elementwise* e) {
    bool flat = e->dims == 1 && e->out_stride[0] == 1 && e->out_type == 0 && e->count % 4 == 0 && e->count >= 4096 &&
                reinterpret_cast<uintptr_t>(e->out) % 16 == 0;
    for (int k = 0; k < e->num_in; ++k)
        flat = flat && e->stride[k][0] == 1 && e->in_type[k] == 0 && reinterpret_cast<uintptr_t>(e->in[k]) % 16 == 0;
    return flat;
}

EXPORT int pw_elementwise(const Elementwise* e, cudaStream_t stream) {
    if (e->count == 0) return 0;
    if (is_flat(e)) {
        const int64_t parts = (e->count / 4 + 255) / 256;
        const int size = static_cast<int>(parts < 132 * 32 ? parts : 132 * 32);
        if (e->num_in <= 1) elementwise_flat_kernel<1><<<size, 256, 0, stream>>>(*e);
        else if (e->num_in == 2) elementwise_flat_kernel<2><<<size, 256, 0, stream>>>(*e);
        else elementwise_flat_kernel<3><<<size, 256, 0, stream>>>(*e);
        return launched("elementwise");
    }
    const int64_t blocks = (e->count + 255) / 256;
    const int grid = static_cast<int>(blocks < 132 * 32 ? blocks : 132 * 32);
    if (e->num_in <= 1) elementwise_kernel<1><<<grid, 256, 0, stream>>>(*e);
    else if (e->num_in == 2) elementwise_kernel<2><<<grid, 256, 0, stream>>>(*e);
    else elementwise_kernel<3><<<grid, 256, 0, stream>>>(*e);
    return launched("elementwise");
}

// ---------------------------------------------------------------------------------------------------------- reductions

struct Reduce {
    void* out;            // contiguous, num_out elements
    float* partial;       // [chunks, num_out] when chunks > 1
    const void* in[3];
    int32_t out_type, in_type[3];
    int32_t op, largest;  // largest: maximum instead of sum
    int32_t kept_dims, reduced_dims;
    int64_t num_out, num_reduced;
    int32_t kept[MAX_DIMS], reduced[MAX_DIMS];
    int32_t kept_stride[3][MAX_DIMS], reduced_stride[3][MAX_DIMS];
    float p, q;
    int32_t num_in, by_warp, chunks;
};

__device__ __forceinline__ void offsets(uint32_t index, int dims, const int32_t* shape, const int32_t stride[3][MAX_DIMS],
                                        int64_t at[3]) {
#pragma unroll
    for (int d = MAX_DIMS - 1; d >= 0; --d) {
        if (d < dims) {
            const uint32_t next = d == 0 ? 0 : index / static_cast<uint32_t>(shape[d]);
            const uint32_t c = d == 0 ? index : index - next * static_cast<uint32_t>(shape[d]);
            index = next;
#pragma unroll
            for (int k = 0; k < 3; ++k) at[k] += static_cast<int64_t>(c) * stride[k][d];
        }
    }
}

template <bool BY_WARP>
__global__ void reduce_kernel(const Reduce r) {
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int64_t out = BY_WARP ? thread / 32 : thread;
    if (out >= r.num_out) return;
    const int lane = BY_WARP ? threadIdx.x & 31 : 0, lanes = BY_WARP ? 32 : 1;
    int64_t base[3] = {0, 0, 0};
    offsets(static_cast<uint32_t>(out), r.kept_dims, r.kept, r.kept_stride, base);
    const int64_t size = (r.num_reduced + r.chunks - 1) / r.chunks;
    const int64_t begin = size * blockIdx.y;
    const int64_t end = begin + size < r.num_reduced ? begin + size : r.num_reduced;
    float total = r.largest ? -INFINITY : 0.0f;
    for (int64_t i = begin + lane; i < end; i += lanes) {
        int64_t at[3] = {base[0], base[1], base[2]};
        offsets(static_cast<uint32_t>(i), r.reduced_dims, r.reduced, r.reduced_stride, at);
        float v[3] = {0, 0, 0};
#pragma unroll
        for (int k = 0; k < 3; ++k)
            if (k < r.num_in) v[k] = load(r.in[k], at[k], r.in_type[k]);
        const float x = apply(r.op, v[0], v[1], v[2], r.p, r.q);
        total = r.largest ? fmaxf(total, x) : total + x;
    }
    if (BY_WARP)
        for (int o = 16; o > 0; o >>= 1) {
            const float other = __shfl_xor_sync(0xffffffffu, total, o);
            total = r.largest ? fmaxf(total, other) : total + other;
        }
    if (lane == 0) {
        if (r.chunks > 1) r.partial[blockIdx.y * r.num_out + out] = total;
        else store(r.out, out, r.out_type, total);
    }
}

// 32 outputs a block over the chunks' partial results, [chunks, num_out].
__global__ void reduce_finish_kernel(const float* partial, void* out, int out_type, int64_t num_out, int chunks, int largest) {
    __shared__ float shared[32][33];
    const int64_t o = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
    float total = largest ? -INFINITY : 0.0f;
    if (o < num_out)
        for (int c = threadIdx.y; c < chunks; c += 32) {
            const float x = partial[c * num_out + o];
            total = largest ? fmaxf(total, x) : total + x;
        }
    shared[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    total = shared[threadIdx.x][threadIdx.y];
    for (int s = 16; s > 0; s >>= 1) {
        const float other = __shfl_xor_sync(0xffffffffu, total, s);
        total = largest ? fmaxf(total, other) : total + other;
    }
    const int64_t mine = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.y;
    if (threadIdx.x == 0 && mine < num_out) store(out, mine, out_type, total);
}
static void finish(const float* partial, void* out, int out_type, int64_t num_out, int chunks, int largest, cudaStream_t stream) {
    reduce_finish_kernel<<<static_cast<unsigned>((num_out + 31) / 32), dim3(32, 32), 0, stream>>>(partial, out, out_type, num_out,
                                                                                                 chunks, largest);
}

EXPORT int pw_reduce(const Reduce* r, cudaStream_t stream) {
    if (r->num_out == 0) return 0;
    const int64_t threads = r->by_warp ? r->num_out * 32 : r->num_out;
    const dim3 grid(static_cast<unsigned>((threads + 255) / 256), r->chunks);
    if (r->by_warp) reduce_kernel<true><<<grid, 256, 0, stream>>>(*r);
    else reduce_kernel<false><<<grid, 256, 0, stream>>>(*r);
    if (r->chunks > 1) finish(r->partial, r->out, r->out_type, r->num_out, r->chunks, r->largest, stream);
    return launched("reduce");
}

// Sum of squares of an array without gaps, in two passes.
struct Squares {
    float* out;
    float* partial;  // [blocks]
    const float* in;
    int64_t count;
    int32_t blocks;
};
__global__ void squares_kernel(const Squares q) {
    __shared__ float sums[8];
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    float total = 0.0f;
    if (reinterpret_cast<uintptr_t>(q.in) % 16 == 0) {
        const float4* in = reinterpret_cast<const float4*>(q.in);
        const int64_t n = q.count / 4;
        for (int64_t k = i; k < n; k += step) {
            const float4 v = in[k];
            total += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        }
        i += n * 4;
    }
    for (; i < q.count; i += step) total += q.in[i] * q.in[i];
    for (int o = 16; o > 0; o >>= 1) total += __shfl_xor_sync(0xffffffffu, total, o);
    if ((threadIdx.x & 31) == 0) sums[threadIdx.x / 32] = total;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < 8; ++w) total += sums[w];
        q.partial[blockIdx.x] = total;
    }
}
EXPORT int pw_squares(const Squares* q, cudaStream_t stream) {
    squares_kernel<<<q->blocks, 256, 0, stream>>>(*q);
    finish(q->partial, q->out, 0, 1, q->blocks, 0, stream);
    return launched("squares");
}

// -------------------------------------------------------------------------------------------- rows by index, and back

struct Rows {
    void* out;          // gather: the values; scatter: the table
    const void* table;  // gather: the table; scatter: the values
    const int32_t* index;
    int32_t value_type;  // of the rows' side that is not the table (the table is float32)
    int32_t width, table_stride;
    int32_t group;  // row i of the values lies at i / group * group_stride + i % group * value_stride
    int64_t count, value_stride, group_stride, index_stride;
    int32_t zero_is_none;  // scatter: values of index 0 are dropped
};

template <int STEP>  // elements a thread
__global__ void gather_kernel(const Rows r) {
    const uint32_t parts = r.width / STEP, n = static_cast<uint32_t>(r.count) * parts, step = gridDim.x * blockDim.x;
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        const uint32_t row = i / parts, column = (i - row * parts) * STEP, group = row / r.group;
        const float* from = static_cast<const float*>(r.table) + static_cast<int64_t>(r.index[row * r.index_stride]) * r.table_stride + column;
        const int64_t to = group * r.group_stride + (row - group * r.group) * r.value_stride + column;
        float v[STEP];
#pragma unroll
        for (int k = 0; k < STEP; ++k) v[k] = from[k];
        if (STEP == 4 && r.value_type == 0) {
            *reinterpret_cast<float4*>(static_cast<float*>(r.out) + to) = make_float4(v[0], v[1 % STEP], v[2 % STEP], v[3 % STEP]);
        } else {
#pragma unroll
            for (int k = 0; k < STEP; ++k) store(r.out, to + k, r.value_type, v[k]);
        }
    }
}
template <int STEP>
__global__ void scatter_kernel(const Rows r) {
    const uint32_t parts = r.width / STEP, n = static_cast<uint32_t>(r.count) * parts, step = gridDim.x * blockDim.x;
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        const uint32_t row = i / parts, column = (i - row * parts) * STEP, group = row / r.group;
        const int64_t index = r.index[row * r.index_stride];
        if (index == 0 && r.zero_is_none) continue;
        float* to = static_cast<float*>(r.out) + index * r.table_stride + column;
        const int64_t from = group * r.group_stride + (row - group * r.group) * r.value_stride + column;
        if (STEP == 4 && r.value_type != 3) {
            add_four(to, load_four(r.table, from, r.value_type));
        } else {
#pragma unroll
            for (int k = 0; k < STEP; ++k) atomicAdd(to + k, load(r.table, from + k, r.value_type));
        }
    }
}
static bool by_four(const Rows* r, const void* values, const void* table, bool scatter) {
    const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
    const bool rows = r->width % 4 == 0 && r->value_stride % 4 == 0 && r->group_stride % 4 == 0 && aligned(values);
    return rows && (!scatter || (r->table_stride % 4 == 0 && aligned(table)));
}
static unsigned rows_grid(int64_t threads) {
    const int64_t blocks = (threads + 255) / 256;
    return static_cast<unsigned>(blocks < 132 * 64 ? blocks : 132 * 64);
}
EXPORT int pw_gather(const Rows* r, cudaStream_t stream) {
    if (r->count == 0) return 0;
    if (by_four(r, r->out, r->table, false)) gather_kernel<4><<<rows_grid(r->count * r->width / 4), 256, 0, stream>>>(*r);
    else gather_kernel<1><<<rows_grid(r->count * r->width), 256, 0, stream>>>(*r);
    return launched("gather");
}
EXPORT int pw_scatter_add(const Rows* r, cudaStream_t stream) {
    if (r->count == 0) return 0;
    if (by_four(r, r->table, r->out, true)) scatter_kernel<4><<<rows_grid(r->count * r->width / 4), 256, 0, stream>>>(*r);
    else scatter_kernel<1><<<rows_grid(r->count * r->width), 256, 0, stream>>>(*r);
    return launched("scatter_add");
}

// ------------------------------------------------------------------------------------------------- rows to padded rows

// out[r, out_offset + c] = in[r, c]; with fill, columns up to out_columns become 0. Changes the type on the way.
struct Copy2D {
    void* out;
    const void* in;
    int32_t out_type, in_type;
    int64_t rows;
    int32_t columns, fill;  // fill: zero columns written after the copied ones
    int64_t out_stride, in_stride;
};
__global__ void copy2d_kernel(const Copy2D c) {
    const uint32_t width = static_cast<uint32_t>(c.columns + c.fill);
    const int64_t n = c.rows * width, step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) {
        const uint32_t row = static_cast<uint32_t>(i) / width, column = static_cast<uint32_t>(i) - row * width;
        const float v = column < static_cast<uint32_t>(c.columns) ? load(c.in, row * c.in_stride + column, c.in_type) : 0.0f;
        store(c.out, row * c.out_stride + column, c.out_type, v);
    }
}
// float32 to float32 or a 16-bit type, four elements a thread
__global__ void copy2d_by_four_kernel(const Copy2D c) {
    const uint32_t width = static_cast<uint32_t>(c.columns) / 4, n = static_cast<uint32_t>(c.rows) * width;
    const uint32_t step = gridDim.x * blockDim.x;
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        const uint32_t row = i / width, column = (i - row * width) * 4;
        const float4 v = *reinterpret_cast<const float4*>(static_cast<const float*>(c.in) + row * c.in_stride + column);
        store_four(c.out, row * c.out_stride + column, c.out_type, v);
    }
}
EXPORT int pw_copy2d(const Copy2D* c, cudaStream_t stream) {
    const int64_t n = c->rows * (c->columns + c->fill);
    if (n == 0) return 0;
    const bool four = c->in_type == 0 && c->out_type != 3 && c->fill == 0 && c->columns % 4 == 0 && c->in_stride % 4 == 0 &&
                      c->out_stride % 4 == 0 && reinterpret_cast<uintptr_t>(c->in) % 16 == 0 &&
                      reinterpret_cast<uintptr_t>(c->out) % (c->out_type == 0 ? 16 : 8) == 0;
    if (four) {
        copy2d_by_four_kernel<<<rows_grid(n / 4), 256, 0, stream>>>(*c);
        return launched("copy2d");
    }
    const int64_t blocks = (n + 255) / 256;
    copy2d_kernel<<<static_cast<unsigned>(blocks < 132 * 64 ? blocks : 132 * 64), 256, 0, stream>>>(*c);
    return launched("copy2d");
}

// ------------------------------------------------------------- backward of bias and activation: dz and its column sums

// dz[r, n] = dy[r, n] * (y[r, n] > 0 or no activation); partial[block, n] = sums over the block's rows. fill as in Copy2D.
struct BiasGrad {
    void* dz;
    const void* dy;
    const void* y;  // null: no activation
    float* partial;  // [blocks, columns]
    float* db;       // [columns]; null: no bias
    int32_t dz_type, dy_type, y_type, columns, fill, blocks;
    int64_t rows, dz_stride, dy_stride, dy_column_stride, y_stride;
};
__global__ void bias_grad_kernel(const BiasGrad b) {
    __shared__ float sums[8][33];
    const int column = blockIdx.x * 32 + threadIdx.x;
    const int64_t size = (b.rows + gridDim.y - 1) / gridDim.y;
    const int64_t begin = size * blockIdx.y, end = begin + size < b.rows ? begin + size : b.rows;
    float total = 0.0f;
    if (column < b.columns + b.fill)
#pragma unroll 4
        for (int64_t r = begin + threadIdx.y; r < end; r += 8) {
            float v = 0.0f;
            if (column < b.columns) {
                v = load(b.dy, r * b.dy_stride + column * b.dy_column_stride, b.dy_type);
                if (b.y != nullptr && !(load(b.y, r * b.y_stride + column, b.y_type) > 0.0f)) v = 0.0f;
                total += v;
            }
            if (b.dz != nullptr) store(b.dz, r * b.dz_stride + column, b.dz_type, v);
        }
    sums[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.y == 0 && column < b.columns && b.db != nullptr) {
        for (int i = 1; i < 8; ++i) total += sums[i][threadIdx.x];
        b.partial[static_cast<int64_t>(blockIdx.y) * b.columns + column] = total;
    }
}
template <typename T>
struct Eight {  // 16 bytes
    T v[8];
};
template <typename T>
__device__ __forceinline__ void load_eight(const void* p, int64_t at, float* v) {
    const uint4 raw = *reinterpret_cast<const uint4*>(static_cast<const T*>(p) + at);
    const Eight<T>& e = reinterpret_cast<const Eight<T>&>(raw);
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = static_cast<float>(e.v[k]);
}
template <>
__device__ __forceinline__ void load_eight<float>(const void* p, int64_t at, float* v) {
    const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(p) + at);
    const float4 a = from[0], b = from[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
template <typename T>
__device__ __forceinline__ void store_eight(void* p, int64_t at, const float* v) {
    uint4 raw;
    Eight<T>& e = reinterpret_cast<Eight<T>&>(raw);
#pragma unroll
    for (int k = 0; k < 8; ++k) e.v[k] = T(v[k]);
    *reinterpret_cast<uint4*>(static_cast<T*>(p) + at) = raw;
}
template <>
__device__ __forceinline__ void store_eight<float>(void* p, int64_t at, const float* v) {
    float4* to = reinterpret_cast<float4*>(static_cast<float*>(p) + at);
    to[0] = make_float4(v[0], v[1], v[2], v[3]);
    to[1] = make_float4(v[4], v[5], v[6], v[7]);
}
// Sums over the rows of a block, [threads in y][8 columns a thread], into partial[block, columns].
__device__ __forceinline__ void block_sums(float* shared, const float* total, float* partial, int columns, int first, bool valid) {
    float* mine = shared + (threadIdx.y * blockDim.x + threadIdx.x) * 8;
#pragma unroll
    for (int k = 0; k < 8; ++k) mine[k] = total[k];
    __syncthreads();
    if (threadIdx.y == 0 && valid)
        for (int k = 0; k < 8; ++k) {
            float sum = 0.0f;
            for (int y = 0; y < blockDim.y; ++y) sum += shared[(y * blockDim.x + threadIdx.x) * 8 + k];
            partial[static_cast<int64_t>(blockIdx.y) * columns + first + k] = sum;
        }
    __syncthreads();
}
template <typename T>
__global__ void bias_grad_eight_kernel(const BiasGrad b) {
    extern __shared__ float shared[];
    const int first = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
    const bool valid = first < b.columns;
    const int64_t size = (b.rows + gridDim.y - 1) / gridDim.y;
    const int64_t begin = size * blockIdx.y, end = begin + size < b.rows ? begin + size : b.rows;
    float total[8] = {};
    if (valid)
#pragma unroll 4
        for (int64_t r = begin + threadIdx.y; r < end; r += blockDim.y) {
            float v[8];
            load_eight<T>(b.dy, r * b.dy_stride + first, v);
            if (b.y != nullptr) {
                float y[8];
                load_eight<T>(b.y, r * b.y_stride + first, y);
#pragma unroll
                for (int k = 0; k < 8; ++k) v[k] = y[k] > 0.0f ? v[k] : 0.0f;
            }
#pragma unroll
            for (int k = 0; k < 8; ++k) total[k] += v[k];
            if (b.dz != nullptr) store_eight<T>(b.dz, r * b.dz_stride + first, v);
        }
    if (b.db != nullptr) block_sums(shared, total, b.partial, b.columns, first, valid);
}
static dim3 eight_block(int columns) {
    const int parts = columns / 8, x = parts <= 128 ? parts : 64;
    return dim3(x, 256 / x > 0 ? 256 / x : 1);
}
// launch(a value of the type)
template <typename Launch>
static void by_type(int type, const Launch& launch) {
    if (type == 0) launch(float());
    else if (type == 1) launch(__nv_bfloat16());
    else launch(__half());
}
static bool aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

EXPORT int pw_bias_grad(const BiasGrad* b, cudaStream_t stream) {
    const bool types = b->dy_type != 3 && (b->dz == nullptr || b->dz_type == b->dy_type) &&
                       (b->y == nullptr || b->y_type == b->dy_type);
    const bool eight = types && b->fill == 0 && b->columns % 8 == 0 && b->dy_column_stride == 1 && b->dy_stride % 8 == 0 &&
                       b->dz_stride % 8 == 0 && b->y_stride % 8 == 0 && aligned16(b->dy) && aligned16(b->dz) && aligned16(b->y);
    if (eight) {
        const dim3 block = eight_block(b->columns), grid((b->columns / 8 + block.x - 1) / block.x, b->blocks);
        const size_t bytes = block.x * block.y * 8 * sizeof(float);
        by_type(b->dy_type, [&](auto one) { bias_grad_eight_kernel<decltype(one)><<<grid, block, bytes, stream>>>(*b); });
    } else {
        const dim3 grid((b->columns + b->fill + 31) / 32, b->blocks), block(32, 8);
        bias_grad_kernel<<<grid, block, 0, stream>>>(*b);
    }
    if (b->db != nullptr) finish(b->partial, b->db, 0, b->columns, b->blocks, 0, stream);
    return launched("bias_grad");
}

// ---------------------------------------------------------------------------- layers with few outputs (logits): N <= 8

// y[b, n] = x[b, :] . w[:, n] + bias[n], a warp a row.
struct Skinny {
    void* y;         // forward: [rows, n]; backward: dx [rows, k] with x's stride, or null
    const void* x;   // [rows, k]
    const float* w;  // [k, n]
    const float* bias;
    const void* dy;  // backward: [rows, n]
    float* partial;  // backward: [blocks, k, n]
    float* dw;       // backward: [k, n]
    float *db_partial, *db;  // backward: sums of dx over the rows, [blocks, k] and [k]; null: not wanted
    int32_t x_type, y_type, dy_type, k, n, blocks, relu_x;  // relu_x: dx is masked where x is 0
    int64_t rows, x_stride, y_stride, dy_stride;
};
template <int N>
__global__ void skinny_kernel(const Skinny s) {
    const int64_t row = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    const int lane = threadIdx.x & 31;
    if (row >= s.rows) return;
    float total[N] = {};
    for (int k = lane; k < s.k; k += 32) {
        const float x = load(s.x, row * s.x_stride + k, s.x_type);
#pragma unroll
        for (int n = 0; n < N; ++n) total[n] += x * s.w[k * N + n];
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
        for (int o = 16; o > 0; o >>= 1) total[n] += __shfl_xor_sync(0xffffffffu, total[n], o);
        if (lane == 0) store(s.y, row * s.y_stride + n, s.y_type, total[n] + (s.bias != nullptr ? s.bias[n] : 0.0f));
    }
}
template <int N>
__global__ void skinny_grad_kernel(const Skinny s) {
    __shared__ float sums[8][N + 1][33];
    const int k = blockIdx.x * 32 + threadIdx.x;
    const int64_t size = (s.rows + gridDim.y - 1) / gridDim.y;
    const int64_t begin = size * blockIdx.y, end = begin + size < s.rows ? begin + size : s.rows;
    float total[N] = {}, w[N] = {}, dx_total = 0.0f;
    if (k < s.k) {
#pragma unroll
        for (int n = 0; n < N; ++n) w[n] = s.w[k * N + n];
#pragma unroll 4
        for (int64_t r = begin + threadIdx.y; r < end; r += 8) {
            const float x = load(s.x, r * s.x_stride + k, s.x_type);
            float dx = 0.0f;
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const float dy = load(s.dy, r * s.dy_stride + n, s.dy_type);
                total[n] += x * dy;
                dx += dy * w[n];
            }
            if (s.relu_x && !(x > 0.0f)) dx = 0.0f;
            dx_total += dx;
            if (s.y != nullptr) store(s.y, r * s.y_stride + k, s.y_type, dx);
        }
    }
    sums[threadIdx.y][N][threadIdx.x] = dx_total;
#pragma unroll
    for (int n = 0; n < N; ++n) sums[threadIdx.y][n][threadIdx.x] = total[n];
    __syncthreads();
    if (threadIdx.y == 0 && k < s.k)
#pragma unroll
        for (int n = 0; n < N; ++n) {
            for (int i = 1; i < 8; ++i) total[n] += sums[i][n][threadIdx.x];
            s.partial[(static_cast<int64_t>(blockIdx.y) * s.k + k) * N + n] = total[n];
        }
    if (threadIdx.y == 1 && k < s.k && s.db != nullptr) {
        dx_total = 0.0f;
        for (int i = 0; i < 8; ++i) dx_total += sums[i][N][threadIdx.x];
        s.db_partial[static_cast<int64_t>(blockIdx.y) * s.k + k] = dx_total;
    }
}
// One output: eight inputs a thread.
template <typename T>
__global__ void skinny_grad_eight_kernel(const Skinny s) {
    extern __shared__ float shared[];
    const int first = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
    const bool valid = first < s.k;
    const int64_t size = (s.rows + gridDim.y - 1) / gridDim.y;
    const int64_t begin = size * blockIdx.y, end = begin + size < s.rows ? begin + size : s.rows;
    float dw[8] = {}, db[8] = {}, w[8] = {};
    if (valid) {
        for (int k = 0; k < 8; ++k) w[k] = s.w[first + k];
#pragma unroll 4
        for (int64_t r = begin + threadIdx.y; r < end; r += blockDim.y) {
            float x[8], dx[8];
            load_eight<T>(s.x, r * s.x_stride + first, x);
            const float dy = load(s.dy, r * s.dy_stride, s.dy_type);
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                dw[k] += x[k] * dy;
                dx[k] = s.relu_x && !(x[k] > 0.0f) ? 0.0f : dy * w[k];
                db[k] += dx[k];
            }
            if (s.y != nullptr) store_eight<T>(s.y, r * s.y_stride + first, dx);
        }
    }
    block_sums(shared, dw, s.partial, s.k, first, valid);
    if (s.db != nullptr) block_sums(shared, db, s.db_partial, s.k, first, valid);
}
constexpr int SKINNY_ROWS = 4;  // a warp, so that a weight is read once for all of them
template <typename T>
__global__ void skinny_eight_kernel(const Skinny s) {
    const int64_t first = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32 * SKINNY_ROWS;
    const int lane = threadIdx.x & 31;
    if (first >= s.rows) return;
    float total[SKINNY_ROWS] = {};
    for (int k = lane * 8; k < s.k; k += 256) {
        float w[8], x[SKINNY_ROWS][8];
        load_eight<float>(s.w, k, w);
#pragma unroll
        for (int r = 0; r < SKINNY_ROWS; ++r) load_eight<T>(s.x, (first + r < s.rows ? first + r : first) * s.x_stride + k, x[r]);
#pragma unroll
        for (int r = 0; r < SKINNY_ROWS; ++r)
#pragma unroll
            for (int i = 0; i < 8; ++i) total[r] += x[r][i] * w[i];
    }
    const float bias = s.bias != nullptr ? s.bias[0] : 0.0f;
#pragma unroll
    for (int r = 0; r < SKINNY_ROWS; ++r) {
        for (int o = 16; o > 0; o >>= 1) total[r] += __shfl_xor_sync(0xffffffffu, total[r], o);
        if (lane == r && first + r < s.rows) store(s.y, (first + r) * s.y_stride, s.y_type, total[r] + bias);
    }
}
static bool skinny_by_eight(const Skinny* s, bool forward) {
    return s->n == 1 && s->x_type != 3 && s->k % 8 == 0 && s->x_stride % 8 == 0 && aligned16(s->x) && aligned16(s->w) &&
           (forward || s->y == nullptr || (s->y_type == s->x_type && s->y_stride % 8 == 0 && aligned16(s->y)));
}
template <int N>
int skinny(const Skinny* s, bool forward, cudaStream_t stream) {
    if (skinny_by_eight(s, forward)) {
        if (forward) {
            const int64_t warps = (s->rows + SKINNY_ROWS - 1) / SKINNY_ROWS;
            const unsigned grid = static_cast<unsigned>((warps * 32 + 255) / 256);
            by_type(s->x_type, [&](auto one) { skinny_eight_kernel<decltype(one)><<<grid, 256, 0, stream>>>(*s); });
        } else {
            const dim3 block = eight_block(s->k), grid((s->k / 8 + block.x - 1) / block.x, s->blocks);
            const size_t bytes = block.x * block.y * 8 * sizeof(float);
            by_type(s->x_type, [&](auto one) { skinny_grad_eight_kernel<decltype(one)><<<grid, block, bytes, stream>>>(*s); });
        }
    } else if (forward) {
        skinny_kernel<N><<<static_cast<unsigned>((s->rows * 32 + 255) / 256), 256, 0, stream>>>(*s);
    } else {
        skinny_grad_kernel<N><<<dim3((s->k + 31) / 32, s->blocks), dim3(32, 8), 0, stream>>>(*s);
    }
    if (!forward) {
        finish(s->partial, s->dw, 0, s->k * N, s->blocks, 0, stream);
        if (s->db != nullptr) finish(s->db_partial, s->db, 0, s->k, s->blocks, 0, stream);
    }
    return launched("skinny");
}
static int skinny_any(const Skinny* s, bool forward, cudaStream_t stream) {
    if (s->rows == 0) return 0;
    switch (s->n) {
        case 1: return skinny<1>(s, forward, stream);
        case 2: return skinny<2>(s, forward, stream);
        case 3: return skinny<3>(s, forward, stream);
        case 4: return skinny<4>(s, forward, stream);
        default: return failed("skinny", "more than 4 outputs");
    }
}
EXPORT int pw_skinny(const Skinny* s, cudaStream_t stream) { return skinny_any(s, true, stream); }
EXPORT int pw_skinny_grad(const Skinny* s, cudaStream_t stream) { return skinny_any(s, false, stream); }

// -------------------------------------------------------------------------------------- factorization machine's pairs

// out[b] = half of (square of the sum minus sum of the squares) over fields, summed over the width (Rendle, 2010).
struct Pairs {
    void* out;       // forward: float32 [rows]; backward: de [rows, fields, width], float32
    const float* e;  // [rows, fields, width]
    const float* dout;
    const void* add;  // backward: added to the result, [rows, fields * width] of add_type; null: nothing
    int64_t rows, add_stride;
    int32_t fields, width, add_type;
};
// A warp a row. Its lanes are groups of as many columns as the width has (a power of two, at most 32); a group takes every
// so-manyth field, so that all lanes read whatever the width.
__device__ __forceinline__ int lanes_of(int width) {
    int lanes = 1;
    while (lanes < width && lanes < 32) lanes *= 2;
    return lanes;
}
// The sum over the fields of a column, in all groups.
__device__ __forceinline__ float sum_of_groups(float sum, int lanes) {
    for (int o = 16; o >= lanes; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    return sum;
}
__global__ void fm_pairs_kernel(const Pairs p) {
    const int64_t row = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    const int lane = threadIdx.x & 31, lanes = lanes_of(p.width), group = lane / lanes;
    if (row >= p.rows) return;
    const float* e = p.e + row * p.fields * p.width;
    float total = 0.0f;
    for (int first = 0; first < p.width; first += lanes) {
        const int w = first + lane % lanes;
        float sum = 0.0f;
        if (w < p.width)
            for (int f = group; f < p.fields; f += 32 / lanes) {
                const float x = e[f * p.width + w];
                sum += x;
                total -= x * x;
            }
        sum = sum_of_groups(sum, lanes);
        if (group == 0) total += sum * sum;
    }
    for (int o = 16; o > 0; o >>= 1) total += __shfl_xor_sync(0xffffffffu, total, o);
    if (lane == 0) static_cast<float*>(p.out)[row] = 0.5f * total;
}
__global__ void fm_pairs_grad_kernel(const Pairs p) {
    const int64_t row = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    const int lane = threadIdx.x & 31, lanes = lanes_of(p.width), group = lane / lanes;
    if (row >= p.rows) return;
    const float* e = p.e + row * p.fields * p.width;
    float* out = static_cast<float*>(p.out) + row * p.fields * p.width;
    const float scale = p.dout[row];
    for (int first = 0; first < p.width; first += lanes) {
        const int w = first + lane % lanes;
        float sum = 0.0f;
        if (w < p.width)
            for (int f = group; f < p.fields; f += 32 / lanes) sum += e[f * p.width + w];
        sum = sum_of_groups(sum, lanes);
        if (w < p.width)
            for (int f = group; f < p.fields; f += 32 / lanes) {
                const int i = f * p.width + w;
                const float more = p.add != nullptr ? load(p.add, row * p.add_stride + i, p.add_type) : 0.0f;
                out[i] = scale * (sum - e[i]) + more;
            }
    }
}
EXPORT int pw_fm_pairs(const Pairs* p, cudaStream_t stream) {
    if (p->rows == 0) return 0;
    fm_pairs_kernel<<<static_cast<unsigned>((p->rows * 32 + 255) / 256), 256, 0, stream>>>(*p);
    return launched("fm_pairs");
}
EXPORT int pw_fm_pairs_grad(const Pairs* p, cudaStream_t stream) {
    if (p->rows == 0) return 0;
    fm_pairs_grad_kernel<<<static_cast<unsigned>((p->rows * 32 + 255) / 256), 256, 0, stream>>>(*p);
    return launched("fm_pairs_grad");
}

// The same with the lookup before it and the adding up behind it, so that each embedding passes through memory once.
struct Fields {
    void* e;              // lookup: the embeddings, [rows, fields * width] of e_type; null: not wanted
    float* pairs;         // lookup: [rows]
    float* first;         // lookup: sums of the first-order weights, [rows]; null: there are none
    float* sums;          // of the embeddings over the fields, [rows, width]; lookup: written; gradient: read; null: not wanted
    const float* values;  // gradient of pairs: the embeddings by index, as in the lookup
    const float* dpairs;  // gradient: [rows]; null: there are no pairs
    const void* add;      // gradient: that of e, [rows, fields * width] of add_type; null: none
    const float* dfirst;  // gradient of first, [rows]; null: none
    float* table;         // of the embeddings: lookup: read; gradient: added to, 16-byte aligned rows
    float* first_table;   // of the first-order weights, the same rows
    const int32_t* index; // [rows, fields]; the gradient drops 0
    int64_t rows, e_stride, add_stride;
    int32_t fields, width, table_stride, value_stride, e_type, add_type;
    int32_t tile;         // gradient: rows of a field that a block adds up before it adds them to the table, 256 or 512
};
// width is 4, 8, 16, 32, 64 or 128: a lane holds 4 floats, width / 4 lanes a field
__global__ void fields_lookup_kernel(const Fields p) {
    const int64_t row = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    const int lane = threadIdx.x & 31, lanes = p.width / 4, column = lane % lanes * 4;
    if (row >= p.rows) return;
    float4 sum = make_float4(0, 0, 0, 0);
    float squares = 0.0f, first = 0.0f;
    for (int f = lane / lanes; f < p.fields; f += 32 / lanes) {
        const int64_t at = static_cast<int64_t>(p.index[row * p.fields + f]) * p.table_stride;
        const float* from = p.table + at + column;
        const float4 v = make_float4(from[0], from[1], from[2], from[3]);
        if (p.e != nullptr) store_four(p.e, row * p.e_stride + f * p.width + column, p.e_type, v);
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        if (column == 0 && p.first != nullptr) first += p.first_table[at];
    }
    for (int o = 16; o >= lanes; o >>= 1) {
        sum.x += __shfl_xor_sync(0xffffffffu, sum.x, o);
        sum.y += __shfl_xor_sync(0xffffffffu, sum.y, o);
        sum.z += __shfl_xor_sync(0xffffffffu, sum.z, o);
        sum.w += __shfl_xor_sync(0xffffffffu, sum.w, o);
    }
    if (lane < lanes && p.sums != nullptr) store_four(p.sums, row * p.width + column, 0, sum);
    float total = (lane < lanes ? sum.x * sum.x + sum.y * sum.y + sum.z * sum.z + sum.w * sum.w : 0.0f) - squares;
    for (int o = 16; o > 0; o >>= 1) {
        total += __shfl_xor_sync(0xffffffffu, total, o);
        first += __shfl_xor_sync(0xffffffffu, first, o);
    }
    if (lane == 0) {
        p.pairs[row] = 0.5f * total;
        if (p.first != nullptr) p.first[row] = first;
    }
}
// Ids are seldom even: of 65,536 one may occur 12,000 times in a field, and its additions would wait for each other. So a block
// takes TILE rows of one field, groups them by key in shared memory (a hash table, counts, places), and width / 4 lanes add up
// RUN neighbours of that order before they add to the table: once for each key that they meet.
// The gradient of pairs is dpairs (sum - v): v is the same for all rows of a key, so it is taken off once a run.
template <int TILE>
__global__ void __launch_bounds__(256) fields_grad_kernel(const Fields p) {
    constexpr int THREADS = 256, EACH = TILE / THREADS, SLOTS = 2 * TILE, PARTS = SLOTS / THREADS, RUN = TILE / 64;
    __shared__ int keys[SLOTS], counts[SLOTS], ordered_keys[TILE], sums_of_warps[THREADS / 32];
    __shared__ uint16_t ordered_rows[TILE];
    const int64_t row0 = static_cast<int64_t>(blockIdx.y) * TILE;
    const int field = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    for (int i = threadIdx.x; i < SLOTS; i += THREADS) keys[i] = counts[i] = 0;
    __syncthreads();
    int key[EACH], slot[EACH], place[EACH];
#pragma unroll
    for (int q = 0; q < EACH; ++q) {
        const int64_t row = row0 + q * THREADS + threadIdx.x;
        key[q] = row < p.rows ? p.index[row * p.fields + field] : 0;
        if (key[q] == 0) continue;
        slot[q] = (static_cast<uint32_t>(key[q]) * 2654435761u >> 16) % SLOTS;
        while (true) {
            const int other = atomicCAS(&keys[slot[q]], 0, key[q]);
            if (other == 0 || other == key[q]) break;
            slot[q] = (slot[q] + 1) % SLOTS;
        }
        place[q] = atomicAdd(&counts[slot[q]], 1);
    }
    __syncthreads();
    int mine[PARTS], total = 0;  // counts become the places where the slots begin
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
        mine[i] = total;
        total += counts[threadIdx.x * PARTS + i];
    }
    int upto = total;
    for (int o = 1; o < 32; o <<= 1) {
        const int before = __shfl_up_sync(0xffffffffu, upto, o);
        if (lane >= o) upto += before;
    }
    if (lane == 31) sums_of_warps[warp] = upto;
    __syncthreads();
    int start = upto - total, end = 0;
    for (int i = 0; i < THREADS / 32; ++i) {
        if (i < warp) start += sums_of_warps[i];
        end += sums_of_warps[i];
    }
#pragma unroll
    for (int i = 0; i < PARTS; ++i) counts[threadIdx.x * PARTS + i] = start + mine[i];
    __syncthreads();
#pragma unroll
    for (int q = 0; q < EACH; ++q)
        if (key[q] != 0) {
            const int at = counts[slot[q]] + place[q];
            ordered_keys[at] = key[q];
            ordered_rows[at] = static_cast<uint16_t>(q * THREADS + threadIdx.x);
        }
    __syncthreads();
    const int lanes = p.width / 4, column = threadIdx.x % lanes * 4;
    for (int begin = threadIdx.x / lanes * RUN; begin < end; begin += THREADS / lanes * RUN) {
        float4 g = make_float4(0, 0, 0, 0);
        float pairs = 0.0f, first = 0.0f;
        int64_t now = ordered_keys[begin];
        const auto add_up = [&] {
            if (p.dpairs != nullptr) {
                const float* v = p.values + now * p.value_stride + column;
                g.x -= pairs * v[0], g.y -= pairs * v[1], g.z -= pairs * v[2], g.w -= pairs * v[3];
            }
            add_four(p.table + now * p.table_stride + column, g);
            if (column == 0 && p.dfirst != nullptr) atomicAdd(p.first_table + now * p.table_stride, first);
        };
#pragma unroll
        for (int k = 0; k < RUN; ++k) {
            if (begin + k >= end) break;
            const int next = ordered_keys[begin + k];
            if (next != now) {
                add_up();
                g = make_float4(0, 0, 0, 0);
                pairs = first = 0.0f;
                now = next;
            }
            const int64_t row = row0 + ordered_rows[begin + k];
            if (p.add != nullptr) {
                const float4 a = load_four(p.add, row * p.add_stride + field * p.width + column, p.add_type);
                g.x += a.x, g.y += a.y, g.z += a.z, g.w += a.w;
            }
            if (p.dpairs != nullptr) {
                const float d = p.dpairs[row];
                const float4 s = load_four(p.sums, row * p.width + column, 0);
                g.x += d * s.x, g.y += d * s.y, g.z += d * s.z, g.w += d * s.w;
                pairs += d;
            }
            if (p.dfirst != nullptr) first += p.dfirst[row];
        }
        add_up();
    }
}
static bool by_four(const void* p, int64_t stride, int type) {
    return stride % 4 == 0 && reinterpret_cast<uintptr_t>(p) % (type == 0 ? 16 : 8) == 0;
}
EXPORT int pw_fields_lookup(const Fields* p, cudaStream_t stream) {
    if (p->rows == 0) return 0;
    if (!by_four(p->e, p->e_stride, p->e_type)) return failed("fields_lookup", "embeddings that do not begin at 4 elements");
    fields_lookup_kernel<<<static_cast<unsigned>((p->rows * 32 + 255) / 256), 256, 0, stream>>>(*p);
    return launched("fields_lookup");
}
EXPORT int pw_fields_grad(const Fields* p, cudaStream_t stream) {
    if (p->rows == 0) return 0;
    if (!by_four(p->add, p->add_stride, p->add_type)) return failed("fields_grad", "gradients that do not begin at 4 elements");
    const dim3 grid(static_cast<unsigned>(p->fields), static_cast<unsigned>((p->rows + p->tile - 1) / p->tile));
    if (p->tile == 256) fields_grad_kernel<256><<<grid, 256, 0, stream>>>(*p);
    else if (p->tile == 512) fields_grad_kernel<512><<<grid, 256, 0, stream>>>(*p);
    else return failed("fields_grad", "tile");
    return launched("fields_grad");
}

// ------------------------------------------------------------------------------------------ dot products of all pairs

// out[b, p] = v[b, i] . v[b, j] for the pairs i > j in the order of numpy.tril_indices; a warp a row, v in shared memory.
struct Dots {
    void* out;         // forward: [rows, pairs]; backward: dv [rows, vectors, width], float32
    const float* v;    // [rows, vectors, width]
    const void* dout;  // [rows, pairs]
    int64_t rows, out_stride, dout_stride;
    int32_t vectors, width, out_type, dout_type;
};
// A lane makes tiles of 4 x 4 products.
__global__ void dot_pairs_kernel(const Dots d) {
    extern __shared__ float shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, pitch = d.width | 1, n = d.vectors * d.width;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + warp;
    if (row >= d.rows) return;
    const int tiles = (d.vectors + 3) / 4, padded = tiles * 4;
    float* v = shared + warp * padded * pitch;
    for (int i = lane; i < n; i += 32) v[i / d.width * pitch + i % d.width] = d.v[row * n + i];
    for (int i = n + lane; i < padded * d.width; i += 32) v[i / d.width * pitch + i % d.width] = 0.0f;
    __syncwarp();
    int a = 0, start = 0;  // row a of the triangle of tiles, its diagonal included, begins at tile start
    for (int t = lane; t < tiles * (tiles + 1) / 2; t += 32) {
        while (start + a + 1 <= t) start += ++a;
        const int b = t - start;
        float total[4][4] = {};
        for (int w = 0; w < d.width; ++w) {
            float x[4], y[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                x[k] = v[(a * 4 + k) * pitch + w];
                y[k] = v[(b * 4 + k) * pitch + w];
            }
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
                for (int l = 0; l < 4; ++l) total[k][l] += x[k] * y[l];
        }
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int l = 0; l < 4; ++l) {
                const int i = a * 4 + k, j = b * 4 + l;
                if (i < d.vectors && j < i) store(d.out, row * d.out_stride + i * (i - 1) / 2 + j, d.out_type, total[k][l]);
            }
    }
}
// Eight lanes make eight vectors' gradients, a lane two columns of each.
__global__ void dot_pairs_grad_kernel(const Dots d) {
    extern __shared__ float shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, n = d.vectors * d.width;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + warp;
    if (row >= d.rows) return;
    const int pitch = (d.vectors + 15) / 16 * 16;
    float* g = shared + warp * (d.vectors * pitch + (n + 3) / 4 * 4);
    float* v = g + d.vectors * pitch;
    for (int i = lane; i < n; i += 32) v[i] = d.v[row * n + i];
    for (int i = lane; i < d.vectors * (pitch - d.vectors + 1); i += 32) {  // zeros on the diagonal and behind the rows
        const int j = i / (pitch - d.vectors + 1), k = i % (pitch - d.vectors + 1);
        g[j * pitch + (k == 0 ? j : d.vectors + k - 1)] = 0.0f;
    }
    for (int i = lane; i < d.vectors * (d.vectors - 1) / 2; i += 32) {
        int high = static_cast<int>((1.0f + sqrtf(8.0f * i + 1.0f)) * 0.5f);  // i = high (high - 1) / 2 + low
        if (high * (high - 1) / 2 > i) --high;
        else if (high * (high + 1) / 2 <= i) ++high;
        const int low = i - high * (high - 1) / 2;
        g[high * pitch + low] = g[low * pitch + high] = load(d.dout, row * d.dout_stride + i, d.dout_type);
    }
    __syncwarp();
    for (int w = (lane & 7) * 2; w < d.width; w += 16)
        for (int first = (lane >> 3) * 8; first < d.vectors; first += 32) {
            const bool both = w + 1 < d.width;
            float total[8] = {}, next[8] = {};
            for (int j = 0; j < d.vectors; ++j) {
                const float x = v[j * d.width + w], y = both ? v[j * d.width + w + 1] : 0.0f;
                const float4* from = reinterpret_cast<const float4*>(g + j * pitch + first);
#pragma unroll
                for (int q = 0; q < 2; ++q) {
                    const float4 f = from[q];
                    total[q * 4] += f.x * x, next[q * 4] += f.x * y;
                    total[q * 4 + 1] += f.y * x, next[q * 4 + 1] += f.y * y;
                    total[q * 4 + 2] += f.z * x, next[q * 4 + 2] += f.z * y;
                    total[q * 4 + 3] += f.w * x, next[q * 4 + 3] += f.w * y;
                }
            }
            float* to = static_cast<float*>(d.out) + row * n + first * d.width + w;
#pragma unroll
            for (int k = 0; k < 8; ++k)
                if (first + k < d.vectors) {
                    to[k * d.width] = total[k];
                    if (both) to[k * d.width + 1] = next[k];
                }
        }
}
// As many rows a block, up to four, as fit into the shared memory that every GPU gives; one row may take what this GPU has.
template <typename Kernel>
static int launch_dots(Kernel kernel, const Dots* d, int bytes_a_row, const char* name, cudaStream_t stream) {
    int rows = 4;
    while (rows > 1 && rows * bytes_a_row > 48 << 10) rows /= 2;
    if (rows * bytes_a_row > 48 << 10) {
        const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes_a_row);
        if (int code = checked(status, "dot products of so many vectors")) return code;
    }
    kernel<<<static_cast<unsigned>((d->rows + rows - 1) / rows), 32 * rows, rows * bytes_a_row, stream>>>(*d);
    return launched(name);
}
EXPORT int pw_dot_pairs(const Dots* d, cudaStream_t stream) {
    if (d->rows == 0) return 0;
    return launch_dots(dot_pairs_kernel, d, ((d->vectors + 3) / 4 * 4) * (d->width | 1) * 4, "dot_pairs", stream);
}
EXPORT int pw_dot_pairs_grad(const Dots* d, cudaStream_t stream) {
    if (d->rows == 0) return 0;
    const int floats = d->vectors * ((d->vectors + 15) / 16 * 16) + (d->vectors * d->width + 3) / 4 * 4;
    return launch_dots(dot_pairs_grad_kernel, d, floats * 4, "dot_pairs_grad", stream);
}

// ------------------------------------------------------------------------------------------------------------- dropout

// mask[i] = 0 or 1 / (1 - rate), from a hash of the element, the seed and the step counter in device memory.
struct Dropout {
    float* mask;
    const int32_t* step;
    int64_t count;
    uint32_t seed;
    float rate;
};
__global__ void dropout_kernel(const Dropout d) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= d.count) return;
    uint64_t z = (static_cast<uint64_t>(d.seed) << 32 | static_cast<uint32_t>(*d.step)) * 0x9e3779b97f4a7c15ull;
    z += static_cast<uint64_t>(i) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    const float uniform = static_cast<float>(z >> 40) * (1.0f / 16777216.0f);
    d.mask[i] = uniform < d.rate ? 0.0f : 1.0f / (1.0f - d.rate);
}
EXPORT int pw_dropout(const Dropout* d, cudaStream_t stream) {
    if (d->count == 0) return 0;
    dropout_kernel<<<static_cast<unsigned>((d->count + 255) / 256), 256, 0, stream>>>(*d);
    return launched("dropout");
}

// -------------------------------------------------------------------------------------------- the optimizer, one launch

// AdamW as Paddle computes it: the decay first, then the step with bias correction (Loshchilov and Hutter, 2019).
struct Adam {
    float *param, *moment1, *moment2;
    const float* grad;
    const uint8_t* decays;   // 1 for elements of weight matrices
    const int32_t* low_at;   // where the element's copy in low precision lies; -1: nowhere
    void* low;
    const float* scalars;    // rate, 1 / summed weight, beta1^t, beta2^t
    const float* squares;    // sum of the squares of grad; null: no clipping
    int64_t count;
    float beta1, beta2, epsilon, weight_decay, l2, clip_norm;
    int32_t low_type;
};
__global__ void adam_kernel(const Adam a) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= a.count) return;
    const float rate = a.scalars[0];
    float scale = a.scalars[1];
    const float power1 = a.scalars[2], power2 = a.scalars[3];
    if (a.squares != nullptr) {
        const float norm = sqrtf(*a.squares) * scale;
        if (norm > a.clip_norm) scale *= a.clip_norm / norm;
    }
    float param = a.param[i], grad = a.grad[i] * scale;
    if (a.decays[i]) {
        grad += a.l2 * param;
        param *= 1.0f - rate * a.weight_decay;
    }
    const float m = a.beta1 * a.moment1[i] + (1.0f - a.beta1) * grad;
    const float v = a.beta2 * a.moment2[i] + (1.0f - a.beta2) * grad * grad;
    a.moment1[i] = m;
    a.moment2[i] = v;
    param -= rate / (1.0f - power1) * (m / (sqrtf(v) / sqrtf(1.0f - power2) + a.epsilon));
    a.param[i] = param;
    if (a.low_at != nullptr && a.low_at[i] >= 0) store(a.low, a.low_at[i], a.low_type, param);
}
EXPORT int pw_adam(const Adam* a, cudaStream_t stream) {
    adam_kernel<<<static_cast<unsigned>((a->count + 255) / 256), 256, 0, stream>>>(*a);
    return launched("adam");
}

// The copies in low precision alone, after parameters were set from outside.
__global__ void low_copies_kernel(const Adam a) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < a.count && a.low_at[i] >= 0) store(a.low, a.low_at[i], a.low_type, a.param[i]);
}
EXPORT int pw_low_copies(const Adam* a, cudaStream_t stream) {
    low_copies_kernel<<<static_cast<unsigned>((a->count + 255) / 256), 256, 0, stream>>>(*a);
    return launched("low_copies");
}

// ----------------------------------------------------------------------------------------------------- matrix products

struct Matmul {
    void* d;        // row-major [batch, m, n], row stride ldd
    const void *a, *b, *bias;
    int32_t a_type, b_type, d_type, tf32;
    int32_t trans_a, trans_b, relu, batch;
    int64_t m, n, k, lda, ldb, ldd, a_batch_stride, b_batch_stride, d_batch_stride;
    float alpha, beta;
};

namespace {

struct Product {
    cublasLtMatmulDesc_t operation = nullptr;
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, d = nullptr;
    cublasLtMatmulAlgo_t algorithm{};
};
struct Blas {
    cublasLtHandle_t handle = nullptr;
    void* workspace = nullptr;
    std::map<std::string, Product> products;
};
constexpr size_t WORKSPACE = 64u << 20;
std::map<int, Blas> blas_of_device;
std::mutex blas_lock;

cudaDataType_t data_type(int type) { return type == 1 ? CUDA_R_16BF : type == 2 ? CUDA_R_16F : CUDA_R_32F; }

int blas_failed(cublasStatus_t status, const char* what) {
    char text[64];
    snprintf(text, sizeof text, "cuBLAS status %d", static_cast<int>(status));
    return failed(what, text);
}

}  // namespace

// Row-major D = A B is column-major D' = B' A'. The algorithm of each shape is the fastest of cuBLAS's proposals, timed once.
EXPORT int pw_matmul(const Matmul* m, cudaStream_t stream) {
    if (m->m == 0 || m->n == 0 || m->batch == 0) return 0;
    const std::lock_guard<std::mutex> guard(blas_lock);
    int device = 0;
    cudaGetDevice(&device);
    Blas& blas = blas_of_device[device];
    if (blas.handle == nullptr) {
        const cublasStatus_t status = cublasLtCreate(&blas.handle);
        if (status != CUBLAS_STATUS_SUCCESS) return blas_failed(status, "cublasLtCreate");
        if (int code = checked(cudaMalloc(&blas.workspace, WORKSPACE), "workspace of cuBLAS")) return code;
    }
    Matmul shape = *m;  // what decides the algorithm: everything but the addresses (only their alignment)
    auto alignment = [](const void* p) { return reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(p) % 16); };
    shape.d = const_cast<void*>(alignment(m->d));
    shape.a = alignment(m->a);
    shape.b = alignment(m->b);
    shape.bias = m->bias != nullptr ? reinterpret_cast<const void*>(1) : nullptr;
    shape.alpha = 0.0f;
    Product& product = blas.products[std::string(reinterpret_cast<const char*>(&shape), sizeof shape)];
    const bool fresh = product.operation == nullptr;
    if (fresh) {
        const bool low = m->a_type != 0;
        const cublasComputeType_t compute = !low && m->tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
        cublasLtMatmulDescCreate(&product.operation, compute, CUDA_R_32F);
        const cublasOperation_t first = m->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N, second = m->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
        cublasLtMatmulDescSetAttribute(product.operation, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first);
        cublasLtMatmulDescSetAttribute(product.operation, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second);
        const cublasLtEpilogue_t epilogue = m->bias != nullptr ? (m->relu ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_BIAS)
                                                               : (m->relu ? CUBLASLT_EPILOGUE_RELU : CUBLASLT_EPILOGUE_DEFAULT);
        cublasLtMatmulDescSetAttribute(product.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
        auto layout = [&](cublasLtMatrixLayout_t* made, int type, int64_t rows, int64_t columns, int64_t stride, int64_t batch) {
            cublasLtMatrixLayoutCreate(made, data_type(type), rows, columns, stride);
            cublasLtMatrixLayoutSetAttribute(*made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &m->batch, sizeof m->batch);
            cublasLtMatrixLayoutSetAttribute(*made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &batch, sizeof batch);
        };
        layout(&product.a, m->b_type, m->trans_b ? m->k : m->n, m->trans_b ? m->n : m->k, m->ldb, m->b_batch_stride);
        layout(&product.b, m->a_type, m->trans_a ? m->m : m->k, m->trans_a ? m->k : m->m, m->lda, m->a_batch_stride);
        layout(&product.d, m->d_type, m->n, m->m, m->ldd, m->d_batch_stride);
    }
    if (m->bias != nullptr)
        cublasLtMatmulDescSetAttribute(product.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &m->bias, sizeof m->bias);
    auto run = [&](const cublasLtMatmulAlgo_t* algorithm) {
        return cublasLtMatmul(blas.handle, product.operation, &m->alpha, m->b, product.a, m->a, product.b, &m->beta, m->d,
                              product.d, m->d, product.d, algorithm, blas.workspace, WORKSPACE, stream);
    };
    if (fresh) {
        cublasLtMatmulPreference_t preference;
        cublasLtMatmulPreferenceCreate(&preference);
        const size_t limit = WORKSPACE;
        cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &limit, sizeof limit);
        const auto align = [&](cublasLtMatmulPreferenceAttributes_t which, const void* p) {
            const uint32_t bytes = reinterpret_cast<uintptr_t>(p) % 16 == 0 ? 16 : reinterpret_cast<uintptr_t>(p) % 8 == 0 ? 8 : 4;
            cublasLtMatmulPreferenceSetAttribute(preference, which, &bytes, sizeof bytes);
        };
        align(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, m->b);
        align(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, m->a);
        align(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, m->d);
        align(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, m->d);
        cublasLtMatmulHeuristicResult_t found[12];
        int count = 0;
        const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(blas.handle, product.operation, product.a, product.b, product.d,
                                                                     product.d, preference, 12, found, &count);
        cublasLtMatmulPreferenceDestroy(preference);
        if (status != CUBLAS_STATUS_SUCCESS || count == 0) {
            blas.products.erase(std::string(reinterpret_cast<const char*>(&shape), sizeof shape));
            return blas_failed(status, "no algorithm for this matrix product");
        }
        product.algorithm = found[0].algo;
        cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
        cudaStreamIsCapturing(stream, &capturing);
        if (capturing == cudaStreamCaptureStatusNone && m->beta == 0.0f) {
            cudaEvent_t begin, end;
            cudaEventCreate(&begin);
            cudaEventCreate(&end);
            float best = 1e30f;
            for (int i = 0; i < count; ++i) {
                if (run(&found[i].algo) != CUBLAS_STATUS_SUCCESS) continue;
                float fastest = 1e30f;
                for (int round = 0; round < 3; ++round) {
                    cudaEventRecord(begin, stream);
                    for (int n = 0; n < 3; ++n) run(&found[i].algo);
                    cudaEventRecord(end, stream);
                    cudaEventSynchronize(end);
                    float ms = 0.0f;
                    cudaEventElapsedTime(&ms, begin, end);
                    fastest = ms < fastest ? ms : fastest;
                }
                if (fastest < best) {
                    best = fastest;
                    product.algorithm = found[i].algo;
                }
            }
            cudaEventDestroy(begin);
            cudaEventDestroy(end);
        }
    }
    const cublasStatus_t status = run(&product.algorithm);
    return status == CUBLAS_STATUS_SUCCESS ? 0 : blas_failed(status, "matrix product");
}

// ----------------------------------------------------------------------------------------- memory, streams and graphs

struct Fill {
    void* out;
    int64_t bytes;
};
EXPORT int pw_zero(const Fill* f, cudaStream_t stream) {
    return f->bytes == 0 ? 0 : checked(cudaMemsetAsync(f->out, 0, f->bytes, stream), "memset");
}
struct Count {
    int32_t* counter;
};
__global__ void count_kernel(int32_t* counter) { ++*counter; }
EXPORT int pw_count(const Count* c, cudaStream_t stream) {
    count_kernel<<<1, 1, 0, stream>>>(c->counter);
    return launched("count");
}

EXPORT const char* pw_last_error() { return last_error.c_str(); }
EXPORT int pw_num_devices() {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    return count;
}
EXPORT int pw_use_device(int device) { return checked(cudaSetDevice(device), "cudaSetDevice"); }
EXPORT int pw_capability(int device) {
    int major = 0, minor = 0;
    if (checked(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "device attribute")) return -1;
    if (checked(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "device attribute")) return -1;
    return major * 10 + minor;
}
EXPORT void* pw_alloc(int64_t bytes) {
    void* p = nullptr;
    return checked(cudaMalloc(&p, bytes > 0 ? bytes : 1), "cudaMalloc") ? nullptr : p;
}
EXPORT int pw_free(void* p) { return checked(cudaFree(p), "cudaFree"); }
EXPORT void* pw_alloc_host(int64_t bytes) {
    void* p = nullptr;
    return checked(cudaMallocHost(&p, bytes > 0 ? bytes : 1), "cudaMallocHost") ? nullptr : p;
}
EXPORT int pw_free_host(void* p) { return checked(cudaFreeHost(p), "cudaFreeHost"); }
EXPORT void* pw_stream() {
    cudaStream_t s = nullptr;
    return checked(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "stream") ? nullptr : s;
}
EXPORT int pw_synchronize(cudaStream_t stream) { return checked(cudaStreamSynchronize(stream), "synchronize"); }
EXPORT int pw_upload(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
    return checked(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream), "upload");
}
EXPORT int pw_download(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
    return checked(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream), "download");
}
EXPORT int pw_begin_capture(cudaStream_t stream) {
    return checked(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
}
EXPORT void* pw_end_capture(cudaStream_t stream) {
    cudaGraph_t graph = nullptr;
    if (checked(cudaStreamEndCapture(stream, &graph), "end of capture")) return nullptr;
    cudaGraphExec_t made = nullptr;
    const int code = checked(cudaGraphInstantiate(&made, graph, 0), "graph");
    cudaGraphDestroy(graph);
    return code ? nullptr : made;
}
EXPORT int pw_launch(void* graph, cudaStream_t stream) {
    return checked(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), stream), "graph launch");
}
EXPORT int pw_free_graph(void* graph) { return checked(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)), "graph"); }
EXPORT void* pw_event() {
    cudaEvent_t e = nullptr;
    return checked(cudaEventCreate(&e), "event") ? nullptr : e;
}
EXPORT int pw_free_event(void* event) { return checked(cudaEventDestroy(static_cast<cudaEvent_t>(event)), "event"); }
// 0: all done, 1: not yet
EXPORT int pw_query(cudaStream_t stream) {
    const cudaError_t status = cudaStreamQuery(stream);
    if (status == cudaErrorNotReady) return 1;
    return checked(status, "query");
}
EXPORT int pw_record(void* event, cudaStream_t stream) {
    return checked(cudaEventRecord(static_cast<cudaEvent_t>(event), stream), "record");
}
EXPORT float pw_elapsed_ms(void* begin, void* end) {
    float ms = -1.0f;
    if (checked(cudaEventSynchronize(static_cast<cudaEvent_t>(end)), "event")) return -1.0f;
    return checked(cudaEventElapsedTime(&ms, static_cast<cudaEvent_t>(begin), static_cast<cudaEvent_t>(end)), "elapsed") ? -1.0f : ms;
}
EXPORT int pw_struct_sizes(int32_t* sizes) {
    const int32_t all[] = {sizeof(Elementwise), sizeof(Reduce), sizeof(Squares), sizeof(Rows),   sizeof(Copy2D),  sizeof(BiasGrad), sizeof(Skinny),
                           sizeof(Pairs), sizeof(Fields), sizeof(Dots),   sizeof(Dropout), sizeof(Adam),    sizeof(Matmul),   sizeof(Fill),
                           sizeof(Count)};
    std::memcpy(sizes, all, sizeof all);
    return sizeof all / sizeof all[0];
}
