"""A batch is copied to the GPU during the previous step, without other changes."""

from __future__ import annotations

import io
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from rich.console import Console
from torch import Tensor, nn

from tests.parity import looks_in
from tests.simulated_cuda.device import DEVICE, Stream
from tests.support import AUTOCAST_DTYPES, OPTIMIZERS, Regression, loader_of, make_trainer
from trainer.callbacks import RunSummary
from trainer.data import prefetching
from trainer.diagnosis.recording import Evidence
from trainer.precision import MixedPrecision

ROWS, WIDTH, BATCHES = 512, 1024, 6
NBYTES = ROWS * WIDTH * 4
SCALE = 2.0**10  # at which nothing overflows


lbfgs = partial(torch.optim.LBFGS, lr=0.01, max_iter=2)


def make_net():
    torch.manual_seed(0)
    return nn.Linear(WIDTH, 2)


def make_batches(number=BATCHES):
    """Pinned; of each, the first tensor is large and the second small."""
    generator = torch.Generator().manual_seed(1)
    sizes = (ROWS, WIDTH), (ROWS, 2)
    return [[torch.randn(size, generator=generator).pin_memory() for size in sizes] for _ in range(number)]


@pytest.fixture(autouse=True)
def _keep_no_batches(monkeypatch):
    """Have OverflowReport keep no batches, which would stay alive for longer."""
    monkeypatch.setattr(Evidence, "_record", lambda evidence, scale, loss: scale(loss))


@pytest.fixture(autouse=True)
def _device_is_behind_the_host(monkeypatch):
    """Have the simulated device never complete a step before the next one, so that there is something to overlap."""
    monkeypatch.setattr(Stream, "query", lambda self: False)


class Probe(Regression):
    """Fits ``make_net``."""

    def __init__(self, optimizer="adamw-fused"):
        super().__init__(make_net(), lbfgs if optimizer == "lbfgs" else OPTIMIZERS[optimizer])

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[0]), batch[1])

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0]).sum()


class Validated(Probe):
    """Sums up, too."""

    def validation_step(self, batch, batch_idx):
        self.log("sum", self.net(batch[0]).sum())


def plugin(precision):
    return MixedPrecision("float16", init_scale=SCALE) if precision == "16-mixed" else precision


def make(folder, *, on=True, precision="bf16-mixed", **options):
    fixed = {"accelerator": "gpu", "devices": 1, "precision": plugin(precision), "prefetch_batches": int(on)}
    return make_trainer(folder, **fixed | options)


def weights(module):
    return [parameter.detach().cpu() for parameter in module.net.parameters()]


@looks_in("on_train_batch_start", "on_train_batch_end")
class Marks(Callback):
    """Numbers of kernels before and after the copy of each batch."""

    def __init__(self, seen):
        self.seen, self.copied, self.issued = seen, [], []

    def look(self, hook, trainer):
        (self.copied if hook == "on_train_batch_start" else self.issued).append(len(self.seen.kernels))


def copies_of_batches(seen):
    return [copy for copy in seen.copies if copy.nbytes == NBYTES]


class Samples:
    """A custom batch: an object with a method ``to`` without ``non_blocking``."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def to(self, device):
        return Samples(self.x.to(device), self.y.to(device))


# --- what it is for -----------------------------------------------------------------------------------------------


def prefetched_by_hand(precision, optimizer, batches):
    """The hand-written loop with a copy of the next batch."""
    net = make_net().cuda()
    stepper, dtype = OPTIMIZERS[optimizer](net.parameters()), AUTOCAST_DTYPES.get(precision)
    scaler = torch.amp.GradScaler("cuda", SCALE, enabled=precision == "16-mixed")
    usual, side, left = torch.cuda.current_stream(), torch.cuda.Stream(), iter(batches)

    def copied_ahead():
        side.wait_stream(usual)
        with torch.cuda.stream(side):
            return [part.to("cuda", non_blocking=True) for part in next(left, ())]

    following = copied_ahead()
    while following:
        usual.wait_stream(side)
        x, y = following
        following = copied_ahead()
        stepper.zero_grad()
        with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(stepper)  # CUDA's fused SGD rounds differently if it unscales the gradients itself
        scaler.step(stepper)
        scaler.update()
    return [parameter.detach().cpu() for parameter in net.parameters()]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [("adamw-fused", "32-true"), ("adamw", "bf16-mixed"), ("adamw", "16-mixed"), ("momentum-fused", "16-mixed")],
)
def test_weights_equal_those_of_a_hand_written_loop(tmp_path, precision, optimizer):
    batches = make_batches()
    by_hand = prefetched_by_hand(precision, optimizer, batches)
    assert not torch.equal(by_hand[0], make_net().weight)
    for on in (True, False):
        trainer, module = make(tmp_path, on=on, precision=precision), Probe(optimizer)
        trainer.fit(module, loader_of(batches))
        assert all(map(torch.equal, weights(module), by_hand))


def test_batch_is_released_when_the_device_becomes_idle(cuda, tmp_path, monkeypatch):
    held = []

    def look(trainer, module, batch, batch_idx):
        monkeypatch.setattr(Stream, "query", lambda self: batch_idx >= 2)
        held.append(len(trainer.data.prefetching._held))

    with cuda.watch() as seen:
        make(tmp_path, callbacks=[LambdaCallback(on_train_batch_start=look)]).fit(Probe(), loader_of(make_batches()))
    assert [copy.stream > 0 for copy in copies_of_batches(seen)] == [True] * 3 + [False] * (BATCHES - 3)
    assert held == [1, 1, 1, 0, 0, 0]


def test_copy_waits_for_the_step_before_the_last_and_the_host_for_nothing(cuda, tmp_path):
    waits = {}
    for on in (True, False):
        with cuda.watch() as seen:
            marks = Marks(seen)
            make(tmp_path, on=on, precision="16-mixed", callbacks=[marks]).fit(Probe(), loader_of(make_batches()))
        copies = copies_of_batches(seen)
        assert len(copies) == BATCHES
        assert [copy.stream > 0 for copy in copies] == [on] * BATCHES
        assert marks.issued[:-1] == marks.copied[1:]  # copies are not kernels
        before = [0, *marks.copied[:-1]] if on else marks.copied
        assert [copy.after for copy in copies] == before
        assert len(set(before)) == BATCHES  # there are kernels in each step
        waits[on] = [(wait.what, wait.where) for wait in seen.waits]
    assert waits[True] == waits[False]


def test_evaluation_is_prefetched_too(cuda, tmp_path):
    batches, predictions, sums = make_batches(), {}, {}
    for on in (True, False):
        trainer, module = make(tmp_path, on=on), Validated()
        with cuda.watch() as seen:
            predictions[on] = trainer.predict(module, loader_of(batches))
            sums[on] = trainer.validate(module, loader_of(batches), verbose=False)
        copies = copies_of_batches(seen)
        assert [copy.stream > 0 for copy in copies] == [on] * 2 * BATCHES
        assert max(copy.alive for copy in copies) == 2 * NBYTES * on
    assert predictions[True] == predictions[False]
    assert sums[True] == sums[False]


@pytest.mark.parametrize("kind", [list, tuple, dict, Tensor, Samples])
def test_batch_of_any_kind_is_sent_if_it_has_a_large_tensor(cuda, kind):
    ways = {
        list: lambda x, y: [y, x],
        tuple: lambda x, y: (y, x),
        dict: lambda x, y: {"y": y, "x": x},
        Tensor: lambda x, y: x,
        Samples: Samples,
    }
    x, y = make_batches(1)[0]
    move = prefetching.Prefetching(torch.device("cuda", 0)).around(move_data_to_device)
    for large in (x, x[1:]):
        with cuda.watch() as seen:
            move(ways[kind](large, y), torch.device("cuda", 0))
        assert [copy.stream > 0 for copy in seen.copies if copy.nbytes == large.nbytes] == [large is x]
        assert all(copy.stream == 0 for copy in seen.copies if copy.nbytes == y.nbytes)


def test_tensors_of_other_kinds_take_the_usual_way(cuda, monkeypatch):
    monkeypatch.setattr(prefetching, "MIN_BYTES", 0)
    around, sparse = prefetching.Prefetching(torch.device("cuda", 0)).around, torch.eye(3).to_sparse()
    given = [torch.ones(3).requires_grad_(), nn.Parameter(torch.ones(3)), torch.ones(3)]
    with cuda.watch() as seen:
        around(move_data_to_device)(given, torch.device("cuda", 0))
    assert [copy.stream > 0 for copy in seen.copies] == [False, False, True]
    assert around(lambda batch: batch)([sparse])[0] is sparse


def test_no_prefetching_on_a_cpu(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.fit(Probe(), loader_of([[torch.ones(2, WIDTH), torch.ones(2, 2)]]))
    assert (trainer.prefetch_batches, trainer.data.prefetching) == (1, None)


def test_summary_reports_prefetching_and_pinning(cuda, tmp_path):
    pinned, reported = make_batches(2), []
    for on, batches in ((False, pinned), (True, pinned), (True, [[part.clone() for part in one] for one in pinned])):
        summary = RunSummary(console=Console(file=io.StringIO()))
        make(tmp_path, on=on, callbacks=[summary]).fit(Probe(), loader_of(batches))
        reported.append(summary.summary.get("prefetching"))
    not_pinned = "1 batch, from memory that is not pinned: DataLoader(pin_memory=True)"
    assert reported == [None, "1 batch, from pinned memory", not_pinned]


# --- memory -------------------------------------------------------------------------------------------------------


def test_two_batches_are_alive_however_far_the_host_is_ahead(cuda, tmp_path):
    with cuda.watch() as seen:
        make(tmp_path).fit(Probe("adamw"), loader_of(make_batches(20)))
    first, *others = copies_of_batches(seen)
    assert first.alive == NBYTES
    assert {copy.alive for copy in others} == {2 * NBYTES}


class Dropping(Probe):
    """Frees its batch before the step is issued."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        batch.clear()
        return loss


class Keeping(Probe):
    """Also trains on the batch before the last, and then frees it."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.kept.append(batch[0][1:] if batch_idx % 2 else batch[0])  # a view shares the memory
        return loss + self.net(self.kept.pop(0)).mean() if len(self.kept) > 2 else loss


def test_memory_waits_for_the_device_without_reference_counts(cuda, tmp_path, monkeypatch):
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    module = Keeping()
    with cuda.watch() as seen:
        make(tmp_path).fit(module, loader_of(make_batches()))
    assert copies_of_batches(seen)[-1].alive == BATCHES * NBYTES


def bytes_held():
    return sum(block.nbytes for block in DEVICE.watched if block.is_taken(DEVICE.done))


def test_batches_are_freed_for_a_validation_and_after_a_run(cuda, tmp_path):
    held = []

    @looks_in("on_train_batch_end", "on_validation_start")
    class Look(Callback):
        def look(self, hook, trainer):
            held.append((hook, bytes_held()))

    batches = make_batches(2)
    trainer = make(tmp_path, callbacks=[Look()], val_check_interval=1, num_sanity_val_steps=0)
    with cuda.watch() as seen:
        trainer.fit(Validated(), loader_of(batches), loader_of(batches))
    assert held == 2 * [("on_train_batch_end", NBYTES), ("on_validation_start", 0)]
    assert bytes_held() == 0
    assert [copy.alive // NBYTES for copy in copies_of_batches(seen)] == [1, 1, 2, 2, 1, 2]


# --- unchanged results ------------------------------------------------------------------------------------------------


class Hooked(Probe):
    """Draws random numbers in each hook, on the host and on the device, and keeps them.

    Args:
        way: transfer of a batch: the default, or custom batches with non-blocking copies.
    """

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.account = []

    def draw(self, where):
        number = torch.rand(()).item()
        self.account.append((where, number))
        return number

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return Samples(batch[0] + self.draw("before"), batch[1]) if self.way != "usual" else batch

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.draw("transfer")
        if self.way != "sent":
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        batch.x = batch.x.cuda(non_blocking=True) / 2  # it computes, too
        batch.y = batch.y.to(device=device, dtype=torch.float32)
        return batch

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch if self.way == "usual" else (batch.x, batch.y)
        return [x + torch.rand(x.shape, device=x.device) * self.draw("after"), y]

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + self.draw("step"))


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["usual", "sent"])
def test_hooks_run_in_their_order_and_draw_the_same_numbers(tmp_path, way):
    account, trained = {}, {}
    for on in (True, False):
        module = Hooked(way)
        torch.manual_seed(5)
        make(tmp_path, on=on).fit(module, loader_of(make_batches()))
        account[on], trained[on] = module.account, weights(module)
    assert account[True] == account[False]
    each = ["transfer", "after", "step"] if way == "usual" else ["before", "transfer", "after", "step"]
    assert [where for where, _ in account[True]] == each * BATCHES
    assert all(map(torch.equal, trained[True], trained[False]))


@pytest.mark.parametrize("way", ["usual", "sent"])
def test_hooks_copy_on_the_side_stream_and_compute_on_the_default_stream(cuda, tmp_path, way):
    with cuda.watch() as seen:
        marks = Marks(seen)
        make(tmp_path, callbacks=[marks]).fit(Hooked(way), loader_of(make_batches()))
    copies = copies_of_batches(seen)
    assert [copy.stream > 0 for copy in copies] == [True] * BATCHES
    assert all(copy.after < issued for copy, issued in zip(copies[1:], marks.issued, strict=False))
    assert len(seen.numbers) == len(seen.kernels)  # all on the default stream


PATHS = {
    "window": (Probe, {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1}),
    "closures": (lambda: Probe("lbfgs"), {"precision": "32-true"}),
    "validations": (Validated, {"val_check_interval": 2, "max_epochs": 2}),
    "anew": (Probe, {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2}),
    "freed earlier": (Dropping, {}),
    "freed later": (Keeping, {}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
def test_every_path_of_a_batch_trains_to_the_same_weights(tmp_path, path):
    kind, options = PATHS[path]
    trained = []
    for on in (True, False):
        module = kind()
        trainer = make(tmp_path, on=on, **options)
        trainer.fit(module, loader_of(make_batches()), loader_of(make_batches(2)) if kind is Validated else None)
        trained.append(weights(module))
    assert all(map(torch.equal, *trained))
    assert not torch.equal(trained[0][0], make_net().weight)


class Fetched:
    """Batches without a length that are counted when they are fetched. Fetching the last one fails."""

    def __init__(self, batches):
        self.batches, self.count = batches, 0

    def __len__(self):
        return len(self.batches) + 1

    def __iter__(self):
        for batch in self.batches:
            self.count += 1
            yield batch
        raise OSError("the disk is gone")


def test_batch_is_fetched_after_the_previous_step_and_released_after_an_error(cuda, tmp_path):
    source, account = Fetched(make_batches(3)), []

    look = LambdaCallback(on_train_batch_end=lambda trainer, *_: account.append((source.count, trainer.global_step)))
    with pytest.raises(OSError, match="the disk is gone"):
        make(tmp_path, callbacks=[look]).fit(Probe(), source)
    assert account == [(1, 1), (2, 2), (3, 3)]
    assert bytes_held() == 0
