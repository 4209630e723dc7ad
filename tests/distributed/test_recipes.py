"""The recipes gpt and finetune have the same result on two ranks as in one process, by DDP and FSDP2.

In float32 they differ by the order of a few sums: at most 1e-5 in weights of about 1, after 9 updates.
"""

import warnings
from functools import cache, partial
from importlib.util import find_spec

import pytest
import torch
from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader, TensorDataset

from recipes.data.text import NO_TARGET
from recipes.finetune import FineTuner
from recipes.language_model import LanguageModel, TextSamples
from recipes.schedules import warmup_cosine
from tests.distributed.worker import Recorder, Shard
from tests.recipes.samples import tiny_llama
from tests.support import make_trainer, needs_fsdp2
from trainer.callbacks import ActivationCheckpointing

HAS_EXTRA = all(find_spec(name) for name in ("transformers", "peft", "tokenizers"))
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, eps=1e-3)  # the steps of tiny gradients mean little
SCHEDULE = partial(warmup_cosine, warmup=0.2)


def sequences():
    """Random tokens below 256, in sequences of very different lengths."""
    draw = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(0, 256, (48, 16), generator=draw) for _ in range(2))
    lengths = torch.randint(1, 17, (48, 1), generator=draw)
    return TensorDataset(tokens, targets.masked_fill(torch.arange(16) >= lengths, NO_TARGET))


def make_module(name, folder):
    """Return the module of a recipe. ``folder / "model"`` is the model to fine-tune."""
    if name == "gpt":
        sizes = {"context": 16, "width": 16, "heads": 2, "layers": 2, "sample_length": 3}
        return LanguageModel(ADAMW, SCHEDULE, positions="rotary", tie_weights=True, **sizes)
    return FineTuner(ADAMW, SCHEDULE, folder=str(folder / "model"), lora_rank=4 if name == "finetune, lora" else None)


def fit(name, folder, strategy, processes):
    """One fit of nine windows of two batches."""
    seed_everything(7, verbose=False)
    module, recorder, output = make_module(name, folder), Recorder(), folder / strategy / name
    callbacks = [recorder]
    if isinstance(module, FineTuner):
        module.save_to = str(output)
    else:
        callbacks += [TextSamples(str(output), prompt="The "), ActivationCheckpointing("Block")]
    trainer = make_trainer(
        folder, devices=processes, strategy=strategy, max_epochs=3, accumulate_grad_batches=2, gradient_clip_val=0.5,
        use_distributed_sampler=False, num_sanity_val_steps=0, callbacks=callbacks,
    )  # fmt: skip
    loader = partial(DataLoader, sequences(), batch_size=8 // processes, sampler=Shard(processes, number=48))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers")
        trainer.fit(module, loader(), loader())
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("val_")}
    return {
        "weights": recorder.state["weights"],
        "norms": recorder.norms,
        "metrics": metrics,
        "global_step": trainer.global_step,
    }


NEEDS_EXTRA = pytest.mark.skipif(not HAS_EXTRA, reason="needs transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    if HAS_EXTRA:
        tiny_llama(folder / "model")
    return folder


@pytest.fixture(scope="module")
def results(ranks, folder):
    """Return the results of each rank for a module and an engine (``"auto"``: one process), which are run once."""

    def run(name, engine):
        if engine == "auto":
            return [fit(name, folder, engine, 1)]
        return ranks.call(fit, name, folder, engine, 2)

    return cache(run)


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("gpt", "ddp"),
        pytest.param("gpt", "fsdp", marks=needs_fsdp2),
        pytest.param("finetune", "ddp", marks=NEEDS_EXTRA),
        pytest.param("finetune", "fsdp", marks=[NEEDS_EXTRA, needs_fsdp2]),
        pytest.param("finetune, lora", "fsdp", marks=[NEEDS_EXTRA, needs_fsdp2]),
    ],
)
def test_result_equals_that_of_one_process(results, folder, name, engine):
    (expected,) = results(name, "auto")
    for found in results(name, engine):
        assert found["global_step"] == expected["global_step"] == 9
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-4)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-3)
        torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=1e-5)
    if name == "gpt":
        texts = [(folder / one / name / "written.txt").read_bytes() for one in (engine, "auto")]
        assert texts[0] == texts[1]


@NEEDS_EXTRA
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft 0.21 with transformers 5
@pytest.mark.parametrize("engine", [pytest.param("fsdp", marks=needs_fsdp2), "auto"])
def test_written_folder_is_a_model(results, folder, engine):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    whole_weights, adapter_weights = (results(name, engine)[0]["weights"] for name in ("finetune", "finetune, lora"))
    whole = folder / engine / "finetune"
    read = AutoModelForCausalLM.from_pretrained(whole)
    for key, value in read.named_parameters():
        assert torch.equal(value, whole_weights[f"net.{key}"]), key
    tokenizer = AutoTokenizer.from_pretrained(whole)
    assert tokenizer.decode(tokenizer("The")["input_ids"]) == "The"

    adapters = folder / engine / "finetune, lora"
    assert not (adapters / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    before = {key: value.clone() for key, value in base.named_parameters()}
    joined = PeftModel.from_pretrained(base, adapters)
    for key, value in joined.named_parameters():
        assert torch.equal(value, adapter_weights[f"net.{key}"]), key
    frozen = [key for key in before if torch.equal(before[key], whole_weights[f"net.{key}"])]
    assert frozen == []  # without adapters, all parameters were trained
    assert any(value.abs().max() > 1e-4 for key, value in joined.named_parameters() if "lora_B" in key)
