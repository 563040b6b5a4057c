"""The stores of ``torch.distributed`` that its types do not export; the names are public."""

from __future__ import annotations

from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]  # see above

__all__ = ["FileStore", "TCPStore"]
