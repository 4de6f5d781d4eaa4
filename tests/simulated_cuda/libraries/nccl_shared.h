// The memory that the ranks of a communicator share.
#pragma once
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <string>
#include <utility>
#include <vector>

struct Transfer {
  bool is_send;
  int peer;
  char* buffer;
  size_t bytes, done = 0;
};

struct Aborted {};

struct Meeting {  // of all ranks; its waiters sleep in the kernel
  std::atomic<uint32_t> arrived, round;
};

struct Mailbox {  // from one rank to another
  static constexpr size_t SIZE = 1 << 16;
  std::atomic<uint64_t> written, read;
  char data[SIZE];
};

struct Shared {
  static constexpr size_t SLOT = 1 << 20;
  static constexpr int MOST = 64;

  struct Head {
    std::atomic<uint32_t> joined;
    Meeting work, host;
    uint64_t calls[MOST];
    int colors[MOST], keys[MOST];
  };

  std::string name;
  int size = 1, rank = 0, splits = 0;
  char* memory = nullptr;
  cudaEvent_t last = nullptr;  // reached when its latest call is done
  std::atomic<bool> is_aborted{false}, is_broken{false};

  static size_t bytes(int size) { return sizeof(Head) + 4096 + size * SLOT + size * size * sizeof(Mailbox); }
  Head& head() { return *(Head*)memory; }
  char* slot(int of) { return memory + ((sizeof(Head) + 4095) & ~(size_t)4095) + of * SLOT; }
  Mailbox& mailbox(int from, int to) { return ((Mailbox*)slot(size))[from * size + to]; }

  static Shared* open(const char* name, int size, int rank) {
    if (size > MOST) return nullptr;
    int file = shm_open(name, O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, bytes(size))) return nullptr;
    auto* shared = new Shared;
    shared->name = name, shared->size = size, shared->rank = rank;
    shared->memory = (char*)mmap(nullptr, bytes(size), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (shared->memory == (char*)MAP_FAILED) return nullptr;
    auto& joined = shared->head().joined;
    joined++;
    for (uint32_t seen; (seen = joined.load()) < (uint32_t)size;) usleep(200);
    shared->meet(&Head::host);
    if (rank == 0) shm_unlink(name);  // all have it
    return shared;
  }

  void meet(Meeting Head::* which = &Head::work) {
    Meeting& meeting = head().*which;
    uint32_t round = meeting.round.load();
    if (++meeting.arrived == (uint32_t)size) {
      meeting.arrived = 0;
      meeting.round++;
      syscall(SYS_futex, &meeting.round, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
      return;
    }
    for (timespec at_most{0, 20'000'000}; meeting.round.load() == round;) {
      if (is_aborted) throw Aborted();
      syscall(SYS_futex, &meeting.round, FUTEX_WAIT, round, &at_most, nullptr, 0);
    }
  }

  // Do all ranks make the same call? NCCL would hang, or mix up bytes.
  void agree(uint64_t call) {
    head().calls[rank] = call;
    meet();
    for (int i = 0; i < size; i++)
      if (head().calls[i] != call) {
        if (!is_broken.exchange(true)) fprintf(stderr, "tests/simulated_cuda: rank %d and rank %d make different NCCL calls\n", rank, i);
        throw Aborted();
      }
    meet();
  }

  std::vector<std::pair<int, int>> tell(int color, int key) {
    head().colors[rank] = color, head().keys[rank] = key;
    meet(&Head::host);
    std::vector<std::pair<int, int>> told;
    for (int i = 0; i < size; i++) told.emplace_back(head().colors[i], head().keys[i]);
    meet(&Head::host);
    splits++;
    return told;
  }

  // As much as there is room for, or as has come; those to one peer after one another.
  bool advance(Transfer& one) {
    Mailbox& box = one.is_send ? mailbox(rank, one.peer) : mailbox(one.peer, rank);
    uint64_t held = box.written - box.read;
    size_t n = std::min<size_t>(one.bytes - one.done, one.is_send ? Mailbox::SIZE - held : held);
    for (size_t i = 0; i < n;) {
      size_t at = (one.is_send ? box.written.load() : box.read.load()) % Mailbox::SIZE, piece = std::min(n - i, Mailbox::SIZE - at);
      if (one.is_send) memcpy(box.data + at, one.buffer + one.done, piece), box.written += piece;
      else memcpy(one.buffer + one.done, box.data + at, piece), box.read += piece;
      one.done += piece, i += piece;
    }
    return n > 0;
  }

  void transfer(std::vector<Transfer> all) {
    for (bool is_open = true; is_open;) {
      is_open = false;
      bool moved = false;
      std::vector<bool> is_taken(2 * size);
      for (Transfer& one : all) {
        if (one.done == one.bytes) continue;
        is_open = true;
        if (is_taken[2 * one.peer + one.is_send]) continue;
        is_taken[2 * one.peer + one.is_send] = true;
        moved |= advance(one);
      }
      if (is_aborted) throw Aborted();
      if (is_open && !moved) usleep(50);
    }
  }

  template <class F>
  bool guarded(const F& work) {  // false: the communicator was given up
    if (is_aborted) return false;
    try {
      return work(), true;
    } catch (const Aborted&) {
      return false;
    }
  }

  [[noreturn]] void stop() {  // until the communicator is given up
    for (; !is_aborted;) usleep(1000);
    throw Aborted();
  }

  void abort() { is_aborted = true; }
};
