// What happened on the simulated devices since the last reset. Tests compare these with what a step may cost.
#pragma once

#include <atomic>
#include <cstdint>

namespace sim {

// In the order in which `simulated.py` reads them.
struct Counters {
  std::atomic<int64_t> copies_out{0};  // device to host, and their bytes
  std::atomic<int64_t> bytes_out{0};
  std::atomic<int64_t> copies_in{0};  // host to device
  std::atomic<int64_t> bytes_in{0};
  std::atomic<int64_t> copies_between{0};  // from one device to another
  std::atomic<int64_t> bytes_between{0};
  std::atomic<int64_t> kernels{0};
  std::atomic<int64_t> reads{0};            // stalls: `.item()` and the like
  std::atomic<int64_t> shapes{0};           // stalls: a result whose shape only the data tells
  std::atomic<int64_t> blocking_copies{0};  // stalls: copies from or to memory that is not pinned, or not asynchronous
  std::atomic<int64_t> synchronizations{0};  // stalls: of an event, a stream or a device
  std::atomic<int64_t> streams{0};           // streams that any work was queued on
  std::atomic<int64_t> late_writes{0};       // blocks of memory that were written to after they had been released
};

inline Counters counters;

}  // namespace sim
