// What streams.cpp, clock.cpp and graphs.cpp share.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <set>
#include <vector>

#include "stand_in.h"

namespace stand_in {

using Held = std::unique_lock<std::mutex>;

struct Stream::Queue {
  std::deque<Work> waiting;
  bool is_running = false, has_thread = false;
  double at = 0;  // by the virtual clock: when its latest work ended
};
struct Mark {  // that an event makes in a stream
  Stream* stream;
  long number;
  double at = 0;  // when it was reached, ns
  bool is_reached() const { return stream->finished >= number; }
};
struct Graph {
  unsigned long long id;
  std::vector<Work> nodes;
};

std::mutex& lock();
std::condition_variable& changed();
std::set<Stream*>& streams();

// clock.cpp
void enqueue(Held& held, Stream* stream, Work work);
void settle(Held& held, Stream* stream = nullptr, long number = 0);  // all that has ended by now, or until the stream is so far
double reached_at();                                                 // when the work that is being done ends, ns

}  // namespace stand_in
