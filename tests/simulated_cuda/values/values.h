// Values without a card: what a kernel would have computed is computed by the CPU's kernel on the same memory.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <map>
#include <string>

namespace values {

using c10::Stack;

// For operations that the CPU has not, or has otherwise. In: the arguments, with aliases on the CPU; out: the results.
// `seed` is drawn from the device's generator, anew for each operation.
using Special = void (*)(const c10::OperatorHandle& op, Stack& stack, uint64_t seed);

struct Rule {
  Special special = nullptr;  // instead of the CPU's kernel
  // CUDA's own code is not run: the shapes of its results depend on values, or it needs a library that has no stand-in. Its
  // results are allocated, its temporary memory is not.
  bool is_replaced = false;
  bool waits = false;  // CUDA's waits for the device, too
  bool (*has_own)(const Stack& given) = nullptr;  // of what is replaced: for these arguments torch's own code, which runs
};

void add_rules(std::map<std::string, Rule>& rules);            // special.cpp
void add_attention(std::map<std::string, Rule>& rules);        // attention.cpp
at::Tensor kept(at::IntArrayRef shape, double p, uint64_t seed);  // by a dropout: true or false

}  // namespace values
