"""The adapters of Lightning's loggers (:class:`trainer.loggers.LoggerAdapter`), one class per logger.

The modules import neither torch nor Lightning: the command line imports them before it checks a config.
"""
