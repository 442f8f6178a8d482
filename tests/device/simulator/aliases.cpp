#include "aliases.h"

#include <ATen/core/List.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/TensorImpl.h>

#include "device.h"
#include "memory.h"

namespace sim {
namespace {

c10::Storage storage_on(const c10::Storage& storage, Aliases::Kind kind) {
  const bool host = kind == Aliases::Kind::host;
  void* const memory = host ? kernel_address(const_cast<void*>(storage.data())) : nullptr;
  // Meta tensors are resized, to learn the size of what a call is to write to.
  return {c10::Storage::use_byte_size_t(), storage.nbytes(),
          c10::DataPtr(memory, c10::Device(host ? c10::kCPU : c10::kMeta)),
          host ? nullptr : c10::GetAllocator(c10::kMeta), !host};
}

at::Tensor view_of(const c10::Storage& storage, const at::Tensor& like, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  auto* const impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  return made;
}

}  // namespace

at::Tensor on_host(const at::Tensor& tensor) {
  return view_of(storage_on(tensor.storage(), Aliases::Kind::host), tensor, c10::DispatchKey::CPU);
}

at::Tensor Aliases::of(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  if (kind_ == Kind::meta && is_number) return tensor;  // kernels in Python take it as a number
  auto& made = made_[tensor.unsafeGetTensorImpl()];
  if (made.defined()) return made;
  if (kind_ == Kind::host && tensor.is_cpu()) {
    made = tensor.detach().clone();  // the host may write to it before the kernel runs
    if (is_number) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  } else {
    auto* const owner = tensor.storage().unsafeGetStorageImpl();
    auto found = storages_.find(owner);
    if (found == storages_.end()) found = storages_.emplace(owner, storage_on(tensor.storage(), kind_)).first;
    made = view_of(found->second, tensor, kind_ == Kind::host ? c10::DispatchKey::CPU : c10::DispatchKey::Meta);
  }
  originals_[made.unsafeGetTensorImpl()] = tensor;
  return made;
}

c10::IValue Aliases::of(const c10::IValue& value) {
  if (value.isTensor()) return of(value.toTensor());
  if (value.isDevice()) return c10::Device(kind_ == Kind::host ? c10::kCPU : c10::kMeta);
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& tensor : value.toTensorVector()) made.push_back(of(tensor));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      made.push_back(tensor ? std::optional(of(*tensor)) : std::nullopt);
    return made;
  }
  return value;
}

at::Tensor Aliases::original(const at::Tensor& alias) const {
  const auto found = originals_.find(alias.unsafeGetTensorImpl());
  return found == originals_.end() ? at::Tensor() : found->second;
}

}  // namespace sim
