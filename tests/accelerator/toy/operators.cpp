// The toy accelerator's operators: each runs torch's kernel for the CPU on the same memory.

#include "toy.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <set>
#include <string>

namespace toy {
namespace {

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kToy; }

c10::Allocator* allocator() { return c10::GetAllocator(kToy); }

// The same memory as a tensor of the host; whoever uses it holds the device's tensor meanwhile.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!is_ours(tensor)) {
    return tensor;
  }
  const auto& own = tensor.storage();
  c10::Storage storage(c10::Storage::use_byte_size_t(), own.nbytes(), c10::DataPtr(own.mutable_data(), c10::Device(c10::kCPU)),
                       c10::GetCPUAllocator(), true);
  auto same = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  same.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  same._set_conj(tensor.is_conj());
  same._set_neg(tensor.is_neg());
  return same;
}

at::Tensor on_device(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined()) {
    return tensor;
  }
  auto made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
  on_host(made).copy_(tensor);
  return made;
}

// One call: what it got on the device, and what the CPU's kernel gets in its place.
struct Call {
  const c10::OperatorHandle& op;
  std::vector<c10::IValue> given;
  std::vector<std::pair<at::Tensor, at::Tensor>> written;  // ours, and the same memory on the host
  std::optional<c10::Device> device;
  bool is_index;

  void see(const at::Tensor& tensor) {
    if (is_ours(tensor)) {
      TORCH_CHECK(!device || *device == tensor.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
                  device.value_or(tensor.device()), " and ", tensor.device(), "! (", op.schema().name(), ")");
      device = tensor.device();
    }
  }
  void see_host(const at::Tensor& tensor) const {
    const bool may_lie_there = is_index || op.schema().name().find("ctc_loss") != std::string::npos;
    TORCH_CHECK(!device || !tensor.defined() || is_ours(tensor) || tensor.dim() == 0 || may_lie_there,
                "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ", tensor.device(),
                "! (", op.schema().name(), ")");
  }
  at::Tensor swap(const at::Tensor& tensor, bool is_written) {
    see_host(tensor);
    auto host = on_host(tensor);
    if (is_written && is_ours(tensor)) {
      written.emplace_back(tensor, host);
    }
    return host;
  }
  c10::IValue swap(const c10::Argument& argument, const c10::IValue& value) {
    const bool is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    if (value.isTensor()) {
      return swap(value.toTensor(), is_written);
    }
    if (value.isTensorList()) {
      std::vector<at::Tensor> hosts;
      for (const auto& each : value.toTensorVector()) {
        hosts.push_back(swap(each, is_written));
      }
      return hosts;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> hosts;
      for (const std::optional<at::Tensor>& each : value.toOptionalTensorList()) {
        hosts.push_back(each ? std::optional<at::Tensor>(swap(*each, false)) : std::nullopt);
      }
      return hosts;
    }
    if (value.isDevice()) {
      return c10::Device(c10::kCPU);
    }
    const bool draws = argument.name() == "generator";
    if (draws && (value.isNone() || value.isGenerator())) {
      const auto own = value.isNone() ? std::nullopt : std::optional<at::Generator>(value.toGenerator());
      return inner_generator(own, *device);
    }
    return value;
  }
};

template <class Use>
void each_tensor(const c10::IValue& value, const Use& use) {
  if (value.isTensor()) {
    use(value.toTensor());
  } else if (value.isTensorList()) {
    for (const auto& each : value.toTensorVector()) {
      use(each);
    }
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorList()) {
      if (each) {
        use(*each);
      }
    }
  }
}

// Where the shape of a result depends on values, a host waits for them.
void note_shape(const std::string& name, const std::vector<c10::IValue>& given, bool is_index) {
  static const std::set<std::string> waiting{
      "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
      "aten::equal", "aten::bincount", "aten::repeat_interleave"};
  bool waits = waiting.count(name) > 0;
  if (is_index && name != "aten::index") {  // which finds its shape by nonzero first
    each_tensor(given[1], [&](const at::Tensor& each) {
      waits = waits || (each.defined() && (each.scalar_type() == at::kBool || each.scalar_type() == at::kByte));
    });
  }
  if (waits) {
    waits_for(kShape);
  }
}

// A kernel of the CPU may have resized what it wrote to: `out=` of another size.
void take_back(const at::Tensor& own, const at::Tensor& host) {
  if (host.sizes() != own.sizes() || host.storage().data() != own.storage().data()) {
    own.resize_(host.sizes());
    own.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
    on_host(own).copy_(host);
  }
}

c10::IValue result(const Call& call, const c10::Argument& declared, const c10::IValue& value) {
  if (declared.alias_info() != nullptr) {
    TORCH_CHECK(declared.alias_info()->isWrite(), call.op.schema().name(), " makes a view, which the toy accelerator does not know");
    for (size_t index = 0; index < call.given.size(); ++index) {
      const auto* info = call.op.schema().arguments()[index].alias_info();
      if (info != nullptr && *info == *declared.alias_info()) {
        return call.given[index];
      }
    }
  }
  if (value.isTensor()) {
    return on_device(value.toTensor(), *call.device);
  }
  if (value.isTensorList()) {
    std::vector<at::Tensor> all;
    for (const auto& each : value.toTensorVector()) {
      all.push_back(on_device(each, *call.device));
    }
    return all;
  }
  return value;
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const bool is_index = schema.name().rfind("aten::index", 0) == 0 || schema.name().rfind("aten::_index_put", 0) == 0 ||
      schema.name().rfind("aten::_unsafe_index", 0) == 0;
  Call call{op, {stack->end() - count, stack->end()}, {}, std::nullopt, is_index};
  for (const auto& each : call.given) {
    each_tensor(each, [&](const at::Tensor& tensor) { call.see(tensor); });
    if (each.isDevice() && each.toDevice().type() == kToy && !call.device) {
      call.device = each.toDevice();
    }
  }
  if (!call.device || call.device->index() < 0) {
    call.device = c10::impl::VirtualGuardImpl(kToy).getDevice();
  }
  note_shape(schema.name(), call.given, is_index);
  const c10::DeviceGuard guard(*call.device);
  for (size_t index = 0; index < count; ++index) {
    (*stack)[stack->size() - count + index] = call.swap(schema.arguments()[index], call.given[index]);
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (const auto& [own, host] : call.written) {
    take_back(own, host);
  }
  const auto returned = schema.returns().size();
  for (size_t index = 0; index < returned; ++index) {
    auto& value = (*stack)[stack->size() - returned + index];
    value = result(call, schema.returns()[index], value);
  }
}

// ---------------------------------------------------------------- what has to know the device

using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Where = std::optional<at::Device>;

at::Tensor empty(at::IntArrayRef size, Dtype dtype, Layout, Where device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, Dtype dtype, Layout, Where device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (!is_ours(to) && !(non_blocking && is_pinned(to.storage().data()))) {
    waits_for(kToHost);
  }
  if (!is_ours(self) && !(non_blocking && is_pinned(self.storage().data()))) {
    waits_for(kFromHost);
  }
  on_host(to).copy_(on_host(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  waits_for(kScalar);
  return at::_local_scalar_dense(on_host(self));
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  const c10::OptionalDeviceGuard guard(self.device());
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(self.device());
  return at::native::resize_(self, size, format);
}

// torch's own for the CPU draws from the CPU's generator.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) {
    return {input.clone(), at::full_like(input, 1, at::kBool)};
  }
  const auto noise = at::bernoulli(at::full_like(input, 1 - p, at::MemoryFormat::Contiguous));
  return {input * (noise / (1 - p)), noise.to(at::kBool)};
}

void record_stream(at::Tensor&, at::Stream) {}

// ---------------------------------------------------------------- autocast

template <bool is_lower>
void cast_and_call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard off(c10::DispatchKey::AutocastPrivateUse1);
  const auto wanted = is_lower ? at::autocast::get_autocast_dtype(kToy) : at::kFloat;
  const auto count = op.schema().arguments().size();
  for (auto each = stack->end() - count; each != stack->end(); ++each) {
    if (each->isTensor()) {
      *each = at::autocast::cached_cast(wanted, each->toTensor(), kToy);
    }
  }
  op.callBoxed(stack);
}

}  // namespace
}  // namespace toy

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&toy::run_on_host>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &toy::empty);
  m.impl("empty_strided", &toy::empty_strided);
  m.impl("_copy_from", &toy::copy_from);
  m.impl("_copy_from_and_resize", &toy::copy_from_and_resize);
  m.impl("_local_scalar_dense", &toy::local_scalar_dense);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &toy::resize);
  m.impl("set_.source_Storage_storage_offset", &toy::set_storage);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", &at::native::set_);
  m.impl("native_dropout", &toy::native_dropout);
  m.impl("record_stream", &toy::record_stream);
  // Where torch would put several operators together, whose last bits differ from the CPU's one.
  for (const char* name : {"native_layer_norm", "native_group_norm", "native_batch_norm"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&toy::run_on_host>());
  }
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const char* name : {"mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "conv1d", "conv2d", "conv3d"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&toy::cast_and_call<true>>());
  }
  for (const char* name : {"layer_norm", "mse_loss", "nll_loss", "cross_entropy_loss", "binary_cross_entropy_with_logits"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&toy::cast_and_call<false>>());
  }
}
