// Streams and events. A stream runs what it is given in order: immediately where nothing is queued before it, otherwise on a thread of its own.
// With SIMULATED_CUDA_CLOCK the virtual clock says when (clock.cpp).
#include <chrono>
#include <thread>

#include "streams.h"

namespace stand_in {

// Never destroyed: threads of streams outlive main().
std::mutex& lock() { static auto* it = new std::mutex; return *it; }
std::condition_variable& changed() { static auto* it = new std::condition_variable; return *it; }
std::set<Stream*>& streams() { static auto* it = new std::set<Stream*>; return *it; }

static Stream* made(int device, int priority) {
  auto* stream = new Stream{device, priority};
  stream->queue = new Stream::Queue;
  Held held(lock());
  stream->number = streams().size();
  streams().insert(stream);
  return stream;
}

Stream* stream_of(cudaStream_t handle) {
  static auto* defaults = new std::map<int, Stream*>;
  if (handle && handle != cudaStreamLegacy && handle != cudaStreamPerThread) return (Stream*)handle;
  static auto* making = new std::mutex;
  std::lock_guard<std::mutex> one(*making);
  Stream*& found = (*defaults)[current_device()];
  if (!found) found = made(current_device(), 0);
  return found;
}

static void run(Held& held, Stream* stream, const std::function<void()>& work) {
  stream->queue->is_running = true;
  held.unlock();
  work();
  held.lock();
  stream->queue->is_running = false;
  stream->finished++;
  changed().notify_all();
}

static void serve(Stream* stream) {
  current_device() = stream->device;
  Stream::Queue& queue = *stream->queue;
  Held held(lock());
  for (;;) {
    changed().wait(held, [&] { return !queue.waiting.empty() && !queue.is_running; });
    Work next = std::move(queue.waiting.front());
    queue.waiting.pop_front();
    run(held, stream, next.run);
  }
}

void submit(Stream* stream, Work work, bool may_wait) {
  Held held(lock());
  if (stream->capture) {
    stream->capture->nodes.push_back(std::move(work));
    return;
  }
  Stream::Queue& queue = *stream->queue;
  stream->submitted++;
  if (has_clock()) return enqueue(held, stream, std::move(work));
  if (!may_wait && queue.waiting.empty() && !queue.is_running) return run(held, stream, work.run);
  queue.waiting.push_back(std::move(work));
  if (!queue.has_thread) {
    queue.has_thread = true;
    std::thread(serve, stream).detach();
  }
  changed().notify_all();
}

void wait_for(Stream* stream, long number) {
  Held held(lock());
  if (has_clock()) return settle(held, stream, number);
  changed().wait(held, [&] { return stream->finished >= number; });
}

bool is_idle(Stream* stream) {
  Held held(lock());
  if (has_clock()) settle(held);
  return stream->finished == stream->submitted;
}

void wait_for_device(int device) {
  std::vector<std::pair<Stream*, long>> open;
  {
    Held held(lock());
    for (Stream* stream : streams())
      if (stream->device == device) open.emplace_back(stream, stream->submitted);
  }
  for (auto [stream, number] : open) wait_for(stream, number);
}

struct Event {
  std::shared_ptr<Mark> mark;
  std::shared_ptr<Graph> capture;
  bool is_over() const {
    Held held(lock());
    if (has_clock()) settle(held);
    return !mark || mark->is_reached();
  }
};

static double now() {  // ns
  return has_clock() ? reached_at() : std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace stand_in

using namespace stand_in;

// -------------------------------------------------------------------- streams
API cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int priority) {
  *s = (cudaStream_t)made(current_device(), priority);
  return cudaSuccess;
}
API cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
API cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaStreamGetPriority(cudaStream_t s, int* priority) { return *priority = stream_of(s)->priority, cudaSuccess; }
API cudaStreamSynchronize(cudaStream_t s) {
  count("cudaStreamSynchronize");
  Stream* stream = stream_of(s);
  wait_for(stream, stream->submitted);
  return cudaSuccess;
}
API cudaStreamQuery(cudaStream_t s) {
  poll();
  return is_idle(stream_of(s)) ? cudaSuccess : cudaErrorNotReady;
}
API cudaDeviceSynchronize() {
  count("cudaDeviceSynchronize");
  wait_for_device(current_device());
  return cudaSuccess;
}
API cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t function, void* argument) {
  submit(stream_of(s), {[=] { function(argument); }});
  return cudaSuccess;
}
API cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t function, void* argument, unsigned) {
  submit(stream_of(s), {[=] { function(s, cudaSuccess, argument); }});
  return cudaSuccess;
}
// For the other stand-ins: work that may have to wait for other processes goes to the stream's own thread.
EXPORT void simulated_cuda_submit(cudaStream_t s, std::function<void()>* work, bool may_wait, double ns) {
  submit(stream_of(s), {std::move(*work), ns}, may_wait);
}
// Not counted: what a kernel of CUDA would not have waited for.
EXPORT void simulated_cuda_wait(cudaStream_t s) {
  Stream* stream = stream_of(s);
  wait_for(stream, stream->submitted);
}
EXPORT bool simulated_cuda_is_idle(cudaStream_t s) { return is_idle(stream_of(s)); }

// -------------------------------------------------------------------- events
API cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return *e = (cudaEvent_t) new Event, cudaSuccess; }
API cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
API cudaEventDestroy(cudaEvent_t e) { return delete (Event*)e, cudaSuccess; }
API cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  auto* event = (Event*)e;
  Stream* stream = stream_of(s);
  event->capture = stream->capture;
  if (event->capture) return cudaSuccess;
  spend(1);
  auto mark = std::make_shared<Mark>(Mark{stream});
  {
    Held held(lock());
    mark->number = stream->submitted + 1;
  }
  event->mark = mark;
  submit(stream, {[mark] { mark->at = now(); }});
  return cudaSuccess;
}
API cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }
API cudaEventQuery(cudaEvent_t e) {
  poll();
  return ((Event*)e)->is_over() ? cudaSuccess : cudaErrorNotReady;
}
API cudaEventSynchronize(cudaEvent_t e) {
  count("cudaEventSynchronize");
  if (auto mark = ((Event*)e)->mark) wait_for(mark->stream, mark->number);
  return cudaSuccess;
}
API cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  auto *from = (Event*)begin, *to = (Event*)end;
  if (!from->mark || !to->mark) return fail(cudaErrorInvalidResourceHandle);
  if (!from->is_over() || !to->is_over()) return cudaErrorNotReady;
  *ms = std::max(0.001, (to->mark->at - from->mark->at) / 1e6);
  return cudaSuccess;
}
API cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  const Event& event = *(Event*)e;
  Stream* stream = stream_of(s);
  if (event.capture) return stream->capture = event.capture, cudaSuccess;
  spend(1);
  auto mark = event.mark;
  if (!mark || mark->stream == stream || event.is_over()) return cudaSuccess;
  submit(stream, {[mark] { wait_for(mark->stream, mark->number); }, 0, Engine::compute, mark}, true);
  return cudaSuccess;
}
