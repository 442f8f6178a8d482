#include "memory.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "counters.h"
#include "schedule.h"

namespace sim {
namespace {

constexpr size_t kRange = size_t{1} << 36;  // addresses; the system gives memory to those that are used
constexpr size_t kGranularity = 512;
constexpr int kPoison = 0xff;

struct Block {
  size_t bytes = 0;
  int64_t stream = 0;
  std::vector<int64_t> also_used_on;
};

struct Device {
  char* untouchable = nullptr;
  char* mapped = nullptr;
  size_t next = 0, allocated = 0, most_allocated = 0, limit = 0;
  size_t refused_least = 0;
  int64_t refused_after = 0, refused_times = 0;
  std::unordered_map<void*, Block> blocks;
  std::map<std::pair<int64_t, size_t>, std::vector<void*>> released;  // by stream and size; the last is taken first
};

std::mutex mutex;

Device* map_memory() {
  auto* const device = new Device();
  const int file = memfd_create("simulated device", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0 && ftruncate(file, kRange) == 0, "no memory for a simulated device");
  const auto map = [&](int access) {
    void* const found = mmap(nullptr, kRange, access, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(found != MAP_FAILED, "no addresses for a simulated device");
    return static_cast<char*>(found);
  };
  device->untouchable = map(PROT_NONE);
  device->mapped = map(PROT_READ | PROT_WRITE);
  close(file);
  return device;
}

Device& device_at(int device) {
  static const std::array<Device*, kDevices> all{map_memory(), map_memory()};
  return *all.at(device);
}

void check_room(Device& own, int device, size_t bytes) {
  if (own.refused_times > 0 && bytes >= own.refused_least && own.refused_after-- <= 0) {
    own.refused_times--;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "sim:", device, " out of memory: it was told to refuse ", bytes, " bytes");
  }
  TORCH_CHECK_WITH(
      OutOfMemoryError, own.limit == 0 || own.allocated + bytes <= own.limit, "sim:", device,
      " out of memory: tried to allocate ", bytes, " bytes, where ", own.allocated, " of ", own.limit, " are in use");
}

void poison(Place place, char* memory, size_t bytes) {
  enqueue(place, {Engine::compute, 0, 0, false, [=] { std::memset(memory, kPoison, bytes); }});
}

void look_for_late_writes(Place place, const char* memory, size_t bytes) {
  enqueue(place, {Engine::compute, 0, 0, false, [=] {
    const auto* const bytes_of = reinterpret_cast<const unsigned char*>(memory);
    if (!std::all_of(bytes_of, bytes_of + bytes, [](unsigned char byte) { return byte == kPoison; }))
      counters.late_writes++;
  }});
}

}  // namespace

void* allocate(int device, int64_t stream, size_t bytes) {
  if (bytes == 0) return nullptr;
  bytes = (bytes + kGranularity - 1) / kGranularity * kGranularity;
  std::lock_guard lock(mutex);
  auto& own = device_at(device);
  check_room(own, device, bytes);
  void* found = nullptr;
  auto& released = own.released[{stream, bytes}];
  if (!released.empty()) {
    found = released.back();
    released.pop_back();
    look_for_late_writes({device, stream}, static_cast<char*>(found) - own.untouchable + own.mapped, bytes);
  } else {
    TORCH_CHECK(own.next + bytes <= kRange, "the addresses of a simulated device are used up");
    found = own.untouchable + own.next;
    poison({device, stream}, own.mapped + own.next, bytes);
    own.next += bytes;
  }
  own.blocks[found] = {bytes, stream, {}};
  own.allocated += bytes;
  own.most_allocated = std::max(own.most_allocated, own.allocated);
  return found;
}

void release(void* address) {
  if (address == nullptr) return;
  std::lock_guard lock(mutex);
  const int device = device_of(address);
  auto& own = device_at(device);
  const auto node = own.blocks.extract(address);
  const auto& block = node.mapped();
  for (auto stream : block.also_used_on) order_after({device, block.stream}, record({device, stream}));
  poison({device, block.stream}, static_cast<char*>(address) - own.untouchable + own.mapped, block.bytes);
  own.released[{block.stream, block.bytes}].push_back(address);
  own.allocated -= block.bytes;
}

void also_used_on(void* address, int64_t stream) {
  std::lock_guard lock(mutex);
  const int device = device_of(address);
  if (device < 0) return;
  const auto found = device_at(device).blocks.find(address);
  if (found == device_at(device).blocks.end() || found->second.stream == stream) return;
  found->second.also_used_on.push_back(stream);
}

int device_of(const void* address) {
  for (int device = 0; device < kDevices; device++) {
    const auto* const start = device_at(device).untouchable;
    if (address >= start && address < start + kRange) return device;
  }
  return -1;
}

void* kernel_address(void* address) {
  const int device = device_of(address);
  if (device < 0) return address;
  auto& own = device_at(device);
  return static_cast<char*>(address) - own.untouchable + own.mapped;
}

void set_limit(int device, size_t bytes) {
  std::lock_guard lock(mutex);
  device_at(device).limit = bytes;
}

void refuse(int device, size_t least, int64_t after, int64_t times) {
  std::lock_guard lock(mutex);
  auto& own = device_at(device);
  own.refused_least = least;
  own.refused_after = after;
  own.refused_times = times;
}

size_t allocated(int device) {
  std::lock_guard lock(mutex);
  return device_at(device).allocated;
}

size_t most_allocated(int device) {
  std::lock_guard lock(mutex);
  return device_at(device).most_allocated;
}

void forget_most_allocated(int device) {
  std::lock_guard lock(mutex);
  device_at(device).most_allocated = device_at(device).allocated;
}

}  // namespace sim
