"""Programs that PyTorch ships with its own tests: samples of operators, modules, and programs to capture.

They stand in `torch.testing._internal` and `torch._export.db`, private names that were checked on torch 2.11, 2.13 and
2.15.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch._export.db.examples import all_examples

from tests.peers.comparing import Function, Program

# Samples of an operator, the first of which is the plainest. The last takes its keywords; all are up to thousands.
LOOKED_AT = 8


def name_of(info: Any) -> str:
    return ".".join(part for part in (info.name, getattr(info, "variant_test_name", "")) if part)


def defined(infos: Iterable[Any]) -> list[Any]:
    """Without operators that return memory as it is, and those that are compiled for CUDA."""
    return [info for info in infos if "empty" not in info.name and not info.name.startswith("jiterator")]


def operators(infos: Iterable[Any]) -> Iterator[Program]:
    """Each on one of its samples, with gradients where it has them, and on another one in place."""
    for info in infos:
        found = _plainest(info)
        if not found:
            continue
        first, last = found[0], found[-1]
        build = partial(_call, info.op, (last.input, *last.args), last.kwargs)
        yield Program(name_of(info), build, last.output_process_fn_grad)
        if info.inplace_variant is not None and not first.broadcasts_input:
            build = partial(_in_place, info.inplace_variant, (first.input, *first.args), first.kwargs)
            yield Program(f"{name_of(info)}, in place", build)


def read_by_the_host(infos: Iterable[Any]) -> Iterator[Program]:
    """Each on a sample of integers: metadata of a batch, of which the host reads a number that scales activations."""
    for info in infos:
        if _takes(info, torch.int64):
            for sample in _samples(info, torch.int64, False)[-1:]:
                build = partial(_read, info.op, (sample.input, *sample.args), sample.kwargs)
                yield Program(name_of(info), build)


def modules(infos: Iterable[Any]) -> Iterator[Program]:
    """Each in training, with the first of its arguments that has an input."""
    for info in infos:
        torch.manual_seed(0)
        inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=True)
        given = next((each for each in inputs if each.forward_input is not None), None)
        if given is not None:
            yield Program(info.name, partial(_module, info, given))


def optimizers(infos: Iterable[Any]) -> Iterator[Program]:
    """A step of each with the last of the arguments that it is tested with."""
    for info in infos:
        arguments = info.optim_inputs_func("cpu")[-1].kwargs
        yield Program(info.optim_cls.__name__, partial(_optimizer, info, arguments))


def of_rows(info: Any, at_most: int = 3) -> list[Any]:
    """Samples of an operator whose input has three rows or more."""
    found = _plainest(info)
    return [
        sample
        for sample in found
        if isinstance(sample.input, torch.Tensor) and sample.input.ndim and len(sample.input) > 2
    ][:at_most]


def _plainest(info: Any) -> list[Any]:
    """Samples of the first of these dtypes that an operator takes, with gradients where it has them."""
    dtype = next((each for each in (torch.float32, torch.int64, torch.bool) if _takes(info, each)), None)
    return [] if dtype is None else _samples(info, dtype, info.supports_autograd and dtype.is_floating_point)


def _takes(info: Any, dtype: torch.dtype) -> bool:
    return dtype in info.supported_dtypes("cpu")


def _samples(info: Any, dtype: torch.dtype, requires_grad: bool) -> list[Any]:
    torch.manual_seed(0)
    return list(islice(info.sample_inputs("cpu", dtype, requires_grad=requires_grad), LOOKED_AT))


def _call(op: Function, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    def program(*arguments: Any, **keywords: Any) -> Any:
        return op(*arguments, **keywords)

    return program, arguments, keywords


def _in_place(op: Function, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    def program(x: Any, *arguments: Any, **keywords: Any) -> Any:
        x = x.clone()
        return op(x, *arguments, **keywords), x

    return program, arguments, keywords


def _read(op: Function, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    def program(activations: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        result = op(*arguments, **keywords)
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, torch.Tensor):
                activations = activations * each.sum().item()
        return activations

    return program, (torch.ones(3, requires_grad=True), *arguments), keywords


def _module(info: Any, given: Any) -> Any:
    module = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs)
    return module.train(), given.forward_input.args, given.forward_input.kwargs


def _optimizer(info: Any, keywords: dict[str, Any]) -> Any:
    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (4, 2))]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer = info.optim_cls(weights, **keywords)

    def program() -> list[torch.Tensor]:
        optimizer.step()
        return [weight.detach().clone() for weight in weights]

    return program, (), {}


def examples() -> Iterator[Program]:
    """Of what `torch.export` captures and of what it does not."""
    for name, case in all_examples().items():
        yield Program(name, partial(_example, case))


def _example(case: Any) -> Any:
    return case.model, case.example_args, case.example_kwargs
