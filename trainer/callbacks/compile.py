"""``torch.compile`` for a run: the right parts, in place, with what CUDA graphs overwrite kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric, MetricCollection

from trainer.callbacks.choice import Choice, as_choices, choose
from trainer.callbacks.run_callback import RunCallback
from trainer.engine import compilation
from trainer.errors import ConfigurationError, expect, warn
from trainer.walks import has_forward, plain_class

_USUAL = 4
"""How often a function is compiled anew where all is well: with and without gradients, and when a size first varies."""
_REASONS = 5  # in the record

Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


class Compile(RunCallback):
    """Has ``torch.compile`` compile the module's network while a run lasts: training, validation, test, prediction.

    What is compiled are forward passes: the LightningModule's own ``forward``, and each of its parts (``self.net``)
    with more in it than one layer of torch's. ``training_step`` is not, so that the loss, ``self.log`` and metrics stay
    plain Python, which does not have to be compiled anew when a counter has changed. A step may call ``self(x)`` or
    ``self.net(x)``: what is called first is one graph with all that is in it. Sharded modules (FSDP) are compiled one
    by one, as whole graphs between the exchanges.

    The module is compiled in place: names, weights and the keys of checkpoints stay what they are, copies and pickles
    of it are not compiled, and it is not any more when the run is over. A run may be resumed with it or without it. It
    goes together with every precision, ``fp32_modules``, ``ActivationCheckpointing``, accumulation, clipping and DDP.

    CUDA graphs (``"reduce-overhead"``, ``"max-autotune"``) write the results of each step over those of the one before.
    What is kept is copied: single numbers that a compiled forward pass returns, all that it returns without gradients,
    and gradients that a later backward pass adds to. Of what else a ``training_step`` keeps of a compiled network's
    output, make a ``clone()``; torch raises an error otherwise. After such a run, call
    ``torch.compiler.cudagraph_mark_step_begin()`` in loops of your own in the same process, as torch wants it.

    How often something was compiled is in the record of the run, with the reasons why it was compiled anew. A warning
    tells of a function that is compiled again and again, once.

    Args:
        modules: what to compile instead, as one choice or several: names, classes or patterns as in
            :class:`ActivationCheckpointing`. ``"Block"`` compiles each block of a transformer by itself: one
            compilation serves them all, and it takes a fraction of the time.
        mode, dynamic, fullgraph, backend, options: those of ``torch.compile``.

    Attributes:
        compiled: names of what is compiled, in a run and after it.
        compilations: what torch has compiled in the run (function, reason, seconds), in its order.

    Raises:
        ConfigurationError: no choice at all; or, when the run starts, one that matches nothing, a module in which there
            is nothing to compile, or one that ``torch.compile`` has compiled as a whole.
    """

    unsupported_with: ClassVar = {
        "deepspeed": "makes graphs of forward passes, which DeepSpeed's hooks break. Use strategy='fsdp'."
    }
    of_no_run: ClassVar = {"_undo": [], "_is_on": False}  # the module is compiled, and put back, by the original

    def __init__(
        self,
        modules: Choice | Sequence[Choice] | None = None,
        *,
        mode: Mode | None = None,
        dynamic: bool | None = None,
        fullgraph: bool = False,
        backend: Any = "inductor",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.modules = None if modules is None else as_choices(modules)
        self.settings: dict[str, Any] = {"backend": backend, "fullgraph": fullgraph, "dynamic": dynamic}
        self.settings |= {"mode": mode, "options": None if options is None else dict(options)}
        are_too_many = mode is not None and options is not None
        expect(not are_too_many, "one of them: torch.compile takes no more", mode=mode, options=options)
        self.compiled: list[str] = []
        self._watch = compilation.Compilations()
        self._undo: list[Any] = []
        self._is_on = self._marks = self._warned = False

    @property
    def compilations(self) -> list[compilation.Compilation]:
        """What has been compiled."""
        return self._watch.done

    # --- the run begins ---------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Compile: that is, have it compiled when it is called."""
        self._compile(trainer, pl_module)

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Compile, where this is no part of a fit."""
        if not self._is_on:
            self._compile(trainer, pl_module)

    on_test_start = on_validation_start
    on_predict_start = on_validation_start

    def _compile(self, trainer: Any, module: LightningModule) -> None:
        if getattr(module, "_compiler_ctx", None) is not None:
            raise ConfigurationError(
                f"{type(module).__name__} has been compiled with torch.compile, and the callback Compile is to compile"
                " its parts. Pass the module itself; or leave out the callback."
            )
        self._marks = compilation.reuses_memory(self.settings, trainer.strategy.root_device)
        self._warned = False
        how: dict[str, Any] = {"settings": self.settings, "reuses_memory": self._marks}
        parts = _parts(module) if self.modules is None else choose(module, self.modules, "Compile")
        whole = self.modules is None and _has_own_forward(module) and not _units(module)
        if not parts and not whole:
            raise ConfigurationError(
                f"There is nothing to compile in {type(module).__name__}: it has no forward, and no part with more in"
                " it than one layer. Put what its steps compute into its forward, or into a module of its own."
            )
        self.compiled = [*parts, *(["forward"] if whole else [])]
        if whole:
            self._undo.append(compilation.CompiledForward(module, **how).undo)
        for part in parts.values():
            if not compilation.is_compiled(part):
                self._undo.append(compilation.compile_in_place(part, **how))
        self._is_on = True
        self._watch.start()

    # --- each step --------------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A step begins."""
        if self._marks:
            compilation.begin_step()

    on_validation_batch_start = on_train_batch_start
    on_test_batch_start = on_train_batch_start
    on_predict_batch_start = on_train_batch_start

    def on_after_backward(self, trainer: Any, pl_module: LightningModule) -> None:
        """Keep gradients that outlive the step: the next backward pass of a CUDA graph would write over them."""
        if not self._marks:
            return
        loop, gradients = getattr(trainer, "loop", None), getattr(getattr(trainer, "engine", None), "gradients", None)
        ends_here = loop is not None and loop.window.is_last and loop.path.clears_early
        if gradients is not None and not (pl_module.automatic_optimization and ends_here):
            for optimizer in trainer.optimizers:
                gradients.keep(optimizer)

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """See what has been compiled."""
        if self._watch.read():
            self._warn_of_recompiling()

    # --- the run ends -----------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Warn, if nothing was compiled at all."""
        self._watch.read()
        if not self.compilations and trainer.global_step and not compilation.ever_compiled():
            warn(
                f"Compile has compiled nothing: no step has called {' or '.join(map(repr, self.compiled))}. Steps have"
                " to call modules, as in self.net(x), not their methods.",
                PossibleUserWarning,
            )

    def _let_go(self, trainer: Any) -> None:
        """Leave the module as it was."""
        while self._undo:
            self._undo.pop()()
        self._is_on = False
        self._watch.stop()

    def run_facts(self) -> dict[str, Any]:
        """What the record of the run says."""
        self._watch.read()
        anew = [one for one in self.compilations if one.reason]
        return {
            "compile": {
                "modules": self.compiled,
                **{name: value for name, value in self.settings.items() if isinstance(value, (str, bool))},
                "compilations": len(self.compilations),
                "recompilations": len(anew),
                "reasons": list(dict.fromkeys(f"{one.function}: {one.reason}" for one in anew))[:_REASONS],
                "graph_breaks": self._watch.graph_breaks,
                "seconds": round(sum(one.seconds for one in self.compilations), 3),
            }
        }

    def _warn_of_recompiling(self) -> None:
        anew = [one for one in self.compilations if one.reason]
        function, times = Counter(one.function for one in anew).most_common(1)[0] if anew else ("", 0)
        if self._warned or times <= _USUAL:
            return
        self._warned = True
        of_it = [one for one in anew if one.function == function]
        warn(
            f"{function} has been compiled anew {times} times, in {sum(one.seconds for one in of_it):.1f} s; the last"
            f" time because: {of_it[-1].reason}. After 8 times torch gives up, and runs it uncompiled. Where sizes"
            " differ from batch to batch, dynamic=True compiles once for all of them; a number that changes from step"
            " to step is a constant of the graph, unless it is a tensor.",
            PossibleUserWarning,
        )


def _parts(module: nn.Module) -> dict[str, nn.Module]:
    """What of a module is worth a graph: sharded parts, else its children, containers standing for what they hold."""
    if units := _units(module):
        return units
    found: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        if isinstance(child, (Metric, MetricCollection)):
            continue
        if not has_forward(child):
            found |= {f"{name}.{inner}": part for inner, part in _parts(child).items()}
        elif not _is_one_layer(child):
            found[name] = child
    return found


def _units(module: nn.Module) -> dict[str, nn.Module]:
    """The innermost modules that are sharded by themselves, with more in them than one layer."""
    sharded = {name: part for name, part in module.named_modules() if name and hasattr(part, "unshard")}
    return {
        name: part
        for name, part in sharded.items()
        if not any(other.startswith(f"{name}.") for other in sharded) and not _is_one_layer(part)
    }


def _is_one_layer(module: nn.Module) -> bool:
    """One of torch's, such as ``nn.Linear`` or a loss: there is nothing to fuse it with."""
    return plain_class(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children())


def _has_own_forward(module: LightningModule) -> bool:
    return plain_class(module).forward not in (LightningModule.forward, nn.Module.forward) or "forward" in vars(module)
