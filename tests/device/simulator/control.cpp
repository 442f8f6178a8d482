// What `simulated.py` calls, by ctypes.
#include <cstdint>
#include <cstring>

#include "counters.h"
#include "device.h"
#include "memory.h"
#include "pinned.h"
#include "schedule.h"

#pragma GCC visibility push(default)
extern "C" {

void sim_plug_in(int there) { sim::plug_in(there != 0); }
int sim_is_plugged_in() { return sim::is_plugged_in() ? 1 : 0; }

void sim_counts(int64_t* found) {
  const auto& c = sim::counters;
  const int64_t all[] = {c.copies_out, c.bytes_out, c.copies_in, c.bytes_in, c.copies_between, c.bytes_between,
                         c.kernels, c.reads, c.shapes, c.blocking_copies, c.synchronizations, c.streams,
                         c.late_writes};
  std::memcpy(found, all, sizeof all);
}

void sim_reset_counts() {
  auto& c = sim::counters;
  for (auto* one : {&c.copies_out, &c.bytes_out, &c.copies_in, &c.bytes_in, &c.copies_between, &c.bytes_between,
                    &c.kernels, &c.reads, &c.shapes, &c.blocking_copies, &c.synchronizations, &c.streams,
                    &c.late_writes})
    *one = 0;
  sim::forget_streams_used();
}

// Returns 0, or 1 where work that was queued before has failed.
int sim_set_order(int order, uint64_t seed) {
  try {
    sim::set_order(static_cast<sim::Order>(order), seed);
    return 0;
  } catch (...) {
    return 1;
  }
}

void sim_set_bandwidth(double out, double in, double between) { sim::set_bandwidth(out, in, between); }
void sim_set_kernel_seconds(double seconds) { sim::set_kernel_seconds(seconds); }

void sim_sleep(int device, double seconds) {
  sim::enqueue(sim::current_place(device), {sim::Engine::compute, 0, seconds, true, [] {}});
}

int sim_current_device() { return sim::current_device(); }
void sim_set_limit(int device, size_t bytes) { sim::set_limit(device, bytes); }
void sim_refuse(int device, size_t least, int64_t after, int64_t times) { sim::refuse(device, least, after, times); }
void sim_refuse_pinning(int refuse) { sim::refuse_pinning(refuse != 0); }
size_t sim_allocated(int device) { return sim::allocated(device); }
size_t sim_most_allocated(int device) { return sim::most_allocated(device); }
void sim_forget_most_allocated(int device) { sim::forget_most_allocated(device); }

void sim_generator(int device, uint64_t* state) {
  auto& generator = sim::default_generator(device);
  state[0] = generator.current_seed();
  state[1] = generator.get_offset();
}

void sim_set_generator(int device, const uint64_t* state) {
  auto& generator = sim::default_generator(device);
  generator.set_current_seed(state[0]);
  generator.set_offset(state[1]);
}
}
