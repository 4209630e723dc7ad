"""The processes that a launcher (torchrun, Slurm) has started: check their numbers, and let them find each other."""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from torch.distributed.constants import default_pg_timeout

from trainer.common.collectives import Collectives
from trainer.common.lightning_private import process_group_backend, settings_of
from trainer.common.rendezvous import is_served, store_of_this_start
from trainer.errors import ClusterError

_WHOLE_TRAINING = ": each of them would run the whole training, and write to the same folders"
_ADVICE = "To train in each of them separately, use Trainer(plugins=LightningEnvironment())."


_FILE_TIMEOUT = 10.0
"""Seconds until all nodes can see a file that one of them has written."""


class LaunchedProcesses(NamedTuple):
    """The processes that a launcher has started, read from its environment variables.

    Attributes:
        description: the launcher and its variables, as text.
        processes: the number of processes of the run.
        per_node: the number of processes per node. None if it is unknown or differs between nodes.
        nodes: the number of nodes. None if it is unknown.
    """

    description: str
    processes: int
    per_node: int | None
    nodes: int | None


def check_counts(environment: Any, strategy: Any) -> None:
    """Compare the processes that a launcher has started with the arguments of a Trainer.

    Raises:
        ClusterError: if the numbers differ.
    """
    started = _launched_processes(environment)
    if started is None or not isinstance(strategy, ParallelStrategy):
        return
    devices, nodes = len(strategy.parallel_devices or ()), int(getattr(strategy, "num_nodes", 1))
    fits = devices * nodes == started.processes and started.nodes in (None, nodes)
    if fits and started.per_node in (None, devices):
        return
    expected = "as many as there are"
    if started.per_node and started.nodes:
        expected = f"devices={started.per_node} and num_nodes={started.nodes}"
    raise ClusterError(
        f"Got devices={devices} and num_nodes={nodes}, which is {_count_text(devices * nodes)}, but"
        f" {started.description}. Expected {expected}, or another number of processes from the launcher."
    )


def nodes_started(plugins: Iterable[Any]) -> int:
    """Return the number of nodes that the launcher has started processes on; 1 without a launcher, or if it is unknown.

    Args:
        plugins: the plugins of the Trainer; a cluster environment among them determines the launcher.
    """
    given = [plugin for plugin in plugins if isinstance(plugin, ClusterEnvironment)]
    detected = (cls() for cls in (TorchElasticEnvironment, SLURMEnvironment) if cls.detect())
    environment = next(iter(given), None) or next(detected, None)
    started = _launched_processes(environment)
    return 1 if started is None else started.nodes or 1


def check_local_rank(environment: Any, strategy: Any) -> None:
    """Check that this process has a device. Called when a Trainer is created, before it uses the device.

    Raises:
        ClusterError: if the launcher has started more processes on this node than the Trainer has devices.
    """
    if not isinstance(strategy, ParallelStrategy) or environment.local_rank() < len(strategy.parallel_devices or ()):
        return
    check_counts(environment, strategy)
    try:
        strategy.root_device  # noqa: B018  # raises without a device; some strategies, such as Ray's, take it from elsewhere
    except IndexError:
        place = f"according to {type(environment).__name__} this is process {environment.local_rank() + 1} of a machine"
        devices = len(strategy.parallel_devices or ())
        raise ClusterError(f"Got devices={devices}, but {place}. Expected the number of its processes.") from None


def check_single_process(environment: Any) -> None:
    """Check that a fit on a single device is not started several times by a launcher.

    Raises:
        ClusterError: if the launcher has started several processes, because each would run the same training.
    """
    started = _launched_processes(environment)
    if started is None and type(environment) is not LightningEnvironment and (workers := _workers_of_ray()):
        started = LaunchedProcesses(f"Ray Train has started {_count_text(workers)}", workers, None, None)
    if started is not None and started.processes > 1:
        raise ClusterError(
            f"Got a single device and strategy 'auto', but {started.description}{_WHOLE_TRAINING}. Expected"
            f" strategy='ddp', devices={started.per_node or '...'} and num_nodes={started.nodes or '...'}. {_ADVICE}"
        )


def check_ray(plugins: Iterable[Any]) -> None:
    """Check that a Trainer in one of several workers of Ray Train has a plugin for Ray.

    Raises:
        ClusterError: if no plugin is a cluster environment.
    """
    workers = _workers_of_ray()
    if workers > 1 and not any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):
        raise ClusterError(
            f"Got a Trainer in one of {workers} workers of Ray Train without a plugin for it{_WHOLE_TRAINING}."
            " Expected, from ray.train.lightning: Trainer(strategy=RayDDPStrategy(), plugins=RayLightningEnvironment(),"
            f" devices='auto', callbacks=RayTrainReportCallback()). {_ADVICE}"
        )


def check_addresses(environment: Any, num_nodes: int, processes: int) -> None:
    """Check the environment variables that processes need to find each other.

    Raises:
        ClusterError: if some are missing or contradict the Trainer, because the processes would wait for each other at
            different addresses.
    """
    if type(environment) is not LightningEnvironment or processes == 1:
        return
    local_rank, rank, world_size = (os.environ.get(name) for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"))
    names: list[str] = []
    reason = ""
    if local_rank is not None:
        # on a single machine, the address has a default
        names = ["MASTER_PORT"] if num_nodes == 1 else ["MASTER_ADDR", "MASTER_PORT"]
        reason = f"LOCAL_RANK={local_rank} indicates that this process is one of several"
    elif num_nodes > 1:
        names = ["MASTER_ADDR", "MASTER_PORT", "NODE_RANK"]
        reason = f"num_nodes is {num_nodes}, and each node starts its processes by itself"
    elif rank is not None and world_size not in (None, str(processes)):
        raise ClusterError(
            f"Got {_count_text(processes)} from devices and num_nodes, but RANK={rank} and WORLD_SIZE={world_size} are"
            " set. Expected the same number, and LOCAL_RANK, MASTER_ADDR and MASTER_PORT as well, as torchrun sets"
            " them; or, for processes that the Trainer starts, none of these."
        )
    if missing := [name for name in names if name not in os.environ]:
        raise ClusterError(
            f"{reason}, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, so the processes"
            " cannot connect. Start them with torchrun or srun, which set them; or set on each node MASTER_ADDR (the"
            " first node's name), MASTER_PORT (a free port there) and NODE_RANK (0, 1, ...). If LOCAL_RANK is left over"
            " from another run, unset it."
        )


@contextmanager
def reserved_port(environment: ClusterEnvironment) -> Iterator[None]:
    """Return a context that reserves the port at which spawned processes will find each other.

    A spawned process takes seconds until it listens there. A socket that is bound to the port and does not listen
    prevents the system from choosing that port for other programs. A process that requests this very port can still
    listen there, as torch's store does, because its socket and this one set ``SO_REUSEADDR``.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # the port is in use; the processes will report it
            held.bind(("", environment.main_port))
        yield


def join_process_group(strategy: Any) -> None:
    """Join the process group through a store that belongs to this start only, if torchrun has started this process.

    Lightning finds the process group initialized, and does not join it again. Otherwise, it would use the store that
    torchrun keeps over restarts, read values that the processes of an earlier start wrote, and wait for these
    processes.
    """
    environment = getattr(strategy, "cluster_environment", None)
    if not isinstance(strategy, ParallelStrategy) or not isinstance(environment, TorchElasticEnvironment):
        return
    if not is_served() or torch.distributed.is_initialized():
        return
    device, timeout = strategy.root_device, settings_of(strategy)["timeout"] or default_pg_timeout
    assert strategy.accelerator is not None
    strategy.accelerator.setup_device(device)
    torch.distributed.init_process_group(
        process_group_backend(strategy),
        store=store_of_this_start(timeout),
        rank=environment.global_rank(),
        world_size=environment.world_size(),
        timeout=timeout,
        device_id=None if device.type == "cpu" else device,
    )


def check_shared(collectives: Collectives, look: Callable[[], Any], subject: str) -> None:
    """Check that ``look`` returns the same on all processes.

    Waits up to 10 seconds, because a network file system may show changes late.

    Args:
        collectives: the processes, which all call this.
        look: reads the shared file or folder. Its result on rank 0 is expected on the other ranks.
        subject: the beginning of the error message, with the file or folder, and the reason that all nodes need it.

    Raises:
        ClusterError: on all processes, if the results still differ.
    """
    expected, end = collectives.broadcast(look()), time.monotonic() + _FILE_TIMEOUT
    while (result := look()) != expected and time.monotonic() < end:
        time.sleep(0.1)
    if not collectives.any_rank(result != expected):
        return
    places = collectives.gather((socket.gethostname(), result == expected))
    missing = ", ".join(f"rank {rank} on {host}" for rank, (host, is_same) in enumerate(places) if not is_same)
    missing = collectives.broadcast(missing)  # only rank 0 has gathered
    raise ClusterError(
        f"{subject}, but the files that rank 0 finds there do not exist on {missing}. Expected a folder that all nodes"
        " share: choose another with Trainer(default_root_dir=...) or ModelCheckpoint(dirpath=...); on"
        " the command line, use hydra.run.dir=FOLDER."
    )


def explained(error: torch.distributed.DistNetworkError) -> BaseException:
    """Return the exception to raise instead of ``error``, which occurs if processes cannot find each other."""
    port = os.environ.get("MASTER_PORT")
    if errno.errorcode[errno.EADDRINUSE] not in str(error) or port is None:
        return error
    of_slurm = "15000 plus the last four digits of the job's number, the same for all steps of a job"
    default = of_slurm if "SLURM_JOB_ID" in os.environ else "a free one"
    return ClusterError(
        f"The port {port} of this machine, at which the processes of this run find each other, is in use, perhaps by"
        f" another run. Expected a free one: set another MASTER_PORT on all of them (default: {default})."
    )


_VARIABLES: dict[type[Any], tuple[str, ...]] = {
    TorchElasticEnvironment: ("torchrun", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    SLURMEnvironment: ("Slurm", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES"),
}
"""The name of each launcher, and its variables with the numbers of processes, of processes per node, and of nodes."""


def _launched_processes(environment: Any) -> LaunchedProcesses | None:
    """Return the processes that the launcher of ``environment`` has started, or None if it has started none."""
    launcher, *names = _VARIABLES.get(type(environment), ("", "", "", ""))
    processes, per_node, nodes = map(_number_in, names)
    is_shell = launcher == "Slurm" and os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    if processes is None or is_shell:
        return None
    variables = ", ".join(f"{name}={os.environ[name]}" for name in names if _number_in(name))
    description = f"{launcher} has started {_count_text(processes)}: {variables}"
    return LaunchedProcesses(description, processes, per_node, nodes)


def _workers_of_ray() -> int:
    """Return the number of workers that Ray Train has started if this process is one of them; otherwise 0."""
    train = sys.modules.get("ray.train")
    with suppress(Exception):  # some versions raise outside a worker
        return int(train.get_context().get_world_size())  # type: ignore[union-attr]
    return 0


def _number_in(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else None


def _count_text(count: int) -> str:
    return f"{count} process{'' if count == 1 else 'es'}"
