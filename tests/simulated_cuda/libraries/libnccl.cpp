// libnccl.so.2 between processes of one machine: each communicator is a piece of shared memory through which the bytes really go. A
// collective is work of its stream and waits there for its peers, so a rank that does not come is a hang, as on a card.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <vector>

#include "nccl_shared.h"

#define NCCL extern "C" __attribute__((visibility("default"))) int
extern "C" void simulated_cuda_submit(cudaStream_t stream, std::function<void()>* work, bool may_wait, double ns);
extern "C" bool simulated_cuda_has_clock();
extern "C" void simulated_cuda_count(const char* name);

namespace {

enum { SUCCESS = 0, CUDA_ERROR = 1, SYSTEM_ERROR = 2, INVALID_USAGE = 5, REMOTE_ERROR = 6 };
enum Type { I8, U8, I32, U32, I64, U64, F16, F32, F64, BF16 };
enum Operation { SUM, PROD, MAX, MIN, AVG, FIRST_SCALED };

struct Id { char name[128]; };

size_t width(int type) {
  static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return widths[type];
}

struct BFloat {
  uint16_t bits;
  operator float() const { uint32_t wide = (uint32_t)bits << 16; float value; memcpy(&value, &wide, 4); return value; }
  static BFloat of(float value) {
    uint32_t wide;
    memcpy(&wide, &value, 4);
    if (std::isnan(value)) return {(uint16_t)0x7FC0};
    return {(uint16_t)((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16)};
  }
};
template <class T, class V> T rounded(V value) { return (T)value; }
template <> BFloat rounded<BFloat, float>(float value) { return BFloat::of(value); }

// V: what T is computed in; each sum is rounded to T, as NCCL's are.
template <class T, class V>
void reduce(void* into, const void* from, size_t count, int operation) {
  T* a = (T*)into;
  const T* b = (const T*)from;
  for (size_t i = 0; i < count; i++) {
    V x = (V)a[i], y = (V)b[i];
    a[i] = rounded<T, V>(operation == PROD ? x * y : operation == MAX ? std::max(x, y) : operation == MIN ? std::min(x, y) : x + y);
  }
}
template <class T, class V>
void scale(void* into, size_t count, double by) {
  for (size_t i = 0; i < count; i++) ((T*)into)[i] = rounded<T, V>((V)((V)((T*)into)[i] * (V)by));
}
#define EACH_TYPE(F, ...)                                                                                                         \
  switch (type) {                                                                                                                  \
    case I8: return F<int8_t, int8_t>(__VA_ARGS__); case U8: return F<uint8_t, uint8_t>(__VA_ARGS__);                                \
    case I32: return F<int32_t, int32_t>(__VA_ARGS__); case U32: return F<uint32_t, uint32_t>(__VA_ARGS__);                          \
    case I64: return F<int64_t, int64_t>(__VA_ARGS__); case U64: return F<uint64_t, uint64_t>(__VA_ARGS__);                          \
    case F16: return F<_Float16, float>(__VA_ARGS__); case F32: return F<float, float>(__VA_ARGS__);                                \
    case F64: return F<double, double>(__VA_ARGS__); case BF16: return F<BFloat, float>(__VA_ARGS__);                                \
  }
void add(void* into, const void* from, size_t count, int type, int operation) { EACH_TYPE(reduce, into, from, count, operation) }
void multiply(void* into, size_t count, int type, double by) { EACH_TYPE(scale, into, count, by) }

std::mutex& lock() { static auto* it = new std::mutex; return *it; }
std::map<int, double>& scaled() { static auto* it = new std::map<int, double>; return *it; }

// -------------------------------------------------------------------- collectives
struct Call {
  const char* name;
  const void* send;
  void* receive;
  size_t count;
  int type, operation = SUM, root = 0;
};

// Own parts into the own slot, all ranks; then parts of all slots out of them, all ranks. A piece at a time.
template <class In, class Out>
void exchange(Shared& shared, size_t count, size_t unit, size_t parts, const In& in, const Out& out) {
  const size_t step = std::max<size_t>(1, Shared::SLOT / (unit * parts));
  for (size_t at = 0; at < count; at += step) {
    const size_t n = std::min(step, count - at);
    in(at, n);
    shared.meet();
    out(at, n);
    shared.meet();
  }
}

void run(Shared& shared, const Call& call) {
  const size_t unit = width(call.type);
  const int ranks = shared.size, me = shared.rank;
  const std::string name = call.name;
  shared.agree(std::hash<std::string>()(name) ^ (call.count * 31 + call.type * 7 + call.operation));
  int operation = call.operation;
  double factor = 1;
  if (operation == AVG) factor = 1.0 / ranks;
  if (operation >= FIRST_SCALED) {
    std::lock_guard<std::mutex> held(lock());
    factor = scaled().at(operation);
  }
  const char* from = (const char*)call.send;
  char* to = (char*)call.receive;
  auto own = [&](size_t at, size_t n) {
    memcpy(shared.slot(me), from + at * unit, n * unit);
    if (factor != 1) multiply(shared.slot(me), n, call.type, factor);
  };
  auto gathered = [&](char* into, size_t at, size_t n) {
    for (int i = 0; i < ranks; i++) memcpy(into + (i * call.count + at) * unit, shared.slot(i), n * unit);
  };
  auto reduced = [&](char* into, size_t offset, size_t n) {
    std::vector<char> sum(shared.slot(0) + offset, shared.slot(0) + offset + n * unit);
    for (int i = 1; i < ranks; i++) add(sum.data(), shared.slot(i) + offset, n, call.type, operation);
    memcpy(into, sum.data(), n * unit);
  };
  auto split = [&](size_t at, size_t n) {  // a part for each rank
    for (int i = 0; i < ranks; i++) {
      memcpy(shared.slot(me) + i * n * unit, from + (i * call.count + at) * unit, n * unit);
      if (factor != 1) multiply(shared.slot(me) + i * n * unit, n, call.type, factor);
    }
  };
  if (name == "AllReduce") {
    exchange(shared, call.count, unit, 1, own, [&](size_t at, size_t n) { reduced(to + at * unit, 0, n); });
  } else if (name == "Reduce") {
    exchange(shared, call.count, unit, 1, own, [&](size_t at, size_t n) { if (me == call.root) reduced(to + at * unit, 0, n); });
  } else if (name == "Broadcast") {
    exchange(shared, call.count, unit, 1, [&](size_t at, size_t n) { if (me == call.root) own(at, n); },
             [&](size_t at, size_t n) { memcpy(to + at * unit, shared.slot(call.root), n * unit); });
  } else if (name == "AllGather") {
    exchange(shared, call.count, unit, 1, own, [&](size_t at, size_t n) { gathered(to, at, n); });
  } else if (name == "Gather") {
    exchange(shared, call.count, unit, 1, own, [&](size_t at, size_t n) { if (me == call.root) gathered(to, at, n); });
  } else if (name == "ReduceScatter") {
    exchange(shared, call.count, unit, ranks, split, [&](size_t at, size_t n) { reduced(to + at * unit, me * n * unit, n); });
  } else if (name == "AllToAll") {
    exchange(shared, call.count, unit, ranks, split, [&](size_t at, size_t n) {
      for (int i = 0; i < ranks; i++) memcpy(to + (i * call.count + at) * unit, shared.slot(i) + me * n * unit, n * unit);
    });
  }
}

// -------------------------------------------------------------------- faults
// SIMULATED_CUDA_NCCL_FAULT=KIND:RANK:N: the N-th call of the process with that RANK fails when it is made ("error", or
// "memory" where NCCL itself finds none), while it runs ("async"), never ends ("hang"), or does not
// even return ("stuck").
std::string last_error = "of the simulated NCCL";

std::string fault_of_this_call() {
  static std::atomic<long> calls{0};
  static const std::string told = getenv("SIMULATED_CUDA_NCCL_FAULT") ?: "", own = getenv("RANK") ?: "0";
  const size_t first = told.find(':'), second = told.find(':', first + 1);
  if (second == std::string::npos) return "";
  if (told.substr(first + 1, second - first - 1) != own || ++calls != atol(told.c_str() + second + 1)) return "";
  fprintf(stderr, "tests/simulated_cuda: call %ld to NCCL of rank %s has the fault \"%s\"\n", calls.load(), own.c_str(), told.substr(0, first).c_str());
  return told.substr(0, first);
}

// -------------------------------------------------------------------- groups of calls
struct Pending {
  Shared* shared;
  cudaStream_t stream;
  Call call;
  Transfer transfer;
  bool is_transfer;
  std::string fault;
};
thread_local int open_groups = 0;
thread_local std::vector<Pending> pending;

void launch(std::vector<Pending> calls) {
  Shared* shared = calls[0].shared;
  std::function<void()> work = [shared, calls] {
    std::vector<Transfer> transfers;
    for (const Pending& each : calls) {
      if (each.fault == "async") shared->is_broken = true;
      if (!each.fault.empty() && !shared->guarded([&] { shared->stop(); })) return;
      if (each.is_transfer) transfers.push_back(each.transfer);
      else if (!shared->guarded([&] { run(*shared, each.call); })) return;
    }
    if (!transfers.empty()) shared->guarded([&] { shared->transfer(transfers); });
  };
  // Calls of one communicator run in the order in which they were made, on whatever streams: as NCCL's do.
  if (!shared->last) cudaEventCreateWithFlags(&shared->last, cudaEventDisableTiming);
  cudaStreamWaitEvent(calls[0].stream, shared->last, 0);
  simulated_cuda_submit(calls[0].stream, &work, shared->size > 1, 0);
  cudaEventRecord(shared->last, calls[0].stream);
}

int enqueue(Pending one) {
  if (!one.shared) return INVALID_USAGE;
  simulated_cuda_count((std::string("NCCL ") + (one.is_transfer ? (one.transfer.is_send ? "Send" : "Recv") : one.call.name)).c_str());
  one.fault = fault_of_this_call();
  for (; one.fault == "stuck";) sleep(1);
  if (one.fault == "error") return last_error = "a simulated failure of the network", SYSTEM_ERROR;
  if (one.fault == "memory") return last_error = "Cuda failure 2 'out of memory'", CUDA_ERROR;
  if (open_groups) pending.push_back(one);
  else launch({one});
  return SUCCESS;
}
int collective(void* comm, cudaStream_t stream, Call call) { return enqueue({(Shared*)comm, stream, call, {}, false}); }
int transfer(void* comm, cudaStream_t stream, Transfer one) { return enqueue({(Shared*)comm, stream, {}, one, true}); }

int join(void** comm, int ranks, const Id& id, int rank) {
  if (ranks > 1 && simulated_cuda_has_clock()) {
    fprintf(stderr, "tests/simulated_cuda: the virtual clock is for one process; unset SIMULATED_CUDA_CLOCK for several ranks\n");
    return INVALID_USAGE;
  }
  *comm = Shared::open(id.name, ranks, rank);
  return *comm ? SUCCESS : REMOTE_ERROR;
}

}  // namespace

NCCL ncclGroupStart() { return open_groups++, SUCCESS; }
NCCL ncclGroupEnd() {
  if (--open_groups) return SUCCESS;
  std::vector<Pending> calls;
  calls.swap(pending);
  while (!calls.empty()) {  // those of one communicator and stream together
    std::vector<Pending> together, rest;
    for (const Pending& each : calls)
      (each.shared == calls[0].shared && each.stream == calls[0].stream ? together : rest).push_back(each);
    launch(together);
    calls = rest;
  }
  return SUCCESS;
}

NCCL ncclGetVersion(int* version) { return *version = 23007, SUCCESS; }
NCCL ncclGetUniqueId(Id* id) {
  std::random_device random;
  memset(id, 0, sizeof *id);
  snprintf(id->name, sizeof id->name, "/simulated-nccl-%08x%08x", random(), random());
  return SUCCESS;
}
NCCL ncclCommInitRank(void** comm, int ranks, Id id, int rank) { return join(comm, ranks, id, rank); }
NCCL ncclCommInitRankConfig(void** comm, int ranks, Id id, int rank, void*) { return join(comm, ranks, id, rank); }
NCCL ncclCommInitRankScalable(void** comm, int ranks, int rank, int, Id* ids, void*) { return join(comm, ranks, ids[0], rank); }
NCCL ncclCommSplit(void* parent, int color, int key, void** comm, void*) {
  auto& shared = *(Shared*)parent;
  *comm = nullptr;
  auto told = shared.tell(color, key);  // by rank
  if (color < 0) return SUCCESS;
  std::vector<std::pair<int, int>> members;
  for (int i = 0; i < shared.size; i++)
    if (told[i].first == color) members.emplace_back(told[i].second, i);
  std::sort(members.begin(), members.end());
  int rank = 0;
  while (members[rank].second != shared.rank) rank++;
  Id id{};
  snprintf(id.name, sizeof id.name, "%.90s-%d-%d", shared.name.c_str(), shared.splits, color);
  return join(comm, members.size(), id, rank);
}
NCCL ncclCommDestroy(void*) { return SUCCESS; }  // work of streams may still use it: its memory ends with the process
NCCL ncclCommFinalize(void*) { return SUCCESS; }
NCCL ncclCommAbort(void* comm) {
  if (comm) ((Shared*)comm)->abort();
  return SUCCESS;
}
NCCL ncclCommRevoke(void* comm, int) { return ncclCommAbort(comm); }
NCCL ncclCommCount(void* comm, int* n) { return *n = ((Shared*)comm)->size, SUCCESS; }
NCCL ncclCommUserRank(void* comm, int* rank) { return *rank = ((Shared*)comm)->rank, SUCCESS; }
NCCL ncclCommGetAsyncError(void* comm, int* error) { return *error = ((Shared*)comm)->is_broken ? REMOTE_ERROR : SUCCESS, SUCCESS; }
extern "C" __attribute__((visibility("default"))) const char* ncclGetErrorString(int error) {
  switch (error) {
    case SUCCESS: return "no error";
    case CUDA_ERROR: return "unhandled cuda error";
    case SYSTEM_ERROR: return "unhandled system error";
    case INVALID_USAGE: return "invalid usage";
    default: return "remote process exited or there was a network error";
  }
}
extern "C" __attribute__((visibility("default"))) const char* ncclGetLastError(void*) { return last_error.c_str(); }

NCCL ncclAllReduce(const void* s, void* r, size_t n, int type, int operation, void* comm, cudaStream_t stream) {
  return collective(comm, stream, {"AllReduce", s, r, n, type, operation});
}
NCCL ncclReduce(const void* s, void* r, size_t n, int type, int operation, int root, void* comm, cudaStream_t stream) {
  return collective(comm, stream, {"Reduce", s, r, n, type, operation, root});
}
NCCL ncclReduceScatter(const void* s, void* r, size_t n, int type, int operation, void* comm, cudaStream_t stream) {
  return collective(comm, stream, {"ReduceScatter", s, r, n, type, operation});
}
NCCL ncclBroadcast(const void* s, void* r, size_t n, int type, int root, void* comm, cudaStream_t stream) {
  return collective(comm, stream, {"Broadcast", s, r, n, type, SUM, root});
}
NCCL ncclBcast(void* buffer, size_t n, int type, int root, void* comm, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, n, type, root, comm, stream);
}
NCCL ncclAllGather(const void* s, void* r, size_t n, int type, void* comm, cudaStream_t stream) {
  return collective(comm, stream, {"AllGather", s, r, n, type});
}
NCCL ncclGather(const void* s, void* r, size_t n, int type, int root, void* comm, cudaStream_t stream) {
  return collective(comm, stream, {"Gather", s, r, n, type, SUM, root});
}
NCCL ncclAlltoAll(const void* s, void* r, size_t n, int type, void* comm, cudaStream_t stream) {
  return collective(comm, stream, {"AllToAll", s, r, n, type});
}
NCCL ncclSend(const void* buffer, size_t n, int type, int peer, void* comm, cudaStream_t stream) {
  return transfer(comm, stream, {true, peer, (char*)buffer, n * width(type)});
}
NCCL ncclRecv(void* buffer, size_t n, int type, int peer, void* comm, cudaStream_t stream) {
  return transfer(comm, stream, {false, peer, (char*)buffer, n * width(type)});
}

NCCL ncclRedOpCreatePreMulSum(int* operation, void* scalar, int type, int, void*) {
  static int next = FIRST_SCALED;
  std::lock_guard<std::mutex> held(lock());
  double value = type == F64 ? *(double*)scalar : type == F32 ? *(float*)scalar : type == F16 ? (double)*(_Float16*)scalar : (float)*(BFloat*)scalar;
  scaled()[*operation = next++] = value;
  return SUCCESS;
}
NCCL ncclRedOpDestroy(int, void*) { return SUCCESS; }
NCCL ncclMemAlloc(void** pointer, size_t bytes) { return cudaMalloc(pointer, bytes); }
NCCL ncclMemFree(void* pointer) { return cudaFree(pointer); }
NCCL ncclCommRegister(void*, void*, size_t, void** handle) { return *handle = nullptr, SUCCESS; }
NCCL ncclCommWindowRegister(void*, void*, size_t, void** window, int) { return *window = nullptr, INVALID_USAGE; }
NCCL ncclCommMemStats(void*, int, uint64_t*) { return INVALID_USAGE; }
NCCL ncclCommShrink(void*, int*, int, void**, void*, int) { return INVALID_USAGE; }
