#include "pinned.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace sim {
namespace {

constexpr size_t kAlignment = 64;

struct Memory {
  explicit Memory(size_t bytes) : bytes(bytes), start(static_cast<char*>(std::aligned_alloc(kAlignment, bytes))) {
    TORCH_CHECK(start != nullptr, "the host has no ", bytes, " bytes to pin");
    std::memset(start, 0xff, bytes);  // what is read before a copy has arrived is nonsense
  }
  ~Memory() {
    std::memset(start, 0xff, bytes);
    std::free(start);
  }
  size_t bytes;
  char* start;
};

std::mutex mutex;
std::atomic<bool> refused{false};

std::map<const char*, std::shared_ptr<Memory>>& all() {
  static auto* const one = new std::map<const char*, std::shared_ptr<Memory>>();
  return *one;
}

std::shared_ptr<Memory> find(const void* address) {
  std::lock_guard lock(mutex);
  auto after = all().upper_bound(static_cast<const char*>(address));
  if (after == all().begin()) return nullptr;
  const auto& memory = std::prev(after)->second;
  return address < memory->start + memory->bytes ? memory : nullptr;
}

void forget(void* address) {
  std::shared_ptr<Memory> last;  // given back after the lock
  std::lock_guard lock(mutex);
  const auto found = all().find(static_cast<const char*>(address));
  if (found == all().end()) return;
  last = found->second;
  all().erase(found);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::DeviceType::CPU)};
    TORCH_CHECK(!refused, "sim: pinning of ", bytes, " bytes is refused");
    auto memory = std::make_shared<Memory>((bytes + kAlignment - 1) / kAlignment * kAlignment);
    auto* const start = memory->start;
    std::lock_guard lock(mutex);
    all()[start] = std::move(memory);
    return {start, start, &forget, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &forget; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
};

}  // namespace

c10::Allocator* pinned_allocator() {
  static Allocator one;
  return &one;
}

bool is_pinned(const void* address) { return find(address) != nullptr; }

std::shared_ptr<void> hold(const void* address) { return find(address); }

void refuse_pinning(bool refuse) { refused = refuse; }

}  // namespace sim
