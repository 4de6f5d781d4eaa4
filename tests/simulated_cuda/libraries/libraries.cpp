// What cuBLAS, cuDNN, cuSPARSE, cuSOLVER and NVRTC must answer with more than "success"; their other functions are made by build.py and do
// nothing. Handles are opaque, so the vendor's headers are not needed.
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

static int make(void** handle) { return *handle = calloc(1, 512), 0; }

EXPORT int cublasCreate_v2(void** handle) { return make(handle); }
EXPORT int cublasDestroy_v2(void* handle) { return free(handle), 0; }
EXPORT int cublasGetVersion_v2(void*, int* version) { return *version = 130101, 0; }
EXPORT int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0, 0; }
EXPORT int cublasGetMathMode(void*, int* mode) { return *mode = 0, 0; }

struct Heuristic {
  uint64_t algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};
EXPORT int cublasLtCreate(void** handle) { return make(handle); }
EXPORT int cublasLtMatmulDescCreate(void** made, int, int) { return make(made); }
EXPORT int cublasLtMatmulDescDestroy(void* made) { return free(made), 0; }
EXPORT int cublasLtMatrixLayoutCreate(void** made, int, uint64_t, uint64_t, int64_t) { return make(made); }
EXPORT int cublasLtMatrixLayoutDestroy(void* made) { return free(made), 0; }
EXPORT int cublasLtMatmulPreferenceCreate(void** made) { return make(made); }
EXPORT int cublasLtMatmulPreferenceDestroy(void* made) { return free(made), 0; }
EXPORT int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, Heuristic* found, int* n) {
  memset(found, 0, sizeof *found);
  return *n = 1, 0;
}

EXPORT size_t cudnnGetVersion() { return 92400; }
EXPORT size_t cudnnGetCudartVersion() { return 13000; }
EXPORT int cudnnCreate(void** handle) { return make(handle); }
EXPORT const char* cudnnGetErrorString(int) { return "the simulated cuDNN has no engine for this"; }

EXPORT int cusparseCreate(void** handle) { return make(handle); }
EXPORT int cusolverDnCreate(void** handle) { return make(handle); }
EXPORT int cuptiGetVersion(uint32_t* version) { return *version = 26, 0; }

// Kernels that torch writes while it runs (its "jiterator"): compiled to nothing.
EXPORT int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, 0; }
EXPORT int nvrtcCreateProgram(void** program, const char*, const char*, int, void*, void*) { return make(program); }
EXPORT int nvrtcDestroyProgram(void** program) { return free(*program), 0; }
EXPORT int nvrtcGetPTXSize(void*, size_t* size) { return *size = 1, 0; }
EXPORT int nvrtcGetPTX(void*, char* text) { return *text = 0, 0; }
EXPORT int nvrtcGetCUBINSize(void*, size_t* size) { return *size = 1, 0; }
EXPORT int nvrtcGetCUBIN(void*, char* text) { return *text = 0, 0; }
EXPORT int nvrtcGetProgramLogSize(void*, size_t* size) { return *size = 1, 0; }
EXPORT int nvrtcGetProgramLog(void*, char* text) { return *text = 0, 0; }
EXPORT int nvrtcGetLoweredName(void*, const char*, const char** name) { return *name = "kernel", 0; }
EXPORT const char* nvrtcGetErrorString(int) { return "an error of the simulated NVRTC"; }
