"""Runs a program of rows chunk by chunk, with the products that make its logits and use their gradient.

    for rows in chunks:
        logits = x[rows] @ w.T                          a buffer, used for each chunk
        total += program(logits, target[rows], ...)     overwrites the logits with their gradient
        x_grad[rows] = logits @ w
        w_grad += logits.T @ x[rows]

Three products, as in eager mode, and memory for one chunk. Computing the gradients in forward is the idea of Liger
Kernel's fused linear cross entropy (Hsu et al., 2024, https://arxiv.org/abs/2410.10989), here for any program of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxpasses.loss.row_program import RowProgram, Wanted, widened

# Measured on a CPU (bench case `loss_head`): with fewer rows, products wait for the weight and its gradient, which are
# read and written for each chunk; more bytes gain nothing.
CHUNK_BYTES, _LEAST_ROWS = 60 << 20, 256
_MOST_BYTES = 96 << 20  # of a chunk with the least number of rows
_MULTIPLE = 32  # products of an odd number of rows take some 4 % longer
_BLOCK = 4096  # columns whose products are added at a time, if they are added in another dtype


@dataclass(frozen=True)
class Operands:
    """xs: the rows [N, H] of each product; ws: its weight [V, H]. rows: operands [N, ...]. shared: without rows."""

    xs: Sequence[Tensor]
    ws: Sequence[Tensor]
    rows: Sequence[Tensor]
    shared: Sequence[Tensor]

    @property
    def all(self) -> list[Tensor]:
        return [*self.xs, *self.ws, *self.rows, *self.shared]


@dataclass(frozen=True)
class Found:
    """total: the sum of results times cotangents, if there are any. values: the results for all rows, if wanted.
    gradients: those of the operands for which they are wanted, in order."""

    total: Tensor | None
    values: list[Tensor]
    gradients: list[Tensor]


def run(
    program: RowProgram, operands: Operands, cotangents: Sequence[Tensor], needs: Sequence[bool], values: bool
) -> Found:
    """Run a program on all rows, or, without values, on those whose cotangents are not all 0.

    needs: for each of `operands.all`, whether its gradient is wanted.
    """
    return _Run(program, operands, cotangents, needs, values).run()


class _Run:
    def __init__(
        self, program: RowProgram, operands: Operands, cotangents: Sequence[Tensor], needs: Sequence[bool], values: bool
    ) -> None:
        self.program, self.operands, self.cotangents, self.values = program, operands, cotangents, values
        count = len(operands.xs)
        self.need_x, self.need_w = needs[:count], needs[count : 2 * count]
        self.need_rest = needs[2 * count :]
        of_products = [x or w for x, w in zip(self.need_x, self.need_w, strict=True)]
        self.wanted = Wanted(values, (*of_products, *self.need_rest))

    def run(self) -> Found:
        self.index = self._read()
        xs, rows, cotangents = (self._taken(own) for own in (self.operands.xs, self.operands.rows, self.cotangents))
        shared = [x.contiguous() for x in self.operands.shared]
        total: Tensor | None = None
        found: list[list[Tensor]] = []
        parts = self._parts(len(xs[0]))
        self._prepare(bool(parts))
        most = max((part.stop - part.start for part in parts), default=0)
        buffers = [x.new_empty(most, w.shape[0]) for x, w in zip(xs, self.operands.ws, strict=True)]
        for part in parts:
            z = [buffer[: part.stop - part.start] for buffer in buffers]
            for logits, x, w in zip(z, xs, self.operands.ws, strict=True):
                torch.mm(x[part], w.t(), out=logits)
            operands = [*z, *(x[part] for x in rows), *shared]
            results = list(self.program(operands, [c[part] for c in cotangents], self.wanted))
            if cotangents:
                own = results.pop(0)
                total = own if total is None else total + own
            if self.values:
                found.append([results.pop(0) for _ in self.program.results])
            self._accumulate(part, z, [x[part] for x in xs], results, part is parts[0])
        if cotangents and total is None:
            total = torch.zeros((), dtype=self.program.wide, device=xs[0].device)
        return Found(total, self._joined(found), self._gradients())

    def _taken(self, operands: Sequence[Tensor]) -> list[Tensor]:
        return [x.contiguous() if self.index is None else x.index_select(0, self.index) for x in operands]

    def _read(self) -> Tensor | None:
        """The rows whose cotangents are not 0, if the host may read them; None for all rows."""
        if self.values or not self.cotangents or self.operands.xs[0].device.type != "cpu":
            return None
        used = torch.stack([(c != 0).flatten(1).any(1) if c.dim() > 1 else c != 0 for c in self.cotangents]).any(0)
        index = used.nonzero()[:, 0]
        return None if len(index) == len(used) else index

    def _parts(self, count: int) -> list[slice]:
        """Chunks of rows, of about the same length."""
        logits = sum(w.shape[0] * w.element_size() for w in self.operands.ws)
        products = [x.new_empty(0, w.shape[0]) for x, w in zip(self.operands.xs, self.operands.ws, strict=True)]
        saved = self.program.bytes_saved_of_a_row([*products, *self.operands.rows, *self.operands.shared])
        # A gradient is computed in the memory that the softmax saves; tensors that a cap saves come on top, twice.
        row = max(logits, 2 * saved - logits)
        most = max(1, CHUNK_BYTES // row, min(_LEAST_ROWS, _MOST_BYTES // row))
        most -= most % _MULTIPLE if most > _MULTIPLE else 0
        length = -(-count // max(1, -(-count // most)))
        if length > _MULTIPLE:
            length += -length % _MULTIPLE
        return [slice(start, min(count, start + length)) for start in range(0, count, length or 1)]

    def _prepare(self, any_chunk: bool) -> None:
        """Allocate the gradients: zeros if chunks are summed, and where no chunk may write.

        The first chunk writes the gradients of weights: filling them with zeros takes longer than it looks.
        """
        own = self.operands
        is_part = self.index is not None

        def like(x: Tensor, sums: bool) -> Tensor:
            if sums:
                return torch.zeros(x.shape, dtype=widened(x.dtype), device=x.device)
            make = torch.zeros if is_part else torch.empty
            return make(x.shape, dtype=x.dtype, device=x.device)

        self.of_x = [like(x, False) if need else None for x, need in zip(own.xs, self.need_x, strict=True)]
        self.of_w = [
            (w.new_empty(w.shape) if any_chunk and w.dtype == x.dtype == widened(w.dtype) else like(w, True))
            if need
            else None
            for x, w, need in zip(own.xs, own.ws, self.need_w, strict=True)
        ]
        rest = [*((x, False) for x in own.rows), *((x, True) for x in own.shared)]
        self.of_rest = [like(*each) for each, need in zip(rest, self.need_rest, strict=True) if need]
        self.rest_sums = [sums for (_, sums), need in zip(rest, self.need_rest, strict=True) if need]

    def _accumulate(self, part: slice, z: list[Tensor], xs: list[Tensor], rest: list[Tensor], is_first: bool) -> None:
        at = part if self.index is None else self.index[part]
        for gradient, x, w, of_x, of_w in zip(z, xs, self.operands.ws, self.of_x, self.of_w, strict=True):
            if of_x is not None and self.index is None:
                torch.mm(gradient, w, out=of_x[part])
            elif of_x is not None:
                of_x[at] = gradient @ w
            if of_w is not None and of_w.dtype == gradient.dtype:
                if is_first:
                    torch.mm(gradient.t(), x, out=of_w)
                else:
                    of_w.addmm_(gradient.t(), x)
            elif of_w is not None:
                for start in range(0, len(of_w), _BLOCK):
                    of_w[start : start + _BLOCK] += gradient[:, start : start + _BLOCK].t() @ x
        for gradient, total, sums in zip(rest, self.of_rest, self.rest_sums, strict=True):
            if sums:
                total += gradient
            else:
                total[at] = gradient

    def _joined(self, found: list[list[Tensor]]) -> list[Tensor]:
        if not self.values:
            return []
        if not found:
            device = self.operands.xs[0].device
            return [torch.empty(0, *r.sizes, dtype=r.dtype, device=device) for r in self.program.results]
        return [torch.cat(parts) for parts in zip(*found, strict=True)]

    def _gradients(self) -> list[Tensor]:
        own = self.operands
        needed = [x for x, need in zip(own.all, [*self.need_x, *self.need_w, *self.need_rest], strict=True) if need]
        made = [*(g for g in self.of_x if g is not None), *(g for g in self.of_w if g is not None), *self.of_rest]
        return [gradient.to(x.dtype) for gradient, x in zip(made, needed, strict=True)]
