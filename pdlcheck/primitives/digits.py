"""A data set of real images that ships in a wheel: 1797 handwritten digits of 8 x 8 pixels."""

from __future__ import annotations

import torch
from torch import Tensor

from pdlcheck.extras import extra

with extra("data", "pdlcheck.primitives.digits"):
    from sklearn.datasets import load_digits

__all__ = ["digits"]


def digits(*, train: bool = True, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return images ``(n, 1, 8, 8)`` with pixels in [0, 1], and labels ``(n,)`` as int64.

    Every fifth image, 360 of 1797, is kept for testing: ``train=False`` returns those.

    Example:
        >>> images, labels = digits(train=False)
        >>> images.shape, labels[:5].tolist()
        (torch.Size([360, 1, 8, 8]), [0, 5, 0, 5, 0])

    Source: the test set of E. Alpaydin, C. Kaynak, "Optical recognition of handwritten digits", UCI (1998), as packaged
    by scikit-learn.
    """
    data = load_digits()
    images = torch.from_numpy(data.images).to(dtype).unsqueeze(1) / 16
    labels = torch.from_numpy(data.target).to(torch.int64)
    test = torch.arange(len(labels)) % 5 == 0
    chosen = ~test if train else test
    return images[chosen], labels[chosen]
