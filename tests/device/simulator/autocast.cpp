// Autocast by PyTorch's own lists of operators, with one boxed kernel for each rule.
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "device.h"

namespace sim {
namespace {

using torch::jit::Stack;

c10::IValue cast(const c10::IValue& value, at::ScalarType dtype) {
  if (value.isTensor()) return at::autocast::cached_cast(dtype, value.toTensor(), kType);
  if (value.isTensorList()) return at::autocast::cached_cast(dtype, at::TensorList(value.toTensorVector()), kType);
  return value;
}

void call(const c10::OperatorHandle& op, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKeySet(c10::DispatchKey::AutocastPrivateUse1));
  op.callBoxed(stack);
}

void cast_and_call(const c10::OperatorHandle& op, Stack* stack, at::ScalarType dtype) {
  const auto count = op.schema().arguments().size();
  for (size_t i = stack->size() - count; i < stack->size(); i++) (*stack)[i] = cast((*stack)[i], dtype);
  call(op, stack);
}

void in_lower_precision(const c10::OperatorHandle& op, Stack* stack) {
  cast_and_call(op, stack, at::autocast::get_autocast_dtype(kType));
}

void in_float32(const c10::OperatorHandle& op, Stack* stack) { cast_and_call(op, stack, at::kFloat); }

void with_result_in_float32(const c10::OperatorHandle& op, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto first = stack->size() - arguments.size();
  const auto& operand = (*stack)[first].toTensor();
  const bool eligible = at::autocast::is_eligible(operand, kType) &&
                        (operand.scalar_type() == at::kHalf || operand.scalar_type() == at::kBFloat16);
  for (size_t i = 0; i < arguments.size(); i++)
    if (eligible && arguments[i].name() == "dtype" && (*stack)[first + i].isNone())
      (*stack)[first + i] = static_cast<int64_t>(at::kFloat);
  call(op, stack);
}

void in_widest(const c10::OperatorHandle& op, Stack* stack) {
  auto widest = at::autocast::get_autocast_dtype(kType);
  for (auto i = stack->size() - op.schema().arguments().size(); i < stack->size(); i++)
    if ((*stack)[i].isTensor()) widest = at::autocast::prioritize(widest, (*stack)[i].toTensor(), kType);
  cast_and_call(op, stack, widest);
}

std::string name(const char* op) { return std::string("aten::") + op; }
std::string name(const char* op, const char* overload) { return name(op) + "." + overload; }

}  // namespace

#define SIM_NAME_1(OP) name(#OP)
#define SIM_NAME_2(OP, OVERLOAD) name(#OP, #OVERLOAD)
#define SIM_PICK(_1, _2, NAME, ...) NAME
#define SIM_NAME(...) SIM_PICK(__VA_ARGS__, SIM_NAME_2, SIM_NAME_1)(__VA_ARGS__)
#define SIM_LOWER(...) m.impl(SIM_NAME(__VA_ARGS__).c_str(), torch::CppFunction::makeFromBoxedFunction<&in_lower_precision>());
#define SIM_FLOAT(...) m.impl(SIM_NAME(__VA_ARGS__).c_str(), torch::CppFunction::makeFromBoxedFunction<&in_float32>());
#define SIM_RESULT(...) m.impl(SIM_NAME(__VA_ARGS__).c_str(), torch::CppFunction::makeFromBoxedFunction<&with_result_in_float32>());
#define SIM_WIDEST(...) m.impl(SIM_NAME(__VA_ARGS__).c_str(), torch::CppFunction::makeFromBoxedFunction<&in_widest>());

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER)
  AT_FORALL_FP32(SIM_FLOAT)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIM_RESULT)
  AT_FORALL_PROMOTE(SIM_WIDEST)
}

}  // namespace sim
