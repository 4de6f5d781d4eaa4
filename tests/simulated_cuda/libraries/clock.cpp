// The virtual clock. The host has a time, which its calls and waits move; each stream has one, which its work moves. Work ends, and is done,
// in the order of time, when the host's time has come to its end or the host waits for it: what happens does not depend on this machine.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "streams.h"

namespace stand_in {

static double host;                       // ns
static double reached;                    // ns: the end of the work that is being done
static double free_at[64][3];             // ns, by device and engine: copies of one direction take turns
static std::thread::id settler;           // who does the work at the moment
static thread_local int polls;            // since this thread's last call that was none
struct ByNumber { bool operator()(Stream* one, Stream* other) const { return one->number < other->number; } };
using Streams = std::set<Stream*, ByNumber>;
static Streams& busy() { static auto* it = new Streams; return *it; }

double factor(const char* name, double otherwise) {
  const char* value = getenv(name);
  return value && *value ? atof(value) : otherwise;
}

bool has_clock() {
  static const bool it = setting("SIMULATED_CUDA_CLOCK", 0);
  return it;
}

static double kernel_time() {
  static const double it = factor("SIMULATED_CUDA_KERNEL_TIME", 1);
  return it;
}
double launch_ns() { return 2000 * kernel_time(); }
double kernel_ns(double bytes, double flops, bool is_half) {
  const double moving = bytes / device().bandwidth, computing = flops / (1e3 * (is_half ? device().half : device().full));
  return kernel_time() * std::max(moving, computing);
}

double copy_ns(double bytes, bool is_pinned) {
  static const double slowness = factor("SIMULATED_CUDA_COPY_TIME", 1);
  return slowness * (2000 + bytes / device().link * (is_pinned ? 1 : 2));  // pageable memory is copied twice
}

void spend(double us) {
  if (!has_clock()) return;
  Held held(lock());
  polls = 0;
  host += 1000 * us;
}

// A thread that does nothing but look gets there in the end: its looks become longer, up to a millisecond.
void poll() {
  if (!has_clock()) return;
  Held held(lock());
  host += 1000 << std::min(polls++ / 16, 10);
}

double reached_at() { return reached; }

static void begin(Stream* stream) {
  Work& next = stream->queue->waiting.front();
  if (next.end >= 0 || (next.after && !next.after->is_reached())) return;
  double& turn = free_at[stream->device][(int)next.engine];
  double at = std::max({stream->queue->at, next.given, next.after ? next.after->at : 0, next.engine == Engine::compute ? 0 : turn});
  next.end = at + next.ns;
  if (next.engine != Engine::compute) turn = next.end;
}

static void finish(Held& held, Stream* stream) {
  Stream::Queue& queue = *stream->queue;
  Work work = std::move(queue.waiting.front());
  queue.waiting.pop_front();
  if (queue.waiting.empty()) busy().erase(stream);
  queue.at = reached = work.end;
  if (work.run) {
    held.unlock();
    work.run();
    held.lock();
  }
  stream->finished++;
}

void enqueue(Held& held, Stream* stream, Work work) {
  work.given = host;
  stream->queue->waiting.push_back(std::move(work));
  busy().insert(stream);
  settle(held);
}

void settle(Held& held, Stream* stream, long number) {
  if (settler == std::this_thread::get_id()) return;  // the work itself asks
  changed().wait(held, [] { return settler == std::thread::id(); });
  settler = std::this_thread::get_id();
  for (;;) {
    if (stream && stream->finished >= number) break;
    Stream* next = nullptr;
    for (Stream* each : busy()) {
      begin(each);
      const double end = each->queue->waiting.front().end;
      if (end >= 0 && (!next || end < next->queue->waiting.front().end)) next = each;
    }
    if (!next && stream) fprintf(stderr, "tests/simulated_cuda: a stream waits for what never comes\n"), abort();
    if (!next || (!stream && next->queue->waiting.front().end > host)) break;
    finish(held, next);
  }
  if (stream) host = std::max(host, stream->queue->at);
  settler = {};
  changed().notify_all();
}

}  // namespace stand_in

EXPORT bool simulated_cuda_has_clock() { return stand_in::has_clock(); }
EXPORT double simulated_cuda_kernel_ns(double bytes, double flops, bool is_half) { return stand_in::kernel_ns(bytes, flops, is_half); }
EXPORT double simulated_cuda_host_ns() {
  stand_in::Held held(stand_in::lock());
  return stand_in::host;
}
