// Devices: the kinds that headway.forecast knows, and what CUDA says of them.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <vector>

#include "stand_in.h"

namespace stand_in {

long setting(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value && *value ? atol(value) : otherwise;
}

const Device& device() {
  static const Device& chosen = []() -> const Device& {
    const char* name = getenv("SIMULATED_CUDA");
    if (!name || !*name) return KINDS[0];
    for (const Device& kind : KINDS)
      if (!strcmp(kind.key, name)) return kind;
    fprintf(stderr, "SIMULATED_CUDA=%s is no device of tests/simulated_cuda; it has", name);
    for (const Device& kind : KINDS) fprintf(stderr, " %s", kind.key);
    fprintf(stderr, "\n");
    abort();
  }();
  return chosen;
}

static const std::vector<int>& visible() {
  static const std::vector<int> found = [] {
    int all = setting("SIMULATED_CUDA_DEVICES", 1);
    std::vector<int> seen;
    const char* told = getenv("CUDA_VISIBLE_DEVICES");
    if (!told) {
      for (int i = 0; i < all; i++) seen.push_back(i);
      return seen;
    }
    std::istringstream list(told);
    for (std::string each; std::getline(list, each, ',');) {
      char* end;
      long number = strtol(each.c_str(), &end, 10);
      if (end == each.c_str() || number < 0 || number >= all) break;  // as CUDA: what follows is not seen either
      seen.push_back(number);
    }
    return seen;
  }();
  return found;
}

int num_devices() { return visible().size(); }
int physical(int number) { return visible().at(number); }
size_t capacity() { return (size_t)setting("SIMULATED_CUDA_MIB", device().mib) << 20; }
size_t context_bytes() { return (size_t)setting("SIMULATED_CUDA_CONTEXT_MIB", 500) << 20; }
int& current_device() {
  static thread_local int number = 0;
  return number;
}

}  // namespace stand_in

using namespace stand_in;

static bool is_known(int number) { return number >= 0 && number < num_devices(); }

API cudaGetDeviceCount(int* n) { return *n = num_devices(), *n ? cudaSuccess : fail(cudaErrorNoDevice); }
API cudaGetDevice(int* number) { return *number = current_device(), cudaSuccess; }
API cudaSetDevice(int number) {
  if (!is_known(number)) return fail(cudaErrorInvalidDevice);
  current_device() = number;
  open_context(number);
  return cudaSuccess;
}
API cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
API cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
API cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
API cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
API cudaDeviceGetPCIBusId(char* text, int length, int number) {
  snprintf(text, length, "0000:%02x:00.0", physical(number) + 1);
  return cudaSuccess;
}

// What the kinds differ in beside the table does not change what torch does with a kernel that computes nothing.
API cudaGetDeviceProperties(cudaDeviceProp* p, int number) {
  if (!is_known(number)) return fail(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", device().product);
  p->totalGlobalMem = capacity();
  p->major = device().major;
  p->minor = device().minor;
  p->multiProcessorCount = device().multiprocessors;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  const int kind = 10 * device().major + device().minor;
  p->maxThreadsPerMultiProcessor = kind == 75 ? 1024 : kind == 86 || kind == 89 || kind == 120 ? 1536 : 2048;
  p->regsPerBlock = p->regsPerMultiprocessor = p->totalConstMem = 65536;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->reservedSharedMemPerBlock = 1024;
  p->maxBlocksPerMultiProcessor = 32;
  p->l2CacheSize = 50 << 20;
  p->memoryBusWidth = 5120;
  for (int i = 0; i < 3; i++) {
    p->maxThreadsDim[i] = i == 2 ? 64 : 1024;
    p->maxGridSize[i] = i ? 65535 : 2147483647;
  }
  p->unifiedAddressing = p->managedMemory = p->concurrentKernels = p->canMapHostMemory = p->cooperativeLaunch = 1;
  p->streamPrioritiesSupported = p->memoryPoolsSupported = 1;
  p->asyncEngineCount = 3;
  p->pciBusID = physical(number) + 1;
  p->textureAlignment = 512;
  p->memPitch = 2147483647;
  p->uuid.bytes[0] = 1 + physical(number);
  return cudaSuccess;
}

API cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int number) {
  cudaDeviceProp p;
  if (cudaGetDeviceProperties(&p, number) != cudaSuccess) return cudaErrorInvalidDevice;
  static const std::map<int, int cudaDeviceProp::*> same = {
      {cudaDevAttrComputeCapabilityMajor, &cudaDeviceProp::major},
      {cudaDevAttrComputeCapabilityMinor, &cudaDeviceProp::minor},
      {cudaDevAttrMultiProcessorCount, &cudaDeviceProp::multiProcessorCount},
      {cudaDevAttrMaxThreadsPerBlock, &cudaDeviceProp::maxThreadsPerBlock},
      {cudaDevAttrMaxThreadsPerMultiProcessor, &cudaDeviceProp::maxThreadsPerMultiProcessor},
      {cudaDevAttrMaxRegistersPerBlock, &cudaDeviceProp::regsPerBlock},
      {cudaDevAttrMaxRegistersPerMultiprocessor, &cudaDeviceProp::regsPerMultiprocessor},
      {cudaDevAttrMaxBlocksPerMultiprocessor, &cudaDeviceProp::maxBlocksPerMultiProcessor},
      {cudaDevAttrWarpSize, &cudaDeviceProp::warpSize},
      {cudaDevAttrL2CacheSize, &cudaDeviceProp::l2CacheSize},
      {cudaDevAttrGlobalMemoryBusWidth, &cudaDeviceProp::memoryBusWidth},
      {cudaDevAttrAsyncEngineCount, &cudaDeviceProp::asyncEngineCount},
  };
  auto found = same.find(attribute);
  if (found != same.end()) return *value = p.*(found->second), cudaSuccess;
  switch (attribute) {
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = p.reservedSharedMemPerBlock; break;
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMemoryClockRate: *value = 2619000; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    case cudaDevAttrCooperativeLaunch: case cudaDevAttrUnifiedAddressing: case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrConcurrentKernels: case cudaDevAttrStreamPrioritiesSupported: case cudaDevAttrMemoryPoolsSupported:
      *value = 1; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
