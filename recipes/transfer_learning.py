"""torchvision's networks with pretrained weights and a new last layer."""

import difflib
import pickle
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchvision import models

from recipes.image_classification import ImageClassifier

Weights = dict[str, Tensor]


def transfer_classifier(
    architecture: str,
    optimizer: Callable[[Iterable[Any]], Optimizer],
    scheduler: Callable[[Optimizer, int], LRScheduler] | None = None,
    *,
    num_classes: int | None = None,
    weights: str | None = None,
    checkpoint: str | None = None,
    frozen: bool = False,
    **options: Any,
) -> ImageClassifier:
    """Build an `ImageClassifier` with a `TransferNet`. Weights are loaded here, before a run loads its data.

    Args:
        architecture: see `TransferNet`.
        optimizer: see `ImageClassifier`; it receives the parameters that are not frozen.
        scheduler: see `ImageClassifier`.
        num_classes: see `ImageClassifier`.
        weights: see `TransferNet`.
        checkpoint: the checkpoint that the Trainer will load, a file or a folder. If it exists, ``weights`` is ignored,
            because it contains all weights. Default: None.
        frozen: see `TransferNet`.
        **options: further arguments of `ImageClassifier`.

    Raises:
        FileNotFoundError: see `load_weights`.
        ValueError: see `TransferNet`.
    """
    if checkpoint is not None and Path(checkpoint).exists():  # `last` may not exist yet
        weights = None
    net = TransferNet(architecture, num_classes, weights=weights, frozen=frozen)
    if frozen:  # the frozen layers stay in eval mode on purpose
        warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode at the start of training")
    return ImageClassifier(net, optimizer, scheduler, num_classes=num_classes, **options)


class TransferNet(nn.Module):
    """A classification network of torchvision with a new last linear layer, the head.

    Args:
        architecture: its name in ``torchvision.models``, such as ``"resnet50"``.
        num_classes: number of outputs of the head. None: that of torchvision's network, until `set_num_classes` is
            called.
        weights: initial weights of the other layers: the name of weights that torchvision has, such as
            ``"IMAGENET1K_V2"``, or a file with the network's ``state_dict``, such as torchvision's own. The
            head in these weights is not used. None for random weights.
        frozen: whether to train only the head: the other layers get no gradients and stay in eval mode, so that
            BatchNorm keeps its statistics and dropout is off.

    Attributes:
        net: torchvision's network.

    Raises:
        FileNotFoundError: see `load_weights`.
        ValueError: an unknown architecture, an architecture without a linear layer, or weights of another architecture.
    """

    def __init__(
        self, architecture: str, num_classes: int | None, *, weights: str | None = None, frozen: bool = False
    ) -> None:
        super().__init__()
        known = models.list_models(module=models)
        if architecture not in known:
            near = ", ".join(difflib.get_close_matches(str(architecture), known, n=3)) or "resnet50, vit_b_16, ..."
            raise ValueError(f"architecture is {architecture!r}, expected a name in torchvision.models: {near}")
        self.frozen = frozen
        self.net = models.get_model(architecture, weights=None)
        name = _last_linear(self.net, architecture)
        if weights is not None:
            _load_all_but(name, self.net, load_weights(architecture, weights), f"{weights} of {architecture}")
        self.net.requires_grad_(not frozen)
        self._head = name
        if num_classes is not None:
            self.set_num_classes(num_classes)
        self.train()

    def set_num_classes(self, num_classes: int) -> None:
        """Replace the head with a new one of ``num_classes`` outputs, of the same dtype and on the same device."""
        parent, _, last = self._head.rpartition(".")
        old = self.head.weight
        head = nn.Linear(self.head.in_features, num_classes, device=old.device, dtype=old.dtype)
        setattr(self.net.get_submodule(parent), last, head)

    @property
    def head(self) -> nn.Linear:
        """The last layer."""
        head = self.net.get_submodule(self._head)
        assert isinstance(head, nn.Linear)
        return head

    def train(self, mode: bool = True) -> "TransferNet":
        """Set train or eval mode; frozen layers stay in eval mode."""
        super().train(mode)
        if self.frozen:
            self.net.eval()
            self.head.train(mode)
        return self

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (batch, ``num_classes``)."""
        return self.net(images)


def load_weights(architecture: str, weights: str) -> Weights:
    """Return the weights of a network of torchvision, with the original number of classes, on the CPU.

    Args:
        architecture: its name in ``torchvision.models``.
        weights: the name of weights that torchvision has for this network, which are read from torch's cache or
            downloaded into it; or a file that holds a ``state_dict``, loaded with ``weights_only=True``.

    Raises:
        FileNotFoundError: the file does not exist and cannot be downloaded. The message contains its address.
        ValueError: the file does not contain a ``state_dict``.
    """
    known = models.get_model_weights(architecture).__members__
    if weights in known:
        return _torchvisions(known[weights], f"{weights} of {architecture}")
    file = Path(weights).expanduser()
    if not file.is_file():
        raise FileNotFoundError(
            f"weights is {weights}, but the file {file.resolve()} does not exist, and torchvision has no weights"
            f" of that name for {architecture}. Set model.weights to the path of a file, to one of"
            f" {', '.join(known)}, or to null for random weights."
        )
    return _read(file)


def _torchvisions(weights: Any, name: str) -> Weights:
    """Return weights of torchvision, from torch's cache or the server."""
    file = Path(torch.hub.get_dir()) / "checkpoints" / weights.url.rpartition("/")[2]
    if file.is_file():
        return _read(file)
    try:
        return weights.get_state_dict(check_hash=True, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError) as error:  # no network, a proxy's page instead of the file, or no permission
        raise FileNotFoundError(
            f"The weights {name} are not in {file} and could not be downloaded from {weights.url}"
            f" ({type(error).__name__}: {error}). Without a network, download that file on another machine, and save it"
            " there or set model.weights to its path. model.weights=null starts from random weights, which is enough"
            " if a checkpoint replaces them."
        ) from error


def _read(file: Path) -> Weights:
    try:
        weights = torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        # Leave out torch's message, because it advises to load the file in a way that can run code.
        raise ValueError(
            f"{file.resolve()} cannot be read as weights ({type(error).__name__}). Expected a state_dict saved with"
            " torch.save that contains only tensors, such as torchvision's files. If it is damaged, delete it and"
            " download it again."
        ) from error
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise ValueError(
            f"{file.resolve()} is not a mapping of names to weights. Expected a state_dict, such as torchvision's"
            " files; to extract it from a checkpoint: torch.save(checkpoint['state_dict'], FILE)."
        )
    return weights


def _last_linear(net: nn.Module, architecture: str) -> str:
    """Return the name of the last linear layer of ``net``."""
    names = [name for name, layer in net.named_modules() if isinstance(layer, nn.Linear)]
    if not names:
        raise ValueError(
            f"architecture is {architecture!r}, which has no linear layer to replace. Choose another architecture."
        )
    return names[-1]


def _load_all_but(head: str, net: nn.Module, weights: Weights, weights_name: str) -> None:
    """Load all weights except those of ``head``, because its number of classes may differ."""
    rest = {name: value for name, value in weights.items() if not name.startswith(f"{head}.")}
    expected = {name: value.shape for name, value in net.state_dict().items() if not name.startswith(f"{head}.")}
    wrong = [name for name in rest if name not in expected or rest[name].shape != expected[name]]
    missing = [name for name in expected if name not in rest]
    if wrong or missing:
        raise ValueError(
            f"The weights {weights_name} do not fit: {len(missing)} are missing ({', '.join(missing[:3])}) and"
            f" {len(wrong)} are unknown or of another shape ({', '.join(wrong[:3])}). Check that they belong to"
            " model.architecture."
        )
    net.load_state_dict(rest, strict=False)
