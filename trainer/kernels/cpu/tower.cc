// Operators for the dense part on CPUs, each with its gradient. `trainer/kernels/cpu/__init__.py` says what they compute.
//
// Legend: B batch rows, F features, U unique keys, W floats of a pulled row, E floats of an embedding, X inputs of a
// layer, Y its outputs.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "matmul.h"
#include "paddle/phi/api/all.h"

// Loops below are plain; the compiler makes one version for each of these processors and picks at load time.
#define VECTORISED __attribute__((target_clones("avx512f", "avx2", "default")))

namespace {

using paddle::Tensor;
using paddlewheel::bfloat16;
using paddlewheel::MatMul;
using Shape = std::vector<std::int64_t>;
using Tensors = std::vector<Tensor>;

inline bfloat16 round_to_bfloat16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const std::uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
  return static_cast<bfloat16>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

inline float widen(bfloat16 value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

inline float widen(float value) { return value; }

VECTORISED void narrow(const float* from, std::int64_t count, bfloat16* to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = round_to_bfloat16(from[i]);
}

inline void narrow(const float* from, std::int64_t count, float* to) { std::memcpy(to, from, count * sizeof(float)); }

// g becomes 0 where the layer's output was not positive; sums[y] += its columns.
VECTORISED void mask_and_sum(const bfloat16* output, bfloat16* g, std::int64_t rows, std::int64_t columns, float* sums) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const bfloat16* o = output + r * columns;
    bfloat16* row = g + r * columns;
    for (std::int64_t c = 0; c < columns; ++c) {
      row[c] = o[c] == 0 || o[c] == 0x8000 ? 0 : row[c];
      sums[c] += widen(row[c]);
    }
  }
}

VECTORISED void mask_and_sum(const float* output, float* g, std::int64_t rows, std::int64_t columns, float* sums) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* o = output + r * columns;
    float* row = g + r * columns;
    for (std::int64_t c = 0; c < columns; ++c) {
      row[c] = o[c] == 0.0f ? 0.0f : row[c];
      sums[c] += row[c];
    }
  }
}

VECTORISED void add_columns(const float* g, std::int64_t rows, std::int64_t columns, float* sums) {
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < columns; ++c) sums[c] += g[r * columns + c];
}

VECTORISED void add_columns(const bfloat16* g, std::int64_t rows, std::int64_t columns, float* sums) {
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < columns; ++c) sums[c] += widen(g[r * columns + c]);
}

VECTORISED void add_to(const float* from, std::int64_t count, float* to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] += from[i];
}

// squares: scratch of `width` floats, so that no sum runs across the lanes of a vector
VECTORISED void pairwise_row(const float* fields, std::int64_t num_fields, std::int64_t width, float* sum, float* squares,
                             float* out) {
  for (std::int64_t e = 0; e < width; ++e) sum[e] = squares[e] = 0.0f;
  for (std::int64_t f = 0; f < num_fields; ++f)
    for (std::int64_t e = 0; e < width; ++e) {
      const float value = fields[f * width + e];
      sum[e] += value;
      squares[e] += value * value;
    }
  float total = 0.0f;
  for (std::int64_t e = 0; e < width; ++e) total += sum[e] * sum[e] - squares[e];
  *out = 0.5f * total;
}

VECTORISED void pairwise_row_gradient(const float* fields, const float* sum, float g, std::int64_t num_fields,
                                      std::int64_t width, float* out) {
  for (std::int64_t f = 0; f < num_fields; ++f)
    for (std::int64_t e = 0; e < width; ++e) out[f * width + e] = g * (sum[e] - fields[f * width + e]);
}

Tensor zeros(const Shape& shape, const paddle::Place& place) {
  Tensor result = paddle::empty(shape, paddle::DataType::FLOAT32, place);
  std::memset(result.data<float>(), 0, result.numel() * sizeof(float));
  return result;
}

// ---------------------------------------------------------------- lookup

Tensors Lookup(const Tensor& rows, const Tensor& index, int first_order) {
  const std::int64_t width = rows.shape()[1], batch = index.shape()[0], fields = index.shape()[1];
  const std::int64_t size = width - first_order;
  Tensor vectors = paddle::empty({batch, fields, size}, paddle::DataType::FLOAT32, rows.place());
  Tensor first = zeros({batch, 1}, rows.place());
  const float* from = rows.data<float>();
  const std::int32_t* at = index.data<std::int32_t>();
  float *to = vectors.data<float>(), *weight = first.data<float>();
#pragma omp parallel for schedule(static)
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t f = 0; f < fields; ++f) {
      const std::int32_t place = at[b * fields + f];
      float* out = to + (b * fields + f) * size;
      if (place == 0) {
        std::memset(out, 0, size * sizeof(float));
        continue;
      }
      const float* row = from + (place - 1) * width;
      if (first_order) weight[b] += row[0];
      std::memcpy(out, row + first_order, size * sizeof(float));
    }
  return {vectors, first};
}

Tensors LookupGrad(const Tensor& rows, const Tensor& index, const Tensor& g_vectors, const Tensor& g_first,
                   int first_order) {
  const std::int64_t width = rows.shape()[1], batch = index.shape()[0], fields = index.shape()[1];
  const std::int64_t size = width - first_order, num_rows = rows.shape()[0];
  Tensor result = zeros(rows.shape(), rows.place());
  float* to = result.data<float>();
  const std::int32_t* at = index.data<std::int32_t>();
  const float *from = g_vectors.data<float>(), *weight = g_first.data<float>();
  const int parts = omp_get_max_threads();  // each row has one owner: sums do not depend on the number of threads
#pragma omp parallel for schedule(static)
  for (int part = 0; part < parts; ++part) {
    const std::int64_t low = num_rows * part / parts, high = num_rows * (part + 1) / parts;
    for (std::int64_t i = 0; i < batch * fields; ++i) {
      const std::int64_t place = static_cast<std::int64_t>(at[i]) - 1;
      if (place < low || place >= high) continue;
      float* row = to + place * width;
      if (first_order) row[0] += weight[i / fields];
      add_to(from + i * size, size, row + first_order);
    }
  }
  return {result};
}

std::vector<Shape> LookupShape(const Shape& rows, const Shape& index, int first_order) {
  return {{index[0], index[1], rows[1] - first_order}, {index[0], 1}};
}

std::vector<paddle::DataType> LookupType(const paddle::DataType& rows, const paddle::DataType&) { return {rows, rows}; }

// ---------------------------------------------------------------- pairwise

Tensors Pairwise(const Tensor& fields) {
  const std::int64_t batch = fields.shape()[0], num_fields = fields.shape()[1], width = fields.shape()[2];
  Tensor out = paddle::empty({batch, 1}, paddle::DataType::FLOAT32, fields.place());
  Tensor sum = paddle::empty({batch, width}, paddle::DataType::FLOAT32, fields.place());
  const float* from = fields.data<float>();
  float *to = out.data<float>(), *sums = sum.data<float>();
#pragma omp parallel
  {
    std::vector<float> squares(width);
#pragma omp for schedule(static)
    for (std::int64_t b = 0; b < batch; ++b)
      pairwise_row(from + b * num_fields * width, num_fields, width, sums + b * width, squares.data(), to + b);
  }
  return {out, sum};
}

Tensors PairwiseGrad(const Tensor& fields, const Tensor& sum, const Tensor& g_out) {
  const std::int64_t batch = fields.shape()[0], num_fields = fields.shape()[1], width = fields.shape()[2];
  Tensor result = paddle::empty(fields.shape(), paddle::DataType::FLOAT32, fields.place());
  const float *from = fields.data<float>(), *sums = sum.data<float>(), *g = g_out.data<float>();
  float* to = result.data<float>();
#pragma omp parallel for schedule(static)
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t offset = b * num_fields * width;
    pairwise_row_gradient(from + offset, sums + b * width, g[b], num_fields, width, to + offset);
  }
  return {result};
}

std::vector<Shape> PairwiseShape(const Shape& fields) { return {{fields[0], 1}, {fields[0], fields[2]}}; }

std::vector<paddle::DataType> PairwiseType(const paddle::DataType& fields) { return {fields, fields}; }

// ---------------------------------------------------------------- tower

// A custom operator may have one list of tensors as its output, so that the gradients come as one list, and so do the
// inputs: inputs of the first layer, weights of all layers, biases of all layers.
struct Layers {
  Layers(const Tensors& all, std::size_t depth)
      : inputs(all.begin(), all.end() - 2 * depth),
        weights(all.end() - 2 * depth, all.end() - depth),
        biases(all.end() - depth, all.end()) {}
  Tensors inputs, weights, biases;
};

// Floats a row; what has more than two dimensions is taken as if flattened.
std::int64_t columns_of(const Tensor& x) {
  std::int64_t columns = 1;
  const Shape shape = x.shape();
  for (std::size_t d = 1; d < shape.size(); ++d) columns *= shape[d];
  return columns;
}

// Where the forward pass leaves what the backward pass needs, one after the other: the inputs side by side, each
// layer's output but the last, each layer's weights; all as T.
template <typename T>
struct Kept {
  Kept(std::int64_t batch, const Tensors& inputs, const Tensors& weights) {
    std::int64_t columns = 0;
    for (const Tensor& x : inputs) columns += columns_of(x);
    activations.push_back(0);
    size = batch * columns;
    for (std::size_t l = 0; l + 1 < weights.size(); ++l) {
      activations.push_back(size);
      size += batch * weights[l].shape()[1];
    }
    for (const Tensor& w : weights) {
      matrices.push_back(size);
      size += w.numel();
    }
  }
  std::vector<std::int64_t> activations, matrices;
  std::int64_t size = 0;
};

Tensors in_order(Tensors first, const Tensors& second, const Tensors& third) {
  first.insert(first.end(), second.begin(), second.end());
  first.insert(first.end(), third.begin(), third.end());
  return first;
}

// Inputs [B, X_i] into their columns of [B, X].
template <typename T>
void join(const Tensors& inputs, std::int64_t batch, std::int64_t columns, T* to) {
  std::int64_t offset = 0;
  for (const Tensor& x : inputs) {
    const std::int64_t width = columns_of(x);
    const float* from = x.data<float>();
#pragma omp parallel for schedule(static)
    for (std::int64_t b = 0; b < batch; ++b) narrow(from + b * width, width, to + b * columns + offset);
    offset += width;
  }
}

template <typename T>
Tensors Forward(const Layers& layers, const std::vector<int>& relu) {
  const auto& [inputs, weights, biases] = layers;
  const std::int64_t batch = inputs[0].shape()[0];
  const std::size_t depth = weights.size();
  const paddle::Place place = inputs[0].place();
  const Kept<T> kept(batch, inputs, weights);
  Tensor saved = paddle::empty({static_cast<std::int64_t>(kept.size * sizeof(T))}, paddle::DataType::UINT8, place);
  Tensor out = paddle::empty({batch, weights.back().shape()[1]}, paddle::DataType::FLOAT32, place);
  T* memory = reinterpret_cast<T*>(saved.data<std::uint8_t>());
  if (batch == 0) return {out, saved};
  join(inputs, batch, weights[0].shape()[0], memory);
  for (std::size_t l = 0; l < depth; ++l) {
    const std::int64_t num_in = weights[l].shape()[0], num_out = weights[l].shape()[1];
    T* matrix = memory + kept.matrices[l];
    narrow(weights[l].data<float>(), weights[l].numel(), matrix);
    const T* x = memory + kept.activations[l];
    const float* bias = biases[l].data<float>();
    if (l + 1 < depth)
      MatMul::run(batch, num_in, num_out, x, false, matrix, false, bias, relu[l] != 0, memory + kept.activations[l + 1]);
    else
      MatMul::run(batch, num_in, num_out, x, false, matrix, false, bias, relu[l] != 0, out.data<float>());
  }
  return {out, saved};
}

// Memory that a thread keeps from step to step: pages that come and go cost more than what is done with them.
template <typename T>
T* scratch(int which, std::int64_t count) {
  thread_local std::unique_ptr<T[]> kept[2];
  thread_local std::int64_t sizes[2] = {0, 0};
  if (sizes[which] < count) {
    kept[which].reset(new T[count]);
    sizes[which] = count;
  }
  return kept[which].get();
}

// wanted: for each of the inputs, whether anyone uses its gradient; the others get zeros.
template <typename T>
Tensors Backward(const Layers& layers, const Tensor& out, const Tensor& saved, const Tensor& g_out,
                 const std::vector<int>& relu, const std::vector<int>& wanted) {
  const auto& [inputs, weights, biases] = layers;
  const std::int64_t batch = inputs[0].shape()[0];
  const std::size_t depth = weights.size();
  const paddle::Place place = inputs[0].place();
  const Kept<T> kept(batch, inputs, weights);
  const T* memory = reinterpret_cast<const T*>(saved.data<std::uint8_t>());
  Tensors g_inputs, g_weights(depth), g_biases(depth);
  std::int64_t widest = g_out.shape()[1];
  for (std::size_t l = 0; l < depth; ++l) {
    g_weights[l] = batch ? paddle::empty(weights[l].shape(), paddle::DataType::FLOAT32, place)
                         : zeros(weights[l].shape(), place);
    g_biases[l] = zeros(biases[l].shape(), place);
    if (l > 0) widest = std::max(widest, weights[l].shape()[0]);
  }
  for (std::size_t i = 0; i < inputs.size(); ++i)
    g_inputs.push_back(wanted[i] ? paddle::empty(inputs[i].shape(), paddle::DataType::FLOAT32, place)
                                 : zeros(inputs[i].shape(), place));
  if (batch == 0) return in_order(g_inputs, g_weights, g_biases);
  T *g = scratch<T>(0, batch * widest), *below = scratch<T>(1, batch * widest);
  narrow(g_out.data<float>(), g_out.numel(), g);
  if (relu.back()) {
    std::unique_ptr<float[]> masked(new float[g_out.numel()]);
    std::memcpy(masked.get(), g_out.data<float>(), g_out.numel() * sizeof(float));
    mask_and_sum(out.data<float>(), masked.get(), batch, g_out.shape()[1], g_biases[depth - 1].data<float>());
    narrow(masked.get(), g_out.numel(), g);
  } else {
    add_columns(g_out.data<float>(), batch, g_out.shape()[1], g_biases[depth - 1].data<float>());
  }
  for (std::size_t l = depth; l-- > 0;) {
    const std::int64_t num_in = weights[l].shape()[0], num_out = weights[l].shape()[1];
    const T *x = memory + kept.activations[l], *matrix = memory + kept.matrices[l];
    MatMul::run(num_in, batch, num_out, x, true, g, false, nullptr, false, g_weights[l].data<float>());
    if (l == 0) break;
    MatMul::run(batch, num_out, num_in, g, false, matrix, true, nullptr, false, below);
    float* sums = g_biases[l - 1].data<float>();
    if (relu[l - 1])
      mask_and_sum(x, below, batch, num_in, sums);
    else
      add_columns(below, batch, num_in, sums);
    std::swap(g, below);
  }
  const std::int64_t num_out = weights[0].shape()[1];
  const T* rows = memory + kept.matrices[0];  // an input's columns are rows of the first layer's weights
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const std::int64_t width = columns_of(inputs[i]);
    if (wanted[i]) MatMul::run(batch, num_out, width, g, false, rows, true, nullptr, false, g_inputs[i].data<float>());
    rows += width * num_out;
  }
  return in_order(g_inputs, g_weights, g_biases);
}

Tensors Tower(const Tensors& all, const std::vector<int>& relu, const std::vector<int>&, int narrow_products) {
  const Layers layers(all, relu.size());
  return narrow_products ? Forward<bfloat16>(layers, relu) : Forward<float>(layers, relu);
}

Tensors TowerGrad(const Tensors& all, const Tensor& out, const Tensor& saved, const Tensor& g_out,
                  const std::vector<int>& relu, const std::vector<int>& wanted, int narrow_products) {
  const Layers layers(all, relu.size());
  return narrow_products ? Backward<bfloat16>(layers, out, saved, g_out, relu, wanted)
                         : Backward<float>(layers, out, saved, g_out, relu, wanted);
}

std::vector<Shape> TowerShape(const std::vector<Shape>& all, const std::vector<int>&, const std::vector<int>&, int) {
  return {{all[0][0], all.back()[0]}, {-1}};
}

std::vector<paddle::DataType> TowerType(const std::vector<paddle::DataType>& all) {
  return {all[0], paddle::DataType::UINT8};
}

// ---------------------------------------------------------------- optimizer

struct AdamW {
  float scale, l2, rate, beta1, beta2, epsilon, decay;
};

VECTORISED void adamw(const AdamW& s, float rate, float epsilon, std::int64_t count, const float* gradient, float* value,
                      float* first, float* second) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float g = gradient[i] * s.scale + s.l2 * value[i];
    first[i] = s.beta1 * first[i] + (1.0f - s.beta1) * g;
    second[i] = s.beta2 * second[i] + (1.0f - s.beta2) * g * g;
    value[i] = value[i] * (1.0f - s.rate * s.decay) - rate * first[i] / (std::sqrt(second[i]) + epsilon);
  }
}

}  // namespace

// One parameter's step. `powers` hold beta1^t and beta2^t of this step on entry, of the next one on return.
extern "C" void paddlewheel_adamw(const AdamW* settings, std::int64_t count, const float* gradient, float* value,
                                  float* first, float* second, float* power1, float* power2) {
  const float root = std::sqrt(1.0f - *power2);
  adamw(*settings, settings->rate * root / (1.0f - *power1), settings->epsilon * root, count, gradient, value, first, second);
  *power1 *= settings->beta1;
  *power2 *= settings->beta2;
}

PD_BUILD_OP(paddlewheel_lookup)
    .Inputs({"Rows", "Index"})
    .Outputs({"Vectors", "First"})
    .Attrs({"first_order: int"})
    .SetKernelFn(PD_KERNEL(Lookup))
    .SetInferShapeFn(PD_INFER_SHAPE(LookupShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(LookupType));

PD_BUILD_GRAD_OP(paddlewheel_lookup)
    .Inputs({"Rows", "Index", paddle::Grad("Vectors"), paddle::Grad("First")})
    .Outputs({paddle::Grad("Rows")})
    .Attrs({"first_order: int"})
    .SetKernelFn(PD_KERNEL(LookupGrad));

PD_BUILD_OP(paddlewheel_pairwise)
    .Inputs({"Fields"})
    .Outputs({"Out", "Sum"})
    .SetKernelFn(PD_KERNEL(Pairwise))
    .SetInferShapeFn(PD_INFER_SHAPE(PairwiseShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(PairwiseType));

PD_BUILD_GRAD_OP(paddlewheel_pairwise)
    .Inputs({"Fields", "Sum", paddle::Grad("Out")})
    .Outputs({paddle::Grad("Fields")})
    .SetKernelFn(PD_KERNEL(PairwiseGrad));

PD_BUILD_OP(paddlewheel_tower)
    .Inputs({paddle::Vec("All")})
    .Outputs({"Out", "Saved"})
    .Attrs({"relu: std::vector<int>", "wanted: std::vector<int>", "bfloat16: int"})
    .SetKernelFn(PD_KERNEL(Tower))
    .SetInferShapeFn(PD_INFER_SHAPE(TowerShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(TowerType));

PD_BUILD_GRAD_OP(paddlewheel_tower)
    .Inputs({paddle::Vec("All"), "Out", "Saved", paddle::Grad("Out")})
    .Outputs({paddle::Grad(paddle::Vec("All"))})
    .Attrs({"relu: std::vector<int>", "wanted: std::vector<int>", "bfloat16: int"})
    .SetKernelFn(PD_KERNEL(TowerGrad));
