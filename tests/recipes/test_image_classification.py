import copy
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18

from recipes.image_classification import ImageClassifier
from recipes.schedules import onecycle, warmup_cosine
from trainer import Trainer

CLASSES = 4
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


class FirstPixels(nn.Module):
    """Returns the first pixels of the image, times a weight, as logits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))
        self.bias = nn.Parameter(torch.zeros(1))
        self.memory_formats: list[bool] = []

    def forward(self, images: Tensor) -> Tensor:
        self.memory_formats.append(images.is_contiguous(memory_format=torch.channels_last))
        return images[:, 0, 0, :CLASSES] * self.weight + self.bias


def loader(count: int = 8, right: int | None = None) -> DataLoader[tuple[Tensor, ...]]:
    """Return images with the label at the largest first pixel; after the first ``right``, labels are one too high."""
    labels = torch.arange(count) % CLASSES
    images = torch.zeros(count, 3, 32, 32)
    images[torch.arange(count), 0, 0, labels] = 5.0
    labels[count if right is None else right :] += 1
    return DataLoader(TensorDataset(images, labels % CLASSES), batch_size=4)


def trainer(root: Path, **options: object) -> Trainer:
    defaults = {
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return Trainer(accelerator="cpu", default_root_dir=root, **{**defaults, **options})


def test_torchvision_model_trains_and_logs_by_the_documented_names(tmp_path: Path):
    torch.manual_seed(0)
    module = ImageClassifier(resnet18(num_classes=CLASSES), SGD, partial(onecycle, pct_start=0.5), num_classes=CLASSES)
    before = copy.deepcopy(module.net.state_dict())
    fit = trainer(tmp_path)
    fit.fit(module, loader(), loader())

    assert set(fit.callback_metrics) == {"train_loss", "val_loss", "val_acc"}
    assert set(fit.progress_bar_metrics) >= {"train_loss", "val_loss", "val_acc"}
    assert all(value.isfinite() for value in fit.callback_metrics.values())
    assert not torch.equal(before["fc.weight"], module.net.fc.weight)
    assert fit.global_step == 2


def test_accuracy_and_loss_of_an_epoch_are_over_images(tmp_path: Path):
    module = ImageClassifier(FirstPixels(), SGD, num_classes=CLASSES, label_smoothing=0.3)
    module.net.weight.data.fill_(2.0)  # logits 10 for the label of the image, 0 for the others
    right, wrong = torch.tensor([10.0, 0, 0, 0]), torch.tensor([0.0, 10, 0, 0])
    losses = [nn.functional.cross_entropy(logits, torch.tensor(0)).item() for logits in (right, wrong)]
    expected = (losses[0] * 5 + losses[1]) / 6  # and no label smoothing, which is for training

    (metrics,) = trainer(tmp_path).validate(module, loader(6, right=5), verbose=False)
    assert metrics == {"val_loss": pytest.approx(expected), "val_acc": pytest.approx(5 / 6)}
    (metrics,) = trainer(tmp_path).test(module, loader(6, right=5), verbose=False)
    assert metrics == {"test_loss": pytest.approx(expected), "test_acc": pytest.approx(5 / 6)}


def test_test_leaves_a_confusion_matrix_and_samples(tmp_path: Path):
    module = ImageClassifier(FirstPixels(), SGD, num_classes=CLASSES)
    module.net.weight.data.fill_(2.0)
    tested = trainer(tmp_path, logger=CSVLogger(tmp_path, name="", version=""))
    for _ in range(2):  # and the second one is counted separately
        tested.test(module, loader(6, right=5), verbose=False)
        matrix = json.loads((tmp_path / "figures" / "test.json").read_text())
        labels = torch.cat([labels for _, labels in loader(6, right=5)])
        assert [sum(row) for row in matrix["counts"]] == torch.bincount(labels, minlength=CLASSES).tolist()
        assert sum(matrix["counts"][i][i] for i in range(CLASSES)) == 5
    assert (tmp_path / "figures" / "test_samples.png").read_bytes().startswith(b"\x89PNG")


def test_label_smoothing_is_in_the_training_loss(tmp_path: Path):
    module = ImageClassifier(FirstPixels(), SGD, num_classes=CLASSES, label_smoothing=0.3)
    images, labels = next(iter(loader()))
    logits = images[:, 0, 0, :CLASSES]
    expected = nn.functional.cross_entropy(logits, labels, label_smoothing=0.3)

    fit = trainer(tmp_path, max_steps=1)
    fit.fit(module, loader(), loader())
    assert fit.callback_metrics["train_loss"].item() == pytest.approx(expected.item())


def test_predictions_are_probabilities(tmp_path: Path):
    module = ImageClassifier(FirstPixels(), SGD, num_classes=CLASSES)
    first, _ = trainer(tmp_path).predict(module, loader())
    assert first.dtype == torch.float32
    assert torch.allclose(first, (torch.eye(CLASSES) * 5).softmax(dim=1))


def test_schedule_spans_the_run_and_steps_with_the_optimizer(tmp_path: Path):
    module = ImageClassifier(FirstPixels(), SGD, partial(warmup_cosine, warmup=0.0), num_classes=CLASSES)
    fit = trainer(tmp_path, max_epochs=3)
    fit.fit(module, loader(), loader())

    (config,) = fit.lr_scheduler_configs
    assert config.interval == "step"
    assert config.scheduler.lr_lambdas[0].total_steps == 3 * 2
    assert config.scheduler.last_epoch == 3 * 2


def test_without_a_schedule_the_rate_stays(tmp_path: Path):
    module = ImageClassifier(FirstPixels(), SGD, num_classes=CLASSES)
    fit = trainer(tmp_path)
    fit.fit(module, loader(), loader())
    assert fit.lr_scheduler_configs == []
    assert fit.optimizers[0].param_groups[0]["lr"] == 0.1


def test_schedule_for_a_run_without_end_is_refused(tmp_path: Path):
    module = ImageClassifier(FirstPixels(), SGD, onecycle, num_classes=CLASSES)
    with pytest.raises(ValueError, match=r"this run has no end. Set trainer.max_epochs"):
        trainer(tmp_path, max_epochs=-1).fit(module, loader(), loader())


def test_norm_and_bias_can_be_exempt_from_weight_decay():
    net = resnet18(num_classes=CLASSES)
    module = ImageClassifier(net, SGD, num_classes=CLASSES, decay_norm_and_bias=False)
    decayed, exempt = module.configure_optimizers().param_groups

    assert decayed["weight_decay"] == 0.01
    assert exempt["weight_decay"] == 0.0
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == {
        name for name in names.values() if "conv" in name or name in ("fc.weight",) or "downsample.0" in name
    }
    assert len(decayed["params"]) + len(exempt["params"]) == len(names)

    (everything,) = ImageClassifier(net, SGD, num_classes=CLASSES).configure_optimizers().param_groups
    assert everything["weight_decay"] == 0.01
    assert len(everything["params"]) == len(names)


def test_frozen_parameters_are_not_changed():
    net = FirstPixels()
    net.bias.requires_grad_(False)
    (group,) = ImageClassifier(net, SGD, num_classes=CLASSES).configure_optimizers().param_groups
    assert [id(parameter) for parameter in group["params"]] == [id(net.weight)]


def test_channels_last_changes_the_layout_and_not_the_result():
    torch.manual_seed(0)
    net = resnet18(num_classes=CLASSES).eval()
    images = torch.rand(2, 3, 32, 32)
    expected = ImageClassifier(copy.deepcopy(net), SGD, num_classes=CLASSES)(images)

    module = ImageClassifier(net, SGD, num_classes=CLASSES, channels_last=True)
    assert module.net.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(module(images), expected, atol=1e-4)

    for channels_last in (True, False):
        probe = ImageClassifier(FirstPixels(), SGD, num_classes=CLASSES, channels_last=channels_last)
        probe(images)
        assert probe.net.memory_formats == [channels_last]


def test_checkpoint_loads_with_weights_only(tmp_path: Path):
    module = ImageClassifier(FirstPixels(), SGD, partial(onecycle), num_classes=CLASSES, label_smoothing=0.1)
    fit = trainer(tmp_path)
    fit.fit(module, loader(), loader())
    fit.save_checkpoint(tmp_path / "last.ckpt")

    torch.load(tmp_path / "last.ckpt", weights_only=True)
    loaded = ImageClassifier.load_from_checkpoint(
        tmp_path / "last.ckpt", net=FirstPixels(), optimizer=SGD, weights_only=True
    )
    assert loaded.train_loss.label_smoothing == 0.1
    assert torch.equal(loaded.net.weight, module.net.weight)


def test_classifier_can_be_copied():
    module = ImageClassifier(resnet18(num_classes=CLASSES), SGD, onecycle, num_classes=CLASSES, channels_last=True)
    clone = copy.deepcopy(module)
    assert torch.equal(clone.net.conv1.weight, module.net.conv1.weight)
