// libcuda.so.1, as far as torch asks it directly: contexts, and kernels that it compiles. Everything else is in driver.cpp, or not supported.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))
extern "C" bool simulated_cuda_has_context(int device);
extern "C" void simulated_cuda_launch(cudaStream_t stream);
extern "C" void* simulated_cuda_driver_function(const char* name);

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = simulated_cuda_has_context(device);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { return *context = (CUcontext)1, CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetCurrent(CUcontext* context) { return *context = (CUcontext)1, CUDA_SUCCESS; }
EXPORT CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGet(CUdevice* found, int number) { return *found = number, CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice number) {
  return ((CUresult(*)(int*, CUdevice_attribute, CUdevice))simulated_cuda_driver_function("cuDeviceGetAttribute"))(value, which, number);
}
EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  return ((CUresult(*)(CUresult, const char**))simulated_cuda_driver_function("cuGetErrorString"))(error, text);
}
EXPORT CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
EXPORT CUresult cuDriverGetVersion(int* version) { return *version = 13000, CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetCount(int* count) { return cudaGetDeviceCount(count) == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
EXPORT CUresult cuCtxGetDevice(CUdevice* found) { return cudaGetDevice(found), CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetLimit(size_t* value, CUlimit) { return *value = 1 << 20, CUDA_SUCCESS; }

// Kernels that were compiled while the program ran: NVRTC's, which are empty here and have their values computed as all others, and
// Triton's, which are whole and computed by nobody.
static bool can_load(const void* image) {
  const char* told = getenv("SIMULATED_CUDA_VALUES");
  if ((image && memcmp(image, "\177ELF", 4)) || (told && !strcmp(told, "0"))) return true;
  fprintf(stderr, "tests/simulated_cuda: Triton's kernels compute nothing here, so they only run with SIMULATED_CUDA_VALUES=0\n");
  return false;
}
EXPORT CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  return *module = (CUmodule)1, can_load(image) ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}
EXPORT CUresult cuModuleLoad(CUmodule* module, const char*) {
  return *module = (CUmodule)1, can_load(nullptr) ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}
EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char*) { return *function = (CUfunction)1, CUDA_SUCCESS; }
EXPORT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction) {
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream stream, void**, void**) {
  return simulated_cuda_launch(stream), CUDA_SUCCESS;
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction, void**, void**) { return simulated_cuda_launch(config->hStream), CUDA_SUCCESS; }
EXPORT CUresult cuPointerGetAttribute(void* value, CUpointer_attribute which, CUdeviceptr pointer) {
  if (which != CU_POINTER_ATTRIBUTE_DEVICE_POINTER) return CUDA_ERROR_NOT_SUPPORTED;
  return *(CUdeviceptr*)value = pointer, CUDA_SUCCESS;
}
EXPORT CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) { return *clusters = 1, CUDA_SUCCESS; }
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) { return *blocks = 2, CUDA_SUCCESS; }
EXPORT CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
EXPORT CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
EXPORT CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
