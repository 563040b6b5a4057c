"""Bugs of data loading: epochs that repeat, samples that several ranks have, and samples that no rank has."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from pdlcheck.checks import check_epoch_loop, check_metric, check_resume

from .entry import entry


@entry(
    "set-epoch-forgotten",
    "SimCLR #26",
    check="check_epoch_loop",
    cause="set_epoch was forgotten",
)
def forgets_set_epoch(broken, world):
    """Loops over epochs never call set_epoch on their sampler."""

    def train(dataset, epochs):
        sampler = DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size=4, sampler=sampler)
        visited = []
        for epoch in range(epochs):
            if not broken:
                sampler.set_epoch(epoch)
            visited.append(list(loader))
        return visited

    check_epoch_loop(train, world, num_samples=50, world_size=2)


class ShuffledStream(IterableDataset):
    """A stream in an order of each epoch, whole or the share of a rank."""

    def __init__(self, source, num_shards=1, index=0):
        self.source, self.num_shards, self.index = source, num_shards, index
        self.epoch = 0

    def __iter__(self):
        order = torch.randperm(len(self.source), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for place in order[self.index :: self.num_shards]:
            yield self.source[place]


@entry(
    "sampler-missing",
    "transformers #11254",
    check="check_epoch_loop",
    cause="every rank has the whole data set: the sampler is missing",
)
def iterates_over_the_full_stream(broken, world):
    """Every rank iterates over the full stream of an IterableDataset."""

    def get_train_dataloader(dataset):
        share = (1, 0) if broken else (dist.get_world_size(), dist.get_rank())
        return DataLoader(ShuffledStream(dataset, *share), batch_size=4)

    def train(dataset, epochs):
        loader, visited = get_train_dataloader(dataset), []
        for epoch in range(epochs):
            loader.dataset.epoch = epoch
            visited.append(list(loader))
        return visited

    check_epoch_loop(train, world, num_samples=50, world_size=2)


@entry(
    "sampler-pad-eval-dup",
    "accelerate #575",
    check="check_metric",
    cause="the first sample counts twice, as a sampler pads to 32",
)
def counts_the_padding_of_the_sampler(broken, world):
    """Accuracy counts samples twice that the sampler repeats for equal lengths."""
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(31, 4, generator=generator), torch.randint(0, 3, (31,), generator=generator)

    def gather_for_metrics(values, remainder):
        gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, values)
        flat = torch.stack(gathered, dim=1).flatten(0, 1)
        return flat if broken else flat[:remainder]

    def evaluate(inputs, labels):
        torch.manual_seed(0)
        model, dataset = nn.Linear(4, 3), TensorDataset(inputs, labels)
        loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset, shuffle=False))
        correct, seen = 0, 0
        for x, y in loader:
            is_right = gather_for_metrics(model(x).argmax(-1) == y, len(dataset) - seen)
            correct, seen = correct + int(is_right.sum()), seen + len(is_right)
        return {"accuracy": correct / seen}

    check_metric(evaluate, [inputs, labels], world)


@entry(
    "drop-last-loses-tail",
    "burn #5695",
    check="check_epoch_loop",
    cause="nothing is shuffled, .*; every epoch drops the same: samples 48, 49",
)
def drops_the_same_tail_in_each_epoch(broken, world):
    """Each epoch leaves out the same samples, because the loader keeps one order and drops the last batch."""

    def train(dataset, epochs):
        sampler = DistributedSampler(dataset, shuffle=not broken)
        loader = DataLoader(dataset, batch_size=4, sampler=sampler, drop_last=True)
        visited = []
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            visited.append(list(loader))
        return visited

    check_epoch_loop(train, world, num_samples=50, world_size=2, drop_last=4)


class Loader:
    """A loader that gives its sampler the number of the epoch, and may leave out the first batches."""

    def __init__(self, dataset, num_skipped=0):
        self.dataset, self.num_skipped, self.epoch = dataset, num_skipped, 0
        self.sampler = DistributedSampler(dataset, seed=42)
        self.batches = DataLoader(dataset, batch_size=4, sampler=self.sampler)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.sampler.set_epoch(self.epoch)
        yield from list(self.batches)[self.num_skipped :]


@entry(
    "resume-skips-in-epoch-0",
    "accelerate skip_first_batches",
    check="check_resume",
    cause="step 6 got the batch of step 2: in step 6 the sampler had epoch 0, and epoch 1 in the run without a stop",
)
def skips_batches_of_epoch_0(broken, world):
    """Skip the first batches by a new loader that does not know the epoch, and has the order of epoch 0."""
    inputs = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))

    def skip_first_batches(loader, count):
        rest = Loader(loader.dataset, count)
        if not broken:
            rest.set_epoch(loader.epoch)
        return rest

    class Script:
        def __init__(self):
            self.model = nn.Linear(3, 1)
            self.ddp = DistributedDataParallel(self.model)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
            self.loader, self.overall_step, self.stream = Loader(dataset), 0, None

        def rest_of_the_epochs(self):
            epoch, skipped = divmod(self.overall_step, len(self.loader.batches))
            while True:
                self.loader.set_epoch(epoch)
                yield from skip_first_batches(self.loader, skipped) if skipped else self.loader
                epoch, skipped = epoch + 1, 0

        def step(self, _):
            self.stream = self.stream or self.rest_of_the_epochs()
            x, y = next(self.stream)
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.ddp(x), y).backward()
            self.optimizer.step()
            self.overall_step += 1

        def save(self, path):
            if dist.get_rank() == 0:
                torch.save([self.model.state_dict(), self.optimizer.state_dict(), self.overall_step], path)
            dist.barrier()

        def load(self, path):
            model, optimizer, self.overall_step = torch.load(path)
            self.model.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)

    def start():
        script = Script()
        return script.model, script.step, script.save, script.load

    check_resume(start, world)
