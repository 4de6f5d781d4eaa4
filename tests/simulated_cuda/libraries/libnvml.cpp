// libnvidia-ml.so.1: how many devices there are and what lies on them, of this process alone.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kinds.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

static long setting(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value && *value ? atol(value) : otherwise;
}
static long mib() {
  const char* name = getenv("SIMULATED_CUDA");
  long found = 0;
  for (const auto& kind : stand_in::KINDS)
    if (!strcmp(kind.key, name && *name ? name : "h100")) found = kind.mib;
  return setting("SIMULATED_CUDA_MIB", found);
}
enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6 };
static long number(void* handle) { return (long)handle - 1; }

EXPORT int nvmlInit_v2() { return SUCCESS; }
EXPORT int nvmlInit() { return SUCCESS; }
EXPORT int nvmlInitWithFlags(unsigned) { return SUCCESS; }
EXPORT int nvmlShutdown() { return SUCCESS; }
EXPORT const char* nvmlErrorString(int) { return "an error of the simulated NVML"; }
EXPORT int nvmlDeviceGetCount_v2(unsigned* n) { return *n = setting("SIMULATED_CUDA_DEVICES", 1), SUCCESS; }
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
  if (index >= (unsigned)setting("SIMULATED_CUDA_DEVICES", 1)) return INVALID;
  return *handle = (void*)(long)(index + 1), SUCCESS;
}
EXPORT int nvmlDeviceGetUUID(void* handle, char* text, unsigned length) {
  snprintf(text, length, "GPU-%02lx000000-0000-0000-0000-000000000000", number(handle) + 1);
  return SUCCESS;
}
EXPORT int nvmlDeviceGetHandleByUUID(const char* wanted, void** handle) {
  char text[96];
  for (long i = 1; i <= setting("SIMULATED_CUDA_DEVICES", 1); i++) {
    nvmlDeviceGetUUID((void*)i, text, sizeof text);
    if (!strcmp(text, wanted)) return *handle = (void*)i, SUCCESS;
  }
  return NOT_FOUND;
}
EXPORT int nvmlDeviceGetMemoryInfo(void* handle, unsigned long long* memory) {
  // The runtime's, where this process has it: the launcher asks before torch is loaded.
  auto ask = (size_t(*)(int))dlsym(RTLD_DEFAULT, "simulated_cuda_used_bytes");
  unsigned long long used = ask ? ask(number(handle)) : 0;
  memory[0] = (unsigned long long)mib() << 20;
  memory[1] = memory[0] - used;
  memory[2] = used;
  return SUCCESS;
}
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** handle) {
  long domain, found;
  if (sscanf(bus, "%lx:%lx:", &domain, &found) != 2 || found < 1 || found > setting("SIMULATED_CUDA_DEVICES", 1)) return NOT_FOUND;
  return *handle = (void*)found, SUCCESS;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* n, void*) { return *n = 0, SUCCESS; }
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* n, void*) { return *n = 0, SUCCESS; }
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetP2PStatus(void*, void*, int, int*) { return NOT_SUPPORTED; }
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int* version) { return *version = 13000, SUCCESS; }
EXPORT int nvmlDeviceGetMigMode(void*, unsigned*, unsigned*) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetName(void*, char* text, unsigned length) { return snprintf(text, length, "a simulated GPU"), SUCCESS; }
EXPORT int nvmlSystemGetDriverVersion(char* text, unsigned length) { return snprintf(text, length, "580.00"), SUCCESS; }
