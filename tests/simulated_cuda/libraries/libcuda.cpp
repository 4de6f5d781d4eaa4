// libcuda.so.1, as far as torch asks it directly: contexts, and kernels that it compiles. Everything else is in driver.cpp, or not supported.
#include <cuda.h>

#define EXPORT extern "C" __attribute__((visibility("default")))
extern "C" bool simulated_cuda_has_context(int device);
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
// Kernels that were compiled while the program ran.
EXPORT CUresult cuModuleLoadData(CUmodule* module, const void*) { return *module = (CUmodule)1, CUDA_SUCCESS; }
EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char*) { return *function = (CUfunction)1, CUDA_SUCCESS; }
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) { return *blocks = 2, CUDA_SUCCESS; }
