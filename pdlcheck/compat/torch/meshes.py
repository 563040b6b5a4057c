"""The private names of ``DeviceMesh``."""

from __future__ import annotations

from typing import Any

from pdlcheck.compat.private import uses

__all__ = ["whole_mesh"]


@uses(
    "torch.distributed.device_mesh.DeviceMesh._root_mesh",
    lost="slices of a mesh of CUDA devices are of the CPU under --cuda-as-cpu",
)
def whole_mesh(mesh: Any) -> Any:
    """Return the mesh that a mesh was sliced from; the mesh itself if it is no slice."""
    return getattr(mesh, "_root_mesh", None) or mesh
