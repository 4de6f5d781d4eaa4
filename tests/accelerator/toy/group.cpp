// How processes with toy devices exchange tensors: gloo's group of the CPU, given the same memory as tensors of the host.

#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

namespace toy {
namespace {

using Tensors = std::vector<at::Tensor>;
using Works = c10::intrusive_ptr<c10d::Work>;

at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.device().type() != c10::DeviceType::PrivateUse1) {
    return tensor;
  }
  const auto& own = tensor.storage();
  c10::Storage storage(c10::Storage::use_byte_size_t(), own.nbytes(), c10::DataPtr(own.mutable_data(), c10::Device(c10::kCPU)),
                       c10::GetCPUAllocator(), false);
  auto same = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  same.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return same;
}

Tensors on_host(const Tensors& tensors) {
  Tensors all;
  for (const auto& each : tensors) {
    all.push_back(on_host(each));
  }
  return all;
}

std::vector<Tensors> on_host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> all;
  for (const auto& each : lists) {
    all.push_back(on_host(each));
  }
  return all;
}

// Waits for gloo's work; its result are the device's own tensors, which it keeps until then.
struct Work final : c10d::Work {
  Work(Works inner, Tensors kept) : inner_(std::move(inner)), kept_(std::move(kept)) {}
  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  bool wait(std::chrono::milliseconds timeout) override { return inner_->wait(timeout); }
  void synchronize() override { inner_->synchronize(); }
  void abort() override { inner_->abort(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  Tensors result() override { return kept_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::vector<c10::Device> devices;
    if (!kept_.empty()) {
      devices.push_back(kept_.front().device());
    }
    auto made = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    inner_->getFuture()->addCallback([made, kept = kept_](c10::ivalue::Future& done) {
      done.hasError() ? made->setError(done.exception_ptr()) : made->markCompleted(kept);
    });
    return made;
  }

 private:
  Works inner_;
  Tensors kept_;
};

Tensors flat(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const auto& each : lists) {
    all.insert(all.end(), each.begin(), each.end());
  }
  return all;
}

Works made(Works inner, const Tensors& kept) { return c10::make_intrusive<Work>(std::move(inner), kept); }

struct Group final : c10d::Backend {
  explicit Group(c10::intrusive_ptr<c10d::Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "toygloo"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  Works broadcast(Tensors& all, const c10d::BroadcastOptions& how) override {
    auto hosts = on_host(all);
    return made(gloo_->broadcast(hosts, how), all);
  }
  Works allreduce(Tensors& all, const c10d::AllreduceOptions& how) override {
    auto hosts = on_host(all);
    return made(gloo_->allreduce(hosts, how), all);
  }
  Works allreduce_coalesced(Tensors& all, const c10d::AllreduceCoalescedOptions& how) override {
    auto hosts = on_host(all);
    return made(gloo_->allreduce_coalesced(hosts, how), all);
  }
  Works reduce(Tensors& all, const c10d::ReduceOptions& how) override {
    auto hosts = on_host(all);
    return made(gloo_->reduce(hosts, how), all);
  }
  Works allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& how) override {
    auto outs = on_host(out);
    auto ins = on_host(in);
    return made(gloo_->allgather(outs, ins, how), flat(out));
  }
  Works _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& how) override {
    auto to = on_host(out), from = on_host(in);
    return made(gloo_->_allgather_base(to, from, how), {out});
  }
  Works gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& how) override {
    auto outs = on_host(out);
    auto ins = on_host(in);
    return made(gloo_->gather(outs, ins, how), flat(out));
  }
  Works scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& how) override {
    auto outs = on_host(out);
    auto ins = on_host(in);
    return made(gloo_->scatter(outs, ins, how), out);
  }
  Works send(Tensors& all, int to, int tag) override {
    auto hosts = on_host(all);
    return made(gloo_->send(hosts, to, tag), all);
  }
  Works recv(Tensors& all, int from, int tag) override {
    auto hosts = on_host(all);
    return made(gloo_->recv(hosts, from, tag), all);
  }
  Works barrier(const c10d::BarrierOptions& how) override { return gloo_->barrier(how); }
  void abort() override { gloo_->abort(); }
  void shutdown() override { gloo_->shutdown(); }

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace
}  // namespace toy

PYBIND11_MODULE(toy_group, m) {
  py::class_<toy::Group, c10::intrusive_ptr<toy::Group>, c10d::Backend>(m, "Group", py::module_local())
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>());
}
