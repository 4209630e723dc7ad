"""RL4CO: reinforcement learning; a Trainer subclass, data resampled each epoch, loops inside of steps."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from rl4co.envs import TSPEnv
from rl4co.envs.routing.tsp.generator import TSPGenerator
from rl4co.models import AttentionModelPolicy
from rl4co.models.rl import A2C, PPO, REINFORCE
from rl4co.models.zoo import ActiveSearch
from rl4co.utils.callbacks.speed_monitor import SpeedMonitor
from rl4co.utils.trainer import RL4COTrainer

REQUIRES = ("rl4co==0.7.0", "torch==2.15.0", "lightning==2.6.6")
VARIES = (r"/time(/|$)",)


def case_reinforce(run: Any) -> None:
    """REINFORCE with a rollout baseline: a copy of the policy, evaluated and replaced between epochs"""
    schedule = {"lr_scheduler": "MultiStepLR", "lr_scheduler_kwargs": {"milestones": [1]}}
    train(run, REINFORCE, {"baseline": "rollout", **schedule})


def case_ppo(run: Any) -> None:
    """PPO: manual optimization, several updates a step with `clip_gradients`"""
    train(run, PPO, {"mini_batch_size": 0.5})


def case_a2c(run: Any) -> None:
    """A2C: two groups of parameters of an actor and a critic"""
    train(run, A2C, {})


def case_active_search(run: Any) -> None:
    """Active search: a hook resets the weights and creates a new optimizer for each batch"""
    environment, policy = world(run)
    data = environment.dataset(3, phase="test")
    search = ActiveSearch(environment, policy, data, max_iters=4, augment_size=8, num_parallel_runs=1)
    build(run, max_epochs=1).fit(search)
    run.keep("rewards", search.instance_rewards)
    run.keep("solutions", search.instance_solutions)


def train(run: Any, cls: Any, options: dict[str, Any]) -> None:
    """Fit, test, load the checkpoint. Lightning cannot resume from it: `RL4COTrainer.fit` has no `weights_only`."""
    sizes = {"batch_size": 16, "train_data_size": 64, "val_data_size": 16, "test_data_size": 16}

    def model() -> Any:
        environment, policy = world(run)
        return cls(environment, policy, **sizes, **options)

    saver = ModelCheckpoint(run.folder / "saved", monitor="val/reward", mode="max", save_last=True)
    trainer = build(run, max_epochs=3, callbacks=[saver, SpeedMonitor()], gradient_clip_val=1.0)
    trained = model()
    trainer.fit(trained)
    run.keep("test", trainer.test(trained))
    environment, policy = world(run)
    run.reload(cls, saver.best_model_path, env=environment, policy=policy, strict=False)


def build(run: Any, **options: Any) -> Any:
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    logger = CSVLogger(run.folder / "logs")
    return RL4COTrainer(
        precision="32-true", default_root_dir=run.folder, logger=logger, log_every_n_steps=1, **quiet, **options
    )


def world(run: Any) -> tuple[Any, Any]:
    run.seed()
    environment = TSPEnv(TSPGenerator(num_loc=6))
    policy = AttentionModelPolicy(
        env_name=environment.name, embed_dim=128, num_encoder_layers=1, num_heads=2, feedforward_hidden=16
    )
    return environment, policy
