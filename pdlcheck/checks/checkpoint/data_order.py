"""The cause of a resumed training that diverges: the steps read other data than those of a training without a stop."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from pdlcheck.checks.diagnosis import Candidate, explain
from pdlcheck.checks.evidence.batches import Batch, PassOfLoader, Reading

__all__ = ["why_other_data"]

_NOT_RESTORED = "its state at the start of the pass was not saved, or not restored"


@dataclass(frozen=True)
class OtherData:
    """The first step of a rank whose data differ.

    Args:
        step: the number of the step.
        rank: the rank.
        got: the batches that the resumed run used; None if unknown.
        wanted: those of the run without a stop; None if unknown.
        passes: all batches that the run without a stop read on this rank.
        source: the first step without a stop that used the same data; None if none did.
        source_rank: the rank of ``source``.
        length: how many steps from ``step`` on used the data of the steps from ``source`` on.
    """

    step: int
    rank: int
    got: Sequence[Batch] | None
    wanted: Sequence[Batch] | None
    passes: Sequence[Batch]
    source: int | None
    source_rank: int
    length: int

    @property
    def is_known(self) -> bool:
        """Return whether it is known which batches of a loader were used."""
        return bool(self.got) and bool(self.wanted)

    @property
    def pair(self) -> tuple[Batch, Batch]:
        """Return the first batches that differ."""
        pairs = zip(self.got or (), self.wanted or (), strict=False)
        return next(pair for pair in pairs if pair[0].content != pair[1].content)


def why_other_data(
    resumed: Sequence[Reading], straight: Sequence[Reading], saved_after: int, first_wrong: int
) -> str | None:
    """Return what the steps of the resumed run read, and why, in words; None if their data did not differ.

    Args:
        resumed: what each rank read in the resumed run.
        straight: the same in the run without a stop.
        saved_after: the steps before the stop.
        first_wrong: the first step with other weights. Differences of the data after that step explain nothing.
    """
    pairs = list(zip(resumed, straight, strict=True))
    ways = [_way(mine, wanted, saved_after) for mine, wanted in pairs]
    for step in range(saved_after + 1, first_wrong + 1):
        found = [_other_data(pairs, ways, step, rank) for rank in range(len(pairs))]
        apart = [one for one in found if one is not None]
        if apart:
            first = apart[0]
            alike = len({(one.source and one.source - one.step, one.source_rank == one.rank) for one in apart}) == 1
            where = "" if len(apart) == len(pairs) and alike else _on_ranks(apart if alike else apart[:1])
            table = ([Candidate(f"{where}{text}", holds=holds)] for text, holds in _candidates(first))
            return explain(first, *table).cause
    return None


Way = Callable[[Reading, int], "Sequence[Batch] | None"]


def _candidates(one: OtherData) -> Iterator[tuple[str, Callable[[OtherData], bool]]]:
    """Yield the possible causes, the most exact first, with their predicates."""
    read = _words(one)
    if one.is_known:
        got, wanted = one.pair
        yield (
            f"{read}: in step {one.step} the sampler had epoch {got.of.epoch}, and epoch {wanted.of.epoch} in the run "
            "without a stop; set_epoch is not called with the epoch of the checkpoint, or on another sampler",
            lambda one: _is_of_another(one, lambda of: of.epoch),
        )
        yield (f"{read}: {_drawn_again(one)}", _has_the_same_samples)
        yield (
            f"{read}: the generator that shuffles was in another state when the pass began"
            f"{_of_another_pass(one)}; {_NOT_RESTORED}",
            lambda one: _is_of_another(one, lambda of: of.order),
        )
        yield (
            f"{read}: the loader began its pass again",
            _begins_again,
        )
    if one.source is not None:
        of_another = f"the position in the data, or the seed, of rank {one.source_rank} was restored on rank {one.rank}"
        yield (f"{read}: {of_another}", lambda one: one.source_rank != one.rank)
        yield (f"{read}: the data began again", lambda one: not one.is_known and one.source == 1)
        skipped = (one.source - one.step) * len(one.wanted or ())
        batches = "batch" if abs(skipped) == 1 else "batches"
        yield (
            f"{read}: resuming skips {abs(skipped)} {batches} too {'many' if skipped > 0 else 'few'}",
            _is_in_the_same_pass,
        )
        yield (read, lambda one: True)
    yield (read, lambda one: one.is_known)


def _words(one: OtherData) -> str:
    step, source, last = one.step, one.source, one.length - 1
    if source is None:
        same = one.is_known and _has_the_same_samples(one)
        if same:
            return f"step {step} got the samples of the run without a stop, with other values"
        return f"step {step} got no batch that the run without a stop had read"
    of = "" if one.source_rank == one.rank else f" of rank {one.source_rank}"
    if one.is_known:
        if last:
            return f"steps {step} to {step + last} got the batches of steps {source} to {source + last}{of}"
        return f"step {step} got the batch of step {source}{of}"
    if last:
        return f"in steps {step} to {step + last} the model got the inputs of steps {source} to {source + last}{of}"
    return f"in step {step} the model got the inputs of step {source}{of}"


def _on_ranks(some: Sequence[OtherData]) -> str:
    ranks = [str(one.rank) for one in some]
    return f"on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}, "


def _is_of_another(one: OtherData, key: Callable[[PassOfLoader], Hashable]) -> bool:
    """Return whether the ``key`` of the passes differs, and explains the samples.

    They are then those of a pass with this key, and not those of a pass with the right key. A place in a pass counts
    first; a loader for the rest of an epoch has other places. No pass without a stop may have this key.
    """
    got, wanted = one.pair
    if key(got.of) is None or key(wanted.of) is None or key(got.of) == key(wanted.of):
        return False
    alike = [batch for batch in one.passes if _samples(batch) == _samples(got)]
    for batches in ([batch for batch in alike if batch.place == got.place], alike):
        keys = {key(batch.of) for batch in batches}
        if key(got.of) in keys or key(wanted.of) in keys:
            return key(wanted.of) not in keys
    return all(key(batch.of) != key(got.of) for batch in one.passes)


def _begins_again(one: OtherData) -> bool:
    """Return whether the batch is the first of a pass, and has the data of a first batch without a stop."""
    got, wanted = one.pair
    first = any(batch.place == 0 and batch.content == got.content for batch in one.passes)
    return got.place == 0 and wanted.place > 0 and first


def _has_the_same_samples(one: OtherData) -> bool:
    got, wanted = one.pair
    return got.samples is not None and got.samples == wanted.samples


def _drawn_again(one: OtherData) -> str:
    got, wanted = one.pair
    if got.of.seed != wanted.of.seed:
        return (
            "the workers of the loader drew from another seed; the generator that gives it, of the loader or of torch, "
            f"was in another state when the pass began: {_NOT_RESTORED}"
        )
    return "the data set, or collate_fn, draws random numbers or has a state that was not saved, or not restored"


def _of_another_pass(one: OtherData) -> str:
    got, _ = one.pair
    of = next((batch.step for batch in one.passes if batch.of.order == got.of.order), None)
    return "" if of is None else f", that of the pass that began in step {of} without a stop"


def _is_in_the_same_pass(one: OtherData) -> bool:
    if one.source is None or one.wanted is None or not one.is_known:
        return False
    got, wanted = one.pair
    return any(batch.of == wanted.of and batch.content == got.content for batch in one.passes)


def _samples(batch: Batch) -> Hashable:
    return batch.content if batch.samples is None else batch.samples


def _other_data(
    pairs: Sequence[tuple[Reading, Reading]], ways: Sequence[Way | None], step: int, rank: int
) -> OtherData | None:
    """Return the difference of the data of a step on a rank; None if there is none, or if it is unknown."""
    (mine, wanted), way = pairs[rank], ways[rank]
    inputs = [reading.inputs.get(step, []) for reading in (mine, wanted)]
    if inputs[1] and inputs[0] == inputs[1]:
        return None
    got, goal = (way(reading, step) if way else None for reading in (mine, wanted))
    if not got or not goal or len(got) != len(goal):
        way = got = goal = None
    elif [one.content for one in got] == [one.content for one in goal]:
        return None  # the model has other inputs for another reason, such as noise
    key = partial(_key, way)
    held = key(mine, step)
    sources = [(length, other, at) for at, other, length in _sources(pairs, key, step, rank)] if held else []
    own = [one for one in sources if one[1] == rank] or sources
    again = got is not None and got[0].place == 0
    best = max(own, key=lambda one: _preference(one, step, again), default=None)
    if best is None and way is None:
        return None
    length, other, source = best if best is not None else (0, rank, None)
    if source is not None:
        real = takewhile(lambda n: key(mine, step + n) == (key(pairs[other][1], source + n) or ()), range(length))
        length = len(list(real))
    return OtherData(step, rank, got, goal, wanted.batches, source, other, length)


def _preference(source: tuple[int, int, int], step: int, begins_again: bool) -> tuple[int, bool, int]:
    """Return how well a source fits: the longest, then an earlier one if a pass begins again, the nearest."""
    length, _, at = source
    return length, begins_again and at < step, -abs(at - step)


def _sources(
    pairs: Sequence[tuple[Reading, Reading]], key: Callable[[Reading, int], Hashable], step: int, rank: int
) -> Iterator[tuple[int, int, int]]:
    """Yield each step and rank without a stop with the data that ``step`` got, and for how many steps this holds.

    Beyond the last step, the data are unknown. They count as equal.
    """
    mine = pairs[rank][0]
    for other, (_, straight) in enumerate(pairs):
        end = max(straight.step, mine.step)
        for at in range(1, end + 1):
            if key(straight, at) != key(mine, step):
                continue
            alike = (at + n > end or key(straight, at + n) == key(mine, step + n) for n in range(end - step + 1))
            yield at, other, len(list(takewhile(bool, alike)))


def _key(way: Way | None, reading: Reading, step: int) -> Hashable:
    """Return the data of a step, to compare; None if unknown or empty."""
    if way is None:
        inputs = reading.inputs.get(step, [])
        return tuple(inputs) if any(inputs) else None
    batches = way(reading, step)
    return tuple(one.content for one in batches) if batches else None


def _way(resumed: Reading, straight: Reading, saved_after: int) -> Way | None:
    """Return how to find the batches that a step uses; None if there is no way.

    A program may fetch batches ahead. The inputs of the model then show which ones a step uses. Else, each step must
    fetch as many; only the first step after loading may fetch more, in order to skip them.
    """
    last = straight.step
    after = range(saved_after + 1, last + 1)
    if all(_of_inputs(straight, step) for step in range(1, last + 1)) and all(_of_inputs(resumed, n) for n in after):
        return _of_inputs
    fetched = {len(_fetched(straight, step)) for step in range(1, last + 1)}
    if len(fetched) != 1 or fetched == {0}:
        return None
    (each,) = fetched
    numbers = [len(_fetched(resumed, step)) for step in after]
    if numbers[0] < each or any(number != each for number in numbers[1:]):
        return None
    return lambda reading, step: _fetched(reading, step)[-each:]


def _fetched(reading: Reading, step: int) -> list[Batch]:
    return [batch for batch in reading.batches if batch.step == step]


def _of_inputs(reading: Reading, step: int) -> list[Batch] | None:
    """Return the batches whose tensors are the inputs of the model in a step; None unless each call has one."""
    found: dict[int, Batch] = {}
    ahead = [(number, batch) for number, batch in enumerate(reading.batches) if batch.step <= step]
    for call in reading.inputs.get(step, []):
        common = [(len(batch.tensors.intersection(call)), number, batch) for number, batch in ahead]
        most = max((shared for shared, _, _ in common), default=0)
        best = [(number, batch) for shared, number, batch in common if shared == most]
        if not most or len({batch.content for _, batch in best}) > 1:
            return None
        found.setdefault(*best[-1])
    return list(found.values()) or None
