"""`FastpackCallback`: compiles the model of a Hugging Face `Trainer`, TRL's included, in the form that is trained.

    SFTTrainer(model, args, train_dataset=texts, peft_config=lora, callbacks=[FastpackCallback()])

`torch_compile_backend="fastpack"` compiles the model that accelerate has prepared, which also works. The callback also
takes options, buckets lengths, and keeps the host's copies of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from fxpasses import default_options
from fxpasses.base.containment import contained
from fxpasses.base.once import warn_once
from fxpasses.compiler.cache_files import load_caches, save_caches
from fxpasses.compiling import backend_of
from fxpasses.data import bucket_lengths, check_buckets
from fxpasses.metadata.runtime.prefetching import keep_host_copies

_OUTPUTS = "fastpack.outputs"
# Ends of sequences in a batch, as flash attention takes them: `DataCollatorWithFlattening(return_flash_attn_kwargs)`.
_ENDS = ("cu_seq_lens_q", "cu_seq_lens_k")


class FastpackCallback(TrainerCallback):
    """Compiles `trainer.model` in place when training begins, after PEFT has wrapped it and accelerate prepared it.

    options, mode, dynamic: as in `fxpasses.compile`, except that outputs are lazy unless options or defaults say
    otherwise: in training nothing reads the logits that models return beside their loss. buckets: pads the `lengths` of
    a batch with zeros, and its `cu_seq_lens_q` and `cu_seq_lens_k` with their last element, to one of these numbers of
    sequences: True for the powers of two (see `fxpasses.data.bucket_lengths`); a sequence of length zero has no tokens.
    host_copies: integer tensors of a batch that move to a device stay known to the host, so that prologues copy nothing
    back; batches have to be dicts. keep_caches: each checkpoint has a file with the compiled code
    (`fxpasses.save_caches`), and training that is resumed from one starts with it; like any such file it holds code, so
    resume from no checkpoint that you do not trust. Raises `ValueError` for wrong options and buckets, here.

    In place means that checkpoints, `save_pretrained` and `generate` see the model that they know. Under FSDP2 each
    sharded block is compiled, as in docs/sharding.md, and the root is not. A Trainer that compiles by itself
    (`torch_compile`) stays as it is, with one warning if its backend is another.
    """

    def __init__(
        self,
        options: Mapping[str, Any] | None = None,
        *,
        mode: str | None = None,
        dynamic: bool | None = None,
        buckets: bool | Sequence[int] = False,
        host_copies: bool = True,
        keep_caches: bool = False,
    ) -> None:
        given = dict(options or {})
        if default_options.get(_OUTPUTS) is None:
            given.setdefault(_OUTPUTS, "lazy")
        self.backend = backend_of(mode, given)
        self.dynamic = dynamic
        self.buckets: Sequence[int] | bool | None = None if buckets is True else buckets
        if self.buckets is not False:
            check_buckets(self.buckets)
        self.host_copies = host_copies
        self.keep_caches = keep_caches

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.keep_caches:
            with contained("keeping compiled code in a checkpoint"):
                save_caches(_caches(args, state))

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, train_dataloader: Any = None, **_: Any
    ) -> None:
        if self.keep_caches:
            with contained("loading compiled code from a checkpoint", "It is compiled anew."):
                load_caches(_caches(args, state), missing_ok=True)
        if getattr(args, "torch_compile", False):
            if args.torch_compile_backend != "fastpack":
                warn_once(
                    ("callback", args.torch_compile_backend),
                    f"Trainer compiles the model with {args.torch_compile_backend!r} itself; FastpackCallback leaves "
                    "it so. Drop torch_compile and torch_compile_backend from its arguments.",
                )
        elif model is not None:
            with contained("compiling the model of a Trainer", "It trains uncompiled."):
                for module in _to_compile(model):
                    if module._compiled_call_impl is None:  # not in a second call of `train`
                        module.compile(backend=self.backend, dynamic=self.dynamic)
        with contained("wrapping the collator of a Trainer"):
            loader = getattr(train_dataloader, "base_dataloader", train_dataloader)
            if loader is not None and not isinstance(getattr(loader, "collate_fn", None), _Collate):
                loader.collate_fn = _Collate(loader.collate_fn, self.buckets, self.host_copies)


def _caches(args: Any, state: Any) -> Path:
    """The file with the code of this rank in the checkpoint of this step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / f"fxpasses_caches_{args.process_index}.zip"


def _to_compile(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The model itself; if FSDP2 shards it, the innermost sharded modules, around which parameters are gathered."""
    sharded = [module for module in model.modules() if _is_sharded(module)]
    blocks = [module for module in sharded if not any(_is_sharded(part) for part in list(module.modules())[1:])]
    return blocks or [model]


def _is_sharded(module: torch.nn.Module) -> bool:
    fsdp = getattr(torch.distributed, "fsdp", None) if torch.distributed.is_available() else None
    kind = getattr(fsdp, "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


class _Collate:
    """A collator that buckets lengths, and whose batches keep the host's copies of tensors that move to a device."""

    def __init__(self, collate: Callable[[Any], Any], buckets: bool | Sequence[int] | None, host_copies: bool) -> None:
        self.collate, self.buckets, self.host_copies = collate, buckets, host_copies

    def __call__(self, features: Any) -> Any:
        batch = self.collate(features)
        if type(batch) is not dict:
            return batch
        if self.buckets is not False:
            batch = {name: self._bucketed(name, value) for name, value in batch.items()}
        return Batch(batch) if self.host_copies else batch

    def _bucketed(self, name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.ndim != 1 or value.dtype.is_floating_point:
            return value
        sizes = self.buckets if isinstance(self.buckets, Sequence) else None
        if name == "lengths":
            return bucket_lengths(value, sizes)
        if name in _ENDS and len(value):
            count = len(bucket_lengths(value[1:], sizes))
            return torch.cat([value, value[-1:].expand(count + 1 - len(value))])
        return value


class Batch(dict[str, Any]):
    """A batch whose integer tensors, moved to a device by `to`, stay known to the host.

    accelerate moves a batch by its method `to`, if it has one. Prologues then read the host's copies, and nothing is
    copied back from the device.
    """

    def to(self, device: Any, non_blocking: bool = False) -> Batch:
        moved = Batch()
        for name, value in self.items():
            if isinstance(value, torch.Tensor):
                moved[name] = value.to(device, non_blocking=non_blocking)
                keep_host_copies(moved[name], value)
            else:
                moved[name] = value.to(device) if hasattr(value, "to") else value
        return moved
