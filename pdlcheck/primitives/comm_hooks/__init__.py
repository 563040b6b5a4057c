"""Communication hooks for torch's DistributedDataParallel and pdlcheck's: the form in which gradient buckets travel."""

from pdlcheck.primitives.comm_hooks.narrow import bf16_compress, fp16_compress
from pdlcheck.primitives.comm_hooks.power_sgd import PowerSGDState, power_sgd
from pdlcheck.primitives.comm_hooks.top_k import TopKState, top_k

__all__ = ["PowerSGDState", "TopKState", "bf16_compress", "fp16_compress", "power_sgd", "top_k"]
