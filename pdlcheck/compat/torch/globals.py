"""The globals of torch that its context managers and global hooks change.

``late_names.py`` has ``CONTEXTS`` in the table of private names, because some of their modules take long to import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from pdlcheck.compat.private import name

__all__ = ["CONTEXTS", "HOOKS", "TorchGlobal"]


def _same(value: Any) -> Any:
    return value


class TorchGlobal(NamedTuple):
    """A global of torch.

    Args:
        module: the module, which a program may not have imported.
        owner: the object in the module that has the attribute, as a dotted path; empty: the module itself.
        attribute: the attribute.
        what: what it is for.
        at_rest: returns the value outside of a context manager, given the present one.
        is_assigned: whether each context manager assigns a new object when it is entered.
        only_grows: whether entries are added to tens of others, which are never replaced.
    """

    module: str
    owner: str
    attribute: str
    what: str
    at_rest: Callable[[Any], Any] = _same
    is_assigned: bool = False
    only_grows: bool = False

    def register(self) -> None:
        """Put the name into the table of private names."""
        path = ".".join(filter(None, self[:3]))
        name(path, f"{self.what} for each simulated rank", lost=f"simulated ranks share {self.what}")


def _without_losses(handlers: dict[Any, Any]) -> dict[Any, Any]:
    return {op: call for op, call in handlers.items() if not call.__module__.endswith(".parallel.loss")}


_MODULES: Final = (
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_buffer_registration_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
    "_global_forward_pre_hooks",
    "_global_is_full_backward_hook",
    "_global_module_registration_hooks",
    "_global_parameter_registration_hooks",
)
_OPTIMIZERS: Final = ("_global_optimizer_post_hooks", "_global_optimizer_pre_hooks")
HOOKS: Final = (
    *(TorchGlobal("torch.nn.modules.module", "", name, "the hooks of all modules") for name in _MODULES),
    *(TorchGlobal("torch.optim.optimizer", "", name, "the hooks of all optimizers") for name in _OPTIMIZERS),
)
for _hook in HOOKS:
    _hook.register()

_DEBUG: Final = "torch.distributed.fsdp._debug_utils"
_WRAP: Final = ("torch.distributed.fsdp.wrap", "_ConfigAutoWrap")
_IN_WRAP: Final = "the block of enable_wrap"
_PARAMETRIZE: Final = "torch.nn.utils.parametrize"
_CACHE: Final = "the cache of parametrizations"
CONTEXTS: Final = (
    TorchGlobal("torch.utils.checkpoint", "", "_enable_checkpoint_early_stop", "the switch of checkpoint's early stop"),
    TorchGlobal(
        "torch._dynamo.eval_frame", "", "_in_optimized_module", "the mark of a running compiled module", lambda _: False
    ),
    TorchGlobal(_PARAMETRIZE, "", "_cache_enabled", _CACHE, lambda entered: 0),
    TorchGlobal(_PARAMETRIZE, "", "_cache", _CACHE, lambda cache: {}, is_assigned=True),
    TorchGlobal(_DEBUG, "SimpleProfiler", "profiling", "the profiler of FSDP", lambda profiled: set()),
    TorchGlobal(*_WRAP, "in_autowrap_context", _IN_WRAP, lambda entered: False),
    TorchGlobal(*_WRAP, "wrapper_cls", _IN_WRAP, lambda wrapper: None),
    TorchGlobal(*_WRAP, "kwargs", _IN_WRAP, lambda kwargs: {}, is_assigned=True),
    TorchGlobal(
        "torch.distributed.tensor._api",
        "DTensor._op_dispatcher",
        "_custom_op_handlers",
        "the operators of loss_parallel",
        _without_losses,
        only_grows=True,
    ),
)
