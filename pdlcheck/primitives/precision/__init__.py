"""Mixed precision over ranks: a scaler with one scale on all ranks, clipping by the global norm, master weights.

The opt-levels of Apex, and their equivalents today:

====  =========================================  ==========================================================
O0    float32 everywhere                         neither autocast nor scaler
O1    functions cast, weights float32, dynamic   ``torch.autocast("cuda", torch.float16)`` around the forward
      loss scale                                 pass, and :class:`DistributedGradScaler`; with bfloat16, whose
                                                 range is that of float32, ``enabled=False`` for the scaler
O2    model in float16 except batch norm, with   ``model.bfloat16()`` and :class:`MasterWeights`; with float16
      float32 master weights                     also the scaler, on the optimizer of the masters
O3    float16 everywhere                         ``model.half()``; a step below an ulp of the weight is lost
====  =========================================  ==========================================================

The order of a step; every rank runs each part::

    with torch.autocast("cuda", torch.float16):
        loss = criterion(model(inputs), targets)
    scaler.scale(loss).backward()
    sync_gradients(model)                             # float16 and bfloat16 are summed in float32
    scaler.clip_grad_norm_(optimizer, max_norm=1.0)   # unscales first, once
    scaler.step(optimizer)                            # on all ranks, or on none
    scaler.update()                                   # the same scale on every rank

:func:`pdlcheck.primitives.sync_gradients` sums float16 and bfloat16 gradients in float32. So a small contribution is
not lost beside a large one, and a sum of float16 gradients does not overflow if their mean fits.

Source: P. Micikevicius et al., "Mixed precision training", ICLR (2018); the opt-levels are those of "How to scale
training on multiple GPUs" (2019).
"""

from pdlcheck.primitives.precision.clip import clip_grad_norm
from pdlcheck.primitives.precision.master import MasterWeights
from pdlcheck.primitives.precision.saved import saved_activation_bytes
from pdlcheck.primitives.precision.scaler import DistributedGradScaler

__all__ = ["DistributedGradScaler", "MasterWeights", "clip_grad_norm", "saved_activation_bytes"]
