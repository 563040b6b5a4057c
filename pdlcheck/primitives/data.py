"""The samples of a rank, and a digest of the samples that it loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from pdlcheck.primitives.arguments import members, require_at_least, require_int, wire_device
from pdlcheck.primitives.precision.rows import raise_everywhere
from pdlcheck.tensor_bytes import bytes_of

__all__ = ["gather_shard_digests", "shard_digest", "shard_digest_table", "shard_indices"]


def shard_indices(
    num_samples: int,
    *,
    rank: int,
    world_size: int,
    epoch: int = 0,
    shuffle: bool = True,
    seed: int = 0,
    tail: Literal["uneven", "pad", "drop"] = "uneven",
) -> Tensor:
    """Return the samples of ``rank``: every ``world_size``-th one in the epoch's order. No communication.

    Ranks that agree on the other arguments get disjoint shards. The order is drawn from ``(seed, epoch)`` only. So it
    is the same on every rank and differs in every epoch, even if a rank has used its own random numbers.

    Args:
        num_samples: samples in the data set.
        rank: the rank whose shard is returned, from 0.
        world_size: number of shards.
        epoch: number of the epoch, from 0.
        shuffle: False is the order 0, 1, 2, ... in every epoch.
        seed: same on every rank.
        tail: the policy if ``num_samples`` is not divisible by ``world_size``. ``"uneven"`` gives the first ranks one
            more sample. ``"pad"`` repeats the first samples of the order so that shards are equally long (right for
            training, wrong for a metric). ``"drop"`` leaves the last samples of the order out.

    Returns:
        int64, one dimension.

    Raises:
        ValueError: ``world_size`` is below 1; ``rank`` is outside of it; ``num_samples`` or ``epoch`` is negative;
            ``tail`` is unknown.
        TypeError: one of the numbers is not an int.

    Example:
        >>> [shard_indices(5, rank=rank, world_size=2, shuffle=False).tolist() for rank in range(2)]
        [[0, 2, 4], [1, 3]]

    Source: the sampler of "How to scale training on multiple GPUs" (2019).
    """
    require_at_least("shard_indices", "num_samples", num_samples, 0)
    require_at_least("shard_indices", "world_size", world_size, 1)
    require_at_least("shard_indices", "epoch", epoch, 0)
    require_int("shard_indices", "seed", seed)
    if not 0 <= rank < world_size:
        raise ValueError(
            f"shard_indices got rank={rank}, which is outside range({world_size}), the ranks of world_size"
        )
    if tail not in ("uneven", "pad", "drop"):
        raise ValueError(f"shard_indices knows tail 'uneven', 'pad' and 'drop', got {tail!r}")
    order = _order(num_samples, seed, epoch) if shuffle else torch.arange(num_samples)
    if tail == "drop":
        order = order[: num_samples // world_size * world_size]
    elif tail == "pad" and num_samples:
        padded = -(-num_samples // world_size) * world_size
        order = order.repeat(-(-padded // num_samples))[:padded]
    return order[rank::world_size]


def shard_digest(data: Tensor | Iterable[Any]) -> str:
    """Return the SHA-256 of the loaded data: dtype, shape and bytes of every tensor, in order. No communication.

    Equal data has an equal digest on every rank, in every process, and on every machine of the same byte order.

    Args:
        data: a tensor; tensors in lists, tuples and dicts; or a loader that yields these. Indices work too.

    Returns:
        64 hexadecimal digits.

    Example:
        >>> shard_digest(torch.tensor([0, 2, 4])) == shard_digest(torch.tensor([0, 2, 4]).float())
        False

    Source: SHAs of the tensors that each GPU loads, in "How to scale training on multiple GPUs" (2019).
    """
    digest = hashlib.sha256()
    for tensor in _tensors(data):
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(bytes_of(tensor.cpu()).numpy().tobytes())
    return digest.hexdigest()


def gather_shard_digests(data: Tensor | Iterable[Any], group: dist.ProcessGroup | None = None) -> list[str]:
    """Return the :func:`shard_digest` of every rank, on every rank. Shards differ if no two digests are equal.

    The cost is one all_gather of 33 bytes from each rank.

    Args:
        data: the data that this rank loaded, as in :func:`shard_digest`; may differ between ranks in every respect.
        group: process group; ``None`` is the default group.

    Returns:
        One digest for each rank of the group, in its order; the same list on every rank.

    Raises:
        TypeError, ValueError, RuntimeError: the data of a rank could not be read; the same error on every rank.

    Example:
        >>> gathered = world.run(lambda: gather_shard_digests(torch.tensor(dist.get_rank())), world_size=2)
        >>> len(set(gathered[0]))
        2

    Source: as :func:`shard_digest`.
    """
    who = members("gather_shard_digests", group)
    problem, found = None, bytes(32)
    try:
        found = bytes.fromhex(shard_digest(data))
    except Exception as error:  # any error of a loader is sent to the other ranks
        problem = error
    own = torch.tensor([problem is not None, *found], dtype=torch.uint8, device=wire_device(group))
    everyone = [torch.empty_like(own) for _ in who.ranks]
    dist.all_gather(everyone, own, group=group)
    rows = [one.tolist() for one in everyone]
    raise_everywhere("gather_shard_digests", problem, rows, who)
    return [bytes(digest).hex() for _, *digest in rows]


def shard_digest_table(digests: Mapping[str, Sequence[str]]) -> str:
    """Return a table of digests, one column for each rank; repeated digests in a line are marked.

    Args:
        digests: maps a label of the loaded data ("epoch 0") to the result of :func:`gather_shard_digests` for it.

    Returns:
        Lines to print on one rank: 12 digits of each digest. ``= rank r`` follows a digest that equals the one of an
        earlier rank r in all 64 digits.

    Raises:
        ValueError: there are no lines, or lines of different length.

    Example:
        >>> a, b = shard_digest(torch.tensor([0, 2])), shard_digest(torch.tensor([1, 3]))
        >>> print(shard_digest_table({"epoch 0": [a, b, a]}))
                 rank 0        rank 1        rank 2
        epoch 0  c13b2e599f27  904ea7ecd75e  c13b2e599f27 = rank 0

    Source: as :func:`shard_digest`.
    """
    lengths = {len(line) for line in digests.values()}
    if len(lengths) != 1:
        raise ValueError(
            f"shard_digest_table needs a digest of every rank in each line, got lines of length {sorted(lengths)}"
        )
    lines = [["", *(f"rank {rank}" for rank in range(*lengths))]]
    for label, line in digests.items():
        first = {digest: line.index(digest) for digest in line}
        marks = ["" if first[digest] == rank else f" = rank {first[digest]}" for rank, digest in enumerate(line)]
        lines.append([label, *(digest[:12] + mark for digest, mark in zip(line, marks, strict=True))])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _tensors(data: object) -> Iterator[Tensor]:
    """Yield the tensors in ``data``, in order."""
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, Iterable) and not isinstance(data, str | bytes) and not hasattr(data, "__array__"):
        for part in data.values() if isinstance(data, Mapping) else data:
            yield from _tensors(part)
    else:
        raise TypeError(f"shard_digest takes tensors, got {type(data).__name__}; torch.as_tensor makes one")


def _order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """Return a permutation made from ``seed`` and ``epoch``. A sum of both would make (0, 1) and (1, 0) equal."""
    mixed = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(mixed[:7], "little"))
    return torch.randperm(num_samples, generator=generator)
