"""Compile: the weights and logged values equal those without compilation, also with overwritten results."""

import copy
import gc
import pickle
import shutil
import warnings
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric, MetricCollection

from tests.support import (
    OPTIMIZERS,
    Regression,
    assert_identical,
    assert_same,
    fit_and_watch,
    imports_inductor,
    loader_of,
    make_batches,
    make_net,
    make_trainer,
    norm_of,
    plugin_of,
    scaler_of,
    train_by_hand,
)
from trainer.callbacks import Compile, RunRecorder
from trainer.errors import ConfigurationError
from trainer.precision import compilation

pytestmark = [
    # warning of Dynamo when it inspects its inputs
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.usefixtures("fresh_compiler"),
    imports_inductor,
]


class Replays:
    """A backend with graphs that write to the same memory at each step, as CUDA graphs do.

    The n-th call of a graph in a step has its own memory. `torch.compiler.cudagraph_mark_step_begin` starts a step: all
    memory is overwritten with NaN.
    """

    def __init__(self, monkeypatch):
        self.steps = self.graphs = self.calls = 0
        self._memory = {}
        self._called = Counter()
        monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", self.begin_step)

    def begin_step(self):
        self.steps += 1
        self._called.clear()
        for tensor in self._memory.values():
            with torch.inference_mode(tensor.is_inference()):
                torch.Tensor.fill_(tensor, float("nan") if tensor.is_floating_point() else 99)

    @property
    def backend(self):
        from torch._dynamo.backends.common import aot_autograd

        return aot_autograd(fw_compiler=self._compile, bw_compiler=self._compile)

    def _compile(self, graph, inputs):
        from functorch.compile import make_boxed_func

        number = self.graphs = self.graphs + 1

        def replay(*arguments):
            self.calls += 1
            self._called[number] += 1
            call = number, self._called[number]
            return [self._written((*call, i), value, arguments) for i, value in enumerate(graph(*arguments))]

        return make_boxed_func(replay)

    def _written(self, where, value, arguments):
        if not isinstance(value, Tensor) or any(value is one for one in arguments):
            return value
        if where not in self._memory or self._memory[where].shape != value.shape:
            self._memory[where] = value.detach().clone()
        return self._memory[where].copy_(value).detach()


@pytest.fixture
def replays(monkeypatch):
    return Replays(monkeypatch)


# --- overwritten results of CUDA graphs, with a stand-in --------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "window", "optimizer", "gains"),
    [("bf16-mixed", 1, "adamw", {}), ("16-mixed", 3, "adamw-fused", {2: float("inf"), 5: 1e6})],
)
def test_weights_equal_those_of_a_hand_written_loop(tmp_path, replays, precision, window, optimizer, gains):
    mine, theirs, batches, make = make_net(), make_net(), make_batches(7, gains=gains), OPTIMIZERS[optimizer]
    clip = 0.1 if window == 3 else None
    _, trace = fit_and_watch(
        tmp_path, Regression(mine, make), batches, callbacks=[Compile(backend=replays.backend)], max_epochs=2,
        precision=plugin_of(precision), accumulate_grad_batches=window, gradient_clip_val=clip,
    )  # fmt: skip
    expected = train_by_hand(
        theirs, batches, precision=precision, optimizer=make, scaler=scaler_of(precision), epochs=2, window=window,
        clip=norm_of(clip) if clip else None,
    )  # fmt: skip
    if clip is None:
        trace.norms = []
    assert_same(trace, expected)
    assert any(trace.skipped) == bool(gains)
    assert (replays.graphs, replays.calls, replays.steps) == (2, 28, 14)


class Whole(LightningModule):
    """Computes everything in ``forward``, and keeps its loss, weight, predictions and a metric."""

    def __init__(self, weighted=False):
        super().__init__()
        self.net = make_net()
        self.mean = MeanMetric()
        self.weighted = weighted
        self.kept = []
        self.validated = []

    def forward(self, x, y):
        prediction = self.net(x)
        losses = F.mse_loss(prediction, y, reduction="none").mean(1)
        return {"loss": losses.mean(), "weight": losses.detach().abs().sum() + 1.0, "prediction": prediction}

    def training_step(self, batch, batch_idx):
        output = self(*batch[:2])
        self.log("loss", output["loss"], on_step=True, on_epoch=True, prog_bar=True, batch_size=4)
        self.log("weight", output["weight"], on_step=True, on_epoch=True, reduce_fx="max")
        self.mean.update(output["loss"].detach())
        self.log("mean", self.mean, batch_size=4)
        self.kept.append(output["loss"].detach())
        return {"loss": output["loss"], "weight": output["weight"]} if self.weighted else output["loss"]

    def validation_step(self, batch, batch_idx):
        output = self(*batch[:2])
        self.log("val_loss", output["loss"], batch_size=4)
        self.validated.append((output["prediction"], [output]))

    def predict_step(self, batch, batch_idx):
        return self(*batch[:2])

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def run_whole(folder, callbacks, **arguments):
    module = Whole(weighted=arguments.pop("weighted", False))
    batches = [batch[:2] for batch in make_batches(6)]
    recorder = RunRecorder(writes=False)
    arguments |= {"enable_progress_bar": True, "max_epochs": 2}
    trainer = make_trainer(folder, callbacks=[*callbacks, recorder], **arguments)
    trainer.fit(module, loader_of(batches), loader_of(batches[:4]))
    return {
        "metrics": dict(trainer.callback_metrics),
        "curve": recorder.losses.read(),
        "predictions": trainer.predict(module, loader_of(batches)),
        "kept": module.kept,
        "validated": module.validated,
        "weights": list(module.net.parameters()),
    }


@pytest.mark.whole
@pytest.mark.parametrize("arguments", [{}, {"accumulate_grad_batches": 3, "weighted": True}])
def test_kept_results_of_a_step_are_not_overwritten(tmp_path, replays, arguments):
    found = run_whole(tmp_path, [Compile(backend=replays.backend)], **arguments)
    assert replays.steps > 20
    torch.compiler.reset()
    assert_identical(found, run_whole(tmp_path, [], **arguments))


@pytest.mark.parametrize(
    ("settings", "device", "expected"),
    [
        ({}, "cuda", False),
        ({"mode": "max-autotune-no-cudagraphs"}, "cuda", False),
        ({"mode": "reduce-overhead"}, "cuda", True),
        ({"mode": "reduce-overhead"}, "cpu", False),
        ({"options": {"triton.cudagraphs": True}}, "cuda", True),
        ({"backend": "aot_eager", "mode": None}, "cuda", False),
        ({"backend": "of_somebody_else"}, "cpu", True),
    ],
)
def test_settings_that_overwrite_results(settings, device, expected):
    assert compilation.reuses_memory(settings, torch.device(device)) is expected


# --- compiled parts ---------------------------------------------------------------------------------------------------


class Custom(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return torch.relu(x * self.weight)


class Parts(LightningModule):
    """A module with attributes of all kinds."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.weight = nn.Parameter(torch.ones(6))

    def training_step(self, batch, batch_idx):
        return (self.weight * batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WithForward(Parts):
    def forward(self, x):
        return self.weight * x


@pytest.mark.parametrize(
    ("module", "modules", "expected"),
    [
        (lambda: Regression(), None, ["net"]),
        (lambda: Parts(a=Custom(), b=nn.Linear(6, 6), mean=MetricCollection({"mean": MeanMetric()})), None, ["a"]),
        (lambda: Parts(a=nn.ModuleDict({"x": nn.ModuleList([Custom(), nn.ReLU()])})), None, ["a.x.0"]),
        (lambda: WithForward(a=nn.Linear(6, 6)), None, ["forward"]),
        (lambda: WithForward(a=Custom()), None, ["a", "forward"]),
        (lambda: WithForward(a=make_net(), b=Custom()), ["b", nn.LayerNorm], ["a.1", "b"]),
    ],
)
def test_compiled_parts(tmp_path, module, modules, expected):
    callback = Compile(modules, backend="eager")
    with warnings.catch_warnings(action="ignore"):  # not called
        make_trainer(tmp_path, callbacks=[callback]).fit(module(), loader_of(make_batches(1)))
    assert callback.compiled == expected


@pytest.mark.parametrize(
    ("make", "modules", "message"),
    [
        (lambda: Parts(a=nn.Linear(6, 6)), None, r"nothing to compile in Parts: it has neither a forward"),
        (Regression, ["net.blck*"], r"Got 'net.blck\*' among the modules of Compile, expected a pattern"),
        (lambda: torch.compile(Regression(), backend="eager"), None, r"Regression is compiled with torch.compile"),
    ],
)
def test_unsupported_modules_are_refused(tmp_path, make, modules, message):
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(tmp_path, callbacks=[Compile(modules, backend="eager")]).fit(make(), loader_of(make_batches(1)))


def counting(graphs):
    def backend(graph, inputs):
        graphs.append(len(inputs))
        return graph

    return backend


@pytest.mark.parametrize("whole", [True, False])
def test_forward_is_one_graph_with_its_parts_in_it(tmp_path, whole):
    class Both(Regression):
        def forward(self, x):
            return self.net(x) * 2

        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self(batch[0]) if whole else self.net(batch[0]) * 2, batch[1])
            self.log("loss", loss)
            return loss

    graphs = []
    callback = Compile(backend=counting(graphs))
    make_trainer(tmp_path, callbacks=[callback]).fit(Both(), loader_of(make_batches(5)))
    assert len(graphs) == len(callback.compilations) == 1
    assert callback.run_facts()["compile"]["graph_breaks"] == 0


def test_blocks_share_a_compilation(tmp_path):
    module, plain = (Regression(nn.Sequential(*[Custom() for _ in range(12)], nn.Linear(6, 3))) for _ in range(2))
    plain.load_state_dict(module.state_dict())
    graphs = []
    callback = Compile(["Custom"], backend=counting(graphs))
    _, trace = fit_and_watch(tmp_path, module, make_batches(3), callbacks=[callback])
    assert len(callback.compiled) == 12
    assert len(graphs) == 2  # the first block's input requires no gradient
    assert_same(trace, fit_and_watch(tmp_path, plain, make_batches(3))[1])


@pytest.mark.whole
def test_containers_of_torchs_are_compiled_each(tmp_path):
    """The compiler creates at most 8 graphs for one code object, and runs further modules eagerly."""
    graphs = []
    widths = [(6 + i, 7 + i) for i in range(9)]
    net = nn.Sequential(*(nn.Sequential(nn.Linear(*width), nn.ReLU()) for width in widths))
    module = Regression(nn.Sequential(net, nn.Linear(widths[-1][1], 3)))
    callback = Compile([f"net.0.{i}" for i in range(9)], backend=counting(graphs))
    make_trainer(tmp_path, callbacks=[callback], max_epochs=1).fit(module, loader_of(make_batches(2)))
    assert len(callback.compiled) == len(graphs) == 9


@pytest.mark.skipif(torch.__version__ < "2.13", reason="of torch 2.13: older ones compile no nn.Sequential in place")
def test_modules_compiled_by_the_user_are_kept(tmp_path):
    own = []
    module = Regression()
    module.net.compile(backend=counting(own))
    fit_and_watch(tmp_path, module, make_batches(2), callbacks=[Compile(backend="eager")])
    assert own != []
    assert compilation.is_compiled(module.net)


@pytest.mark.parametrize("fails", [False, True])
def test_module_is_restored_and_its_keys_are_unchanged(tmp_path, fails):
    class Looking(Whole):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            assert list(self.state_dict()) == keys
            assert compilation.is_compiled(self.net)
            assert isinstance(vars(self)["forward"], compilation.CompiledForward)
            for other in (copy.deepcopy(self.net), pickle.loads(pickle.dumps(self.net))):
                assert not compilation.is_compiled(other)
                assert torch.equal(other(batch[0]), self.net(batch[0]))
            twin = copy.deepcopy(self)
            assert twin.forward.__self__ is twin
            assert torch.equal(twin(*batch[:2])["loss"], self(*batch[:2])["loss"])
            if fails:
                raise RuntimeError("enough")

    module = Looking()
    keys = list(module.state_dict())
    trainer = make_trainer(tmp_path, callbacks=[Compile(backend="eager")])
    with pytest.raises(RuntimeError, match="enough") if fails else nullcontext():
        trainer.fit(module, loader_of(make_batches(3)), loader_of(make_batches(1)))
    assert not compilation.is_compiled(module.net)
    assert "_compiled_call_impl" not in vars(module.net)
    assert "forward" not in vars(module)


def test_memory_of_a_run_is_freed(tmp_path):
    fit_and_watch(tmp_path, Regression(), make_batches(2), callbacks=[Compile(backend="aot_eager")])
    handlers = __import__("torch._dynamo.callback", fromlist=["callback_handler"]).callback_handler.end_callbacks
    gc.collect()
    assert handlers == []


# --- inductor ---------------------------------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_compiles_a_small_network(tmp_path):
    mine, theirs = (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(2))
    theirs.load_state_dict(mine.state_dict())
    callback = Compile(mode="reduce-overhead")
    fit_and_watch(tmp_path, Regression(mine), make_batches(3), callbacks=[callback], accumulate_grad_batches=2)
    train_by_hand(theirs, make_batches(3), window=2)
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    facts = callback.run_facts()["compile"]
    assert (facts["compilations"], facts["recompilations"], facts["modules"]) == (1, 0, ["net"])
    assert facts["seconds"] > 0


# --- recompilations ---------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Has a number that changes at each step and is a constant of the graph."""

    def __init__(self):
        super().__init__()
        self.net = make_net()
        self.steps = "0"

    def forward(self, x):
        self.steps = self.steps + "0"
        return self.net(x) * len(self.steps)


def test_recompilations_are_counted_and_reported_once(tmp_path):
    callback = Compile(backend="eager")
    with pytest.warns(match=r"forward \(.*test_compile.py:\d+\) was recompiled 5 times, in .* s; the last") as caught:
        fit_and_watch(tmp_path, Regression(Counting()), make_batches(8), callbacks=[callback])
    (mine,) = [str(one.message) for one in caught if "recompiled" in str(one.message)]
    assert "steps ==" in mine.partition("because: ")[2]
    facts = callback.run_facts()["compile"]
    assert (facts["recompilations"], facts["compilations"], len(facts["reasons"])) == (7, 8, 5)
    assert all("steps ==" in reason for reason in facts["reasons"])


def test_module_that_no_step_calls(tmp_path, monkeypatch):
    monkeypatch.setitem(torch._dynamo.utils.counters["stats"], "unique_graphs", 0)
    with pytest.warns(match="Compile has compiled nothing: no step has called 'a'. Steps have to call modules"):
        make_trainer(tmp_path, callbacks=[Compile(backend="eager")]).fit(Parts(a=Custom()), loader_of(make_batches(1)))


def test_graph_breaks_of_an_earlier_run_do_not_count():
    def broken(x):
        torch._dynamo.graph_break()
        return x + 1

    watch = compilation.Compilations()
    for breaks in (1, 0):
        watch.start()
        if breaks:
            torch.compile(broken, backend="eager")(torch.ones(2))
        watch.stop()
        assert watch.graph_breaks == breaks
