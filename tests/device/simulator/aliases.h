// Tensors of the simulated devices as tensors of other devices: the same sizes, strides and sharing of memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <unordered_map>

namespace sim {

// Operators inside compute and nothing else: no autograd, no autocast, no modes of the thread.
struct Plainly {
  c10::impl::ForceDispatchKeyGuard guard{
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset};
};

// The memory of a device's tensor under the address that kernels use, as a tensor of the CPU that does not keep it. A
// kernel that was queued does not keep its operands on a real device either.
at::Tensor on_host(const at::Tensor& tensor);

// The operands of a call, one alias for each tensor; tensors that share memory have aliases that do.
class Aliases {
 public:
  enum class Kind { host, meta };
  explicit Aliases(Kind kind) : kind_(kind) {}

  c10::IValue of(const c10::IValue& value);
  at::Tensor of(const at::Tensor& tensor);
  // What an alias stands for; undefined for another tensor.
  at::Tensor original(const at::Tensor& alias) const;

 private:
  Kind kind_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> made_, originals_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
};

}  // namespace sim
