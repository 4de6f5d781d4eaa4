// Fused attention: flash, memory-efficient and cuDNN's, whose schemas the CPU has not. Computed in single precision, as they do.
#include <limits>

#include "values.h"

namespace values {
namespace {

struct Heads {
  at::Tensor query, key, value;
  int64_t groups;  // heads of queries to one of keys
};

Heads single(const Stack& stack, size_t first) {
  Heads heads{stack[first].toTensor().to(at::kFloat), stack[first + 1].toTensor().to(at::kFloat), stack[first + 2].toTensor().to(at::kFloat)};
  heads.groups = heads.query.size(1) / heads.key.size(1);
  if (heads.groups > 1) {
    heads.key = heads.key.repeat_interleave(heads.groups, 1);
    heads.value = heads.value.repeat_interleave(heads.groups, 1);
  }
  return heads;
}

double scale_of(const c10::IValue& scale, const at::Tensor& query) {
  return scale.isDouble() ? scale.toDouble() : 1 / std::sqrt((double)query.size(-1));
}

// Whose causal mask ends at the lower right, where there are fewer queries than keys: flash attention's.
enum class Causal { no, upper_left, lower_right };

at::Tensor scores(const Heads& heads, const c10::IValue& bias, Causal causal, double scale) {
  at::Tensor found = at::matmul(heads.query, heads.key.transpose(-2, -1)) * scale;
  if (bias.isTensor() && bias.toTensor().defined()) found = found + bias.toTensor().to(at::kFloat);
  if (causal != Causal::no) {
    const int64_t queries = found.size(-2), keys = found.size(-1);
    at::Tensor is_seen = at::ones({queries, keys}, at::kBool).tril(causal == Causal::lower_right ? keys - queries : 0);
    found = found.masked_fill(is_seen.logical_not(), -std::numeric_limits<float>::infinity());
  }
  return found;
}

struct Forward {
  at::Tensor output, log_sum;
};

Forward forward(const Stack& stack, const c10::IValue& bias, double p, Causal causal, const c10::IValue& scale, uint64_t seed) {
  const at::Tensor query = stack[0].toTensor();
  Heads heads = single(stack, 0);
  at::Tensor weights = scores(heads, bias, causal, scale_of(scale, query));
  at::Tensor log_sum = at::logsumexp(weights, {-1});
  weights = at::softmax(weights, -1);
  if (p > 0) weights = weights * kept(weights.sizes(), p, seed) / (1 - p);
  at::Tensor found = at::matmul(weights, heads.value);
  // In memory as the queries are: batch, position, head.
  at::Tensor output = at::empty({query.size(0), query.size(2), query.size(1), found.size(-1)}, query.options()).transpose(1, 2);
  return {output.copy_(found), log_sum};
}

at::Tensor ungrouped(const at::Tensor& gradient, int64_t groups) {
  if (groups == 1) return gradient;
  auto shape = gradient.sizes().vec();
  return gradient.reshape({shape[0], shape[1] / groups, groups, shape[2], shape[3]}).sum(2);
}

struct Backward {
  at::Tensor query, key, value, bias;
};

Backward backward(const Stack& stack, const at::Tensor& output, at::Tensor log_sum, const c10::IValue& bias, double p, Causal causal,
                  const c10::IValue& scale, const at::Tensor& seed) {
  Heads heads = single(stack, 1);
  const double factor = scale_of(scale, heads.query);
  const at::Tensor gradient = stack[0].toTensor().to(at::kFloat);
  if (log_sum.dim() == 4) log_sum = log_sum.squeeze(-1);
  log_sum = log_sum.narrow(-1, 0, heads.query.size(2));
  at::Tensor weights = at::exp(scores(heads, bias, causal, factor) - log_sum.unsqueeze(-1)), dropped = weights;
  at::Tensor of_weights = at::matmul(gradient, heads.value.transpose(-2, -1));
  if (p > 0) {
    at::Tensor mask = kept(weights.sizes(), p, seed.reshape({-1})[0].to(at::kLong).item<int64_t>()) / (1 - p);
    dropped = weights * mask;
    of_weights = of_weights * mask;
  }
  at::Tensor delta = (gradient * output.to(at::kFloat)).sum(-1, true);
  at::Tensor of_scores = weights * (of_weights - delta);
  const auto type = stack[1].toTensor().scalar_type();
  Backward found;
  found.query = (at::matmul(of_scores, heads.key) * factor).to(type);
  found.key = ungrouped(at::matmul(of_scores.transpose(-2, -1), heads.query) * factor, heads.groups).to(type);
  found.value = ungrouped(at::matmul(dropped.transpose(-2, -1), gradient), heads.groups).to(type);
  if (bias.isTensor() && bias.toTensor().defined()) found.bias = at::sum_to(of_scores, bias.toTensor().sizes()).to(bias.toTensor().scalar_type());
  return found;
}

Causal causal(const c10::IValue& is_it, Causal form = Causal::upper_left) { return is_it.toBool() ? form : Causal::no; }

at::Tensor number(uint64_t seed) { return at::full({}, (int64_t)seed, at::kLong); }

void flash(const c10::OperatorHandle&, Stack& stack, uint64_t seed) {
  auto found = forward(stack, {}, stack[3].toDouble(), causal(stack[4], Causal::lower_right), stack[6], seed);
  c10::IValue num_queries = stack[0].toTensor().size(2), num_keys = stack[1].toTensor().size(2);
  stack = {found.output, found.log_sum, at::Tensor(), at::Tensor(), num_queries, num_keys, at::stack({number(seed), number(0)}), at::Tensor(), at::Tensor()};
}
void flash_backward(const c10::OperatorHandle&, Stack& stack, uint64_t) {
  auto found = backward(stack, stack[4].toTensor(), stack[5].toTensor(), {}, stack[10].toDouble(), causal(stack[11], Causal::lower_right), stack[14], stack[12].toTensor());
  stack = {found.query, found.key, found.value};
}

void efficient(const c10::OperatorHandle&, Stack& stack, uint64_t seed) {
  auto found = forward(stack, stack[3], stack[5].toDouble(), causal(stack[6]), stack[7], seed);
  at::Tensor log_sum = stack[4].toBool() ? found.log_sum : at::Tensor();
  stack = {found.output, log_sum, number(seed), number(0)};
}
void efficient_backward(const c10::OperatorHandle&, Stack& stack, uint64_t) {
  auto found = backward(stack, stack[5].toTensor(), stack[6].toTensor(), stack[4], stack[9].toDouble(), causal(stack[11]), stack[12], stack[7].toTensor());
  stack = {found.query, found.key, found.value, stack[10].toBoolList()[3] ? found.bias : at::Tensor()};
}

void cudnn(const c10::OperatorHandle&, Stack& stack, uint64_t seed) {
  auto found = forward(stack, stack[3], stack[5].toDouble(), causal(stack[6]), stack[8], seed);
  c10::IValue num_queries = stack[0].toTensor().size(2), num_keys = stack[1].toTensor().size(2);
  at::Tensor log_sum = stack[4].toBool() ? found.log_sum.unsqueeze(-1) : at::Tensor();
  stack = {found.output, log_sum, at::Tensor(), at::Tensor(), num_queries, num_keys, number(seed), number(0), at::Tensor()};
}
void cudnn_backward(const c10::OperatorHandle&, Stack& stack, uint64_t) {
  auto found = backward(stack, stack[4].toTensor(), stack[5].toTensor(), stack[8], stack[13].toDouble(), causal(stack[14]), stack[15], stack[6].toTensor());
  stack = {found.query, found.key, found.value};
}

}  // namespace

void add_attention(std::map<std::string, Rule>& rules) {
  rules["aten::_scaled_dot_product_flash_attention"] = {flash};
  rules["aten::_scaled_dot_product_flash_attention_backward"] = {flash_backward};
  rules["aten::_scaled_dot_product_efficient_attention"] = {efficient};
  rules["aten::_scaled_dot_product_efficient_attention_backward"] = {efficient_backward};
  rules["aten::_scaled_dot_product_cudnn_attention"] = {cudnn, true};
  rules["aten::_scaled_dot_product_cudnn_attention_backward"] = {cudnn_backward, true};
}

}  // namespace values
