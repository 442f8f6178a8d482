// Copies between the devices and the host, new memory, and the views that PyTorch has no kernel of its own for.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "aliases.h"
#include "counters.h"
#include "device.h"
#include "memory.h"
#include "pinned.h"
#include "schedule.h"

namespace sim {
namespace {

using at::IntArrayRef;
using at::Tensor;

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

const Tensor& resize(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const auto bytes = at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), self.itemsize(), self.storage_offset());
  if (bytes > self.storage().nbytes()) at::native::resize_bytes_nocuda(self.storage(), bytes);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.data() != nullptr)
    impl->set_sizes_and_strides(size, stride);
  else
    impl->set_sizes_contiguous(size);
  return self;
}

at::Scalar read(const Tensor& self) {
  counters.reads++;
  wait_for(current_place(self.device().index()));
  const Plainly plainly;
  return at::_local_scalar_dense(on_host(self));
}

// A copy that a device does by itself; anything else takes the host's help, as with CUDA.
bool runs_by_itself(const Tensor& host, const Tensor& device) {
  return is_pinned(host.const_data_ptr()) && host.dtype() == device.dtype() && host.strides() == device.strides() &&
         host.is_non_overlapping_and_dense();
}

void copy_host(const Tensor& source, const Tensor& target, bool non_blocking) {
  const bool out = target.is_cpu();
  const auto &host = out ? target : source, &device = out ? source : target;
  const auto bytes = static_cast<size_t>(device.numel() * device.itemsize());
  (out ? counters.copies_out : counters.copies_in)++;
  (out ? counters.bytes_out : counters.bytes_in) += bytes;
  const auto place = current_place(device.device().index());
  enqueue(place, {out ? Engine::out : Engine::in, bytes, 0, false,
                  [a = on_host(source), b = on_host(target), held = hold(host.const_data_ptr())] {
                    const Plainly plainly;
                    b.copy_(a);
                  }});
  if (non_blocking && runs_by_itself(host, device)) return;
  counters.blocking_copies++;
  wait_for(place);
}

// On the source's stream, and as if on the target's too: each device's work waits for the other's.
void copy_between(const Tensor& source, const Tensor& target) {
  const auto from = current_place(source.device().index()), to = current_place(target.device().index());
  const auto bytes = static_cast<size_t>(target.numel() * target.itemsize());
  counters.copies_between++;
  counters.bytes_between += bytes;
  order_after(from, record(to));
  enqueue(from, {Engine::between, bytes, 0, false, [a = on_host(source), b = on_host(target)] {
                   const Plainly plainly;
                   b.copy_(a);
                 }});
  order_after(to, record(from));
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  if (source.is_cpu() || target.is_cpu()) {
    // A host tensor is not broadcast by the device.
    copy_host(source.expand(target.sizes()), target, non_blocking);
  } else if (source.device() != target.device()) {
    copy_between(source, target);
  } else {
    enqueue(current_place(target.device().index()),
            {Engine::compute, 0, 0, true, [a = on_host(source), b = on_host(target)] {
               const Plainly plainly;
               b.copy_(a);
             }});
  }
  return target;
}

Tensor copy_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

void record_stream(Tensor& self, c10::Stream stream) {
  also_used_on(const_cast<void*>(self.storage().data()), stream.id());
}

// The CPU's kernel takes its random numbers from the CPU's generator.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& self, double p, std::optional<bool> train) {
  if (train.has_value() && !*train) return {self.clone(), at::empty_like(self, at::kBool).fill_(true)};
  const auto mask = at::empty_like(self, at::kBool).bernoulli_(1 - p);
  return {self.mul(mask).mul(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("_local_scalar_dense", &read);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_and_resize);
  m.impl("native_dropout", &native_dropout);
  m.impl("record_stream", &record_stream);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
}

}  // namespace sim
