#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/ops/empty.h>
#include <c10/core/GeneratorImpl.h>

#include <array>
#include <cstring>
#include <mutex>
#include <random>

#include "device.h"

namespace sim {
namespace {

struct Generator final : c10::GeneratorImpl {
  explicit Generator(int device)
      : c10::GeneratorImpl(c10::Device(kType, static_cast<c10::DeviceIndex>(device)), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override { numbers_ = {seed, 0}; }
  uint64_t current_seed() const override { return numbers_[0]; }
  uint64_t seed() override {
    set_current_seed(std::random_device{}());
    return current_seed();
  }
  void set_offset(uint64_t offset) override { numbers_[1] = offset; }
  uint64_t get_offset() const override { return numbers_[1]; }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({sizeof numbers_}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    std::memcpy(state.mutable_data_ptr(), numbers_.data(), sizeof numbers_);
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == sizeof numbers_, "the state of a generator of sim has ", sizeof numbers_, " bytes");
    std::memcpy(numbers_.data(), state.data(), sizeof numbers_);
  }

  Generator* clone_impl() const override {
    auto* const other = new Generator(device().index());
    other->numbers_ = numbers_;
    return other;
  }

 private:
  std::array<uint64_t, 2> numbers_{c10::default_rng_seed_val, 0};
};

}  // namespace

at::Generator& default_generator(int device) {
  static std::array<at::Generator, kDevices> all{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return all.at(device);
}

at::Generator new_generator(int device) { return at::make_generator<Generator>(device); }

at::Generator take_generator(const at::Generator& given, int device) {
  auto generator = given.defined() ? given : default_generator(device);
  std::lock_guard lock(generator.mutex());
  const auto offset = generator.get_offset();
  generator.set_offset(offset + 1);
  return at::detail::createCPUGenerator(generator.current_seed() + 0x9e3779b97f4a7c15 * (offset + 1));
}

}  // namespace sim
