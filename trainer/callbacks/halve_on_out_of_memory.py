"""Continue a fit in which memory runs out, by running a batch in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback

from trainer.data.samples import part_of, tensors_in
from trainer.errors import ConfigurationError, expect, is_count, rank_zero_warn


class HalveOnOutOfMemory(Callback):
    """Splits a batch in halves when memory runs out in its forward or backward pass, and goes on with these.

    The gradients of the batch that failed are undone, and its halves run one after the other, like batches of an
    accumulation window. So the step is the one that the whole batch would have made, up to rounding: a half counts
    by its number of samples (or by the ``"weight"`` that ``training_step`` returns beside its loss). The halves
    are halved again where they need to be, down to a single sample. Later batches are split at once into parts of the
    size that fitted; a warning says so. While nothing has been split, a step is the usual one, to the bit.

    What is different from the whole batch, and cannot be otherwise:

    - BatchNorm, and whatever else looks across samples (a contrastive loss), sees parts;
    - the loss must be a mean over the samples of a batch, or come with a weight;
    - ``training_step`` and the hooks around a backward pass run once for each part, with the same ``batch_idx``: what
      ``self.log`` is given with ``on_step`` is the last part's, an epoch's mean is that over parts, by their sizes, and
      a part that failed after it had logged has been logged;
    - random numbers (dropout) are others.

    On several processes each splits what does not fit in its own memory, and the others wait for it at the end of the
    window. There, gradients are averaged after the last backward pass, not during it; a ``training_step`` must not
    wait for other processes (``self.log(..., on_step=True, sync_dist=True)``, ``SyncBatchNorm``). With accumulation,
    a second set of gradients is there during a backward pass.

    Memory that runs out elsewhere, in moving a batch to the device or in the optimizer's step, ends the run.
    For automatic optimization with optimizers that take one gradient a step.

    Args:
        split: takes the samples from ``start`` to ``stop`` out of a batch, ``split(batch, start, stop)``. Default: for
            nested tuples, lists, mappings and dataclasses, in which all tensors that have a length have the same one:
            that of the batch. Lists of as many other things are cut, too.
        limit: samples in a part at most, from the start; None for none until memory runs out.

    Attributes:
        limit: as it is now. Kept in checkpoints, so that a run that is resumed computes the same.

    Raises:
        ConfigurationError: a limit below 1; when a fit starts, a module that optimizes by hand or draws its own
            batches, or an optimizer that evaluates the loss itself.
    """

    def __init__(self, split: Callable[[Any, int, int], Any] | None = None, limit: int | None = None) -> None:
        expect(limit is None or is_count(limit), "a number of samples, at least 1, or None", limit=limit)
        self.limit = limit
        self.split = part_of if split is None else split
        self._is_default = split is None

    def check(self, path: object, draws_batches: bool) -> None:
        """Refuse fits whose batches cannot be run in parts.

        Raises:
            ConfigurationError: the module takes its optimizer into its own hands, or draws its own batches.
        """
        if path is not None or draws_batches:
            what = "draws its own batches (dataloader_iter)"
            if path is not None:
                what = "optimizes by hand, overrides `optimizer_step`, or whose optimizer evaluates the loss itself"
            raise ConfigurationError(
                f"Got HalveOnOutOfMemory and a module that {what}, expected automatic optimization with optimizers that"
                " take one gradient a step: only there can a batch be split behind the module's back. Take a smaller"
                " batch_size, and accumulate."
            )

    def measure(self, batch: Any) -> int:
        """The number of samples in a batch.

        Raises:
            ValueError: it cannot be told from the lengths of the batch's tensors.
        """
        lengths = sorted({len(tensor) for tensor in tensors_in(batch) if tensor.dim()})
        if len(lengths) == 1 or (lengths and not self._is_default):
            return lengths[0] if self._is_default else next(len(t) for t in tensors_in(batch) if t.dim())
        found = f"has tensors of the lengths {lengths}" if lengths else f"({type(batch).__name__}) has no tensors"
        raise ValueError(
            f"the batch {found}, expected the same for all of them: its number of samples. Pass"
            " HalveOnOutOfMemory(split=...), a function that takes samples out of such a batch."
        )

    def announce(self, size: int, limit: int) -> None:
        """Memory has run out, and did not with parts of ``limit`` samples."""
        self.limit = limit
        rank_zero_warn(
            f"Memory ran out on a batch of {size} samples. It was run in parts of at most {limit}, and so will be the"
            " next ones: with the same gradients, in more time. BatchNorm sees the parts. A smaller batch_size with"
            " accumulate_grad_batches does the same without the attempt."
        )

    def state_dict(self) -> dict[str, Any]:
        """The limit, if there is one."""
        return {} if self.limit is None else {"limit": self.limit}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the limit that the run of the checkpoint had found."""
        self.limit = state_dict["limit"]
