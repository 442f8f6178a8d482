"""The features of the capture, one line each: its title, the module of its handlers, what does not work without it,
and what has to change in PyTorch or another library before it can go. `fxpasses doctor` lists them.

A module has `handlers` (`dynamo/interceptions.py`) and, where the feature needs them, some of these functions:

    close(trace)                    # called when the graph is complete
    check(trace, gm, rewritten)     # raises `FeatureRejected` for a graph that must not be used
    is_following(trace)             # whether it follows each instruction, so that none may be skipped
    changed(trace)                  # called when Python's state has changed in a way that the trace does not record
    may_replace(trace, operands)    # whether it would trace a layer alike with other operands, by those that it had
    can_be_copied(trace, branches, nodes, results)  # whether copies of these do what a layer's trace has done
    copied(trace, branches, copies, symbols)    # called with the copies of nodes, and of the symbols of sizes

`check` is called with None in place of graphs that are not known yet. A feature keeps its knowledge of one trace in a
class of its own, which `Trace.state` instantiates on first use.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True)
class _Line:
    title: str
    module: str = ""
    effect: str = ""
    until: str = ""
    needs: tuple[str, ...] = ("HINTS",)


def _rule(module: str) -> str:
    return f"fxpasses.dynamo.rules.{module}"


def _of_experts(module: str) -> str:
    return f"fxpasses.experts.capture.{module}"


class Feature(enum.Enum):
    """A part of the capture. The members are in the order of their handlers, unless `order` gives another.

    title: its name in messages. module: the module of its handlers; "" for a part of another feature that has none.
    effect: what does not work while it is off. until: when it can go.
    """

    FLOATS = _Line(
        "floating-point arithmetic",
        _rule("float_arithmetic"),
        "numbers computed in floating point may be rounded otherwise than by Python",
        until="sympy keeps the order of sums and products of floats",
        needs=(),
    )
    HINTS = _Line(
        "value hints",
        "fxpasses.dynamo.hints",
        "code that asks the batch for a number breaks the graph",
        until="Dynamo asks the batch, and guards the answer",
        needs=(),
    )
    MEMBERS = _Line(
        "members of lists",
        _rule("list_members"),
        "`3 in lengths.tolist()` may take the wrong branch",
        until="Dynamo compares numbers without a value when it searches a list",
        needs=(),
    )
    CHUNKS = _Line(
        "ranges over chunks",
        _rule("chunk_ranges"),
        "`range(0, n, 64)` is compiled anew for each n",
        until="a range of Dynamo's may have an end without a value",
    )
    SLICES = _Line(
        "sizes of slices",
        _rule("slice_sizes"),
        "slices whose bounds depend on the batch may break the graph",
        until="fake kernels define the sizes that they make, and AOTAutograd keeps what is learned of them later",
    )
    LAYOUTS = _Line(
        "layouts of convolutions",
        _rule("conv_layouts"),
        "trimmed images in channels-last layout may be compiled for other strides",
        until="the fake kernel of a convolution finds channels-last layout without asking for sizes",
    )
    OUTPUTS = _Line(
        "recorded outputs",
        _rule("recorded_outputs"),
        "transformers' recorded outputs of layers break the graph",
        until="Dynamo traces transformers' hooks: `with lock:`, appends in checkpoints, and `Signature.parameters`",
    )
    STORES = _Line(
        "stored values",
        _rule("stored_values"),
        "what checkpointed layers store outside break the graph",
        until="Dynamo allows side effects in checkpoints that a recomputation repeats",
    )
    SHARED = _Line(
        "shared tensors",
        _rule("shared_tensors"),
        "tensors that checkpointed layers share through a dict break the graph",
        until="Dynamo allows side effects in checkpoints that a recomputation repeats",
    )
    GRADIENTS = _Line(
        "required gradients",
        _rule("required_gradients"),
        "requiring the gradient of an intermediate breaks the graph",
        until="AOTAutograd differentiates with respect to intermediates",
    )
    ADAPTED = _Line(
        "adapted parameters",
        _rule("adapted_parameters"),
        "LoRA on parameters, such as the weights of experts, breaks the graph",
        until="Dynamo traces `register_parametrization`, or PEFT computes the adapted parameter without it",
    )
    OUT = _Line(
        "out= arguments",
        _rule("out_arguments"),
        "`torch.mm(..., out=...)` into memory that is not contiguous breaks the graph",
        until="functionalization keeps the strides of `out=` arguments",
    )
    HOST = _Line(
        "functions of metadata",
        _rule("host_functions"),
        "positions and windows of images break the graph, or are compiled anew for each batch",
        until="transformers computes them by tensor operations, or before the model",
    )
    CTC = _Line(
        "CTC losses",
        _rule("ctc_losses"),
        "`F.ctc_loss` with lengths in tensors breaks the graph",
        until="`torch._ctc_loss` has a meta kernel",
    )
    PADDED = _Line(
        "padded sequences",
        _rule("padded_sequences"),
        "`pad_sequence` compiles for each order of the lengths",
        until="`pad_sequence` has a decomposition that takes a maximum",
    )
    STRIDES = _Line(
        "strides in backward functions",
        _rule("strides_in_backward"),
        "`.stride()` in the backward of a function may break the graph",
        until="Dynamo knows the strides of what a backward allocates",
    )
    RANDOM = _Line(
        "random numbers",
        _rule("random_numbers"),
        "`if random.uniform(0, 1) < rate:` breaks the graph, also at rate 0",
        until="Dynamo traces branches on numbers of `random`",
    )
    WARNINGS = _Line(
        "warnings", _rule("shown_once"), "`warnings.warn(...)` breaks the graph", until="Dynamo traces `warnings.warn`"
    )
    SCALARS = _Line(
        "integer tensors in indices",
        _rule("scalar_indices"),
        "tuples of integer tensors in an index fail",
        until="Dynamo makes a tensor of a tuple in an index",
    )
    STRINGS = _Line(
        "strings with sizes",
        _rule("lazy_strings"),
        'f"{x.shape[0]} tokens" is compiled anew for each size',
        until="Dynamo joins the parts of a string when it is read",
        needs=(),
    )
    FUNCTIONS = _Line(
        "numbers of autograd functions",
        _rule("function_numbers"),
        "an autograd function that reads a number ends the capture of the model",
        until="Dynamo gives an autograd function's backward the numbers that forward has read",
    )
    INSIDE = _Line("numbers captured in autograd functions", needs=("FUNCTIONS", "HINTS"))
    PLANS = _Line(
        "plans of random blocks",
        _rule("block_plans"),
        "BigBird's random blocks, drawn from a constant seed, break the graph",
        until="Dynamo seeds NumPy's generator as the program does",
    )
    QUERIES = _Line(
        "sizes of queries",
        _rule("query_sizes"),
        "graphs assert that `torch.where(mask)` finds no more elements than the mask has, which takes time",
        until="PyTorch asserts no range that an operator ensures",
    )
    CODE = _Line(
        "unused code",
        _rule("unused_code"),
        "code is generated for each graph that Dynamo completes, which takes time",
        until="Dynamo makes no module of a graph to write assertions into it",
    )
    SPECULATION = _Line(
        "speculation",
        _of_experts("speculation_handlers"),
        "loops that skip experts without tokens break the graph",
        until="nothing is planned in Dynamo that could take its place",
    )
    NUMPY = _Line(
        "NumPy's numbers",
        _of_experts("numpy_counts"),
        "loops over counts that went through NumPy break the graph",
        until="elements of a NumPy array are numbers in Dynamo, as those of `.tolist()` are",
        needs=("HINTS", "SPECULATION"),
    )
    LISTS = _Line(
        "grown lists",
        _of_experts("grown_lists"),
        "lists that grow only for experts with tokens break the graph",
        until="nothing is planned in Dynamo that could take its place",
        needs=("HINTS", "SPECULATION"),
    )
    INDICES = _Line(
        "lists of indices",
        _of_experts("index_lists"),
        "an expert's tokens as a list of indices break the graph",
        until="Dynamo has lists of a length without a value",
        needs=("HINTS", "SPECULATION"),
    )
    ROUNDS = _Line(
        "equal rounds",
        _of_experts("equal_rounds"),
        "each round of a loop over experts is traced",
        until="nothing is planned in Dynamo that could take its place",
        needs=("HINTS", "SPECULATION"),
    )
    SEQUENCES = _Line(
        "loops over parts",
        "fxpasses.sequences.capture.handlers",
        "loops over parts, `x.split(lengths.tolist())`, are unrolled, and compile for each number of parts",
        until="nothing is planned in Dynamo that could take its place",
        needs=("HINTS", "SPECULATION"),
    )
    HOOKS = _Line(
        "repeated hooks",
        _rule("repeated_hooks"),
        "a model whose checkpointing is switched off and on compiles again each time",
        until="transformers adds the hook once",
        needs=(),
    )
    WRITES = _Line(
        "writes in checkpoints",
        _rule("checkpoint_writes"),
        "what checkpointed layers write to buffers is written once",
        until="AOTAutograd repeats a checkpoint's writes in its recomputation",
        needs=(),
    )
    LAYERS = _Line(
        "equal layers",
        _rule("equal_layers"),
        "each of equal layers is traced",
        until="Dynamo traces equal layers once, without a mark on them",
    )
    MOVED = _Line("writes moved out of checkpoints", needs=("HINTS", "WRITES"))

    @property
    def title(self) -> str:
        return self.value.title

    @property
    def module(self) -> str:
        return self.value.module

    @property
    def effect(self) -> str:
        return self.value.effect

    @property
    def until(self) -> str:
        return self.value.until

    def needs(self, other: Feature) -> bool:
        """Whether this feature is off if `other` is."""
        return other is self or other.name in self.value.needs
