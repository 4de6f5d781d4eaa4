// The driver's functions that torch asks for by name: expandable segments are made of them.
#include <sys/mman.h>

#include <cstring>

#include "stand_in.h"

using namespace stand_in;

namespace {
struct Physical {
  size_t bytes;
  int device;
};
std::mutex& lock() { static auto* it = new std::mutex; return *it; }
std::map<CUmemGenericAllocationHandle, Physical>& handles() { static auto* it = new std::map<CUmemGenericAllocationHandle, Physical>; return *it; }

CUresult reserve(CUdeviceptr* begin, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  void* found = reserve_address_space(bytes);
  if (!found) return CUDA_ERROR_OUT_OF_MEMORY;
  *begin = (CUdeviceptr)found;
  register_device_range(found, bytes, current_device());
  return CUDA_SUCCESS;
}
CUresult give_back(CUdeviceptr begin, size_t bytes) {
  forget_range((void*)begin);
  munmap((void*)begin, bytes);
  return CUDA_SUCCESS;
}
CUresult create(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* wanted, unsigned long long) {
  static CUmemGenericAllocationHandle next = 1;
  count("cuMemCreate");
  if (!charge(wanted->location.id, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  std::lock_guard<std::mutex> held(lock());
  handles()[*handle = next++] = {bytes, wanted->location.id};
  return CUDA_SUCCESS;
}
CUresult release(CUmemGenericAllocationHandle handle) {
  std::lock_guard<std::mutex> held(lock());
  auto at = handles().find(handle);
  if (at == handles().end()) return CUDA_ERROR_INVALID_VALUE;
  discharge(at->second.device, at->second.bytes);
  handles().erase(at);
  return CUDA_SUCCESS;
}
CUresult unmap(CUdeviceptr begin, size_t bytes) {
  wait_for_device(current_device());
  madvise((void*)begin, bytes, MADV_DONTNEED);
  return CUDA_SUCCESS;
}
CUresult granularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) { return *bytes = 2 << 20, CUDA_SUCCESS; }
CUresult range(CUdeviceptr* begin, size_t* bytes, CUdeviceptr pointer) {
  char* found;
  size_t size;
  if (!range_of((void*)pointer, &found, &size)) return CUDA_ERROR_INVALID_VALUE;
  if (begin) *begin = (CUdeviceptr)found;
  if (bytes) *bytes = size;
  return CUDA_SUCCESS;
}
CUresult attribute(int* value, CUdevice_attribute which, CUdevice number) {
  if (which == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) return *value = 1, CUDA_SUCCESS;
  return cudaDeviceGetAttribute(value, (cudaDeviceAttr)which, number) == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult device_get(CUdevice* found, int number) { return *found = number, CUDA_SUCCESS; }
CUresult error_string(CUresult error, const char** text) {
  return *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error of the simulated driver", CUDA_SUCCESS;
}
CUresult context(CUcontext* found) { return *found = (CUcontext)1, CUDA_SUCCESS; }
CUresult done() { return CUDA_SUCCESS; }
CUresult not_supported() { return CUDA_ERROR_NOT_SUPPORTED; }
}  // namespace

void* stand_in::driver_function(const char* name) {
  static const std::map<std::string, void*> known = {
      {"cuDeviceGet", (void*)device_get}, {"cuDeviceGetAttribute", (void*)attribute}, {"cuGetErrorString", (void*)error_string},
      {"cuMemGetAddressRange", (void*)range}, {"cuMemAddressReserve", (void*)reserve}, {"cuMemAddressFree", (void*)give_back},
      {"cuMemCreate", (void*)create}, {"cuMemRelease", (void*)release}, {"cuMemMap", (void*)done}, {"cuMemUnmap", (void*)unmap},
      {"cuMemSetAccess", (void*)done}, {"cuMemGetAllocationGranularity", (void*)granularity}, {"cuCtxGetCurrent", (void*)context},
      {"cuCtxSetCurrent", (void*)done},
  };
  auto at = known.find(name);
  return at == known.end() ? (void*)not_supported : at->second;
}

API cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* status) {
  *found = driver_function(name);
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
EXPORT void* simulated_cuda_driver_function(const char* name) { return driver_function(name); }
