#include "device.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <cstring>
#include <utility>

#include "counters.h"
#include "memory.h"
#include "pinned.h"

namespace sim {

at::Generator new_generator(int device);

namespace {

using c10::Device;
using c10::DeviceIndex;

thread_local int device_now = 0;
thread_local std::array<int64_t, kDevices> streams_now{};
std::atomic<bool> there{false};

Device device_of_index(int index) { return {kType, static_cast<DeviceIndex>(index)}; }
int index_of(Device device) { return device.has_index() ? device.index() : device_now; }
Place place_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

struct Event {
  MomentPtr moment;
};
Event* event_of(void* event) { return static_cast<Event*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }

  Device exchangeDevice(Device device) const override {
    return device_of_index(std::exchange(device_now, device.index()));
  }
  Device getDevice() const override { return device_of_index(device_now); }
  void setDevice(Device device) const override { device_now = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { device_now = device.index(); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(Device device) const override {
    const auto index = index_of(device);
    return stream(index, streams_now.at(index));
  }
  c10::Stream getDefaultStream(Device device) const override { return stream(index_of(device), 0); }
  c10::Stream getNewStream(Device device, int) const override {
    return stream(index_of(device), new_stream(index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(next.device_index(), std::exchange(streams_now.at(next.device_index()), next.id()));
  }
  bool queryStream(const c10::Stream& stream) const override { return idle(place_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override {
    counters.synchronizations++;
    wait_for(place_of(stream));
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    counters.synchronizations++;
    wait_for_device(device < 0 ? device_now : device);
  }

  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    event_of(*event)->moment = sim::record(place_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) order_after(place_of(stream), event_of(event)->moment);
  }
  bool queryEvent(void* event) const override { return event == nullptr || passed(event_of(event)->moment); }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    counters.synchronizations++;
    wait_for(event_of(event)->moment);
  }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    const auto &first = event_of(start)->moment, &last = event_of(end)->moment;
    TORCH_CHECK(first && last && passed(first) && passed(last), "the device has not passed both events yet");
    return (last->seconds - first->seconds) * 1e3;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete event_of(event); }

  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    also_used_on(memory.get(), stream.id());
  }

 private:
  static c10::Stream stream(int device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, device_of_index(device), id);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* const memory = sim::allocate(device_now, streams_now.at(device_now), bytes);
    return {memory, memory, &release, device_of_index(device_now)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    enqueue(current_place(device_now),
            {Engine::compute, bytes, 0, false,
             [target = kernel_address(target), source = kernel_address(const_cast<void*>(source)), bytes] {
               std::memcpy(target, source, bytes);
             }});
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return there; }
  bool hasPrimaryContext(DeviceIndex) const override { return there; }
  DeviceIndex deviceCount() const override { return there ? kDevices : 0; }
  DeviceIndex getCurrentDevice() const override { return static_cast<DeviceIndex>(device_now); }
  void setCurrentDevice(DeviceIndex device) const override { device_now = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return static_cast<DeviceIndex>(std::exchange(device_now, device));
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  Device getDeviceFromPtr(void* address) const override { return device_of_index(sim::device_of(address)); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device < 0 ? device_now : device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return new_generator(device < 0 ? device_now : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const int device = storage.device().index();
    void* const memory = sim::allocate(device, current_place(device).stream, bytes);
    const auto kept = std::min(bytes, storage.nbytes());
    enqueue(current_place(device), {Engine::compute, kept, 0, false,
                                    [target = kernel_address(memory),
                                     source = kernel_address(storage.mutable_data()), kept] {
                                      std::memcpy(target, source, kept);
                                    }});
    storage.set_data_ptr({memory, memory, &release, storage.device()});
    storage.set_nbytes(bytes);
  }
};

const bool registered = [] {
  static DeviceAllocator allocator;
  static Hooks hooks;
  c10::SetAllocator(kType, &allocator);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

}  // namespace

int current_device() { return device_now; }
Place current_place(int device) { return {device, streams_now.at(device)}; }
c10::Allocator* device_allocator() { return c10::GetAllocator(kType); }
void plug_in(bool is_there) { there = is_there; }
bool is_plugged_in() { return there; }

}  // namespace sim
