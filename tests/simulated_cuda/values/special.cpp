// Operations of CUDA that the CPU has not, or whose arguments it takes otherwise; and those whose own code is not run.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/native/ConvUtils.h>

#include "values.h"

namespace values {

at::Tensor kept(at::IntArrayRef shape, double p, uint64_t seed) {
  return at::rand(shape, at::detail::createCPUGenerator(seed), at::TensorOptions().dtype(at::kFloat)) >= p;
}

namespace {

void native_dropout(const c10::OperatorHandle&, Stack& stack, uint64_t seed) {
  const at::Tensor input = stack[0].toTensor();
  const double p = stack[1].toDouble();
  const bool trains = !stack[2].isBool() || stack[2].toBool();
  at::Tensor mask = trains ? kept(input.sizes(), p, seed) : at::ones(input.sizes(), at::kBool);
  at::Tensor out = trains ? (p == 1 ? at::zeros_like(input) : input * mask * (1 / (1 - p))).to(input.scalar_type()) : input.clone();
  stack = {out, mask};
}

void fused_dropout(const c10::OperatorHandle&, Stack& stack, uint64_t seed) {
  const at::Tensor input = stack[0].toTensor();
  const double p = stack[1].toDouble();  // of keeping
  at::Tensor mask = kept(input.sizes(), 1 - p, seed);
  stack = {(input * mask * (1 / p)).to(input.scalar_type()), mask.to(at::kByte)};
}

// half_to_float: CUDA's own, the last argument before an output.
template <bool is_log>
void softmax(const c10::OperatorHandle& op, Stack& stack, uint64_t) {
  at::Tensor input = stack[0].toTensor();
  if (stack[2].toBool()) input = input.to(at::kFloat);
  at::Tensor found = is_log ? at::_log_softmax(input, stack[1].toInt(), false) : at::_softmax(input, stack[1].toInt(), false);
  if (stack.size() > 3) found = stack[3].toTensor().copy_(found);
  stack = {found};
}

template <bool is_log>
void softmax_backward(const c10::OperatorHandle& op, Stack& stack, uint64_t) {
  at::Tensor gradient = stack[0].toTensor(), output = stack[1].toTensor();
  const int64_t dim = stack[2].toInt();
  at::Tensor found = is_log ? at::_log_softmax_backward_data(gradient, output, dim, gradient.scalar_type())
                            : at::_softmax_backward_data(gradient, output, dim, gradient.scalar_type());
  found = found.to(stack[3].toScalarType());
  if (stack.size() > 4) found = stack[4].toTensor().copy_(found);
  stack = {found};
}

void convolution(const c10::OperatorHandle&, Stack& stack, uint64_t) {
  std::vector<int64_t> none(stack[2].toIntVector().size(), 0);
  stack = {at::convolution(stack[0].toTensor(), stack[1].toTensor(), std::nullopt, stack[3].toIntVector(), stack[2].toIntVector(),
                           stack[4].toIntVector(), false, none, stack[5].toInt())};
}

void convolution_transposed(const c10::OperatorHandle&, Stack& stack, uint64_t) {
  stack = {at::convolution(stack[0].toTensor(), stack[1].toTensor(), std::nullopt, stack[4].toIntVector(), stack[2].toIntVector(),
                           stack[5].toIntVector(), true, stack[3].toIntVector(), stack[6].toInt())};
}

std::optional<at::Tensor> given(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() ? std::optional(value.toTensor()) : std::nullopt;
}

// cuDNN has no convolutions in bfloat16 below capability 8.0, and torch prefers its own for some depthwise ones.
bool is_not_cudnns(const Stack& stack) {
  auto ints = [&](size_t i) { return stack[i].toSymIntVector(); };
  const auto strides = ints(4), paddings = ints(5), dilations = ints(6), outputs = ints(8);
  const std::vector<c10::SymInt> biases = stack[3].isNone() ? std::vector<c10::SymInt>{} : ints(3);
  const auto backend = at::native::select_conv_backend(
      stack[1].toTensor(), stack[2].toTensor(), std::nullopt, strides, paddings, dilations, stack[7].toBool(), outputs, stack[9].toSymInt(),
      stack[3].isNone() ? at::OptionalSymIntArrayRef() : at::OptionalSymIntArrayRef(biases));
  return backend != at::native::ConvBackend::Cudnn && backend != at::native::ConvBackend::CudnnTranspose;
}

void batch_norm(const c10::OperatorHandle&, Stack& stack, uint64_t) {
  auto [out, mean, rstd] = at::native_batch_norm(stack[0].toTensor(), given(stack[1]), given(stack[2]), given(stack[3]), given(stack[4]),
                                                 stack[5].toBool(), stack[6].toDouble(), stack[7].toDouble());
  stack = {out, mean, rstd, at::empty({0}, at::kByte)};
}

void batch_norm_backward(const c10::OperatorHandle&, Stack& stack, uint64_t) {
  auto [input, weight, bias] =
      at::native_batch_norm_backward(stack[1].toTensor().contiguous(), stack[0].toTensor(), stack[2].toTensor(), given(stack[3]), given(stack[4]),
                                     given(stack[5]), given(stack[6]), true, stack[7].toDouble(), {true, true, true});
  stack = {input, weight, bias};
}

at::Tensor rms(const at::Tensor& input, size_t num, double eps) {
  std::vector<int64_t> dims;
  for (size_t i = 1; i <= num; i++) dims.push_back(-(int64_t)i);
  return input.to(at::kFloat).square().mean(dims, true).add(eps).rsqrt();
}

void rms_norm(const c10::OperatorHandle&, Stack& stack, uint64_t) {
  const at::Tensor input = stack[0].toTensor();
  const double eps = stack[3].isDouble() ? stack[3].toDouble() : std::numeric_limits<float>::epsilon();
  at::Tensor scale = rms(input, stack[1].toIntVector().size(), eps), out = input * scale;
  if (auto weight = given(stack[2])) out = out * *weight;
  stack = {out.to(input.scalar_type()), scale};
}

void rms_norm_backward(const c10::OperatorHandle&, Stack& stack, uint64_t) {
  const at::Tensor gradient = stack[0].toTensor().to(at::kFloat), input = stack[1].toTensor(), scale = stack[3].toTensor();
  const auto shape = stack[2].toIntVector();
  std::vector<int64_t> inner, outer;
  for (int64_t i = 0; i < input.dim(); i++) (i < input.dim() - (int64_t)shape.size() ? outer : inner).push_back(i);
  at::Tensor normal = input.to(at::kFloat) * scale, of_normal = gradient, of_weight;
  if (auto weight = given(stack[4])) {
    of_normal = gradient * *weight;
    of_weight = gradient * normal;
    of_weight = (outer.empty() ? of_weight : of_weight.sum(outer)).to(weight->scalar_type());
  }
  at::Tensor of_input = scale * (of_normal - normal * (of_normal * normal).mean(inner, true));
  stack = {of_input.to(input.scalar_type()), of_weight};
}

}  // namespace

void add_rules(std::map<std::string, Rule>& rules) {
  rules["aten::native_dropout"] = {native_dropout};
  rules["aten::_fused_dropout"] = {fused_dropout};
  rules["aten::_softmax"] = {softmax<false>};
  rules["aten::_log_softmax"] = {softmax<true>};
  rules["aten::_softmax_backward_data"] = {softmax_backward<false>};
  rules["aten::_log_softmax_backward_data"] = {softmax_backward<true>};
  rules["aten::_fused_rms_norm"] = {rms_norm};
  rules["aten::_fused_rms_norm_backward"] = {rms_norm_backward};
  rules["aten::cudnn_convolution"] = {convolution, true};
  rules["aten::cudnn_convolution_transpose"] = {convolution_transposed, true};
  rules["aten::convolution_backward"] = {nullptr, true, false, is_not_cudnns};
  rules["aten::cudnn_batch_norm"] = {batch_norm, true};
  rules["aten::cudnn_batch_norm_backward"] = {batch_norm_backward, true};
  for (const char* name : {"nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
                           "repeat_interleave.Tensor", "bincount", "isin", "histc", "histogram", "equal"})
    rules[std::string("aten::") + name] = {nullptr, true, true};
  for (const char* name : {"cholesky", "_cholesky_solve_helper", "cholesky_inverse", "geqrf", "ormqr", "triangular_solve", "lu_unpack",
                           "_ctc_loss", "_ctc_loss_backward"})
    rules[std::string("aten::") + name] = {nullptr, true};
}

}  // namespace values
