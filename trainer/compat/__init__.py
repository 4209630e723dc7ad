"""Everything that is shaped by Lightning's private surface, and nothing else.

Names with a leading underscore that belong to Lightning appear in this package only. Each module says which part of
Lightning it stands for:

``engine``       the accelerator connector and strategies
``precision``    the precision plugin that strategies and ``LightningOptimizer`` talk to
``data``         the data connector: requesting dataloaders, distributed samplers, limits
``logging``      ``LightningModule.log`` and the name of the hook that runs
``callbacks``    the order of callbacks, ``configure_callbacks``
``loop_state``   the ``loops`` part of a checkpoint
``views``        ``trainer.loops.fit`` and its relatives, as stock callbacks read them
``base``         the base class of ``Trainer``: attributes that modules, callbacks and loggers expect of it
"""
