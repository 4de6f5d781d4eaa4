// libcuda.so.1, as far as torch asks it directly: contexts. Everything else is in driver.cpp, or not supported.
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
