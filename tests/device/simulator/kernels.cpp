// Every operator that nothing else is registered for: a kernel, queued on the current stream of its device.
//
// The shapes of its results are found at once, from meta tensors, and the CPU's own kernel computes them when the stream
// comes to it. Where the data decides a shape, there is no kernel for meta tensors: then the host waits, as it does for a
// real device, and the wait is counted.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "aliases.h"
#include "counters.h"
#include "device.h"
#include "schedule.h"

namespace sim {
namespace {

using torch::jit::Stack;

// Take tensors of the CPU as indices, whatever their sizes.
const std::set<std::string> kTakeHostIndices = {"aten::index", "aten::index_put", "aten::index_put_",
                                                "aten::_index_put_impl_", "aten::_unsafe_index"};

template <typename Function>
void each_tensor(const c10::IValue& value, Function function) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) function(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) function(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      if (tensor && tensor->defined()) function(*tensor);
  }
}

// The device of a call's operands, which must be one: what a GPU refuses is not to pass here.
int device_of_call(const c10::OperatorHandle& op, const Stack& arguments) {
  std::optional<int> found;
  bool host = false;
  for (const auto& argument : arguments)
    each_tensor(argument, [&](const at::Tensor& tensor) {
      if (tensor.is_cpu()) {
        host |= tensor.dim() > 0;
        return;
      }
      const int device = tensor.device().index();
      TORCH_CHECK(!found || *found == device, op.operator_name(), ": expected all tensors to be on the same device");
      found = device;
    });
  TORCH_CHECK(!host || kTakeHostIndices.count(op.schema().name()), op.operator_name(),
              ": expected all tensors to be on the same device, and some are on the CPU");
  for (const auto& argument : arguments)
    if (!found && argument.isDevice() && argument.toDevice().has_index()) found = argument.toDevice().index();
  return found.value_or(current_device());
}

void draw(const c10::OperatorHandle& op, Stack& arguments, int device) {
  const auto& names = op.schema().arguments();
  bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
  for (size_t i = 0; i < names.size(); i++) {
    const auto& type = *names[i].real_type();
    if (type.str() != "Generator?" && type.str() != "Generator") continue;
    arguments[i] = take_generator(arguments[i].isNone() ? at::Generator() : arguments[i].toGenerator(), device);
    draws = false;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(!draws, "sim: ", op.operator_name(), " draws numbers, and takes no generator");
}

at::Tensor empty_as(const at::Tensor& like, int device) {
  return at::empty_strided(like.sizes(), like.strides(),
                           like.options().device(c10::Device(kType, static_cast<c10::DeviceIndex>(device))));
}

void give_size(const at::Tensor& tensor, const at::Tensor& like) {
  if (tensor.sizes() == like.sizes()) return;
  tensor.resize_(like.sizes());
  if (tensor.strides() != like.strides())
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
}

// What a call gives the host at once: results that are operands, memory for those that are new, and plain values.
class Results {
 public:
  Results(const Aliases& aliases, int device) : aliases_(aliases), device_(device) {}

  c10::IValue of(const c10::IValue& found) {
    if (found.isTensor()) return of(found.toTensor());
    if (found.isTensorList()) {
      c10::List<at::Tensor> made;
      for (const at::Tensor& tensor : found.toTensorVector()) made.push_back(of(tensor));
      return made;
    }
    return found;
  }

  at::Tensor of(const at::Tensor& found) {
    if (!found.defined()) return found;
    const auto operand = aliases_.original(found);
    targets_.push_back(operand.defined() ? at::Tensor() : empty_as(found, device_));
    return operand.defined() ? operand : targets_.back();
  }

  // For each tensor that the call gives, in order, where it belongs; undefined for operands.
  std::vector<at::Tensor> targets() const {
    std::vector<at::Tensor> found;
    for (const auto& target : targets_) found.push_back(target.defined() ? on_host(target) : target);
    return found;
  }

 private:
  const Aliases& aliases_;
  int device_;
  std::vector<at::Tensor> targets_;
};

void fill(const std::vector<at::Tensor>& targets, const Stack& computed) {
  size_t next = 0;
  for (const auto& value : computed)
    each_tensor(value, [&](const at::Tensor& tensor) {
      const auto& target = targets.at(next++);
      if (target.defined()) target.copy_(tensor);
    });
}

Stack aliases_of(const Stack& arguments, Aliases& aliases) {
  Stack made;
  for (const auto& argument : arguments) made.push_back(aliases.of(argument));
  return made;
}

// The CPU's kernels of norms keep statistics in the dtype of the operand, where those for meta tensors say float32.
void correct_statistics(const c10::OperatorHandle& op, const Stack& arguments, Stack& found) {
  const auto& name = op.schema().name();
  if (name != "aten::native_layer_norm" && name != "aten::native_group_norm") return;
  const auto dtype = arguments[0].toTensor().scalar_type();
  for (size_t i = 1; i < arguments.size(); i++)
    if (arguments[i].isTensor() && arguments[i].toTensor().defined() &&
        arguments[i].toTensor().scalar_type() != dtype)
      return;  // mixed
  for (size_t i = 1; i < found.size(); i++) found[i] = found[i].toTensor().to(dtype);
}

// Whether meta tensors told the results' shapes.
bool infer(const c10::OperatorHandle& op, const Stack& arguments, Aliases& aliases, Stack& found) {
  Plainly plainly;
  found = aliases_of(arguments, aliases);
  try {
    op.callBoxed(&found);
    correct_statistics(op, arguments, found);
    return true;
  } catch (const std::exception&) {  // a call that is wrong is so for the CPU's kernel too, which says it better
    return false;
  }
}

void call_and_wait(const c10::OperatorHandle& op, const Stack& arguments, int device, Stack& results) {
  counters.shapes++;
  wait_for(current_place(device));
  Aliases aliases(Aliases::Kind::host);
  Stack computed;
  {
    Plainly plainly;
    computed = aliases_of(arguments, aliases);
    op.callBoxed(&computed);
  }
  Results made(aliases, device);
  for (const auto& value : computed) results.push_back(made.of(value));
  enqueue(current_place(device), {Engine::compute, 0, 0, true, [targets = made.targets(), computed] {
    Plainly plainly;
    fill(targets, computed);
  }});
}

void kernel(const c10::OperatorHandle& op, Stack* stack) {
  const auto count = op.schema().arguments().size();
  Stack arguments(stack->end() - count, stack->end());
  stack->erase(stack->end() - count, stack->end());
  for (const auto& result : op.schema().returns())
    TORCH_CHECK_NOT_IMPLEMENTED(result.alias_info() == nullptr || result.alias_info()->isWrite(), "sim: ",
                                op.operator_name(), " gives a view, and is not registered");
  const int device = device_of_call(op, arguments);
  Aliases meta(Aliases::Kind::meta);
  Stack inferred;
  const bool known = infer(op, arguments, meta, inferred);
  draw(op, arguments, device);
  if (!known) return call_and_wait(op, arguments, device, *stack);

  for (const auto& argument : arguments)
    each_tensor(argument, [&](const at::Tensor& tensor) {
      if (!tensor.is_cpu()) give_size(tensor, meta.of(tensor));
    });
  Results made(meta, device);
  for (const auto& value : inferred) stack->push_back(made.of(value));
  const Plainly plainly;
  Aliases host(Aliases::Kind::host);
  enqueue(current_place(device), {Engine::compute, 0, 0, true,
    [op, operands = aliases_of(arguments, host), targets = made.targets()] {
      Plainly plainly;
      // The operands stay: torch 2.11 releases them before it takes several results that are operands, as of `sort`.
      Stack computed = operands;
      op.callBoxed(&computed);
      fill(targets, computed);
    }});
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }

// Devices without kernels of their own for these take others, which round differently.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&kernel>());
  m.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&kernel>());
}

}  // namespace sim
