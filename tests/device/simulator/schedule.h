// The streams of the simulated devices: queues of work, and the order in which it runs.
//
// A stream runs its own work in order. What two streams do is ordered by moments (events) alone, and every order that
// moments allow is right. The driven orders choose among them, so that a missing wait is a wrong number every time:
//
//   late    nothing runs before the host waits for it, and then only what it waits for: a copy ends at the last moment
//   early   the same for kernels, while a copy runs as soon as the waits before it allow
//   random  some work of any stream that may run does so whenever more is queued; the seed decides
//   timed   threads, one for each stream: copies take the time that their bytes take, and kernels no less than set
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace sim {

constexpr int kDevices = 2;

enum class Order : int { late, early, random, timed };
enum class Engine : int { compute, out, in, between };

struct Stream;

// A point in a stream's work. `passed` and `seconds` are the schedule's own.
struct Moment {
  Stream* stream = nullptr;
  uint64_t position = 0;
  bool passed = false;
  double seconds = 0;
};
using MomentPtr = std::shared_ptr<Moment>;

struct Work {
  Engine engine = Engine::compute;
  size_t bytes = 0;
  double seconds = 0;  // at least, in the timed order
  bool kernel = false;  // takes at least what is set for kernels, and is counted
  // Must not take the interpreter's lock: a thread that holds it may wait for this work.
  std::function<void()> run;
};

struct Place {
  int device = 0;
  int64_t stream = 0;
};

int64_t new_stream(int device);
void enqueue(Place place, Work work);
MomentPtr record(Place place);
void order_after(Place place, const MomentPtr& moment);
bool passed(const MomentPtr& moment);
bool idle(Place place);

// Waits on the host, and raises what a kernel of the device raised meanwhile.
void wait_for(const MomentPtr& moment);
void wait_for(Place place);
void wait_for_device(int device);

// Waits for all work, then changes the order. seed: of the random one.
void set_order(Order order, uint64_t seed);
void set_bandwidth(double out, double in, double between);  // bytes a second; 0: no limit
void set_kernel_seconds(double seconds);
void forget_streams_used();

}  // namespace sim
