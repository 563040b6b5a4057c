"""Small networks to train on replicas, and the function that ``FunctionNet`` learns."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["ConvNet", "FunctionNet", "LeNet", "function_samples"]


def function_samples(num_samples: int = 80_000, *, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return ``x`` evenly spaced on [0, 20] and ``sqrt(x) * sin(3.14 * x / 5)``, both of shape ``(num_samples, 1)``.

    Example:
        >>> x, y = function_samples(5)
        >>> x.flatten().tolist()
        [0.0, 5.0, 10.0, 15.0, 20.0]

    Source: D. Gannon, "Doing Deep Learning in Parallel with PyTorch" (2020).
    """
    x = torch.linspace(0, 20, num_samples, dtype=torch.float64).unsqueeze(1)
    y = x.sqrt() * torch.sin(3.14 * x / 5)
    return x.to(dtype), y.to(dtype)


class ConvNet(nn.Sequential):
    """Two convolutions of 16 and 32 channels with batch norm, ReLU and max pooling, and one fully connected layer.

    Input: images ``(n, 1, side, side)``. Output: scores ``(n, num_classes)``. Ranks that see different data have
    different batch norm buffers, unless the buffers are broadcast.

    Args:
        side: pixels along one side of an image, a multiple of 4: 8 for the digits, 28 for MNIST.
        num_classes: number of scores for each image.

    Example:
        >>> ConvNet()(torch.zeros(3, 1, 8, 8)).shape
        torch.Size([3, 10])

    Source: the network of "How to scale training on multiple GPUs" (2019), for MNIST.
    """

    def __init__(self, side: int = 8, num_classes: int = 10) -> None:
        super().__init__(
            *_convolution(1, 16),
            *_convolution(16, 32),
            nn.Flatten(),
            nn.Linear(32 * (side // 4) ** 2, num_classes),
        )


class FunctionNet(nn.Sequential):
    """A network with layers 1 -> 80 -> 80 -> 40 -> 1 and ReLU, to learn a function of one variable.

    Example:
        >>> sum(parameter.numel() for parameter in FunctionNet().parameters())
        9921

    Source: as :func:`function_samples`.
    """

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(1, 80),
            nn.ReLU(),
            nn.Linear(80, 80),
            nn.ReLU(),
            nn.Linear(80, 40),
            nn.ReLU(),
            nn.Linear(40, 1),
        )


class LeNet(nn.Sequential):
    """LeNet-5 for images of 8 x 8 pixels and ten classes: two convolutions, three fully connected layers.

    It uses tanh and average pooling, as in 1998. Both are smooth, so replicas that differ by round-off stay that close.
    Input: images ``(n, 1, 8, 8)``. Output: scores ``(n, 10)``.

    Example:
        >>> LeNet()(torch.zeros(3, 1, 8, 8)).shape
        torch.Size([3, 10])

    Source: Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, "Gradient-based learning applied to document recognition", Proc.
    IEEE 86 (1998), sized down from 32 x 32.
    """

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 6, kernel_size=3, padding=1),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Conv2d(6, 16, kernel_size=3, padding=1),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 120),
            nn.Tanh(),
            nn.Linear(120, 84),
            nn.Tanh(),
            nn.Linear(84, 10),
        )


def _convolution(before: int, after: int) -> list[nn.Module]:
    return [nn.Conv2d(before, after, kernel_size=5, padding=2), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
