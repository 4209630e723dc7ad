"""Adapters to Lightning's private API, and nothing else.

Names with a leading underscore that belong to Lightning occur only in this package. Each module adapts one part of
Lightning, for example:

``engine``           the accelerator connector and strategies
``precision``        the precision plugin that strategies and ``LightningOptimizer`` use
``data``             the data connector: requesting dataloaders, distributed samplers, limits
``logging``          ``LightningModule.log`` and the name of the running hook
``callback_order``   the order of callbacks, ``configure_callbacks``
``loop_state``       the ``loops`` entry of a checkpoint
``views``            ``trainer.fit_loop`` and the other loops, as stock callbacks read them
``base``             the base class of ``Trainer``: attributes that modules, callbacks and loggers require
"""
