#include "schedule.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "counters.h"

namespace sim {

// One of: work; a moment to record (`moment`, `records`); a moment to wait for (`moment`).
struct Entry {
  Work work;
  MomentPtr moment;
  bool records = false;
  double queued_at = 0;
};

struct Stream {
  int device = 0;
  std::deque<Entry> queue;
  uint64_t queued = 0, done = 0;
  bool used = false;
  double clock = 0;  // timed order: when its last work ended, had its thread been woken in time
};

namespace {

// Nothing here is ever destroyed: workers and Python's finalizers outlive the end of `main`.
struct State {
  std::recursive_mutex mutex;
  std::condition_variable_any changed;
  std::array<std::vector<std::unique_ptr<Stream>>, kDevices> streams;
  std::array<std::exception_ptr, kDevices> failure;
  Order order = Order::late;
  uint64_t times_ordered = 0;  // a worker of an earlier order ends
  std::mt19937_64 chance;
  std::array<double, 4> bandwidth{};
  double kernel_seconds = 0;
  std::array<std::array<std::mutex, 4>, kDevices> engines;  // each copies one thing at a time
  std::array<std::array<double, 4>, kDevices> engine_clocks{};
};

State& state() {
  static auto* const one = new State();
  return *one;
}

using Lock = std::unique_lock<std::recursive_mutex>;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void start_worker(Stream& stream);

Stream& stream_of(Place place) {
  auto& streams = state().streams.at(place.device);
  while (static_cast<int64_t>(streams.size()) <= place.stream) {
    streams.push_back(std::make_unique<Stream>());
    streams.back()->device = place.device;
    if (state().order == Order::timed) start_worker(*streams.back());
  }
  return *streams[place.stream];
}

void run(Stream& stream, const Work& work) {
  try {
    work.run();
  } catch (...) {  // the host is told when it waits, as by a real device
    Lock lock(state().mutex);
    state().failure[stream.device] = std::current_exception();
  }
}

void pass(Stream& stream, const Entry& entry) {
  if (entry.records) {
    entry.moment->passed = true;
    entry.moment->seconds = state().order == Order::timed ? std::max(stream.clock, entry.queued_at) : now();
  } else if (entry.moment) {
    stream.clock = std::max(stream.clock, entry.moment->seconds);
  }
  stream.done++;
}

bool may_run(const Stream& stream) {
  if (stream.queue.empty()) return false;
  const auto& head = stream.queue.front();
  return head.records || head.moment == nullptr || head.moment->passed;
}

// Driven orders: the caller holds the lock, and runs the work itself.

void run_up_to(Stream& stream, uint64_t position) {
  while (stream.done < position) {
    const auto awaited = stream.queue.front().records ? nullptr : stream.queue.front().moment;
    if (awaited && !awaited->passed) run_up_to(*awaited->stream, awaited->position);
    const auto entry = std::move(stream.queue.front());
    stream.queue.pop_front();
    if (entry.moment == nullptr) run(stream, entry.work);
    pass(stream, entry);
  }
}

void run_copies() {
  for (bool progress = true; progress;) {
    progress = false;
    for (auto& streams : state().streams)
      for (auto& stream : streams)
        while (may_run(*stream) &&
               (stream->queue.front().moment || stream->queue.front().work.engine != Engine::compute)) {
          run_up_to(*stream, stream->done + 1);
          progress = true;
        }
  }
}

void run_some() {
  auto& chance = state().chance;
  for (auto steps = chance() % 4; steps > 0; steps--) {
    std::vector<Stream*> ready;
    for (auto& streams : state().streams)
      for (auto& stream : streams)
        if (may_run(*stream)) ready.push_back(stream.get());
    if (ready.empty()) return;
    auto& chosen = *ready[chance() % ready.size()];
    run_up_to(chosen, chosen.done + 1);
  }
}

// The timed order: a thread for each stream. Work starts when, by the clock of its stream, it could: a thread that a busy
// machine wakes late delays what it runs next by nothing, unless it is late by more than the work takes.

void sleep_until(double time) {
  std::this_thread::sleep_for(std::chrono::duration<double>(time - now()));
}

void take_time(Stream& stream, const Work& work, double queued_at) {
  const auto engine = static_cast<int>(work.engine);
  const auto bandwidth = state().bandwidth[engine];
  const bool copies = work.engine != Engine::compute;
  const auto least = copies && bandwidth > 0 ? work.bytes / bandwidth : work.kernel ? state().kernel_seconds : 0;
  const auto seconds = std::max(work.seconds, least);
  auto start = std::max(stream.clock, queued_at);
  std::unique_lock<std::mutex> busy;
  auto& engine_clock = state().engine_clocks[stream.device][engine];
  if (copies) {
    busy = std::unique_lock(state().engines[stream.device][engine]);
    start = std::max(start, engine_clock);
  }
  const auto end = start + seconds;
  if (copies) sleep_until(end);  // the data is there at the end, not at the beginning
  const auto begun = now();
  run(stream, work);
  const auto ran = now() - begun;
  sleep_until(end);
  stream.clock = std::max(end, start + ran);
  if (copies) engine_clock = stream.clock;
}

void work_on(Stream& stream, uint64_t order) {
  Lock lock(state().mutex);
  while (true) {
    state().changed.wait(lock, [&] { return state().times_ordered != order || may_run(stream); });
    if (state().times_ordered != order) return;
    const auto entry = std::move(stream.queue.front());
    stream.queue.pop_front();
    if (entry.moment == nullptr) {
      lock.unlock();
      take_time(stream, entry.work, entry.queued_at);
      lock.lock();
    }
    pass(stream, entry);
    state().changed.notify_all();
  }
}

void start_worker(Stream& stream) {
  std::thread([&stream, order = state().times_ordered] { work_on(stream, order); }).detach();
}

// What differs between the two kinds of order

void put(Stream& stream, Entry entry) {
  entry.queued_at = now();
  stream.queue.push_back(std::move(entry));
  stream.queued++;
  switch (state().order) {
    case Order::late: break;
    case Order::early: run_copies(); break;
    case Order::random: run_some(); break;
    case Order::timed: state().changed.notify_all(); break;
  }
}

void finish(Lock& lock, Stream& stream, uint64_t position) {
  if (state().order == Order::timed)
    state().changed.wait(lock, [&] { return stream.done >= position; });
  else
    run_up_to(stream, position);
}

void raise_failure(int device) {
  if (auto failure = std::exchange(state().failure[device], nullptr)) std::rethrow_exception(failure);
}

}  // namespace

int64_t new_stream(int device) {
  Lock lock(state().mutex);
  const auto id = std::max<int64_t>(1, state().streams.at(device).size());  // 0 is the default stream
  stream_of({device, id});
  return id;
}

void enqueue(Place place, Work work) {
  Lock lock(state().mutex);
  auto& stream = stream_of(place);
  if (!std::exchange(stream.used, true)) counters.streams++;
  if (work.kernel) counters.kernels++;
  put(stream, {std::move(work)});
}

MomentPtr record(Place place) {
  Lock lock(state().mutex);
  auto& stream = stream_of(place);
  auto moment = std::make_shared<Moment>();
  moment->stream = &stream;
  moment->position = stream.queued + 1;
  put(stream, {{}, moment, true});
  return moment;
}

void order_after(Place place, const MomentPtr& moment) {
  if (moment == nullptr) return;
  Lock lock(state().mutex);
  put(stream_of(place), {{}, moment, false});
}

bool passed(const MomentPtr& moment) {
  Lock lock(state().mutex);
  return moment == nullptr || moment->passed;
}

bool idle(Place place) {
  Lock lock(state().mutex);
  const auto& stream = stream_of(place);
  return stream.done == stream.queued;
}

void wait_for(const MomentPtr& moment) {
  if (moment == nullptr) return;
  Lock lock(state().mutex);
  finish(lock, *moment->stream, moment->position);
  raise_failure(moment->stream->device);
}

void wait_for(Place place) {
  Lock lock(state().mutex);
  auto& stream = stream_of(place);
  finish(lock, stream, stream.queued);
  raise_failure(place.device);
}

void wait_for_device(int device) {
  Lock lock(state().mutex);
  auto& streams = state().streams.at(device);
  for (size_t i = 0; i < streams.size(); i++) finish(lock, *streams[i], streams[i]->queued);
  raise_failure(device);
}

void set_order(Order order, uint64_t seed) {
  for (int device = 0; device < kDevices; device++) wait_for_device(device);
  Lock lock(state().mutex);
  state().chance.seed(seed);
  if (state().order == order) return;
  state().order = order;
  state().times_ordered++;
  state().changed.notify_all();
  if (order != Order::timed) return;
  for (auto& streams : state().streams)
    for (auto& stream : streams) start_worker(*stream);
}

void set_bandwidth(double out, double in, double between) {
  Lock lock(state().mutex);
  state().bandwidth = {0, out, in, between};
}

void set_kernel_seconds(double seconds) {
  Lock lock(state().mutex);
  state().kernel_seconds = seconds;
}

void forget_streams_used() {
  Lock lock(state().mutex);
  for (auto& streams : state().streams)
    for (auto& stream : streams) stream->used = false;
}

}  // namespace sim
