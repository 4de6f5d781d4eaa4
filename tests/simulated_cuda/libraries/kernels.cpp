// Kernels: launched, counted, and computing nothing. One is run: torch.cuda._sleep keeps its stream busy.
#include <chrono>
#include <cstring>
#include <set>
#include <thread>

#include "stand_in.h"

using namespace stand_in;

static std::set<const void*>& sleepers() { static auto* it = new std::set<const void*>; return *it; }

static cudaError_t launch(const void* kernel, void** arguments, cudaStream_t s) {
  count("kernel");
  static const double host_us = factor("SIMULATED_CUDA_HOST_US", 5);
  spend(host_us);
  if (sleepers().count(kernel)) {
    long ns = *(long*)arguments[0] / 2;  // at 2 GHz
    submit(stream_of(s), {[=] { if (!has_clock()) std::this_thread::sleep_for(std::chrono::nanoseconds(ns)); }, (double)ns}, true);
  } else if (has_clock()) {
    submit(stream_of(s), {nullptr, launch_ns()});
  }
  return cudaSuccess;
}

EXPORT void simulated_cuda_launch(cudaStream_t s) { launch(nullptr, nullptr, s); }  // by the driver

EXPORT void** __cudaRegisterFatBinary(void*) { static void* handle[4]; return handle; }
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  if (strstr(name, "spin_kernel")) sleepers().insert(host);
}
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORT char __cudaInitModule(void**) { return 1; }

static thread_local struct { dim3 grid, block; size_t shared; void* stream; } configuration;
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st* stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
  *(void**)stream = configuration.stream;
  return cudaSuccess;
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) { return *kernel = (cudaKernel_t)host, cudaSuccess; }
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t, cudaStream_t s) {
  return launch((const void*)kernel, arguments, s);
}
API cudaLaunchKernel(const void* kernel, dim3, dim3, void** arguments, size_t, cudaStream_t s) { return launch(kernel, arguments, s); }
API cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) { return launch(kernel, arguments, config->stream); }
API cudaLaunchCooperativeKernel(const void* kernel, dim3, dim3, void** arguments, size_t, cudaStream_t s) { return launch(kernel, arguments, s); }

API cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->binaryVersion = found->ptxVersion = device().major * 10 + device().minor;
  found->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
API cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }
API cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int size, size_t, unsigned) {
  return *blocks = size > 0 ? 2048 / size : 1, cudaSuccess;
}
API cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel, int size, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, kernel, size, shared, 0);
}
API cudaLibraryLoadData(cudaLibrary_t* library, const void*, cudaJitOption*, void**, unsigned, cudaLibraryOption*, void**, unsigned) {
  return *library = (cudaLibrary_t)1, cudaSuccess;
}
API cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t, const char*) { return *kernel = (cudaKernel_t)1, cudaSuccess; }
API cudaLibraryUnload(cudaLibrary_t) { return cudaSuccess; }
API cudaProfilerStart() { return cudaSuccess; }
API cudaProfilerStop() { return cudaSuccess; }
