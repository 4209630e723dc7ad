"""Muon for the matrices of hidden layers, and AdamW for all other parameters: two optimizers of one loss."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import AdamW, Muon, Optimizer


@dataclass
class MuonWithAdamW:
    """The settings of both optimizers. `recipes.schedules.with_schedule` creates them, because it has the module.

    Muon's update of a matrix is scaled to the size of AdamW's (``match_rms_adamw``), so both have one learning rate and
    one weight decay.

    Args:
        parameters: the parameters, or parameter groups.
        lr: learning rate.
        weight_decay: decoupled weight decay; a group may have its own.
        momentum: momentum factor of Muon.
        betas: decay rates of AdamW's running means of the gradient and its square.
        eps: added to AdamW's denominator.
    """

    parameters: Iterable[Any]
    lr: float = 1e-3
    weight_decay: float = 0.01
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def optimizers(self, module: nn.Module) -> list[Optimizer]:
        """Return Muon and AdamW. See `outer_parameters` for the matrices that AdamW trains.

        Raises:
            ValueError: no parameter is a matrix of a hidden layer, such as in a convolutional network.
        """
        given = list(self.parameters)
        groups = given if isinstance(given[0], dict) else [{"params": given}]
        outer = {id(parameter) for parameter in outer_parameters(module)}
        matrices: list[Any] = []
        others: list[Any] = []
        for group in groups:
            hidden = [p for p in group["params"] if p.ndim == 2 and id(p) not in outer]
            ids = {id(p) for p in hidden}
            rest = [p for p in group["params"] if id(p) not in ids]
            matrices += [{**group, "params": hidden}] if hidden else []
            others += [{**group, "params": rest}] if rest else []
        if not matrices:
            raise ValueError(
                f"optimizer=muon trains the matrices of hidden layers, and {type(module).__name__} has none: its"
                " parameters are vectors, convolutions, embeddings and the last layer. Use optimizer=adamw."
            )
        muon = Muon(matrices, self.lr, self.weight_decay, self.momentum, adjust_lr_fn="match_rms_adamw")
        both = [muon, AdamW(others, self.lr, self.betas, self.eps, self.weight_decay) if others else None]
        return [optimizer for optimizer in both if optimizer is not None]


def outer_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the weights of embeddings and of the last linear layer, unless it returns vectors of an embedding's width.

    In that case, the last layer is a hidden one, and the output layer is an embedding (tied weights).
    """
    layers = list(module.modules())
    embeddings = [layer for layer in layers if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))]
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)][-1:]
    widths = {embedding.embedding_dim for embedding in embeddings}
    outputs = [layer for layer in linear if layer.out_features not in widths]
    return [layer.weight for layer in (*embeddings, *outputs)]
