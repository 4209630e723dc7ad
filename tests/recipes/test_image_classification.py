import json
from functools import partial

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18

from recipes.image_classification import ImageClassifier
from recipes.schedules import warmup_cosine
from tests.support import make_trainer

CLASSES = 4
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


class FirstPixels(nn.Module):
    """Returns the first pixels of the image, times a weight, as logits."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, images):
        return images[:, 0, 0, :CLASSES] * self.weight + self.bias


def loader(count=8, right=None):
    """Return images with the label at the largest first pixel; after the first ``right``, labels are one too high."""
    labels = torch.arange(count) % CLASSES
    images = torch.zeros(count, 3, 32, 32)
    images[torch.arange(count), 0, 0, labels] = 5.0
    labels[count if right is None else right :] += 1
    return DataLoader(TensorDataset(images, labels % CLASSES), batch_size=4)


def test_metrics_of_an_epoch_are_over_images_and_predictions_are_probabilities(tmp_path):
    module = ImageClassifier(FirstPixels(), SGD, num_classes=CLASSES, label_smoothing=0.3)
    module.net.weight.data.fill_(2.0)  # logits 10 for the label of the image, 0 for the others
    right, wrong = torch.tensor([10.0, 0, 0, 0]), torch.tensor([0.0, 10, 0, 0])
    losses = [nn.functional.cross_entropy(logits, torch.tensor(0)).item() for logits in (right, wrong)]
    expected = (losses[0] * 5 + losses[1]) / 6  # and no label smoothing, which is for training

    (metrics,) = make_trainer(tmp_path).validate(module, loader(6, right=5), verbose=False)
    assert metrics == {"val_loss": pytest.approx(expected), "val_acc": pytest.approx(5 / 6)}
    (metrics,) = make_trainer(tmp_path).test(module, loader(6, right=5), verbose=False)
    assert metrics == {"test_loss": pytest.approx(expected), "test_acc": pytest.approx(5 / 6)}
    _, second = make_trainer(tmp_path).predict(module, loader(6))
    assert second.dtype == torch.float32
    assert torch.allclose(second, (torch.eye(CLASSES) * 10).softmax(dim=1)[:2])


def test_test_leaves_a_confusion_matrix_and_samples(tmp_path):
    module = ImageClassifier(FirstPixels(), SGD, num_classes=CLASSES)
    module.net.weight.data.fill_(2.0)
    tested = make_trainer(tmp_path, logger=CSVLogger(tmp_path, name="", version=""))
    for _ in range(2):  # and the second one is counted separately
        tested.test(module, loader(6, right=5), verbose=False)
        matrix = json.loads((tmp_path / "figures" / "test.json").read_text())
        labels = torch.cat([labels for _, labels in loader(6, right=5)])
        assert [sum(row) for row in matrix["counts"]] == torch.bincount(labels, minlength=CLASSES).tolist()
        assert sum(matrix["counts"][i][i] for i in range(CLASSES)) == 5
    assert (tmp_path / "figures" / "test_samples.png").read_bytes().startswith(b"\x89PNG")


def test_training_logs_the_smoothed_loss_and_follows_a_schedule_of_the_run(tmp_path):
    schedule = partial(warmup_cosine, warmup=0.0)
    module = ImageClassifier(FirstPixels(), SGD, schedule, num_classes=CLASSES, label_smoothing=0.3)
    images, labels = next(iter(loader(4)))
    expected = nn.functional.cross_entropy(images[:, 0, 0, :CLASSES], labels, label_smoothing=0.3)
    fit = make_trainer(tmp_path, limit_train_batches=1)
    fit.fit(module, loader(), loader())
    assert set(fit.callback_metrics) == {"train_loss", "val_loss", "val_acc"}
    assert fit.callback_metrics["train_loss"].item() == pytest.approx(expected.item())

    fit = make_trainer(tmp_path, max_epochs=3)
    fit.fit(module, loader(), loader())
    (config,) = fit.lr_scheduler_configs
    assert config.interval == "step"
    assert config.scheduler.lr_lambdas[0].total_steps == config.scheduler.last_epoch == 3 * 2
    fit.save_checkpoint(tmp_path / "last.ckpt")
    loaded = ImageClassifier.load_from_checkpoint(
        tmp_path / "last.ckpt", net=FirstPixels(), optimizer=SGD, weights_only=True
    )
    assert loaded.train_loss.label_smoothing == 0.3
    assert torch.equal(loaded.net.weight, module.net.weight)
    with pytest.raises(ValueError, match=r"this run has no end. Set trainer.max_epochs"):
        make_trainer(tmp_path, max_epochs=-1).fit(module, loader(), loader())


def test_norm_and_bias_can_be_exempt_from_weight_decay():
    net = resnet18(num_classes=CLASSES)
    net.fc.bias.requires_grad_(False)  # frozen parameters are left out
    module = ImageClassifier(net, SGD, num_classes=CLASSES, decay_norm_and_bias=False)
    decayed, exempt = module.configure_optimizers().param_groups

    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.01, 0.0)
    assert len(decayed["params"]) == sum(p.ndim >= 2 for p in net.parameters())
    assert len(exempt["params"]) == sum(p.ndim < 2 for p in net.parameters()) - 1

    (everything,) = ImageClassifier(net, SGD, num_classes=CLASSES).configure_optimizers().param_groups
    assert everything["weight_decay"] == 0.01
