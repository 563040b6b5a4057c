"""The private names of torch's dispatcher: its operations, their schemas, and fake tensors."""

from __future__ import annotations

from typing import Any, Final

import torch

from pdlcheck.compat.private import name, take, uses

__all__ = ["COMMUNICATION", "CommModeOp", "FakeTensor", "is_below_autograd", "schema_of"]

COMMUNICATION: Final = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional")  # namespaces of ops

FakeTensor: Any = take(
    "torch._subclasses.fake_tensor.FakeTensor",
    "tensors without memory, to which no access is a hazard",
    lost="the simulated world",
)
_OpOverload: Any = take(
    "torch._ops.OpOverload",
    "the operations that have a schema",
    lost="the simulated world does not detect accesses to buffers of pending operations",
)
_is_excluded: Any = take(
    "torch._C._dispatch_tls_is_dispatch_key_excluded",
    "whether a call comes from C++, below autograd",
    lost="outputs that require grad are not refused as gloo refuses them",
)
_KEY: Final = name(
    "torch._C.DispatchKey.AutogradFunctionality",
    "whether a call comes from C++, below autograd",
    lost="outputs that require grad are not refused as gloo refuses them",
).value
name(
    "torch._ops.OpOverload._overloadpacket",
    "the name under which CommDebugMode counts an operation",
    lost="CommDebugMode does not count the collectives of watched groups",
)


@uses(
    "torch._ops.OpOverload._schema",
    lost="the simulated world does not detect accesses to buffers of pending operations",
)
def schema_of(func: Any) -> Any:
    """Return the schema of an operation, which says what it reads and writes; None without one."""
    return func._schema if isinstance(func, _OpOverload) else None


def is_below_autograd() -> bool:
    """Return whether the caller runs below autograd, as calls from C++ do."""
    return bool(_is_excluded(_KEY))


class CommModeOp:
    """A stand-in for an op of the dispatcher, with the attributes that CommDebugMode reads; it does nothing if called.

    Args:
        name: the name of the op, ``allreduce_``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._overloadpacket = getattr(torch.ops.c10d, name, None)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def __repr__(self) -> str:
        return f"c10d.{self._name}.default"
