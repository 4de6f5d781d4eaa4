// The kinds of devices. Memory, capability and rates are those of headway.forecasting.device.devices (a test compares them).
#pragma once

namespace stand_in {

struct Device {
  const char* key;      // as headway.forecast names it
  const char* product;  // as the driver does
  long mib;
  int major, minor, multiprocessors;
  double full, half;  // TFLOP/s, of products of matrices in float32 and in half precision
  double bandwidth;   // GB/s of its memory
  double link;        // GB/s between pinned memory and the device, each way
};

static const Device KINDS[] = {
    {"h100", "NVIDIA H100 80GB HBM3", 81079, 9, 0, 132, 67, 989.5, 3350, 55},
    {"h200", "NVIDIA H200", 143771, 9, 0, 132, 67, 989.5, 4800, 55},
    {"a100-80gb", "NVIDIA A100-SXM4-80GB", 81920, 8, 0, 108, 19.5, 312, 2039, 25},
    {"a100-40gb", "NVIDIA A100-SXM4-40GB", 40960, 8, 0, 108, 19.5, 312, 1555, 25},
    {"l40s", "NVIDIA L40S", 46068, 8, 9, 142, 91.6, 362.1, 864, 25},
    {"l4", "NVIDIA L4", 23034, 8, 9, 58, 30.3, 121, 300, 25},
    {"a10g", "NVIDIA A10G", 23028, 8, 6, 80, 31.2, 70, 600, 25},
    {"rtx-4090", "NVIDIA GeForce RTX 4090", 24564, 8, 9, 128, 82.6, 165.2, 1008, 25},
    {"rtx-5090", "NVIDIA GeForce RTX 5090", 32607, 12, 0, 170, 104.8, 209.5, 1792, 55},
    {"a6000", "NVIDIA RTX A6000", 49140, 8, 6, 84, 38.7, 154.8, 768, 25},
    {"a40", "NVIDIA A40", 46068, 8, 6, 84, 37.4, 149.7, 696, 25},
    {"l40", "NVIDIA L40", 46068, 8, 9, 142, 90.5, 181, 864, 25},
    {"rtx-3090", "NVIDIA GeForce RTX 3090", 24576, 8, 6, 82, 35.6, 71, 936, 25},
    {"t4", "Tesla T4", 15360, 7, 5, 40, 8.1, 65, 320, 12},
    {"v100-32gb", "Tesla V100-SXM2-32GB", 32768, 7, 0, 80, 15.7, 125, 900, 12},
    {"v100-16gb", "Tesla V100-SXM2-16GB", 16384, 7, 0, 80, 15.7, 125, 900, 12},
    {"b200", "NVIDIA B200", 183359, 10, 0, 148, 75, 2250, 8000, 55},
    {"b100", "NVIDIA B100", 183359, 10, 0, 132, 60, 1750, 8000, 55},
};

}  // namespace stand_in
