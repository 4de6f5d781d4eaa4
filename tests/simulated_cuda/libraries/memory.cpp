// Device and pinned memory, both address space of the host that costs nothing until it is written; copies, counted by kind.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "stand_in.h"

namespace stand_in {

struct Range {
  size_t bytes;
  int device;
  Place place;
  bool is_ours;  // or the program's, registered
};
static std::mutex& lock() { static auto* it = new std::mutex; return *it; }
static std::map<char*, Range>& ranges() { static auto* it = new std::map<char*, Range>; return *it; }
static size_t used[64], peak_pinned, pinned;
static bool opened[64];
using Held = std::lock_guard<std::mutex>;

static std::map<char*, Range>::iterator find(const void* pointer) {
  auto after = ranges().upper_bound((char*)pointer);
  if (after == ranges().begin()) return ranges().end();
  auto at = std::prev(after);
  return (char*)pointer < at->first + at->second.bytes ? at : ranges().end();
}

Place place_of(const void* pointer) {
  Held held(lock());
  auto at = find(pointer);
  return at == ranges().end() ? Place::pageable : at->second.place;
}
bool has_context(int device) { return opened[device]; }
size_t used_bytes(int device) { Held held(lock()); return used[device]; }
void open_context(int device) {
  Held held(lock());
  if (opened[device]) return;
  opened[device] = true;
  used[device] += context_bytes();
}
bool charge(int device, size_t bytes) {
  open_context(device);
  Held held(lock());
  if (used[device] + bytes > capacity()) return false;
  used[device] += bytes;
  return true;
}
void discharge(int device, size_t bytes) { Held held(lock()); used[device] -= bytes; }
void register_device_range(void* begin, size_t bytes, int device) {
  Held held(lock());
  ranges()[(char*)begin] = {bytes, device, Place::device, true};
}
void forget_range(void* begin) { Held held(lock()); ranges().erase((char*)begin); }
bool range_of(const void* pointer, char** begin, size_t* bytes) {
  Held held(lock());
  auto at = find(pointer);
  if (at == ranges().end()) return false;
  *begin = at->first;
  *bytes = at->second.bytes;
  return true;
}
void* reserve_address_space(size_t bytes) {
  void* begin = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) return nullptr;
  madvise(begin, bytes, MADV_NOHUGEPAGE);
  return begin;
}

static size_t mapped(size_t bytes) { return (bytes + (2 << 20) - 1) & ~(size_t)((2 << 20) - 1); }
static size_t charged(size_t bytes) { return bytes < 1 << 20 ? bytes : mapped(bytes); }

static cudaError_t hold_pinned(void* begin, size_t bytes, bool is_ours) {
  Held held(lock());
  if (ranges().count((char*)begin)) return fail(cudaErrorHostMemoryAlreadyRegistered);
  ranges()[(char*)begin] = {bytes, current_device(), Place::pinned, is_ours};
  pinned += bytes;
  peak_pinned = std::max(peak_pinned, pinned);
  return cudaSuccess;
}
static bool let_go(void* begin, size_t* bytes) {
  Held held(lock());
  auto at = ranges().find((char*)begin);
  if (at == ranges().end() || at->second.place != Place::pinned) return false;
  *bytes = at->second.bytes;
  pinned -= *bytes;
  ranges().erase(at);
  return true;
}

// Without values nothing reads what lies on a device: of large copies only the count matters, not gigabytes touched.
static bool is_made(size_t bytes) {
  static const bool has_values = setting("SIMULATED_CUDA_VALUES", 1);
  return has_values || bytes <= 64 << 20;
}

static cudaError_t copy(void* to, const void* from, size_t bytes, size_t rows, size_t to_pitch, size_t from_pitch, cudaStream_t s) {
  if (!bytes || !rows) return cudaSuccess;
  Place source = place_of(from), target = place_of(to);
  static const char* names[] = {"pageable host", "pinned host", "device"};
  count(std::string("copy: ") + names[(int)source] + " to " + names[(int)target]);
  count(std::string("bytes: ") + names[(int)source] + " to " + names[(int)target], bytes * rows);
  Stream* stream = stream_of(s);
  std::shared_ptr<std::vector<char>> staged;
  // CUDA has read pageable memory when the call returns.
  if (source == Place::pageable && target == Place::device && !is_idle(stream)) {
    staged = std::make_shared<std::vector<char>>(bytes * rows);
    for (size_t i = 0; i < rows; i++) memcpy(staged->data() + i * bytes, (char*)from + i * from_pitch, bytes);
  }
  auto move = [=] {
    if (!is_made(bytes * rows)) return;
    const char* begin = staged ? staged->data() : (const char*)from;
    size_t pitch = staged ? bytes : from_pitch;
    for (size_t i = 0; i < rows; i++) memmove((char*)to + i * to_pitch, begin + i * pitch, bytes);
  };
  const bool is_pageable = source == Place::pageable || target == Place::pageable;
  // Within a device torch says what is copied, as of any kernel.
  const double ns = source == target ? 0 : copy_ns(bytes * rows, !is_pageable);
  spend(5);
  submit(stream, {move, ns, source == target ? Engine::compute : target == Place::device ? Engine::to_device : Engine::to_host});
  if (is_pageable && (source == Place::device || (has_clock() && bytes * rows > 64 << 10))) wait_for(stream, stream->submitted);
  return cudaSuccess;
}

}  // namespace stand_in

using namespace stand_in;

API cudaMalloc(void** pointer, size_t bytes) {
  *pointer = nullptr;
  if (!bytes) return cudaSuccess;
  count("cudaMalloc");
  int device = current_device();
  if (!charge(device, charged(bytes))) return fail(cudaErrorMemoryAllocation);
  *pointer = reserve_address_space(mapped(bytes));
  if (!*pointer) return discharge(device, charged(bytes)), fail(cudaErrorMemoryAllocation);
  register_device_range(*pointer, bytes, device);
  return cudaSuccess;
}
API cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  count("cudaFree");
  int device;
  size_t bytes;
  {
    Held held(lock());
    auto at = ranges().find((char*)pointer);
    if (at == ranges().end() || at->second.place != Place::device) return fail(cudaErrorInvalidValue);
    device = at->second.device, bytes = at->second.bytes;
  }
  wait_for_device(device);
  forget_range(pointer);
  munmap(pointer, mapped(bytes));
  discharge(device, charged(bytes));
  return cudaSuccess;
}
API cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) { return cudaMalloc(pointer, bytes); }
API cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }
API cudaMemGetInfo(size_t* free, size_t* total) {
  open_context(current_device());
  *total = capacity();
  *free = capacity() - used_bytes(current_device());
  return cudaSuccess;
}

API cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  count("cudaHostAlloc");
  bytes = std::max<size_t>(bytes, 1);
  *pointer = reserve_address_space(bytes);
  return *pointer ? hold_pinned(*pointer, bytes, true) : fail(cudaErrorMemoryAllocation);
}
API cudaMallocHost(void** pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }
API cudaFreeHost(void* pointer) {
  size_t bytes;
  count("cudaFreeHost");
  for (int i = 0; i < num_devices(); i++) wait_for_device(i);
  if (!let_go(pointer, &bytes)) return fail(cudaErrorInvalidValue);
  munmap(pointer, bytes);
  return cudaSuccess;
}
API cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  count("cudaHostRegister");
  return hold_pinned(pointer, bytes, false);
}
API cudaHostUnregister(void* pointer) {
  size_t bytes;
  return let_go(pointer, &bytes) ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}
API cudaHostGetDevicePointer(void** device, void* host, unsigned) { return *device = host, cudaSuccess; }
EXPORT size_t simulated_cuda_pinned_bytes(bool at_peak) { Held held(lock()); return at_peak ? peak_pinned : pinned; }
// By the number that NVML gives a device, which CUDA_VISIBLE_DEVICES does not change.
EXPORT size_t simulated_cuda_used_bytes(int number) {
  for (int i = 0; i < num_devices(); i++)
    if (physical(i) == number) return used_bytes(i);
  return 0;
}
EXPORT bool simulated_cuda_has_context(int device) { return has_context(device); }

API cudaPointerGetAttributes(cudaPointerAttributes* found, const void* pointer) {
  memset(found, 0, sizeof *found);
  Held held(lock());
  auto at = find(pointer);
  found->type = cudaMemoryTypeUnregistered;
  found->device = -2;
  if (at == ranges().end()) return cudaSuccess;
  bool is_pinned = at->second.place == Place::pinned;
  found->type = is_pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  found->device = at->second.device;
  found->devicePointer = (void*)pointer;
  found->hostPointer = is_pinned ? (void*)pointer : nullptr;
  return cudaSuccess;
}

API cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t s) { return copy(to, from, bytes, 1, 0, 0, s); }
API cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t s) { return copy(to, from, bytes, 1, 0, 0, s); }
API cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows, cudaMemcpyKind, cudaStream_t s) {
  return copy(to, from, width, rows, to_pitch, from_pitch, s);
}
API cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  count("cudaMemcpy");
  copy(to, from, bytes, 1, 0, 0, nullptr);
  Stream* stream = stream_of(nullptr);
  wait_for(stream, stream->submitted);
  return cudaSuccess;
}
API cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t s) {
  spend(5);
  submit(stream_of(s), {[=] { if (is_made(bytes)) memset(to, value, bytes); }, launch_ns() + kernel_ns(bytes)});
  return cudaSuccess;
}
API cudaMemset(void* to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }
API cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
API cudaGetSymbolAddress(void** address, const void* symbol) { return *address = (void*)symbol, cudaSuccess; }

// The driver's own pools: asked for by name only, torch's allocator does not use them unless it is told to.
API cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) { return *pool = (cudaMemPool_t)1, cudaSuccess; }
API cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) { return *(unsigned long long*)value = 0, cudaSuccess; }
API cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
API cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
API cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
API cudaDeviceGetGraphMemAttribute(int, cudaGraphMemAttributeType, void* value) { return *(unsigned long long*)value = 0, cudaSuccess; }
API cudaDeviceSetGraphMemAttribute(int, cudaGraphMemAttributeType, void*) { return cudaSuccess; }
// Memory of another process is only shared by the stand-in of NCCL.
API cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return fail(cudaErrorNotSupported); }
API cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { return fail(cudaErrorNotSupported); }
API cudaIpcCloseMemHandle(void*) { return fail(cudaErrorNotSupported); }
API cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) { return fail(cudaErrorNotSupported); }
API cudaIpcOpenEventHandle(cudaEvent_t*, cudaIpcEventHandle_t) { return fail(cudaErrorNotSupported); }
