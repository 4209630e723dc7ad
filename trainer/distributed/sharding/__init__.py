"""FSDP2: shard parameters, gradients and optimizer states over processes with ``torch.distributed.fsdp.fully_shard``.

``wrap`` shards a module and restores it; ``sharded_gradients`` processes sharded gradients in a training step; ``idle``
lets a process without a batch take part in the collectives of the others; ``state_dicts`` converts between whole and
sharded state dicts. This package does not import Lightning: ``trainer.distributed.fsdp`` connects the two.
"""
