"""Names in modules of torch that a program may never import, for the table of private names.

A check whether they are there imports these modules, which takes seconds. Only :func:`pdlcheck.compat.private.names`
imports this module, so a session does not check them; ``pdlcheck doctor`` does.
"""

from __future__ import annotations

from pdlcheck.compat.private import name
from pdlcheck.compat.torch.globals import CONTEXTS
from pdlcheck.compat.torch.patched import STANCE

__all__: list[str] = []

for _one in CONTEXTS:
    _one.register()
name(
    "torch.distributed.tensor.DTensor._local_tensor",
    "the local shard of a DTensor, which has the memory",
    lost="DTensors under --cuda-as-cpu",
)
name(
    ".".join(STANCE),
    "functions given to torch.compile, which simulated ranks run as they are written",
    lost="the second simulated rank runs the compiled code of the first one",
)
