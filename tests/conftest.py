"""What a test may assume: fresh Dynamo state, seed 0, one thread; gpu tests run only where CUDA is.

Fixtures that tests of several folders ask for are here as well.
"""

import gc
import itertools
import os
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import torch._dynamo.guards
import torch.distributed as dist

from fxpasses.base import once
from fxpasses.dynamo import flags
from tests import rounding
from tests.support import thorough

# On a busy machine, threads that wait for each other take a hundred times as long as these tensors need.
MAX_THREADS = 1

# No deadline: the first example of a property pays for compilation.
hypothesis.settings.register_profile("fxpasses", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("fxpasses")

if torch.get_num_threads() > MAX_THREADS:
    torch.set_num_threads(MAX_THREADS)

# Inductor takes code for one capability from the cache for another, where it may not compile (docs/upstream.md).
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"fxpasses_{capability}"))

if rounding.BY_SIZES:
    rounding.round_by_sizes()

_APART = [Path(__file__).with_name(name) for name in ("device", "cuda_code")]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests that change their process are collected where they are asked for: `test_device.py` and `test_cuda_code.py`
    give them one."""
    if collection_path not in _APART:
        return None
    asked = [(config.invocation_params.dir / argument.split("::")[0]).resolve() for argument in config.args]
    return None if any(collection_path in (path, *path.parents) for path in asked) else True


# Of a parametrized test, so many cases are quick, where it compiles in each of them; `quick(n)` says another number. Of
# the others, and of those that are marked as slow, so many are slow, the rest need THOROUGH=1. `all_cases`: no rule.
MOST_QUICK = 3
MOST_SLOW = 1
_COMPILING = {
    *("attention", "compiler", "device", "distributed", "dynamo", "end_to_end", "experts", "fold", "inspect"),
    *("integrations", "loss", "memory", "metadata", "offload", "programs", "rows", "sequences", "topk"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    families: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("all_cases"):
            families.setdefault((item.path, item.originalname), []).append(item)
    for family in families.values():
        _sort_by_speed(family)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def _sort_by_speed(family: list[pytest.Item]) -> None:
    first = family[0]
    quick = [item for item in family if not item.get_closest_marker("slow")]
    mark = first.get_closest_marker("quick")
    most = mark.args[0] if mark else MOST_QUICK if first.path.parent.name in _COMPILING else len(family)
    kept = _spread(len(quick), most)
    for item in (item for at, item in enumerate(quick) if at not in kept):
        item.add_marker("slow")
    slow = [item for item in family if item.get_closest_marker("slow") and not item.get_closest_marker("skipif")]
    kept = _spread(len(slow), MOST_SLOW)
    for item in (item for at, item in enumerate(slow) if at not in kept):
        item.add_marker(thorough)


def _spread(cases: int, number: int) -> set[int]:
    """So many of the cases, all over them, and without a period, which several parameters would have in common."""
    found: set[int] = set()
    steps = itertools.count()
    while len(found) < min(cases, number):
        found.add(int(next(steps) * 0.618034 % 1 * cases))
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip what PyTorch's own attention refuses: bfloat16 on a processor with AMX, under another capability."""
    try:
        return (yield)
    except Exception as error:
        if capability and "pack_vnni2 is only supported" in "".join(traceback.format_exception(error)):
            pytest.skip("scaled_dot_product_attention of bfloat16 fails here, under eager mode as well")
        raise


@pytest.fixture(autouse=True, scope="module")
def little_garbage() -> None:
    """The collector looks only at what the module's tests make: all that a run leaves behind takes it seconds."""
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def guards_are_not_timed() -> Iterator[None]:
    """Dynamo times the guards of each graph that it compiles, with empty caches of the processor, which takes 30 ms."""

    def check_once(root: Any, local_scope: Any, iterations: int) -> float:
        root.check(local_scope)
        return 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo.guards, "profile_guard_manager", check_once, raising=False)
        yield


@pytest.fixture(autouse=True, scope="session")
def pytorch_operators_stay() -> Iterator[None]:
    """An operator that is made anew has another identity, so Inductor's lowerings and decompositions miss it."""

    def overloads() -> dict[str, list[torch._ops.OpOverload]]:
        packets = [each for each in vars(torch.ops.aten).values() if isinstance(each, torch._ops.OpOverloadPacket)]
        kind = torch._ops.OpOverload
        return {str(packet): [each for each in vars(packet).values() if isinstance(each, kind)] for packet in packets}

    before = overloads()
    yield
    after = overloads()
    anew = [str(each) for name, known in before.items() for each in known if not any(each is a for a in after[name])]
    assert not anew, f"made anew by these tests: {', '.join(anew)}"


@pytest.fixture(autouse=True)
def fresh_dynamo_and_seed() -> None:
    """Resets Dynamo's compiled code and seeds torch, so that no test depends on the tests before it."""
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture
def capture_flags() -> Iterator[None]:
    """Dynamo's capture flags are on, as they are in a process that has used the backend."""
    with flags.scoped():
        yield


@pytest.fixture(autouse=True)
def warnings_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings that a process gives once are given again."""
    monkeypatch.setattr(once, "_given", set())


@pytest.fixture
def single_process_group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
