// The toy accelerator: devices whose memory lies on the host. What torch asks of any accelerator: an allocator that
// counts and runs out, streams and events that are always done, generators, and a count of what would make a host wait.

#include "toy.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <cstdlib>
#include <set>

namespace toy {
namespace {

int64_t setting(const char* name, int64_t otherwise) {
  const char* said = std::getenv(name);
  return said == nullptr ? otherwise : std::atoll(said);
}

thread_local c10::DeviceIndex here = 0;
thread_local std::array<c10::StreamId, kMost> streams{};

std::array<std::atomic<int64_t>, kKinds> waits{};
std::atomic<bool> is_trapped{false};

// ---------------------------------------------------------------- memory

struct Block {
  void* start;
  size_t size;
  c10::DeviceIndex device;
};

struct Memory {
  std::mutex lock;
  std::array<c10::CachingDeviceAllocator::DeviceStats, kMost> counts;
  size_t capacity = setting("TOY_MEMORY", int64_t(1) << 30);

  void count(c10::DeviceIndex device, size_t size, bool is_freed) {
    auto& of = counts[device];
    for (auto* each : {&of.allocated_bytes[0], &of.reserved_bytes[0], &of.active_bytes[0], &of.requested_bytes[0]}) {
      is_freed ? each->decrease(size) : each->increase(size);
    }
    for (auto* each : {&of.allocation[0], &of.active[0]}) {
      is_freed ? each->decrease(1) : each->increase(1);
    }
  }
};

Memory& memory() {
  static auto* const one = new Memory();  // tensors outlive what C++ destroys at its end
  return *one;
}

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard<std::mutex> held(memory().lock);
    memory().count(block->device, block->size, true);
  }
  std::free(block->start);
  delete block;
}

c10::DataPtr reserve(size_t size) {
  const c10::Device device(kToy, here);
  auto& all = memory();
  {
    std::lock_guard<std::mutex> held(all.lock);
    auto& of = all.counts[here];
    const size_t used = of.allocated_bytes[0].current;
    if (used + size > all.capacity) {
      of.num_ooms += 1;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "toy out of memory. Tried to allocate ", size, " bytes. Device ", int(here),
                       " has a total capacity of ", all.capacity, " bytes of which ", all.capacity - used, " are free.");
    }
    all.count(here, size, false);
  }
  void* start = nullptr;
  TORCH_CHECK(posix_memalign(&start, 64, size == 0 ? 64 : size) == 0, "the host itself has no memory left");
  return {start, new Block{start, size, here}, &release, device};
}

struct CountingAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override { return reserve(size); }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> held(memory().lock);
    return memory().counts.at(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> held(memory().lock);
    memory().counts.at(device).allocated_bytes[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> held(memory().lock);
    memory().counts.at(device).allocated_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> held(memory().lock);
    return {memory().capacity - memory().counts.at(device).allocated_bytes[0].current, memory().capacity};
  }
};

// What a vendor has who implements no more than torch's oldest interface: nothing counts.
struct PlainAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override { return reserve(size); }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

std::mutex pinned_lock;
std::set<const void*> pinned;

void unpin(void* start) {
  {
    std::lock_guard<std::mutex> held(pinned_lock);
    pinned.erase(start);
  }
  std::free(start);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* start = nullptr;
    TORCH_CHECK(posix_memalign(&start, 64, size == 0 ? 64 : size) == 0, "the host itself has no memory left");
    std::lock_guard<std::mutex> held(pinned_lock);
    pinned.insert(start);
    return {start, start, &unpin, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

// ---------------------------------------------------------------- random numbers

struct ToyGenerator final : c10::GeneratorImpl {
  explicit ToyGenerator(c10::DeviceIndex device, uint64_t seed = c10::default_rng_seed_val)
      : GeneratorImpl(c10::Device(kToy, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(at::detail::createCPUGenerator(seed)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  ToyGenerator* clone_impl() const override {
    auto* copy = new ToyGenerator(device_.index());
    copy->inner = inner.clone();
    return copy;
  }
  at::Generator inner;
};

const at::Generator& generator(c10::DeviceIndex device) {
  static const auto* const all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int index = 0; index < kMost; ++index) {
      made->push_back(at::make_generator<ToyGenerator>(index));
    }
    return made;
  }();
  return all->at(device < 0 ? here : device);
}

// ---------------------------------------------------------------- streams, events, the current device

struct Event {
  c10::DeviceIndex device;
  std::chrono::steady_clock::time_point time;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kToy; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before(kToy, here);
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kToy, here}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < num_devices(), "toy has no device ", int(device.index()));
    if (device.index() >= 0) {
      here = device.index();
    }
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { here = device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    const auto index = device.index() < 0 ? here : device.index();
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kToy, index), streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kToy, device.index() < 0 ? here : device.index()));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> last{0};
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kToy, device.index() < 0 ? here : device.index()), ++last);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices(); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { waits_for(kSynchronize); }
  void synchronizeDevice(const c10::DeviceIndex) const override { waits_for(kSynchronize); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    auto* each = static_cast<Event*>(*event);
    if (each == nullptr) {
      *event = each = new Event();
    }
    *each = {stream.device_index(), std::chrono::steady_clock::now()};
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { waits_for(kSynchronize); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    using Milliseconds = std::chrono::duration<double, std::milli>;
    return Milliseconds(static_cast<Event*>(to)->time - static_cast<Event*>(from)->time).count();
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return num_devices(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({kToy, device}); }
  c10::DeviceIndex getCurrentDevice() const override { return here; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kToy, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<ToyGenerator>(device < 0 ? here : device);
  }
  at::Device getDeviceFromPtr(void*) const override { return {kToy, here}; }
  bool isPinnedPtr(const void* start) const override { return is_pinned(start); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    static auto* const one = new PinnedAllocator();
    return one;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    const c10::OptionalDeviceGuard guard(storage.device());
    auto moved = reserve(size);
    std::memcpy(moved.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(moved));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Registration {
  Registration() {
    static const auto is_plain = setting("TOY_PLAIN", 0) != 0;
    c10::Allocator* allocator = is_plain ? static_cast<c10::Allocator*>(new PlainAllocator()) : new CountingAllocator();
    c10::SetAllocator(kToy, allocator);
    at::RegisterPrivateUse1HooksInterface(new Hooks());
  }
} const registration;

}  // namespace

c10::DeviceIndex num_devices() {
  static const auto count = static_cast<c10::DeviceIndex>(setting("TOY_DEVICES", 2));
  return count;
}

bool is_pinned(const void* start) {
  std::lock_guard<std::mutex> held(pinned_lock);
  auto after = pinned.upper_bound(start);  // the block that begins at or before it; close enough for a toy
  return after != pinned.begin() && static_cast<const char*>(start) - static_cast<const char*>(*--after) < (1 << 24);
}

void waits_for(Wait kind) {
  TORCH_CHECK(!is_trapped, "the host waits for the device (", kNames[kind], "), where it was told not to");
  waits[kind] += 1;
}

at::Generator inner_generator(const std::optional<at::Generator>& given, c10::Device device) {
  const auto& chosen = given.has_value() && given->defined() ? *given : generator(device.index());
  auto* own = dynamic_cast<ToyGenerator*>(chosen.unsafeGetGeneratorImpl());
  TORCH_CHECK(own != nullptr, "Expected a 'toy' device type for generator but found '", chosen.device(), "'");
  return own->inner;
}

}  // namespace toy

TORCH_LIBRARY(toy, m) {
  m.def("num_devices() -> int", [] { return int64_t(toy::num_devices()); });
  m.def("rng_state(int device) -> Tensor", [](int64_t device) { return toy::generator(device).get_state(); });
  m.def("set_rng_state(int device, Tensor state) -> ()", [](int64_t device, const at::Tensor& state) {
    at::Generator(toy::generator(device)).set_state(state);
  });
  m.def("manual_seed(int device, int seed) -> ()", [](int64_t device, int64_t seed) {
    at::Generator(toy::generator(device)).set_current_seed(seed);
  });
  m.def("waits() -> int[]", [] { return std::vector<int64_t>(toy::waits.begin(), toy::waits.end()); });
  m.def("forget_waits() -> ()", [] {
    for (auto& each : toy::waits) {
      each = 0;
    }
  });
  m.def("trap_waits(bool is_on) -> ()", [](bool is_on) { toy::is_trapped = is_on; });
}
