import urllib.error
from functools import partial

import pytest
import torch
from torch import nn
from torchvision import models

from recipes.transfer_learning import TransferNet, load_weights, transfer_classifier
from tests.support import Payload, loader_of, make_trainer

ADAM = partial(torch.optim.Adam, lr=0.01)


@pytest.fixture
def weights(tmp_path):
    """Write a file of resnet18's weights with unusual statistics."""
    torch.manual_seed(7)
    net = models.resnet18()
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean += 0.125
    file = tmp_path / "resnet18.pth"
    torch.save(net.state_dict(), file)
    return file


def test_weights_are_those_of_the_file_but_for_a_new_head(weights):
    stored = torch.load(weights, weights_only=True)
    net = TransferNet("resnet18", 5, weights=str(weights))
    loaded = net.net.state_dict()
    assert loaded["fc.weight"].shape == (5, 512)
    assert net.head is net.net.fc
    rest = [name for name in stored if not name.startswith("fc.")]
    assert len(rest) == len(loaded) - 2
    assert all(torch.equal(stored[name], loaded[name]) for name in rest)


@pytest.mark.parametrize(("architecture", "head"), [("resnet18", "fc"), ("mobilenet_v3_small", "classifier.3")])
def test_head_is_the_last_linear_layer(architecture, head):
    net = TransferNet(architecture, 5, frozen=True)
    assert net.net.get_submodule(head) is net.head
    assert {name for name, p in net.net.named_parameters() if p.requires_grad} == {f"{head}.weight", f"{head}.bias"}
    assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 5)


def test_net_is_trained_whole_unless_it_is_frozen():
    frozen, free = TransferNet("resnet18", 5, frozen=True), TransferNet("resnet18", 5)
    assert not any(part.training for part in frozen.eval().modules())
    assert all(part.training for part in free.modules())
    assert all(p.requires_grad for p in free.parameters())
    free.to(torch.bfloat16).set_num_classes(2)
    assert free.head.weight.dtype is torch.bfloat16


def test_frozen_net_trains_its_head_and_nothing_else(weights, tmp_path):
    torch.manual_seed(0)
    module = transfer_classifier("resnet18", ADAM, num_classes=2, weights=str(weights), frozen=True)
    before = {name: value.clone() for name, value in module.net.state_dict().items()}
    batches = [(torch.randn(4, 3, 32, 32) + 2.0 * label, torch.full((4,), label)) for label in (0, 1)] * 8
    modes = set()
    module.on_train_batch_start = lambda *_: modes.update(
        name for name, part in module.net.net.named_modules() if part.training
    )
    trainer = make_trainer(tmp_path, precision="16-mixed")
    trainer.fit(module, loader_of(batches), loader_of(batches[:2]))

    changed = {name for name, value in module.net.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"net.fc.weight", "net.fc.bias"}
    assert modes == {"fc"}
    assert len(trainer.optimizers[0].param_groups[0]["params"]) == 2
    assert trainer.callback_metrics["val_acc"] == 1.0


def test_torchvisions_cache_is_used_without_a_network(weights, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    weights.rename(tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth")
    assert load_weights("resnet18", "IMAGENET1K_V1")["bn1.running_mean"].tolist() == [0.125] * 64


def test_initial_weights_are_not_read_with_a_checkpoint(weights, tmp_path):
    gone = str(tmp_path / "gone.pth")
    for checkpoint in (weights, tmp_path):  # a sharded checkpoint is a folder
        module = transfer_classifier("resnet18", ADAM, num_classes=2, weights=gone, checkpoint=str(checkpoint))
        assert (module.net.net.bn1.running_mean == 0).all()
    with pytest.raises(FileNotFoundError, match="does not exist"):  # "last" may turn out to be none
        transfer_classifier("resnet18", ADAM, num_classes=2, weights=gone, checkpoint="last")


def test_error_without_a_network_names_the_download_and_its_place(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr("torch.hub.urlopen", refuse)
    with pytest.raises(FileNotFoundError) as caught:
        load_weights("resnet50", "IMAGENET1K_V2")
    assert "https://download.pytorch.org/models/resnet50-11ad3fa6.pth" in str(caught.value)
    assert str(tmp_path / "checkpoints" / "resnet50-11ad3fa6.pth") in str(caught.value)


def test_unfit_architectures_and_weights_of_another_network_are_refused(weights):
    with pytest.raises(ValueError, match=r"'resnet5', expected a name in torchvision.models: resnet50"):
        TransferNet("resnet5", 5)
    with pytest.raises(ValueError, match=r"'squeezenet1_1', which has no linear layer"):
        TransferNet("squeezenet1_1", 5)
    with pytest.raises(ValueError, match=r"do not fit: .* model.architecture"):
        TransferNet("resnet50", 5, weights=str(weights))
    with pytest.raises(FileNotFoundError, match=r"does not exist.* one of IMAGENET1K_V1, DEFAULT, or to null"):
        load_weights("resnet18", "IMAGENET1K_V3")


@pytest.mark.parametrize("content", ["damaged", "code", "checkpoint"])
def test_file_with_other_contents_is_refused(weights, tmp_path, content):
    if content == "damaged":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif content == "code":
        torch.save({"fc.weight": Payload(tmp_path / "ran")}, weights)
    else:
        torch.save({"state_dict": {}}, weights)
    with pytest.raises(ValueError, match=r"resnet18.pth (cannot be read as weights|is not a mapping)") as caught:
        load_weights("resnet18", str(weights))
    assert not (tmp_path / "ran").exists()
    assert "weights_only" not in str(caught.value)  # without advice to allow the code
