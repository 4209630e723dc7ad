"""``torch.compile`` for a run: compile the right parts in place, and copy outputs that CUDA graphs would overwrite.

Forward passes are compiled, and ``training_step`` is not: values that a step logs, counts and reads from the Trainer
change from batch to batch, and each change would cause another graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric, MetricCollection

from trainer.callbacks.module_selection import ModulePattern, as_patterns, select_modules
from trainer.common.module_tree import has_forward, plain_class
from trainer.common.run_callback import RunCallback
from trainer.common.session import Session
from trainer.errors import ConfigurationError, expect, warn
from trainer.precision import compilation
from trainer.record.measures import device_of

_USUAL_RECOMPILATIONS = 4
"""Usual number of recompilations of a function: with and without gradients, and when a size first varies."""
_REASONS = 5  # maximum number of reasons in the record

Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


class Compile(RunCallback):
    """Compiles the network of a module with ``torch.compile`` during a run: training, validation, test, prediction.

    It compiles forward passes: the LightningModule's own ``forward``, and each of its parts (``self.net``), except
    single torch layers. ``training_step`` is not compiled, so that the loss, ``self.log`` and metrics
    remain plain Python and do not cause a recompilation when a counter changes. A step may call ``self(x)`` or
    ``self.net(x)``: the outermost call is one graph with everything inside. Sharded modules (FSDP) are compiled
    separately, as whole graphs between the collectives.

    The module is compiled in place: names, weights and the keys of checkpoints do not change, copies and pickles of it
    are not compiled, and it is restored at the end of the run. A run can be resumed with or without this callback. The
    callback can be combined with every precision, ``fp32_modules``, ``ActivationCheckpointing``, accumulation, clipping
    and DDP.

    With CUDA graphs (``"reduce-overhead"``, ``"max-autotune"``), each step overwrites the outputs of the previous step.
    Therefore the callback copies single numbers that a compiled forward pass returns, all outputs of a forward pass
    without gradients, and gradients that a later backward pass adds to. If a ``training_step`` keeps other outputs of a
    compiled network, it must ``clone()`` them; otherwise torch raises an error. After such a run, call
    ``torch.compiler.cudagraph_mark_step_begin()`` in your own loops in the same process, as torch requires.

    The record of the run contains the number of compilations, and the reasons for recompilations. One warning is issued
    if a function is recompiled more than four times.

    Args:
        modules: the parts to compile, one or several: names, classes or patterns as in
            :class:`ActivationCheckpointing`. ``"Block"`` compiles the blocks of a transformer separately: they share
            one compilation, which takes a fraction of the time. Default: None, for the parts described above.
        mode, dynamic, fullgraph, backend, options: those of ``torch.compile``.

    Attributes:
        compiled: the names of the compiled parts, during a run and after it.
        compilations: torch's compilations in the run (function, reason, seconds), in order.

    Raises:
        ConfigurationError: if ``modules`` is empty, or both ``mode`` and ``options`` are given; when the run starts, if
            a pattern matches no module, the module has nothing to compile, or the user has already compiled the whole
            module with ``torch.compile``.
    """

    unsupported_with: ClassVar = {
        "deepspeed": "makes graphs of forward passes, which DeepSpeed's hooks break. Use strategy='fsdp'."
    }
    reset_in_copies: ClassVar = {"_is_on": False}  # only the original compiles and restores the module

    def __init__(
        self,
        modules: ModulePattern | Sequence[ModulePattern] | None = None,
        *,
        mode: Mode | None = None,
        dynamic: bool | None = None,
        fullgraph: bool = False,
        backend: Any = "inductor",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.modules = None if modules is None else as_patterns(modules)
        self.settings: dict[str, Any] = {"backend": backend, "fullgraph": fullgraph, "dynamic": dynamic}
        self.settings |= {"mode": mode, "options": None if options is None else dict(options)}
        are_too_many = mode is not None and options is not None
        expect(not are_too_many, "one of them, because torch.compile does not accept both", mode=mode, options=options)
        self.compiled: list[str] = []
        self._watch = compilation.Compilations()
        self._session = Session()
        self._is_on = self._marks = self._warned = False
        if not compilation.reuses_memory(self.settings, torch.device("cuda")):  # on no device
            self._omit(Compile.on_after_backward)

    @property
    def compilations(self) -> list[compilation.Compilation]:
        """The compilations so far."""
        return self._watch.done

    # --- the run begins ---------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Prepare the compilation, which happens at the first call."""
        self._compile(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Prepare the compilation of a run without a fit."""
        if not self._is_on:
            self._compile(trainer, pl_module)

    on_test_start = on_validation_start
    on_predict_start = on_validation_start

    def _compile(self, trainer: pl.Trainer, module: LightningModule) -> None:
        if getattr(module, "_compiler_ctx", None) is not None:
            raise ConfigurationError(
                f"{type(module).__name__} is compiled with torch.compile already, expected an uncompiled module for"
                " the callback Compile. Pass the original module, or remove the callback."
            )
        self._marks = compilation.reuses_memory(self.settings, device_of(trainer))
        self._warned = False
        options: dict[str, Any] = {"settings": self.settings, "reuses_memory": self._marks}
        parts = _parts(module) if self.modules is None else select_modules(module, self.modules, "Compile")
        # the user may define a forward in the class, or in the instance
        has_own = plain_class(module).forward not in (LightningModule.forward, nn.Module.forward)
        whole = self.modules is None and (has_own or "forward" in vars(module)) and not _units(module)
        if not parts and not whole:
            raise ConfigurationError(
                f"There is nothing to compile in {type(module).__name__}: it has neither a forward nor a submodule"
                " with more than one layer. Move the computation of its steps to forward, or to a submodule."
            )
        self.compiled = [*parts, *(["forward"] if whole else [])]
        if whole:
            self._session.replace(module, "forward", compilation.CompiledForward(module, **options))
        for module_part in parts.values():
            if not compilation.is_compiled(module_part):
                compilation.compile_in_place(self._session, module_part, **options)
        self._is_on = True
        self._watch.start()

    # --- each step --------------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Mark the beginning of a step for CUDA graphs."""
        if self._marks:
            compilation.begin_step()

    on_validation_batch_start = on_train_batch_start
    on_test_batch_start = on_train_batch_start
    on_predict_batch_start = on_train_batch_start

    def on_after_backward(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Copy gradients that outlive the step, because the next backward pass of a CUDA graph would overwrite them."""
        if not self._marks:
            return
        loop, gradients = getattr(trainer, "loop", None), getattr(getattr(trainer, "engine", None), "gradients", None)
        ends_here = loop is not None and loop.window.is_last and loop.path.clears_before_forward
        if gradients is not None and not (pl_module.automatic_optimization and ends_here):
            for optimizer in trainer.optimizers:
                gradients.keep(optimizer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Read the compilations since the last batch."""
        if self._watch.read():
            self._warn_of_recompiling()

    # --- the run ends -----------------------------------------------------------------------------------------

    def on_train_end(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Warn if nothing was compiled at all."""
        self._watch.read()
        if not self.compilations and trainer.global_step and not compilation.ever_compiled():
            warn(
                f"Compile has compiled nothing: no step has called {' or '.join(map(repr, self.compiled))}. Steps have"
                " to call modules, as in self.net(x), not their methods.",
                PossibleUserWarning,
            )

    def _clean_up(self, trainer: pl.Trainer) -> None:
        """Restore the module."""
        self._session.close()
        self._is_on = False
        self._watch.stop()

    def run_facts(self) -> dict[str, Any]:
        """Return the entries for the record of the run."""
        self._watch.read()
        recompiled = [record for record in self.compilations if record.reason]
        return {
            "compile": {
                "modules": self.compiled,
                **{name: value for name, value in self.settings.items() if isinstance(value, (str, bool))},
                "compilations": len(self.compilations),
                "recompilations": len(recompiled),
                "reasons": list(dict.fromkeys(f"{r.function}: {r.reason}" for r in recompiled))[:_REASONS],
                "graph_breaks": self._watch.graph_breaks,
                "seconds": round(sum(record.seconds for record in self.compilations), 3),
            }
        }

    def _warn_of_recompiling(self) -> None:
        recompiled = [record for record in self.compilations if record.reason]
        function, times = Counter(record.function for record in recompiled).most_common(1)[0] if recompiled else ("", 0)
        if self._warned or times <= _USUAL_RECOMPILATIONS:
            return
        self._warned = True
        compilations = [record for record in recompiled if record.function == function]
        warn(
            f"{function} was recompiled {times} times, in {sum(r.seconds for r in compilations):.1f} s; the last"
            f" time because: {compilations[-1].reason}. After 8 times, torch runs it uncompiled. If sizes differ"
            " between batches, use dynamic=True. Python numbers are constants of the graph: pass those that change as"
            " tensors.",
            PossibleUserWarning,
        )


def _parts(module: nn.Module) -> dict[str, nn.Module]:
    """Return the parts of a module to compile: sharded parts, or else its children. Containers are searched."""
    if units := _units(module):
        return units
    parts: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        if isinstance(child, (Metric, MetricCollection)):
            continue
        if not has_forward(child):
            parts |= {f"{name}.{inner}": child_part for inner, child_part in _parts(child).items()}
        elif not _is_one_layer(child):
            parts[name] = child
    return parts


def _units(module: nn.Module) -> dict[str, nn.Module]:
    """Return the innermost modules that are sharded separately and consist of more than one layer."""
    sharded = {name: unit for name, unit in module.named_modules() if name and hasattr(unit, "unshard")}
    return {
        name: unit
        for name, unit in sharded.items()
        if not any(other.startswith(f"{name}.") for other in sharded) and not _is_one_layer(unit)
    }


def _is_one_layer(module: nn.Module) -> bool:
    """Return whether a module is a single torch layer (``nn.Linear``, a loss): compiling it gains nothing."""
    return plain_class(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children())
