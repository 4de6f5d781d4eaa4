// Puts itself before every kernel that torch has for CUDA: the kernel runs (it allocates, checks and launches what computes nothing), and
// the CPU's kernel is given to the stream to compute on aliases of the same memory. In every thread, below autograd and autocast.
#include "values.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <cstdio>
#include <unordered_map>

extern "C" void simulated_cuda_submit(cudaStream_t stream, std::function<void()>* work, bool may_wait, double ns);
extern "C" bool simulated_cuda_has_clock();
extern "C" double simulated_cuda_kernel_ns(double bytes, double flops, bool is_half);
extern "C" bool simulated_cuda_is_idle(cudaStream_t stream);
extern "C" void simulated_cuda_wait(cudaStream_t stream);

namespace values {
namespace {

using c10::IValue;
const c10::DispatchKeySet CPU(c10::DispatchKey::CPU);

bool has_values = true;  // or costs alone

struct Kernel {
  c10::SafeKernelFunction original;
  Rule rule;
  bool is_computed;  // the CPU has it, or a special
};
std::unordered_map<std::string, Kernel>& kernels() { static auto* it = new std::unordered_map<std::string, Kernel>; return *it; }
thread_local int depth = 0;  // of kernels of CUDA that call others

// -------------------------------------------------------------------- what could not be computed
std::mutex& lock() { static auto* it = new std::mutex; return *it; }
std::map<std::string, std::pair<long, std::string>>& missing() { static auto* it = new std::map<std::string, std::pair<long, std::string>>; return *it; }

void note(const c10::OperatorHandle& op, std::string why) {
  if (depth) return;  // part of a kernel whose results are computed as a whole
  std::lock_guard<std::mutex> held(lock());
  std::string name = toString(op.operator_name());
  auto& [number, reason] = missing()[name];
  if (!number++) fprintf(stderr, "tests/simulated_cuda: the values of %s are not computed: %s\n", name.c_str(), why.substr(0, 200).c_str());
  reason = why.substr(0, why.find('\n'));
}

// -------------------------------------------------------------------- aliases
bool is_cuda(const at::Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

// A tensor of the host keeps its memory, and not its object in Python: a stream's thread must not have to wait for the interpreter.
at::Tensor on_host(const at::Tensor& tensor) {
  at::TensorOptions options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (!tensor.numel()) return at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), options);
  if (is_cuda(tensor)) return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [](void*) {}, options);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [memory = tensor.storage()](void*) {}, options);
}

template <class F>
IValue mapped(const IValue& value, const F& f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    std::vector<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(f(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (std::optional<at::Tensor> each : value.toOptionalTensorList()) list.push_back(each ? std::optional(f(*each)) : each);
    return list;
  }
  return value;
}

template <class F>
void each_tensor(const Stack& stack, const F& f) {
  for (const IValue& value : stack)
    mapped(value, [&](const at::Tensor& tensor) { return f(tensor), tensor; });
}

bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// The seed of what a generator of CUDA would draw next: from its seed and how much was drawn.
uint64_t seed_of(const at::Generator& generator) {
  at::Tensor state = generator.get_state();
  const auto* words = (const uint64_t*)state.data_ptr();
  return (words[0] * 0x9E3779B97F4A7C15ull) ^ (words[1] * 0xC2B2AE3D27D4EB4Full + 0x165667B19E3779F9ull);
}

// -------------------------------------------------------------------- computing
Stack to_host(const Stack& given, const c10::FunctionSchema& schema, uint64_t seed, bool is_later) {
  Stack host;
  for (size_t i = 0; i < given.size(); i++) {
    const bool is_read_later = is_later && !is_written(schema.arguments()[i]);
    IValue value = mapped(given[i], [&](const at::Tensor& tensor) {
      if (is_cuda(tensor)) return on_host(tensor);
      // CUDA has read small values of the host when the call returns.
      if (!is_later || !tensor.defined() || !tensor.is_cpu()) return tensor;
      if (!is_read_later || tensor.is_pinned()) return on_host(tensor);
      at::Tensor copied = tensor.clone();
      copied.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
      return copied;
    });
    if (value.isDevice()) value = at::Device(at::kCPU);
    if (value.isGenerator() || (value.isNone() && schema.arguments()[i].name() == "generator"))
      value = at::detail::createCPUGenerator(seed);
    host.push_back(value);
  }
  return host;
}

void call(const c10::OperatorHandle& op, const Rule& rule, Stack& stack, uint64_t seed) {
  rule.special ? rule.special(op, stack, seed) : op.redispatchBoxed(CPU, &stack);
}

bool is_half(const at::Tensor& tensor) { return tensor.defined() && (tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16); }

// What the CPU does not compute in half precision is computed in single precision and rounded, as many kernels of CUDA do.
Stack in_single(const c10::OperatorHandle& op, const Rule& rule, const Stack& host, uint64_t seed) {
  std::vector<std::pair<at::Tensor, at::Tensor>> written;
  Stack stack;
  for (size_t i = 0; i < host.size(); i++) {
    const bool is_out = is_written(op.schema().arguments()[i]);
    stack.push_back(mapped(host[i], [&](const at::Tensor& tensor) {
      if (!is_half(tensor)) return tensor;
      at::Tensor single = tensor.to(at::kFloat);
      if (is_out) written.emplace_back(tensor, single);
      return single;
    }));
  }
  call(op, rule, stack, seed);
  for (auto& [tensor, single] : written) tensor.copy_(single);
  return stack;
}

Stack computed(const c10::OperatorHandle& op, const Rule& rule, const Stack& host, uint64_t seed) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  c10::impl::ExcludeDispatchKeyGuard below_python(c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  Stack stack = host;
  try {
    call(op, rule, stack, seed);
    return stack;
  } catch (const c10::Error&) {
    bool has_half = false;
    each_tensor(host, [&](const at::Tensor& tensor) { has_half |= is_half(tensor); });
    if (!has_half) throw;
    return in_single(op, rule, host, seed);
  }
}

void put(const at::Tensor& target, const at::Tensor& value) {
  if (!target.numel() || !value.defined() || !value.numel()) return;
  if (target.is_same(value) || target.data_ptr() == value.data_ptr()) return;
  if (target.sizes() == value.sizes()) {
    target.copy_(value);
  } else if (target.numel() == value.numel()) {
    target.copy_(value.reshape(target.sizes()));
  } else {  // padded: the log of sums of an attention
    TORCH_CHECK(target.dim() == value.dim() && target.size(-1) >= value.size(-1), "the CPU's result has another shape: ", value.sizes(),
                ", CUDA's: ", target.sizes());
    target.narrow(-1, 0, value.size(-1)).copy_(value);
  }
}

std::vector<at::Tensor> tensors_of(const Stack& stack) {
  std::vector<at::Tensor> found;
  each_tensor(stack, [&](const at::Tensor& tensor) { found.push_back(tensor); });
  return found;
}

// -------------------------------------------------------------------- what it costs
// Products of matrices, by the places of the two, and attention's, by those of queries and keys.
double flops_of(const std::string& name, const Stack& given) {
  static const std::map<std::string, std::pair<int, int>> products = {
      {"aten::mm", {0, 1}}, {"aten::bmm", {0, 1}}, {"aten::addmm", {1, 2}}, {"aten::baddbmm", {1, 2}}, {"aten::_scaled_mm", {0, 1}}};
  auto of = [&](size_t i) { return i < given.size() && given[i].isTensor() ? given[i].toTensor() : at::Tensor(); };
  const std::string base = name.substr(0, name.find('.'));
  if (auto at = products.find(base); at != products.end()) return 2.0 * of(at->second.first).numel() * of(at->second.second).size(-1);
  if (base.rfind("aten::_scaled_dot_product_", 0)) return 0;
  const bool is_backward = base.find("backward") != std::string::npos;
  const at::Tensor query = of(is_backward), key = of(is_backward + 1);
  return query.defined() && key.dim() == 4 ? (is_backward ? 10.0 : 4.0) * query.numel() * key.size(2) : 0;
}

// ns by the virtual clock: all of its tensors moved once, or its products computed, whichever takes longer.
double cost(const std::string& name, const Stack& given, const Stack& results) {
  if (!simulated_cuda_has_clock() || depth) return 0;
  if (name == "aten::copy_" && (!is_cuda(given[0].toTensor()) || !is_cuda(given[1].toTensor()))) return 0;  // the runtime's copy
  double bytes = 0;
  bool is_half = false;
  for (const Stack* stack : {&given, &results}) each_tensor(*stack, [&](const at::Tensor& tensor) {
      if (!is_cuda(tensor)) return;
      bytes += tensor.nbytes();
      is_half |= tensor.is_floating_point() && tensor.itemsize() <= 2;
    });
  return simulated_cuda_kernel_ns(bytes, flops_of(name, given), is_half);
}

void charge(cudaStream_t stream, double ns) {
  std::function<void()> nothing;
  if (ns) simulated_cuda_submit(stream, &nothing, false, ns);
}

// -------------------------------------------------------------------- the kernels
at::Device device_of(const Stack& given, const Stack& results) {
  std::optional<at::Device> found;
  for (const Stack* stack : {&given, &results}) each_tensor(*stack, [&](const at::Tensor& tensor) {
      if (is_cuda(tensor) && !found) found = tensor.device();
    });
  for (const IValue& value : given)
    if (!found && value.isDevice() && value.toDevice().is_cuda()) found = value.toDevice();
  return found && found->has_index() ? *found : at::Device(at::kCUDA, c10::cuda::current_device());
}

void alone(const c10::OperatorHandle& op, const Rule& rule, const Stack& given, Stack* stack, uint64_t seed) {
  const at::Device device = device_of(given, {});
  c10::cuda::CUDAGuard guard(device);
  cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  charge(stream, cost(toString(op.operator_name()), given, {}));
  if (rule.waits) c10::cuda::stream_synchronize(stream);
  Stack results;
  simulated_cuda_wait(stream);
  results = computed(op, rule, to_host(given, op.schema(), seed, false), seed);
  for (size_t i = 0; i < results.size(); i++) {
    const c10::AliasInfo* info = op.schema().returns()[i].alias_info();
    if (info && info->isWrite()) {  // an argument: of the same place among those that are written
      for (size_t j = 0, n = 0; j < given.size(); j++)
        if (is_written(op.schema().arguments()[j]) && n++ == i) results[i] = given[j];
      continue;
    }
    results[i] = mapped(results[i], [&](const at::Tensor& value) {
      if (!value.defined()) return value;
      at::Tensor out = at::empty_strided(value.sizes(), value.strides(), value.options().device(device));
      if (value.numel()) on_host(out).copy_(value);
      return out;
    });
  }
  *stack = std::move(results);
}

// The bytes are copied already, by the runtime.
bool is_copied(const std::string& name, const Stack& given) {
  if (name != "aten::copy_") return false;
  const at::Tensor &to = given[0].toTensor(), &from = given[1].toTensor();
  return to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes() && to.strides() == from.strides() &&
         to.is_non_overlapping_and_dense() && to.is_conj() == from.is_conj() && to.is_neg() == from.is_neg() && to.device() != from.device();
}

bool has_side_on_host(const Stack& given) {
  return !is_cuda(given[0].toTensor()) || !is_cuda(given[1].toTensor());
}

void kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const std::string name = toString(op.operator_name());
  const Kernel& known = kernels().at(name);
  const c10::FunctionSchema& schema = op.schema();
  const size_t num = schema.arguments().size();
  const Stack given(stack->end() - num, stack->end());
  uint64_t seed = 0;
  bool is_random = known.rule.special != nullptr;
  std::optional<at::Generator> generator;
  for (size_t i = 0; i < num; i++) {
    is_random |= schema.arguments()[i].name() == "generator";
    if (given[i].isGenerator()) generator = given[i].toGenerator();
  }
  if (has_values && is_random && (!generator || generator->device().is_cuda()))
    seed = seed_of(generator ? *generator : at::globalContext().defaultGenerator(device_of(given, {})));
  if (has_values && known.rule.is_replaced && !(known.rule.has_own && known.rule.has_own(given))) {
    stack->resize(stack->size() - num);
    Stack results;
    alone(op, known.rule, given, &results, seed);
    stack->insert(stack->end(), results.begin(), results.end());
    return;
  }
  const bool writes = schema.is_mutable();
  depth++;
  try {
    known.original.callBoxed(op, keys, stack);
  } catch (...) {
    depth--;
    throw;
  }
  depth--;
  if (depth && writes) return;  // the outer one writes it
  const Stack results(stack->end() - schema.returns().size(), stack->end());
  const double ns = cost(name, given, writes ? Stack{} : results);
  if (!has_values) return charge(c10::cuda::getCurrentCUDAStream(device_of(given, results).index()), ns);
  if (!known.is_computed) return note(op, "there is no kernel of the CPU");
  if (is_copied(name, given)) return;
  c10::cuda::CUDAGuard guard(device_of(given, results));
  cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const bool is_later = !simulated_cuda_is_idle(stream);
  auto host = std::make_shared<Stack>(to_host(given, schema, seed, is_later));
  std::vector<at::Tensor> targets;
  if (!writes)
    for (const at::Tensor& each : tensors_of(results)) targets.push_back(each.defined() ? on_host(each) : each);
  auto rule = known.rule;
  const int outer = depth;
  std::function<void()> work = [op, rule, host, targets, seed, outer] {
    const int before = depth;
    depth = outer;
    try {
      std::vector<at::Tensor> found = tensors_of(computed(op, rule, *host, seed));
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      for (size_t i = 0; i < targets.size() && i < found.size(); i++)
        if (targets[i].defined()) put(targets[i], found[i]);
    } catch (const std::exception& error) {
      note(op, error.what());
      for (const at::Tensor& each : targets)
        if (each.defined() && each.is_floating_point()) each.fill_(NAN);
    }
    depth = before;
  };
  simulated_cuda_submit(stream, &work, false, ns);
  if (is_later && name == "aten::copy_" && has_side_on_host(given) && !given[2].toBool()) simulated_cuda_wait(stream);
}

// -------------------------------------------------------------------- registration
bool is_view(const c10::FunctionSchema& schema) {
  if (schema.returns().empty()) return false;
  for (const c10::Argument& each : schema.returns())
    if (!each.alias_info() || each.alias_info()->isWrite()) return false;
  return true;
}

bool returns_values_of_the_host(const c10::FunctionSchema& schema) {
  for (const c10::Argument& each : schema.returns())
    if (each.type()->kind() == c10::TypeKind::BoolType || each.type()->kind() == c10::TypeKind::IntType || each.type()->kind() == c10::TypeKind::FloatType) return true;
  return false;
}

bool is_left_alone(const c10::OperatorName& op, const c10::FunctionSchema& schema) {
  static const std::set<std::string> names = {
      // memory, and what reads it by a copy of the runtime
      "aten::empty", "aten::empty_strided", "aten::_local_scalar_dense", "aten::record_stream", "aten::is_pinned", "aten::_pin_memory",
      "aten::set_", "aten::resize_", "aten::_resize_output_", "aten::_efficientzerotensor", "aten::resize_as_", "aten::_empty_affine_quantized",
      "aten::_assert_async", "aten::is_set_to",
  };
  return op.name.rfind("aten::", 0) != 0 || names.count(op.name) || is_view(schema);
}

void install(bool computes) {
  has_values = computes;
  std::map<std::string, Rule> rules;
  add_rules(rules);
  add_attention(rules);
  auto& dispatcher = c10::Dispatcher::singleton();
  auto* handles = new std::vector<c10::RegistrationHandleRAII>;
  struct Silent : c10::WarningHandler { void process(const c10::Warning&) override {} } silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || is_left_alone(name, op->schema())) continue;
    // copy_ is one kernel for all devices, and the only one of its kind.
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) && name.name != "aten::copy_") continue;
    auto of_overload = rules.find(toString(name)), of_name = rules.find(name.name);
    Rule rule = of_overload != rules.end() ? of_overload->second : of_name != rules.end() ? of_name->second : Rule{};
    if (!rule.special && returns_values_of_the_host(op->schema())) rule.is_replaced = rule.waits = true;
    if (name.name.rfind("aten::linalg_", 0) == 0 || name.name.rfind("aten::_linalg_", 0) == 0) rule.is_replaced = true;
    const bool is_computed = rule.special || op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
    if (!is_computed) rule.is_replaced = false;
    kernels().insert_or_assign(toString(name), Kernel{op->getComputedKernelForDispatchKey(c10::DispatchKey::CUDA), rule, is_computed});
    handles->push_back(dispatcher.registerImpl(name, c10::DispatchKey::CUDA, c10::KernelFunction::makeFromBoxedFunction<&kernel>(), std::nullopt, nullptr, "tests/simulated_cuda"));
  }
}

}  // namespace
}  // namespace values

extern "C" __attribute__((visibility("default"))) void simulated_values_install(bool computes) { values::install(computes); }

// Lines "number name: why" of what was not computed; returns the bytes it needs.
extern "C" __attribute__((visibility("default"))) size_t simulated_values_missing(char* buffer, size_t size) {
  std::lock_guard<std::mutex> held(values::lock());
  std::string lines;
  for (const auto& [name, found] : values::missing()) lines += std::to_string(found.first) + " " + name + ": " + found.second + "\n";
  if (buffer && size) snprintf(buffer, size, "%s", lines.c_str());
  return lines.size() + 1;
}
