"""Buckets for embeddings built with sparse=True: only the rows that were looked up travel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from pdlcheck.primitives.data_parallel.buckets import Bucket
from pdlcheck.primitives.flat import gradient_dtype

__all__ = ["SparseBucket", "sparse_embeddings"]


class SparseBucket(Bucket):
    """A bucket of one embedding table. The buffer has space for flags only; the rows travel in a separate message.

    Args:
        index, dtype: as in :class:`Bucket`.
        param: the table, of shape (rows, columns).
    """

    def __init__(self, index: int, param: Parameter, dtype: torch.dtype) -> None:
        super().__init__(index, [param], dtype, sizes=[0])
        self._summed = self.whole.new_empty(0)
        self._rows: dist.Work | None = None

    def fill(self, scale: float, *, trouble: bool, empty: bool = False) -> None:
        """Prepare the message of rows, and write the flags. The rows are scaled later, in ``reduce_beside``."""
        grad = None if empty else self.params[0].grad
        self._summed = self._message(grad)
        self.note([None if grad is None else self.views[0]], trouble=trouble)

    def reduce_beside(self, group: dist.ProcessGroup, divisor: int) -> None:
        """Divide the rows, and begin to sum them over the ranks."""
        self._summed = self._summed / divisor
        self._rows = group.allreduce([self._summed])

    def wait_beside(self) -> None:
        """Wait for the sum of the rows."""
        if self._rows is not None:
            self._rows.wait()
            self._rows = None

    def gives_at_once(self, *, as_view: bool) -> bool:
        """Return False: the gradient is not a view of the buffer."""
        return False

    def give(self, used: Sequence[float] | None, *, as_view: bool) -> None:
        """Assign the table its reduced gradient, unless no rank used the table."""
        param, reduced = self.params[0], self._summed.to(gradient_dtype(self.params[0]))
        if used is not None and not used[0]:
            return
        if param.grad is not None and param.grad.layout == torch.strided:  # the weight is tied to a dense layer's
            param.grad.copy_(reduced.to_dense())
        else:
            param.grad = reduced

    def _message(self, grad: Tensor | None) -> Tensor:
        param = self.params[0]
        if grad is None:
            places = torch.zeros(1, 0, dtype=torch.int64, device=param.device)
            rows = torch.zeros(0, *param.shape[1:], dtype=self.whole.dtype, device=param.device)
            return torch.sparse_coo_tensor(places, rows, param.shape, check_invariants=False)
        if grad.shape != param.shape:
            raise RuntimeError(f"a gradient of shape {tuple(grad.shape)}")
        if grad.layout != torch.sparse_coo or grad.sparse_dim() != 1:
            grad = grad.to_dense().to_sparse(1)
        return grad.coalesce().to(self.whole.dtype)


def sparse_embeddings(module: nn.Module) -> dict[str, Parameter]:
    """Return the tables in ``module`` with sparse gradients, by name."""
    made_by = (nn.Embedding, nn.EmbeddingBag)
    tables = {id(part.weight) for part in module.modules() if isinstance(part, made_by) and part.sparse}
    return {name: param for name, param in module.named_parameters() if id(param) in tables}
