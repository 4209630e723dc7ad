"""Reference loops in plain torch: on one device, with DDP, and with FSDP2.

They use ``fully_shard`` or ``DistributedDataParallel``, ``torch.autocast``, ``torch.amp.GradScaler``,
``clip_grad_norm_`` (of DTensors, under FSDP2), ``no_sync`` or ``set_requires_gradient_sync``, and nothing of this
package. They run a ``Setup``. A batch with weight 0 is run with its loss times 0.
"""

from contextlib import nullcontext

import torch
import torch.distributed as distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.distributed import setups
from tests.distributed.setups import Net, Trace

AUTOCAST = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


def wrap(net, engine):
    """Wrap the module for the engine."""
    if engine == "single":
        return net
    if engine == "ddp":
        return DistributedDataParallel(net)
    if engine == "2d":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
        setups.parallelize(net.net, mesh)
        return fully_shard(net, mesh=mesh["data_parallel"])
    if engine == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    else:
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in net.net:
        if any(True for _ in block.parameters()):
            fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def clip_(parameters, how):
    """Clip, and return the norm before clipping."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if how == "value":
        norm = torch.nn.utils.get_total_norm(gradients)
        torch.nn.utils.clip_grad_value_(parameters, setups.CLIPPING[how])
    elif how == "inf" or len({g.device_mesh for g in gradients if isinstance(g, DTensor)}) > 1:
        # norm of whole gradients: torch cannot compute that of DTensors with an empty shard or on several meshes
        whole = [gradient.full_tensor() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
        norm = torch.nn.utils.get_total_norm(whole, float("inf") if how == "inf" else 2.0)
        torch.nn.utils.clip_grads_with_norm_(parameters, setups.CLIPPING[how], norm, foreach=False)
    else:
        norm = torch.nn.utils.clip_grad_norm_(parameters, setups.CLIPPING[how])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def all_finite(optimizers):
    """Return for each optimizer whether its gradients are finite on all ranks."""
    answers = []
    for optimizer in optimizers:
        found = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        local = [g.to_local() if isinstance(g, DTensor) else g for g in found]
        answers.append(float(not all(torch.isfinite(gradient).all() for gradient in local)))
    flags = torch.tensor(answers)
    if distributed.is_initialized():
        distributed.all_reduce(flags, distributed.ReduceOp.MAX)
    return [flag == 0 for flag in flags.tolist()]


def train(setup, engine, world_size=2):
    """Train the set-up on all ranks of an engine, or on ``single``."""
    rank = setups.data_rank(engine, world_size)
    ranks, each, replicas = (range(world_size), world_size, 1)
    if engine != "single":
        ranks, each, replicas = range(rank, rank + 1), 1, world_size
    net, trace = Net(setup), Trace()
    model = wrap(net, engine)
    optimizers = net.make_optimizers()
    schedules = [setups.make_schedule(optimizer) for optimizer in optimizers] if setup.schedule else []
    scaler = torch.amp.GradScaler("cpu", **setups.SCALER, enabled=setup.precision == "16-mixed")
    train, val = setups.batches_of(ranks, setup.batches), setups.batches_of(ranks, setups.VAL_BATCHES, seed=2)
    autocast = torch.autocast("cpu", AUTOCAST.get(setup.precision), enabled=setup.precision in AUTOCAST)
    steps = skipped_steps = 0

    def forward(batch, epoch=-1):
        with autocast:
            return model(batch, epoch)

    def step(optimizer, norms, is_finite):
        """Unscale, clip and step. Returns whether the step was skipped."""
        nonlocal steps
        steps += 1
        scaler.unscale_(optimizer)
        trace.rates.append(optimizer.param_groups[0]["lr"])
        if setup.clip is not None:
            norms.append(clip_([p for group in optimizer.param_groups for p in group["params"]], setup.clip))
        if not setup.guard or is_finite:
            scaler.step(optimizer)
        return (scaler.is_enabled() or setup.guard) and not is_finite

    def finish(skipped, norms, scale):
        nonlocal skipped_steps
        if scaler.is_enabled():
            scaler.update()
        trace.skipped.append(any(skipped))
        trace.scales.append(scale)
        trace.next_scales.append(scaler.get_scale())
        skipped_steps += any(skipped)
        if norms:
            trace.norms.append((norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))).item())

    for epoch, window in enumerate(setup.windows):
        size = window * each
        for i, batch in enumerate(train):
            if setup.manual:
                skipped, norms, scale = [], [], scaler.get_scale()
                for number, optimizer in enumerate(optimizers):
                    optimizer.zero_grad()
                    loss = forward(batch, epoch) * (number + 1)
                    scaler.scale(loss).backward()
                    skipped.append(step(optimizer, norms, all_finite([optimizer])[0]))
                finish(skipped, norms, scale)
            else:
                start = i - i % size
                length = min(size, len(train) - start)  # batches of this window
                is_last = i == start + length - 1
                weights = [  # the weights of the window's batches, in all processes
                    0.0 if setup.is_none(r, epoch, j) else setup.weight(r, j)
                    for j in range(start // each, (start + length) // each)
                    for r in range(world_size)
                ]
                if i == start:
                    for optimizer in optimizers:
                        optimizer.zero_grad()
                if isinstance(model, FSDPModule):
                    model.set_requires_gradient_sync(setup.sync_each_batch or is_last)
                accumulates = isinstance(model, DistributedDataParallel) and not is_last
                with model.no_sync() if accumulates else nullcontext():
                    loss = forward(batch, epoch)
                    _, _, source, index = batch
                    if setup.is_plain_mean:
                        loss = loss / length if length > 1 else loss
                    elif setup.is_none(source, epoch, index):
                        loss = loss * 0.0
                    else:
                        loss = loss * (setup.weight(source, index) * replicas / sum(weights))
                    scaler.scale(loss).backward()
                if is_last and sum(weights):
                    scale, norms = scaler.get_scale(), []
                    finite = all_finite(optimizers)
                    skipped = [step(*one) for one in zip(optimizers, [norms] * len(finite), finite, strict=True)]
                    finish(skipped, norms, scale)
                    if setup.schedule == "step":
                        for schedule, was_skipped in zip(schedules, skipped, strict=True):
                            if not was_skipped:
                                schedule.step()
                elif is_last:
                    steps += len(optimizers)  # skipped for lack of a loss; Lightning counts it
            if i + 1 == len(train) and setup.schedule == "epoch":
                for schedule in schedules:
                    schedule.step()
            if setup.val_every and (i + 1) % (setup.val_every * each) == 0:
                model.eval()
                with torch.no_grad():
                    loss = torch.stack([forward(batch) for batch in val]).mean()
                if replicas > 1:
                    if distributed.get_rank() % (distributed.get_world_size() // replicas):
                        loss.zero_()  # of data of another rank
                    distributed.all_reduce(loss)
                trace.val_losses.append(loss.item() / replicas)
                model.train()
        trace.take_weights(net)
    trace.take_state(optimizers)
    trace.counts = {"global_step": steps, "skipped_steps": skipped_steps, "scale": scaler.get_scale()}
    return trace
