"""Communication hooks of DistributedDataParallel, torch's and ours: what a bucket of gradients travels as."""

from pdlcheck.primitives.comm_hooks.narrow import bf16_compress, fp16_compress
from pdlcheck.primitives.comm_hooks.power_sgd import PowerSGDState, power_sgd
from pdlcheck.primitives.comm_hooks.top_k import TopKState, top_k

__all__ = ["PowerSGDState", "TopKState", "bf16_compress", "fp16_compress", "power_sgd", "top_k"]
