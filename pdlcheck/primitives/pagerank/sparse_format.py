"""The check of a scipy matrix before scipy's compiled code follows its index arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["well_formed"]


def well_formed(matrix: Any) -> Any:
    """Return ``matrix`` with index arrays that were checked in full; ``matrix`` itself does not change.

    When a CSR, CSC or BSR matrix is made, scipy checks only the last element of ``indptr`` and follows the others
    without a check. A wrong element reads or writes outside the arrays. Matrices of other formats are returned as they
    are.

    Raises:
        ValueError: the index arrays contradict each other or the shape.
    """
    if matrix.format not in ("csr", "csc", "bsr"):
        return matrix
    indptr = np.asarray(matrix.indptr)
    falling = np.flatnonzero(np.diff(indptr.astype(np.int64)) < 0)
    if falling.size:
        at = int(falling[0])
        raise ValueError(
            f"the {matrix.format.upper()} matrix is malformed: its indptr falls from {indptr[at]} to {indptr[at + 1]} "
            f"at {at + 1}, it must never fall; write the matrix again"
        )
    try:
        found = type(matrix)((matrix.data, matrix.indices, matrix.indptr), shape=matrix.shape, copy=False)
        found.check_format(full_check=True)
    except (ValueError, TypeError) as error:
        raise ValueError(f"the {matrix.format.upper()} matrix is malformed: {error}; write the matrix again") from error
    return found
