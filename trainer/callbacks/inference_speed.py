"""How much faster ``predict`` runs in its precision than it would in float32."""

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from trainer.data.samples import batch_size
from trainer.errors import expect
from trainer.precision.devices import now
from trainer.precision.dtypes import cast
from trainer.record.measures import folder_of_files


class InferenceSpeed(Callback):
    """Measures ``predict_step`` on the same batches in the run's precision and in float32.

    The first batches of a ``predict`` are kept on their device. When all predictions are made, ``predict_step`` is
    called on them again: in turn in the one precision and in the other, under the context of the prediction (inference
    mode, unless the Trainer was told otherwise), in eval mode. The first rounds do not count, in which memory is
    allocated and kernels are chosen. A precision's time is the median of its rounds, and what is compared. Loading
    batches, moving them and writing predictions are not in it.

    The result goes to ``inference_speed.json``, into the log, and on the command line into ``run.json``. In float32
    itself there is nothing to compare. On several processes the first one measures, on its device; where the weights
    are sharded all of them take part, in its measurement. Sharded weights of 16 bits (``bf16-true``) cannot be had in
    float32: there nothing is measured, and a line says so. Nothing is done in a ``fit``, ``validate`` or ``test``.

    On a CPU without float16 instructions, ``16-mixed`` brings kernels of its own (``trainer.precision.cpu_fp16``). They
    are in place in the float32 rounds, too, and cost some ten microseconds a product: models of milliseconds do not
    notice.

    Args:
        batches: Batches of each round.
        rounds: Rounds that count, in each precision.
        warmup: Rounds before, which do not.
        dirpath: Folder of ``inference_speed.json``. Default: that of the first logger.

    Attributes:
        result: What was measured; None before. The keys:

            - ``precision``: Such as "bf16-mixed".
            - ``seconds``, ``seconds_float32``: Median time of a round in it, and in float32.
            - ``samples``: In a round.
            - ``samples_per_second``, ``samples_per_second_float32``.
            - ``speed_up``: ``seconds_float32 / seconds``; below 1 the precision is slower.
            - ``batches``, ``rounds``.
            - ``inference_mode``: Whether it was on.

    Raises:
        ConfigurationError: Fewer than one batch or round, or a negative `warmup`.
    """

    def __init__(
        self, batches: int = 4, rounds: int = 7, warmup: int = 2, dirpath: str | os.PathLike[str] | None = None
    ) -> None:
        is_fine = batches >= 1 and rounds >= 1 and warmup >= 0
        expect(is_fine, "at least 1, 1 and 0", batches=batches, rounds=rounds, warmup=warmup)
        self.batches = batches
        self.rounds = rounds
        self.warmup = warmup
        self.result: dict[str, Any] | None = None
        self._dirpath = dirpath
        self._clock = time.perf_counter
        self._kept: list[tuple[Any, ...]] = []  # arguments of predict_step

    def run_facts(self) -> dict[str, Any]:
        """What the record of the run says."""
        return {} if self.result is None else {"inference_speed": self.result}

    def on_predict_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Forgets an earlier prediction."""
        self.result = None
        self._kept = []

    def on_predict_batch_start(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keeps the batch, if it is one of the first."""
        if len(self._kept) < self.batches:
            several = isinstance(trainer.predict_dataloaders, list | tuple) and len(trainer.predict_dataloaders) > 1
            self._kept.append((batch, batch_idx, dataloader_idx) if several else (batch, batch_idx))

    def on_predict_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Measures, unless the precision is float32."""
        kept, self._kept = self._kept, []
        if str(trainer.precision) == "32-true":
            return
        engine = getattr(trainer, "engine", None)  # `lightning.Trainer` has none
        step: Callable[..., Any] = pl_module.predict_step
        if engine is not None and engine.gradients.are_parts:
            step = engine.step_function("predict_step")
            kept = kept[: int(engine.reduce(torch.tensor(len(kept), device=engine.device), "min"))]
            if any(one.is_floating_point() and one.dtype is not torch.float32 for one in pl_module.parameters()):
                rank_zero_info(
                    f"InferenceSpeed measures nothing: precision={trainer.precision!r} keeps the weights in 16 bits,"
                    " and they are sharded. Measure on a single device."
                )
                return
        elif not trainer.is_global_zero:
            return
        if not kept:
            return
        own_times, other_times = [], []
        for _ in range(self.warmup + self.rounds):
            with trainer.precision_plugin.forward_context():
                own_times.append(self._round(trainer, step, kept))
            with _in_float32(pl_module):
                other_times.append(self._round(trainer, step, cast(kept, torch.float32)))
        own, other = (statistics.median(times[self.warmup :]) for times in (own_times, other_times))
        samples = sum(batch_size(arguments[0]) for arguments in kept)
        self.result = {
            "precision": str(trainer.precision),
            "seconds": own,
            "seconds_float32": other,
            "samples": samples,
            "samples_per_second": samples / own,
            "samples_per_second_float32": samples / other,
            "speed_up": other / own,
            "batches": len(kept),
            "rounds": self.rounds,
            "inference_mode": torch.is_inference_mode_enabled(),
        }
        if not trainer.is_global_zero:
            return
        rank_zero_info(in_words(self.result))
        folder = folder_of_files(trainer, self._dirpath)
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "inference_speed.json").write_text(json.dumps(self.result, indent=2) + "\n", encoding="utf-8")

    def _round(self, trainer: "pl.Trainer", step: Callable[..., Any], batches: list[tuple[Any, ...]]) -> float:
        """Seconds that ``predict_step`` takes for all batches."""
        device = trainer.strategy.root_device
        started = now(device, self._clock)
        for arguments in batches:
            step(*arguments)
        return now(device, self._clock) - started


def in_words(result: dict[str, Any]) -> str:
    """One line about what `InferenceSpeed` has measured."""
    own, other = result["samples_per_second"], result["samples_per_second_float32"]
    return (
        f"Inference in {result['precision']}: {own:,.1f} samples/s; in float32: {other:,.1f}; {result['speed_up']:.2f}"
        f" times as fast (medians of {result['rounds']} rounds of {result['batches']} batches)"
    )


@contextmanager
def _in_float32(module: nn.Module) -> Iterator[None]:
    """The module in float32, as no autocast is on here; weights of other dtypes are put back to the bit afterwards."""
    tensors = [*module.parameters(), *module.buffers()]
    others = [(one, one.data) for one in tensors if one.is_floating_point() and one.dtype is not torch.float32]
    with torch.inference_mode(False), torch.no_grad():  # weights made in inference mode could not be trained again
        for one, data in others:
            one.data = data.float()
    try:
        yield
    finally:
        with torch.inference_mode(False), torch.no_grad():
            for one, data in others:
                one.data = data
