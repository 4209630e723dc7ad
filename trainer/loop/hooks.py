"""Every hook, in order, as one annotated loop; and how hooks are called.

The names, the order and the arguments are Lightning's. A hook runs on the callbacks first, in their order, and then on
the module. ``*`` marks a hook that only the module has, ``c`` one that only callbacks have, ``d`` one that a datamodule
may have, too, and ``+`` one that Lightning does not have::

    fit:
        d prepare_data                       one process per node
        d setup                              datamodule, callbacks, module
        * configure_model, configure_optimizers
          on_fit_start
        c on_sanity_check_start; validation (below) on a few batches; on_sanity_check_end
          on_train_start
          for each epoch:
              on_train_epoch_start
              for each batch:
                d on_before_batch_transfer, transfer_batch_to_device, on_after_batch_transfer
                  on_train_batch_start       the module's may return -1: skip the rest of the epoch
                * training_step              under autocast
                  on_before_zero_grad        at a window's first batch
                * optimizer_zero_grad
                  on_before_backward
                * backward
                  on_after_backward          gradients are unscaled (with FSDP: in manual optimization only)
                  on_before_optimizer_step   at a window's last batch; gradients are unscaled and unclipped
                * configure_gradient_clipping
                  (the optimizer steps)
                + on_after_optimizer_step    with the StepOutcome; with a fused optimizer on a GPU, just before the next
                                             update, or when the outcome is read, if that is earlier
                * lr_scheduler_step          unless the step was skipped
                  on_train_batch_end         callbacks that save checkpoints: after the module and the loggers; a
                                             ModelCheckpoint that monitors a metric saves in on_validation_end instead
                                             if a validation follows
                  validation, if it is due:
                    * on_validation_model_zero_grad  unless gradients accumulate
                    * on_validation_model_eval
                      on_validation_start, on_validation_epoch_start
                      for each batch: on_validation_batch_start, validation_step, on_validation_batch_end
                      on_validation_epoch_end, on_validation_end (callbacks that save: after the module)
                    * on_validation_model_train
              on_train_epoch_end             callbacks, module, callbacks that monitor a metric; last, those that save
          on_train_end
          on_fit_end
        d teardown

test and predict run like validation, with their own names; predict has no loss and logs nothing.
on_exception runs if anything above raises.

Overrides are looked up when a run starts, and again at the start of an epoch if callbacks were added or removed, or a
hook was set on a callback or on the module. A hook that nothing overrides costs one ``if``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

Call = Callable[..., Any]
CURRENT_HOOK = "_current_fx_name"
"""Lightning's attribute of a module: the name of the running hook."""


class HookScope:
    """Stores the name of the running hook in a LightningModule, for ``self.log``.

    It writes to the module's ``__dict__``, because ``nn.Module.__setattr__`` takes a microsecond, twice per hook.

    Args:
        module: the LightningModule. None for the hooks of a loop without a run.
    """

    def __init__(self, module: Any) -> None:
        self._state = {CURRENT_HOOK: None} if module is None else vars(module)

    def enter(self, name: str | None) -> str | None:
        """Set the running hook to ``name`` (None: no hook). Return the previous one."""
        state = self._state
        outer: str | None = state[CURRENT_HOOK]
        state[CURRENT_HOOK] = name
        return outer


class Hook:
    """One hook: the calls of callbacks and module at one point of the loop. Call it with the hook's arguments."""

    __slots__ = ("_after", "_before", "_module", "_scope", "is_empty", "name")

    def __init__(self, name: str, scope: HookScope, module: Call | None = None) -> None:
        self.name = name
        self._scope = scope
        self.set((), module, ())

    def set(self, before: Sequence[Call], module: Call | None, after: Sequence[Call]) -> None:
        """Set the calls: those of the callbacks, of the module, and of the callbacks that run after the module."""
        self.is_empty = not before and module is None and not after
        self._before = tuple(before)
        self._module = module
        self._after = tuple(after)

    def __call__(self, *args: Any) -> Any:
        """Run the hook. Return the result of the module's call."""
        if self.is_empty:
            return None
        outer = self._scope.enter(self.name)
        result = None
        for call in self._before:
            call(*args)
        if self._module is not None:
            result = self._module(*args)
        for call in self._after:
            call(*args)
        self._scope.enter(outer)
        return result

    def of_module(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's call only, for a hook with arguments that Lightning passes by name."""
        assert self._module is not None
        outer = self._scope.enter(self.name)
        result = self._module(*args, **kwargs)
        self._scope.enter(outer)
        return result


CALLBACK_ONLY_HOOKS = ("on_sanity_check_start", "on_sanity_check_end")
"""The hooks of ``CALLBACK_HOOKS`` that modules do not have."""


STRATEGY_HOOKS = (
    "on_train_start", "on_train_batch_start", "on_train_end", "on_validation_start", "on_validation_end",
    "on_test_start", "on_test_end", "on_predict_start", "on_predict_end",
)  # fmt: skip
"""The hooks of ``CALLBACK_HOOKS`` that strategies have, too."""


def _return_false(*_: Any) -> bool:
    return False


_SAVING = {"on_train_batch_end": "save_after_batch", "on_train_epoch_end": "save_after_epoch"}
"""For these hooks, callbacks that save checkpoints are called later: by the second hook."""


class Hooks:
    """The hooks of one run, each as an attribute: ``hooks.on_train_start()``. :meth:`follow` may replace attributes.

    Args:
        trainer: the first argument of the callbacks' hooks.
        module: the LightningModule, the second argument of the callbacks' hooks.
        callbacks: the callbacks, in the order they are called; see :meth:`follow`.
        scope: stores the name of each hook that runs.
        overrides: returns whether an object overrides a named method.
        monitors: returns whether a callback's ``on_train_epoch_end`` runs after the module's, because it reads the
            module's metrics.
        saves: returns whether a callback writes checkpoints. Its hook runs last at the end of a batch, a validation or
            an epoch, so that a checkpoint holds the effects of the module and of logging. Default: no callback does.
        profile: wraps a call in a profiler's scope: (owner, name of the hook, call). Default: None, calls are not
            wrapped.
        strategy: an object with hooks that run after those of the module; see ``STRATEGY_HOOKS``. Default: None.

    Attributes:
        callbacks: the current callbacks.
    """

    on_fit_start: Call
    on_fit_end: Call
    on_sanity_check_start: Call
    on_sanity_check_end: Call
    on_train_start: Call
    on_train_end: Call
    on_train_epoch_start: Call
    on_train_epoch_end: Call
    on_train_batch_start: Call
    on_train_batch_end: Call
    on_before_zero_grad: Call
    on_before_backward: Call
    on_after_backward: Call
    on_before_optimizer_step: Call
    on_after_optimizer_step: Call
    save_after_batch: Call
    save_after_epoch: Call

    def __init__(
        self,
        trainer: object,
        module: Any,
        callbacks: Iterable[Any],
        scope: HookScope,
        overrides: Callable[[Any, str], bool],
        monitors: Callable[[Any], bool],
        saves: Callable[[Any], bool] = _return_false,
        profile: Callable[[Any, str, Call], Call] | None = None,
        strategy: Any = None,
    ) -> None:
        self.scope = scope
        self._strategy = strategy
        self._trainer = trainer
        self._module = module
        self._profile = profile
        self._overrides = overrides
        self._monitors = monitors
        self._saves = saves
        self.callbacks: list[Any] = []
        self._known: list[tuple[int, dict[str, Any]]] = []
        self._hooks = {name: Hook(name, scope) for name in CALLBACK_HOOKS}
        self._hooks |= {saving: Hook(name, scope) for name, saving in _SAVING.items()}
        self.follow(callbacks)

    def follow(self, callbacks: Iterable[Any]) -> bool:
        """Look up the overrides of these callbacks and of the module again, if they may have changed.

        Returns:
            Whether a callback was added or removed, or a hook was set on a callback or on the module.
        """
        callbacks = list(callbacks)
        # the hooks that are set on an instance instead of its class
        owners = ((id(owner), getattr(owner, "__dict__", {})) for owner in (*callbacks, self._module, self._strategy))
        known = [
            (number, {name: own_hooks[name] for name in _NAMES & own_hooks.keys()}) for number, own_hooks in owners
        ]
        if known == self._known:
            return False
        self.callbacks, self._known = callbacks, known  # keeps the callbacks alive, so that their ids are not reused
        for name in CALLBACK_HOOKS:
            parts = ((c, self._part_of(c, name, self._trainer, self._module)) for c in callbacks)
            calls = [(c, call) for c, call in parts if call is not None]
            if name in _SAVING:
                saving = [call for c, call in calls if self._saves(c)]
                calls = [(c, call) for c, call in calls if not self._saves(c)]
                self.of(_SAVING[name]).set((), None, saving)
            late = {"on_train_epoch_end": self._monitors, "on_validation_end": self._saves}.get(name, _return_false)
            has_strategy = self._strategy is not None and name in STRATEGY_HOOKS
            strategy = self._part_of(self._strategy, name) if has_strategy else None
            self.of(name).set(
                [call for c, call in calls if not late(c)],
                None if name in CALLBACK_ONLY_HOOKS else self._part_of(self._module, name),
                [*([] if strategy is None else [strategy]), *(call for c, call in calls if late(c))],
            )
        # calling a function or a method takes a fraction of the time of calling an object
        vars(self).update((name, _nothing if hook.is_empty else hook.__call__) for name, hook in self._hooks.items())
        return True

    def of(self, name: str) -> Hook:
        """Return the hook called ``name``, which stays the same; the evaluation loop forms names from its stage."""
        return self._hooks[name]

    def of_module(self, name: str) -> Hook:
        """Return a hook that only the module has, such as ``on_validation_model_eval``.

        If the module does not override it, LightningModule's default is called.
        """
        return Hook(name, self.scope, module=self._bind(self._module, name))

    def override_of(self, name: str) -> Hook | None:
        """Return the module's own version of ``name``, or None if it does not override it."""
        return self.of_module(name) if self._overrides(self._module, name) else None

    def _part_of(self, owner: Any, name: str, *first: Any) -> Call | None:
        """Return the call of ``owner`` at one hook; None, or an empty call for a profiler, if there is no override."""
        if self._overrides(owner, name):
            return self._bind(owner, name, *first)
        if self._profile is None or not hasattr(owner, name):
            return None
        return self._profile(owner, name, _nothing)

    def _bind(self, owner: Any, name: str, *first: Any) -> Call:
        method = getattr(owner, name)
        call: Call = partial(method, *first) if first else method
        return call if self._profile is None else self._profile(owner, name, call)


def _nothing(*_: Any) -> None:
    pass


CALLBACK_HOOKS = (
    *(name for name in Hooks.__annotations__ if name.startswith("on_")),
    *(
        f"on_{stage}_{moment}"
        for stage in ("validation", "test", "predict")
        for moment in ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end")
    ),
)
"""The hooks that callbacks and modules share and that run inside the loops."""
_NAMES = frozenset(CALLBACK_HOOKS)


NO_HOOKS = Hooks(None, None, (), HookScope(None), _return_false, _return_false)
"""The hooks of a loop that has no run yet: all empty."""
