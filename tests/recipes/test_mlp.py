from functools import partial

import pytest
import torch
from torch import nn

from recipes.data import RandomVectors
from recipes.mlp import MLPRegressor, mlp
from tests.support import make_trainer, train_by_hand

SGD = partial(torch.optim.SGD, lr=0.1)
SIZES = {"in_features": 16, "out_features": 8, "width": 32, "layers": 3}


def data(**options):
    return RandomVectors(batch_size=12, num_batches=5, in_features=16, out_features=8, **options)


def test_net_is_linear_layers_with_relu_between():
    net = mlp(5, 2, width=7, layers=3, dropout=0.5)
    assert [type(part) for part in net] == [*[nn.Linear, nn.ReLU, nn.Dropout] * 2, nn.Linear]
    assert [tuple(part.weight.shape) for part in net[::3]] == [(7, 5), (7, 7), (2, 7)]
    with pytest.raises(ValueError, match="layers is 0, expected at least 1"):
        mlp(5, 2, width=7, layers=0)


def test_vectors_depend_on_their_seed_only():
    first, again, other = data(), data(), data(data_seed=1)
    for one in (first, again, other):
        one.setup("fit")
        torch.rand(1)
    (x, y), *rest = first.train_dataloader()
    assert (x.shape, y.shape, len(rest)) == ((12, 16), (12, 8), 4)
    assert torch.equal(next(iter(again.train_dataloader()))[1], y)
    assert not torch.equal(next(iter(other.train_dataloader()))[1], y)
    assert not torch.equal(x, rest[0][0])


def test_weights_equal_those_of_a_hand_written_loop(tmp_path):
    module = MLPRegressor(SGD, **SIZES)
    net = mlp(16, 8, width=32, layers=3)
    net.load_state_dict(module.net.state_dict())
    vectors = data()
    trainer = make_trainer(tmp_path, max_epochs=2)
    trainer.fit(module, datamodule=vectors)

    batches = [[x, y, torch.tensor(1.0)] for x, y in vectors.train_dataloader()]
    trace = train_by_hand(net, batches, optimizer=SGD, epochs=2)
    assert all(torch.equal(a, b) for a, b in zip(module.net.parameters(), net.parameters(), strict=True))
    assert trainer.callback_metrics["train_loss"].item() == trace.losses[-1]
