"""A step on a GPU makes no host-device synchronization, and launches no kernel in addition to a hand-written loop.

Measured on the simulated device, per batch, against the shortest correct loop.
"""

from collections import Counter
from functools import cache, partial

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from tests.simulated_cuda.device import DEVICE, Seen
from tests.support import AUTOCAST_DTYPES, Regression, loader_of, loss_of, make_batches, make_net, make_trainer
from trainer.callbacks import LayerNorms, NonFiniteGuard, RunRecorder, ScaleMonitor, Throughput
from trainer.precision import MixedPrecision
from trainer.precision.scaler import snapshot_loss

WARM_UP = 6
"""Batches until all memory is allocated, and the momentum of a fused SGD exists."""
PHASE = 4
"""Batches without a log, with one, and with one that is read by all readers."""
BATCHES = WARM_UP + 3 * PHASE
SCALE = 2.0**10
LIMIT = 0.5

OPTIMIZERS = {
    "plain": partial(torch.optim.AdamW, lr=1e-3, foreach=False),
    "foreach": partial(torch.optim.AdamW, lr=1e-3),
    "fused": partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "fused momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9, fused=True),
}
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")

KEPT_OF_A_LOSS = {1: "clone", 2: "div"}
"""The kernel that copies a batch's loss for the curve of the run's record; by the batches of a window.

None if the loss is logged, because logging copies it.
"""


def on_device():
    return [[part.cuda() for part in batch] for batch in make_batches(BATCHES)]


class Watch(Callback):
    """Records the operations from each batch's start to the next one's."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        DEVICE.seen = Seen()
        self.seen.append(DEVICE.seen)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == BATCHES - 1:
            DEVICE.seen = None


class Logging(Regression):
    """Logs nothing, then its loss, then a loss that all readers use."""

    def training_step(self, batch, batch_idx):
        loss = loss_of(self.net, batch)
        if batch_idx >= WARM_UP + 2 * PHASE:
            self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=4)
        elif batch_idx >= WARM_UP + PHASE:
            self.log("quiet", loss, batch_size=4)
        return loss


def step_by_hand(optimizer, found_inf):
    """Skip the step if a gradient is not finite."""
    if found_inf is None:
        optimizer.step()
    elif optimizer.defaults["fused"]:
        optimizer.grad_scale, optimizer.found_inf = None, found_inf
        optimizer.step()
    elif not found_inf.item():  # as torch's scaler does
        optimizer.step()


class ByHand:
    """The shortest correct loop, which keeps no tensor that it does not need."""

    def __init__(self, net, precision, kind, clips, window):
        self.net = net
        self.optimizer, self.dtype = OPTIMIZERS[kind](self.net.parameters()), AUTOCAST_DTYPES.get(precision)
        self.scales, self.clips, self.window = precision == "16-mixed", clips, window
        if self.scales:
            self.scale, self.tracker = torch.tensor(SCALE).cuda(), torch.zeros((), dtype=torch.int32).cuda()
            self.inverse = self.scale.reciprocal()

    def step(self, number, batch):
        batch = [part.cuda() for part in batch]
        if number % self.window == 0:
            self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            loss = loss_of(self.net, batch)
        if self.window > 1:
            loss = loss / self.window
        (loss * self.scale if self.scales else loss).backward()
        if number % self.window == self.window - 1:
            self.update()

    def update(self):
        found_inf = torch.zeros((), device="cuda") if self.scales else None
        if self.scales:
            gradients = [parameter.grad for parameter in self.net.parameters()]
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, self.inverse)
        if self.clips:
            nn.utils.clip_grad_norm_(self.net.parameters(), LIMIT)
        step_by_hand(self.optimizer, found_inf)
        if self.scales:
            torch._amp_update_scale_(self.scale, self.tracker, found_inf, 2.0, 0.5, 2000)


@cache
def by_hand(precision, kind, clips, window):
    """Return the operations of each batch of the shortest correct loop, without logs."""
    loop, seen = ByHand(make_net().cuda(), precision, kind, clips, window), []
    for number, batch in enumerate(on_device()):
        with DEVICE.watch() as of_batch:
            loop.step(number, batch)
        seen.append(of_batch)
    return seen


def fit(folder, precision, optimizer, **options):
    """Return the operations of each batch of a fit, except the end of the last: the end of an epoch may synchronize."""
    watch = Watch()
    if precision == "16-mixed":
        precision = MixedPrecision("float16", init_scale=SCALE)  # at which nothing overflows
    trainer = make_trainer(
        folder, accelerator="gpu", devices=1, precision=precision, log_every_n_steps=10 * BATCHES,
        **options | {"callbacks": [watch, *options.get("callbacks", ())]},
    )  # fmt: skip
    trainer.fit(Logging(optimizer=OPTIMIZERS[optimizer]), loader_of(on_device()))
    assert trainer.skipped_steps == 0
    return watch.seen


def added(ours, theirs):
    """Return the additional kernels. The other loop must have none that this one lacks."""
    assert not Counter(theirs.kernels) - Counter(ours.kernels)
    return Counter(ours.kernels) - Counter(theirs.kernels)


@pytest.mark.filterwarnings("ignore:The checkpoint lacks values")  # the records of the callback
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_step_waits_for_nothing_and_computes_nothing_more(cuda, tmp_path, precision, optimizer, clips, window):
    hand = by_hand(precision, optimizer, clips, window)
    clipping = {"gradient_clip_val": LIMIT} if clips else {}
    for callbacks, records in ((False, True), (True, False)):
        shown = {"enable_progress_bar": callbacks, "enable_model_summary": callbacks, "enable_checkpointing": callbacks}
        own = [*([Throughput(warmup_batches=WARM_UP - 1)] if callbacks else []), *([RunRecorder()] if records else [])]
        seen = fit(
            tmp_path, precision, optimizer,
            accumulate_grad_batches=window, logger=True, callbacks=own, **clipping, **shown,
        )  # fmt: skip
        for number in range(WARM_UP, BATCHES - 1):
            closes = precision == "16-mixed" and number % window == window - 1
            known_late = closes and "fused" in optimizer
            is_logged = number >= WARM_UP + PHASE
            expected = Counter({"clone": int(is_logged)})  # of the value that is logged
            if records and not (is_logged and window == 1):
                expected[KEPT_OF_A_LOSS[window]] += 1
            at = f"batch {number}, callbacks={callbacks}, records={records}"
            assert added(seen[number], hand[number]) == expected, at
            waits = ["an event" if known_late else "local_scalar_dense"] if closes else []
            assert [wait.what for wait in seen[number].waits] == waits, (at, seen[number].waits)
            assert seen[number].to_host == ([4] if known_late else []), at  # whether it has overflowed
            assert seen[number].to_device == [], at


class Graphed(torch.autograd.Function):
    """Stands for a compiled function, whose output may be in the memory of a CUDA graph."""

    @staticmethod
    def forward(ctx, loss):
        return loss * 1.0

    @staticmethod
    def backward(ctx, *gradients):
        return gradients


@pytest.mark.parametrize(
    ("make", "is_copied"),
    [(lambda loss: loss * 2, False), (lambda loss: (loss.reshape(1) * 2)[0], True), (Graphed.apply, True)],
)
def test_loss_is_copied_only_if_a_graph_may_reuse_its_memory(cuda, make, is_copied):
    loss = make(torch.ones((), device="cuda", requires_grad=True))
    with cuda.watch() as seen:
        held = snapshot_loss(loss)
    assert seen.kernels == ["clone"] * is_copied
    assert not held.requires_grad


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("32-true", ["zeros", "_amp_foreach_non_finite_check_and_unscale_"]),
        ("bf16-mixed", ["zeros", "_amp_foreach_non_finite_check_and_unscale_"]),
        ("bf16-true", ["_foreach_norm", "stack", "eq", "abs", "ne", "mul", "all", "bitwise_not", "_to_copy"]),
    ],
)
def test_guard_reads_all_gradients_with_one_kernel(cuda, tmp_path, precision, expected):
    without = fit(tmp_path, precision, "foreach")
    seen = fit(tmp_path, precision, "foreach", callbacks=[NonFiniteGuard("skip")])
    for number in range(WARM_UP, BATCHES - 1):
        assert added(seen[number], without[number]) == Counter(expected)
        assert [wait.what for wait in seen[number].waits] == ["local_scalar_dense"]


def test_underflow_is_counted_by_three_kernels_for_each_parameter(cuda, tmp_path):
    without = fit(tmp_path, "16-mixed", "fused", callbacks=[ScaleMonitor(every_n_steps=0)])
    seen = fit(tmp_path, "16-mixed", "fused", callbacks=[ScaleMonitor(every_n_steps=1)])
    number = len(list(make_net().parameters()))
    norm = ["_foreach_norm", "stack", "linalg_vector_norm"]
    counts = ["linalg_vector_norm", "hardshrink", "linalg_vector_norm"] * number + ["stack", "_to_copy", "stack"]
    for batch in range(WARM_UP, BATCHES - 1):
        assert added(seen[batch], without[batch]) == Counter(norm + counts)
        assert {wait.what for wait in seen[batch].waits} == {"an event"}  # late, both of them


def test_layer_norms_take_one_kernel_and_one_asynchronous_copy(cuda, tmp_path):
    without = fit(tmp_path, "16-mixed", "fused")
    seen = fit(tmp_path, "16-mixed", "fused", callbacks=[LayerNorms(every_n_steps=2)])
    for batch in range(WARM_UP, BATCHES - 1):
        looks = batch % 2 == 1
        assert added(seen[batch], without[batch]) == Counter(["_foreach_norm", "stack"] if looks else [])
        assert {wait.what for wait in seen[batch].waits} <= {"an event"}
