// What the stand-in libraries share: streams that run what is given to them, memory, counters, and what each device has.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "kinds.h"

#define EXPORT extern "C" __attribute__((visibility("default")))
#define API EXPORT cudaError_t

namespace stand_in {

long setting(const char* name, long otherwise);  // of the environment
double factor(const char* name, double otherwise);

// devices.cpp
const Device& device();    // all devices of a machine are of one kind: SIMULATED_CUDA
int num_devices();         // that this process sees: SIMULATED_CUDA_DEVICES, less by CUDA_VISIBLE_DEVICES
int physical(int visible);  // the number of a device that this process sees
size_t capacity();         // bytes: the table's, or SIMULATED_CUDA_MIB
size_t context_bytes();    // what the driver takes for a process on a device: SIMULATED_CUDA_CONTEXT_MIB
int& current_device();     // of this thread

// counters.cpp
void count(const std::string& name, long by = 1);
cudaError_t fail(cudaError_t error);  // remembers it as the thread's last error

// clock.cpp: what things cost by the virtual clock (SIMULATED_CUDA_CLOCK); without it all of these do nothing
enum class Engine { compute, to_device, to_host };  // copies of one direction take turns
bool has_clock();
void spend(double us);  // the host's own time
void poll();            // a look at an event or a stream
double launch_ns();     // of any kernel
double kernel_ns(double bytes, double flops = 0, bool is_half = false);
double copy_ns(double bytes, bool is_pinned);

// streams.cpp
struct Graph;
struct Mark;
struct Work {
  std::function<void()> run;  // may be none
  double ns = 0;              // that it takes by the virtual clock
  Engine engine = Engine::compute;
  std::shared_ptr<Mark> after;    // begins when this is reached
  double given = 0, end = -1;     // by the virtual clock
};
struct Stream {
  int device = 0, priority = 0, number = 0;
  long submitted = 0, finished = 0;  // numbers of its work
  struct Queue;
  Queue* queue = nullptr;
  std::shared_ptr<Graph> capture;  // records what is submitted, instead of running it
};
Stream* stream_of(cudaStream_t handle);
// Runs `work` after what the stream was given before: at once where nothing waits, else on the stream's own thread.
void submit(Stream* stream, Work work, bool may_wait = false);
void wait_for(Stream* stream, long number);
bool is_idle(Stream* stream);
void wait_for_device(int device);

// memory.cpp
enum class Place { pageable, pinned, device };
Place place_of(const void* pointer);
bool has_context(int device);
size_t used_bytes(int device);
void open_context(int device);
bool charge(int device, size_t bytes);  // false: the device is full
void discharge(int device, size_t bytes);
void register_device_range(void* begin, size_t bytes, int device);
void forget_range(void* begin);
bool range_of(const void* pointer, char** begin, size_t* bytes);
void* reserve_address_space(size_t bytes);

void* driver_function(const char* name);  // driver.cpp

}  // namespace stand_in
