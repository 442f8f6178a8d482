// What PyTorch asks of a device: its streams and events, its current device, its allocators and generators.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <ATen/core/Generator.h>

#include "schedule.h"

namespace sim {

constexpr auto kType = c10::DeviceType::PrivateUse1;

int current_device();
Place current_place(int device);  // the device's current stream, of this thread
c10::Allocator* device_allocator();

// Seed and offset, and no state on the device, as CUDA's generators: each kernel that draws numbers takes an offset of its
// own, and the host goes on.
at::Generator& default_generator(int device);
// A CPU generator for the next kernel that draws from `generator`, or from the device's default one if that is undefined.
at::Generator take_generator(const at::Generator& generator, int device);

// Whether PyTorch is told that the device is there: other tests of the process can be run without it.
void plug_in(bool there);
bool is_plugged_in();

}  // namespace sim
