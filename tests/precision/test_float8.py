"""fp8-mixed equals torchao's float8 layers in a hand-written loop."""

import copy

import pytest
import torch
from torch import nn

from tests.parity import assert_same_weights
from tests.support import Regression, adamw, loader_of, make_trainer
from trainer.callbacks import ActivationCheckpointing, Compile
from trainer.errors import PrecisionError
from trainer.precision import Float8Precision

torchao = pytest.importorskip("torchao.float8", reason="needs torchao")


class Projection(nn.Linear):
    """A layer with a custom class."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)) for _ in range(2))
        self.norm = nn.LayerNorm(32)
        self.own = Projection(32, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        for block in self.blocks:
            x = self.norm(x + block(x))
        return self.head(self.own(x))


class Classifier(Regression):
    def __init__(self):
        super().__init__(Net(), adamw)
        self.kinds = set()

    def training_step(self, batch, batch_idx):
        self.kinds = {name for name, part in self.net.named_modules() if "_in_float8" in vars(part)}
        x, y = batch
        return nn.functional.cross_entropy(self.net(x).float(), y)


FLOAT8 = {"blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2"}
"""The layers of Net with suitable sizes."""


def batches():
    """Return batches with a size that is not a multiple of 16."""
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(10, 32, generator=draw), torch.randint(10, (10,), generator=draw)) for _ in range(6)]


def by_hand(recipe, *, window=1, clip=None, keep=frozenset()):
    """Convert with torchao, which requires bfloat16 on a CPU."""
    net = Net()
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    config = config.__class__(**{**vars(config), "emulate": True, "pad_inner_dim": True})
    torchao.convert_to_float8_training(net, config=config, module_filter_fn=lambda _, name: name in FLOAT8 - keep)
    for name, part in net.named_modules():
        if name in FLOAT8 - keep:
            part.register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16(),))
        elif name in keep:
            full = torch.autocast("cpu", enabled=False)
            part.forward = full(lambda x, forward=part.forward: forward(x.float()))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches()):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(net(x).float(), y)
        if index % window == 0:
            optimizer.zero_grad()
        (loss / window).backward()
        if (index + 1) % window == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
    return net


def fitted(precision="fp8-mixed", module=None, *callbacks, **options):
    module = module or Classifier()
    trainer = make_trainer(None, precision=precision, callbacks=list(callbacks), max_epochs=1, **options)
    trainer.fit(module, loader_of(batches()))
    return trainer, module


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_weights_are_those_of_a_loop_with_torchaos_own_layers(recipe):
    _, module = fitted(Float8Precision(recipe))
    assert module.kinds == FLOAT8
    assert_same_weights(module.net, by_hand(recipe))


def test_windows_clipping_and_fp32_layers_equal_a_hand_written_loop():
    precision = Float8Precision(fp32_modules="net.blocks.0.2")
    _, module = fitted(precision, None, accumulate_grad_batches=2, gradient_clip_val=0.1)
    assert module.kinds == FLOAT8 - {"blocks.0.2"}
    assert_same_weights(module.net, by_hand("tensorwise", window=2, clip=0.1, keep=frozenset({"blocks.0.2"})))


def test_layer_is_the_same_object_before_during_and_after_a_run():
    module, x = Classifier(), torch.randn(4, 32)
    layer, attributes = module.net.blocks[0][0], set(vars(module.net.blocks[0][0]))

    def look(*_):
        assert module.net.blocks[0][0] is layer
        copied = copy.deepcopy(module.net)
        nn.init.zeros_(copied.head.weight)
        with torch.no_grad():
            rows = copied(x)
        assert torch.equal(rows, rows[:1].expand_as(rows))  # a copy computes with its own weights

    module.on_train_batch_end = look
    trainer, _ = fitted("fp8-mixed", module)
    assert trainer.global_step == 6
    assert type(layer) is nn.Linear
    assert set(vars(layer)) == attributes
    with torch.no_grad():
        assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.filterwarnings("ignore:.*torch._dynamo", "ignore:.*isinstance.treespec")
@pytest.mark.parametrize("callback", [Compile(backend="eager"), ActivationCheckpointing(["Sequential"])])
def test_compiled_and_checkpointed_results_are_equal(callback):
    _, module = fitted("fp8-mixed", None, callback)
    assert_same_weights(module.net, by_hand("tensorwise"))


def test_checkpoints_are_those_of_bfloat16(tmp_path):
    trainer, _ = fitted()
    trainer.save_checkpoint(tmp_path / "eight.ckpt")
    whole = torch.load(tmp_path / "eight.ckpt", weights_only=True)["state_dict"]
    assert {value.dtype for value in whole.values()} == {torch.float32}
    resumed = Classifier()
    again = make_trainer(None, precision="bf16-mixed", max_epochs=2)
    again.fit(resumed, loader_of(batches()), ckpt_path=tmp_path / "eight.ckpt")
    assert again.global_step == 12
    assert resumed.kinds == set()


def test_report_lists_converted_layers_and_reasons():
    net = Net()
    net.blocks[0][0].forward = net.blocks[0][0].forward
    chosen, others = Float8Precision(fp32_modules="blocks.1", modules=["blocks.*", "own", "head"]).layers(net)
    assert set(chosen) == {"blocks.0.2"}
    assert others == {
        "blocks.0.0": "has its own forward",
        "blocks.1.0": "is in fp32_modules",
        "blocks.1.2": "is in fp32_modules",
        "own": "is a Projection",
        "head": "is 32 x 10: not multiples of 16",
    }


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"modules": "net.head"}, "no Linear layer of Classifier .*net.head is 32 x 10: not multiples of 16"),
        ({"modules": "head"}, "modules: 'head' matches no Linear layer of Classifier. It has: net.blocks.0.0"),
        ({"fp32_modules": "net.bloks"}, "fp32_modules: 'net.bloks' matches no module"),
    ],
)
def test_model_without_float8_layers_is_refused(options, expected):
    with pytest.raises(PrecisionError, match=expected):
        fitted(Float8Precision(**options))


def test_invalid_arguments_are_refused():
    with pytest.raises(PrecisionError, match="recipe='columnwise', expected 'tensorwise'"):
        Float8Precision("columnwise")
    with pytest.raises(PrecisionError, match="Got modules with 3 in it"):
        Float8Precision(modules=[3])
    with pytest.raises(PrecisionError, match="on a device of type 'mps', expected cuda, or cpu"):
        Float8Precision().check(torch.device("mps"))


def test_old_gpu_and_a_machine_without_torchao_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(PrecisionError, match=r"compute capability 8\.6, expected 8.9 or newer"):
        Float8Precision().check(torch.device("cuda", 0))
    monkeypatch.setattr("trainer.common.packages.is_installed", lambda name: name != "torchao")
    with pytest.raises(PrecisionError, match=r"needs torchao, which is not installed: pip install torchao\. Without"):
        make_trainer(None, precision="fp8-mixed")
