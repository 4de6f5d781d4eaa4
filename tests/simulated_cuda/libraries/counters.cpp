// How often each thing was asked of the runtime, by name; and a thread's last error.
#include <cstdio>
#include <cstring>

#include "stand_in.h"

namespace stand_in {

static std::mutex& lock() { static auto* it = new std::mutex; return *it; }
static std::map<std::string, long>& counts() { static auto* it = new std::map<std::string, long>; return *it; }
static thread_local cudaError_t last = cudaSuccess;

void count(const std::string& name, long by) {
  std::lock_guard<std::mutex> held(lock());
  counts()[name] += by;
}

cudaError_t fail(cudaError_t error) { return last = error; }

}  // namespace stand_in

using namespace stand_in;

EXPORT void simulated_cuda_count(const char* name) { count(name); }

// Lines "number name" into the buffer; returns the bytes it needs.
EXPORT size_t simulated_cuda_counts(char* buffer, size_t size) {
  std::lock_guard<std::mutex> held(lock());
  std::string lines;
  for (const auto& [name, number] : counts()) lines += std::to_string(number) + " " + name + "\n";
  if (buffer && size) snprintf(buffer, size, "%s", lines.c_str());
  return lines.size() + 1;
}

API cudaGetLastError() {
  cudaError_t error = last;
  last = cudaSuccess;
  return error;
}
API cudaPeekAtLastError() { return last; }
EXPORT const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorNotSupported: return "operation not supported (by the simulated runtime)";
    default: return "an error of the simulated runtime";
  }
}
EXPORT const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    default: return "cudaErrorUnknown";
  }
}
