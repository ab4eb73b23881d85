// The update rules of Paddle's sparse_sgd_rule.cc, bit for bit: float where it uses float, double where it uses double, in
// its order, without fused multiply-add (-ffp-contract=off). The plug-in compares them with Paddle's own objects when it
// is loaded.
#pragma once
#include <cmath>
#include <cstdint>
#include "layout.h"

namespace wheel {

class Rule {
 public:
  Rule() = default;
  Rule(const RuleOptions& options, uint32_t width) : o_(options), width_(int(width)) {}

  uint32_t state_size() const { return state_floats(o_.kind, uint32_t(width_)); }
  const RuleOptions& options() const { return o_; }

  void begin(float* state) const {  // of weights that were never updated
    const uint32_t n = state_size();
    for (uint32_t i = 0; i < n; ++i) state[i] = 0;
    if (o_.kind == RuleKind::kAdam || o_.kind == RuleKind::kAdamShared) state[n - 2] = o_.beta1, state[n - 1] = o_.beta2;
  }

  // One update of `width` weights. rate: factor of the learning rate; W: the width where the compiler knows it, else 0.
  template <int W>
  void step(float* w, float* state, const float* g, float rate) const {
    const float lr = rate == 1.0f ? o_.learning_rate : o_.learning_rate * rate;
    switch (o_.kind) {
      case RuleKind::kSgd: return sgd<W>(w, g, lr);
      case RuleKind::kAdaGrad: return adagrad<W>(w, state, g, lr);
      case RuleKind::kAdaGradElementwise: return adagrad_elementwise<W>(w, state, g, lr);
      case RuleKind::kAdam: return adam<W>(w, state, g, lr);
      case RuleKind::kAdamShared: return adam_shared<W>(w, state, g, lr);
    }
  }

 private:
  template <int W>
  int size() const { return W ? W : width_; }
  float bounded(float v) const { return v >= o_.low ? (o_.high >= v ? v : o_.high) : o_.low; }  // NaN becomes low

  template <int W>
  void sgd(float* w, const float* g, float lr) const {
    for (int i = 0; i < size<W>(); ++i) w[i] = bounded(w[i] - lr * g[i]);
  }

  template <int W>
  void adagrad(float* w, float* state, const float* g, float lr) const {
    const double ratio = std::sqrt(o_.initial_accumulator / (o_.initial_accumulator + state[0])), rate = lr;
    for (int i = 0; i < size<W>(); ++i) w[i] = bounded(float(w[i] - ratio * (rate * double(g[i]))));
    double sum = 0;
    for (int i = 0; i < size<W>(); ++i) sum += double(g[i]) * double(g[i]);
    state[0] = float(state[0] + sum / size<W>());
  }

  template <int W>
  void adagrad_elementwise(float* w, float* state, const float* g, float lr) const {
    const double rate = lr;
    for (int i = 0; i < size<W>(); ++i) {
      const double ratio = std::sqrt(o_.initial_accumulator / (o_.initial_accumulator + state[i]));
      w[i] = bounded(float(w[i] - ratio * (rate * double(g[i]))));
      state[i] = float(state[i] + double(g[i]) * double(g[i]));
    }
  }

  float adam_rate(const float* powers, float lr) const {
    return lr * (std::sqrt(1 - powers[1]) / (1 - powers[0]));
  }

  template <int W>
  void adam(float* w, float* state, const float* g, float lr) const {
    const int n = size<W>();
    float *m = state, *v = state + n, *powers = state + 2 * n;
    lr = adam_rate(powers, lr);
    for (int i = 0; i < n; ++i) {
      m[i] = o_.beta1 * m[i] + (1 - o_.beta1) * g[i];
      v[i] = o_.beta2 * v[i] + (1 - o_.beta2) * g[i] * g[i];
      w[i] = bounded(w[i] - lr * (m[i] / (std::sqrt(v[i]) + o_.epsilon)));
    }
    powers[0] *= o_.beta1, powers[1] *= o_.beta2;
  }

  template <int W>
  void adam_shared(float* w, float* state, const float* g, float lr) const {
    const int n = size<W>();
    const float m = state[0], v = state[1];
    lr = adam_rate(state + 2, lr);
    double sum_m = 0, sum_v = 0;
    for (int i = 0; i < n; ++i) {
      const double new_m = o_.beta1 * m + (1 - o_.beta1) * g[i];
      const double new_v = o_.beta2 * v + (1 - o_.beta2) * g[i] * g[i];
      w[i] = bounded(float(w[i] - lr * (new_m / (std::sqrt(new_v) + o_.epsilon))));
      sum_m += new_m, sum_v += new_v;
    }
    state[0] = float(sum_m / n), state[1] = float(sum_v / n);
    state[2] *= o_.beta1, state[3] *= o_.beta2;
  }

  RuleOptions o_;
  int width_ = 0;
};

}  // namespace wheel
