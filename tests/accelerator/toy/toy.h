// What the parts of the toy accelerator share.

#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <optional>

namespace toy {

constexpr auto kToy = c10::DeviceType::PrivateUse1;
constexpr int kMost = 8;  // devices at most

// What makes a host wait for a real device.
enum Wait { kSynchronize, kScalar, kToHost, kFromHost, kShape, kKinds };
constexpr std::array<const char*, kKinds> kNames{
    "synchronize", "a number is read", "a copy to the host", "a copy from the host", "a shape that depends on values"};

c10::DeviceIndex num_devices();
bool is_pinned(const void* start);
void waits_for(Wait kind);
at::Generator inner_generator(const std::optional<at::Generator>& given, c10::Device device);

}  // namespace toy
