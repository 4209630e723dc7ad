"""``hydra/launcher=parallel``: run several jobs of a sweep at a time on this machine. Imports no torch.

Each job is a separate process (`trainer.cli.sweep.jobs`), and a thread waits for it. The sweep passes signals to all
processes, and assigns devices and threads to each.

hydra-joblib-launcher would add a worker process in between, and Ctrl-C would kill it together with runs that are
saving.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from trainer.arguments import WHOLE, Kind
from trainer.cli.parsing import UsageError
from trainer.cli.schema import check_settings
from trainer.cli.sweep.jobs import Job, StopFile, execute
from trainer.common import machine
from trainer.record.run_record import load_run

_THREADS = "OMP_NUM_THREADS"
_NUMBER = WHOLE.at_least(1, ", or null")
_ACCEPTED = {
    "n_jobs": (Kind("", lambda value: value == -1), WHOLE.at_least(1, ", or -1 for all cores")),
    "gpus_per_job": (_NUMBER, None),
    "threads_per_job": (_NUMBER, None),
}


class ParallelLauncher(Launcher):
    """Run up to ``n_jobs`` jobs at a time.

    Args:
        n_jobs: number of jobs at a time; -1 for the number of CPU cores.
        gpus_per_job: number of GPUs of each job, which other jobs do not see. Default: None, all jobs see all GPUs.
        threads_per_job: CPU threads of each job. Default: None, the cores divided by the number of jobs, unless the
            environment sets ``OMP_NUM_THREADS``.
    """

    places: list[dict[str, str]]
    config: DictConfig
    hydra_context: HydraContext

    def __init__(self, n_jobs: Any = 2, gpus_per_job: Any = None, threads_per_job: Any = None) -> None:
        self.n_jobs, self.gpus_per_job, self.threads_per_job = n_jobs, gpus_per_job, threads_per_job

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store the config. Hydra calls this before it launches jobs.

        Raises:
            UsageError: if a number is out of range, or the machine has too few GPUs.
        """
        settings = {"n_jobs": self.n_jobs, "gpus_per_job": self.gpus_per_job, "threads_per_job": self.threads_per_job}
        check_settings("hydra.launcher", settings, _ACCEPTED)
        self.n_jobs = machine.cores().usable if self.n_jobs == -1 else self.n_jobs
        self.places = _places(self.n_jobs, self.gpus_per_job, self.threads_per_job)
        self.config, self.hydra_context = config, hydra_context

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs.

        Raises:
            KeyboardInterrupt, SystemExit: if a signal ended the sweep. All jobs have saved and exited.
        """
        composed = [self._compose(list(words), initial_job_idx + index) for index, words in enumerate(job_overrides)]
        free: SimpleQueue[dict[str, str]] = SimpleQueue()
        for place in self.places:
            free.put(place)
        stop = StopFile(Path(str(self.config.hydra.sweep.dir)))

        def run(job: Job) -> None:
            job.environment = place = free.get()
            try:
                execute(job, stop)
            finally:
                free.put(place)

        with ThreadPoolExecutor(self.n_jobs) as threads:
            list(threads.map(run, (job for job, _ in composed)))  # raises the first error after all jobs have ended
        stop.end()
        for job, returned in composed:
            returned.return_value, returned.status = load_run(job.folder).result, JobStatus.COMPLETED
        return [returned for _, returned in composed]

    def _compose(self, words: list[str], number: int) -> tuple[Job, JobReturn]:
        """Compose a job, and return it with its result for Hydra."""
        setup_globals()
        config = self.hydra_context.config_loader.load_sweep_config(self.config, words)
        with open_dict(config):
            config.hydra.job.num, config.hydra.job.id = number, str(number)
        instance = HydraConfig.instance()
        before = instance.cfg
        instance.set_config(config)
        try:
            folder = Path(str(OmegaConf.select(config, "hydra.sweep.dir")), str(config.hydra.sweep.subdir)).resolve()
            with read_write(config.hydra.runtime), open_dict(config.hydra.runtime):
                config.hydra.runtime.output_dir = str(folder)
            instance.set_config(config)
            task_config = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
            job = Job.composed(task_config)
        finally:
            instance.cfg = before
        job.own_session = True
        return job, JobReturn(overrides=job.overrides, cfg=task_config, hydra_cfg=config)


def _places(count: int, gpus: int | None, threads: int | None) -> list[dict[str, str]]:
    """Return the environment variables with the devices and threads of each of ``count`` parallel jobs."""
    places: list[dict[str, str]] = [{} for _ in range(count)]
    if threads is not None or _THREADS not in os.environ:
        for place in places:
            place[_THREADS] = str(threads or max(machine.cores().usable // count, 1))
    if gpus is not None:
        known = _gpus()
        if len(known) < count * gpus:
            needed = f"hydra.launcher.n_jobs={count} and hydra.launcher.gpus_per_job={gpus} need {count * gpus} GPUs"
            raise UsageError(f"{needed}, but this machine has {len(known)}. Reduce one of them.")
        for index, place in enumerate(places):
            place["CUDA_VISIBLE_DEVICES"] = ",".join(known[index * gpus : (index + 1) * gpus])
    return places


def _gpus() -> list[str]:
    """Return the GPUs that this process sees, as names for CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
    gpus = [line for line in machine.nvidia_smi("--list-gpus") if line.startswith("GPU ")]
    return [str(index) for index in range(len(gpus))]
