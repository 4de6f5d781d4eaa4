// The kinds of devices. Memory and capability are those of headway.forecasting.devices (a test compares them).
#pragma once

namespace stand_in {

struct Device {
  const char* key;      // as headway.forecast names it
  const char* product;  // as the driver does
  long mib;
  int major, minor, multiprocessors;
};

static const Device KINDS[] = {
    {"h100", "NVIDIA H100 80GB HBM3", 81559, 9, 0, 132},
    {"h200", "NVIDIA H200", 143771, 9, 0, 132},
    {"a100-80gb", "NVIDIA A100-SXM4-80GB", 81920, 8, 0, 108},
    {"a100-40gb", "NVIDIA A100-SXM4-40GB", 40960, 8, 0, 108},
    {"l40s", "NVIDIA L40S", 46068, 8, 9, 142},
    {"l4", "NVIDIA L4", 23034, 8, 9, 58},
    {"a10g", "NVIDIA A10G", 23028, 8, 6, 80},
    {"rtx-4090", "NVIDIA GeForce RTX 4090", 24564, 8, 9, 128},
    {"rtx-3090", "NVIDIA GeForce RTX 3090", 24576, 8, 6, 82},
    {"t4", "Tesla T4", 15360, 7, 5, 40},
    {"v100-32gb", "Tesla V100-SXM2-32GB", 32768, 7, 0, 80},
    {"v100-16gb", "Tesla V100-SXM2-16GB", 16384, 7, 0, 80},
    {"b200", "NVIDIA B200", 183359, 10, 0, 148},
    {"b100", "NVIDIA B100", 183359, 10, 0, 132},
};

}  // namespace stand_in
