// Streams, events and captured graphs. A stream runs what it is given in order: at once where nothing is before it, else on a thread
// of its own; with SIMULATED_CUDA_LAG_MS nothing runs before that time has passed, unless somebody waits for it.
#include <chrono>
#include <condition_variable>
#include <deque>
#include <set>
#include <thread>
#include <vector>

#include "stand_in.h"

namespace stand_in {

using Clock = std::chrono::steady_clock;

struct Work {
  std::function<void()> run;
  Clock::time_point due;
};
struct Stream::Queue {
  std::deque<Work> waiting;
  bool is_running = false, has_thread = false;
};
struct Graph {
  unsigned long long id;
  std::vector<std::function<void()>> nodes;
};

// Never destroyed: threads of streams outlive main().
static std::mutex& lock() { static auto* it = new std::mutex; return *it; }
static std::condition_variable& changed() { static auto* it = new std::condition_variable; return *it; }
static std::set<Stream*>& streams() { static auto* it = new std::set<Stream*>; return *it; }
using Held = std::unique_lock<std::mutex>;

static Clock::duration lag() {
  static const auto it = std::chrono::milliseconds(setting("SIMULATED_CUDA_LAG_MS", 0));
  return it;
}

static Stream* made(int device, int priority) {
  auto* stream = new Stream{device, priority};
  stream->queue = new Stream::Queue;
  Held held(lock());
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
    if (queue.waiting.empty() || queue.is_running) {
      changed().wait(held);
    } else if (stream->wanted <= stream->finished && Clock::now() < queue.waiting.front().due) {
      changed().wait_until(held, queue.waiting.front().due);
    } else {
      Work next = std::move(queue.waiting.front());
      queue.waiting.pop_front();
      run(held, stream, next.run);
    }
  }
}

void submit(Stream* stream, std::function<void()> work, bool may_wait) {
  Held held(lock());
  if (stream->capture) {
    stream->capture->nodes.push_back(std::move(work));
    return;
  }
  Stream::Queue& queue = *stream->queue;
  stream->submitted++;
  if (!may_wait && lag() == Clock::duration::zero() && queue.waiting.empty() && !queue.is_running) return run(held, stream, work);
  queue.waiting.push_back({std::move(work), Clock::now() + lag()});
  if (!queue.has_thread) {
    queue.has_thread = true;
    std::thread(serve, stream).detach();
  }
  changed().notify_all();
}

void wait_for(Stream* stream, long number) {
  Held held(lock());
  if (stream->finished >= number) return;
  stream->wanted = std::max(stream->wanted, number);
  changed().notify_all();
  changed().wait(held, [&] { return stream->finished >= number; });
}

bool is_idle(Stream* stream) {
  Held held(lock());
  return stream->finished == stream->submitted && lag() == Clock::duration::zero();
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
  Stream* stream = nullptr;
  long number = 0;
  std::shared_ptr<double> at = std::make_shared<double>(0);  // ms
  std::shared_ptr<Graph> capture;
};

static bool is_over(const Event& event) {
  Held held(lock());
  return !event.stream || event.stream->finished >= event.number;
}

static void end_capture(const std::shared_ptr<Graph>& graph) {
  Held held(lock());
  for (Stream* stream : streams())
    if (stream->capture == graph) stream->capture = nullptr;
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
  Stream* stream = stream_of(s);
  Held held(lock());
  return stream->finished == stream->submitted ? cudaSuccess : cudaErrorNotReady;
}
API cudaDeviceSynchronize() {
  count("cudaDeviceSynchronize");
  wait_for_device(current_device());
  return cudaSuccess;
}
API cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t function, void* argument) {
  submit(stream_of(s), [=] { function(argument); });
  return cudaSuccess;
}
API cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t function, void* argument, unsigned) {
  submit(stream_of(s), [=] { function(s, cudaSuccess, argument); });
  return cudaSuccess;
}
// For the other stand-ins: work that may have to wait for other processes goes to the stream's own thread.
EXPORT void simulated_cuda_submit(cudaStream_t s, std::function<void()>* work, bool may_wait) {
  submit(stream_of(s), std::move(*work), may_wait);
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
  auto at = event->at = std::make_shared<double>(0);
  {
    Held held(lock());
    event->stream = stream;
    event->number = stream->submitted + 1;
  }
  submit(stream, [at] { *at = std::chrono::duration<double, std::milli>(Clock::now().time_since_epoch()).count(); });
  return cudaSuccess;
}
API cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }
API cudaEventQuery(cudaEvent_t e) { return is_over(*(Event*)e) ? cudaSuccess : cudaErrorNotReady; }
API cudaEventSynchronize(cudaEvent_t e) {
  count("cudaEventSynchronize");
  auto* event = (Event*)e;
  if (event->stream) wait_for(event->stream, event->number);
  return cudaSuccess;
}
API cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  if (!is_over(*(Event*)begin) || !is_over(*(Event*)end)) return cudaErrorNotReady;
  *ms = std::max(0.001, *((Event*)end)->at - *((Event*)begin)->at);
  return cudaSuccess;
}
API cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  Event event = *(Event*)e;
  Stream* stream = stream_of(s);
  if (event.capture) return stream->capture = event.capture, cudaSuccess;
  if (!event.stream || event.stream == stream || is_over(event)) return cudaSuccess;
  submit(stream, [=] { wait_for(event.stream, event.number); }, true);
  return cudaSuccess;
}

// -------------------------------------------------------------------- graphs
API cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* status) {
  *status = stream_of(s)->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
                             const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* n) {
  auto capture = stream_of(s)->capture;
  cudaStreamIsCapturing(s, status);
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = (cudaGraph_t)capture.get();
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (n) *n = 0;
  return cudaSuccess;
}
API cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
  static std::atomic<unsigned long long> next{1};
  stream_of(s)->capture = std::make_shared<Graph>(Graph{next++});
  return cudaSuccess;
}
API cudaStreamBeginCaptureToGraph(cudaStream_t s, cudaGraph_t, const cudaGraphNode_t*, const cudaGraphEdgeData*, size_t,
                                  cudaStreamCaptureMode mode) {
  return cudaStreamBeginCapture(s, mode);
}
API cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* graph) {
  auto captured = stream_of(s)->capture;
  end_capture(captured);
  *graph = (cudaGraph_t) new std::shared_ptr<Graph>(captured);
  return cudaSuccess;
}
API cudaGraphInstantiateWithFlags(cudaGraphExec_t* ready, cudaGraph_t graph, unsigned long long) {
  *ready = (cudaGraphExec_t) new std::shared_ptr<Graph>(*(std::shared_ptr<Graph>*)graph);
  return cudaSuccess;
}
API cudaGraphLaunch(cudaGraphExec_t ready, cudaStream_t s) {
  count("cudaGraphLaunch");
  auto graph = *(std::shared_ptr<Graph>*)ready;
  submit(stream_of(s), [graph] { for (auto& node : graph->nodes) node(); });
  return cudaSuccess;
}
API cudaGraphDestroy(cudaGraph_t graph) { return delete (std::shared_ptr<Graph>*)graph, cudaSuccess; }
API cudaGraphExecDestroy(cudaGraphExec_t ready) { return delete (std::shared_ptr<Graph>*)ready, cudaSuccess; }
API cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* n) {
  return *n = (*(std::shared_ptr<Graph>*)graph)->nodes.size(), cudaSuccess;
}
API cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t, unsigned) { return cudaSuccess; }
API cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
API cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) { return cudaSuccess; }
API cudaUserObjectCreate(cudaUserObject_t* made, void*, cudaHostFn_t, unsigned, unsigned) { return *made = (cudaUserObject_t)1, cudaSuccess; }
API cudaUserObjectRelease(cudaUserObject_t, unsigned) { return cudaSuccess; }
