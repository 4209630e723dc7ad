"""FSDP2: parameters, gradients and optimizer states spread over processes, by ``torch.distributed.fsdp.fully_shard``.

``wrap`` shards a module and puts it back; ``gradients`` is what a training step does to gradients of which each process
holds a part; ``idle`` keeps a process without a batch in step with the others; ``state`` is whole state dicts of what
is sharded. Nothing here imports Lightning: its side is ``trainer.compat.fsdp``.
"""
