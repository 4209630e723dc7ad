"""The recipes gpt and finetune have the same result on two ranks as in one process, by DDP and FSDP2.

In float32 they differ by the order of a few sums: at most 1e-5 in weights of about 1, after 9 updates.
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import recipes_worker as worker
from tests.distributed.test_ddp import load, run
from tests.recipes.samples import tiny_llama
from tests.support import needs_fsdp2
from tests.warm_python import WarmPython

HAS_EXTRA = all(find_spec(name) for name in ("transformers", "peft", "tokenizers"))
NAMES = [
    "gpt", "gpt, tied",
    *(
        pytest.param(name, marks=pytest.mark.skipif(not HAS_EXTRA, reason="needs transformers"))
        for name in ("finetune", "finetune, lora", "finetune, classes")
    ),
]  # fmt: skip
STRATEGIES = ("ddp", pytest.param("fsdp", marks=needs_fsdp2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    if HAS_EXTRA:
        tiny_llama(folder / "model")
    return folder


@pytest.fixture(scope="module")
def ranks(python: WarmPython, folder: Path) -> list[dict[str, Any]]:
    return load(run(python, folder, "torchrun", script=Path(worker.__file__))[1])


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers")
        return {name: worker.fit(name, folder, "auto", 1) for name in worker.scenarios(folder)}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NAMES)
def test_result_equals_that_of_one_process(
    ranks: list[dict[str, Any]], alone: dict[str, dict[str, Any]], name: str, strategy: str
) -> None:
    expected = alone[name]
    for rank in ranks:
        found = rank[name][strategy]
        assert found["global_step"] == expected["global_step"] == 9
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-4)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-3)
        assert found["weights"].keys() == expected["weights"].keys()
        for key, value in expected["weights"].items():
            torch.testing.assert_close(found["weights"][key], value, rtol=0, atol=1e-5, msg=lambda m, k=key: f"{k} {m}")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NAMES[:2])
def test_texts_are_written_while_it_trains(
    ranks: list[dict[str, Any]], alone: dict[str, dict[str, Any]], folder: Path, name: str, strategy: str
) -> None:
    assert (folder / strategy / name / "written.txt").read_bytes() == (
        folder / "auto" / name / "written.txt"
    ).read_bytes()


@pytest.mark.skipif(not HAS_EXTRA, reason="needs transformers")
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft 0.21 with transformers 5
@pytest.mark.parametrize("strategy", [*STRATEGIES, "auto"])
def test_written_folder_is_a_model(
    ranks: list[dict[str, Any]], alone: dict[str, dict[str, Any]], folder: Path, strategy: str
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def weights(name: str) -> dict[str, torch.Tensor]:
        found: dict[str, Any] = alone[name] if strategy == "auto" else ranks[0][name][strategy]
        return found["weights"]

    whole = folder / strategy / "finetune"
    read = AutoModelForCausalLM.from_pretrained(whole)
    for key, value in read.named_parameters():
        assert torch.equal(value, weights("finetune")[f"net.{key}"]), key
    assert (
        AutoTokenizer.from_pretrained(whole).decode(AutoTokenizer.from_pretrained(whole)("The")["input_ids"]) == "The"
    )

    adapters = folder / strategy / "finetune, lora"
    assert not (adapters / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    before = {key: value.clone() for key, value in base.named_parameters()}
    joined = PeftModel.from_pretrained(base, adapters)
    for key, value in joined.named_parameters():
        assert torch.equal(value, weights("finetune, lora")[f"net.{key}"]), key
    frozen = [key for key in before if torch.equal(before[key], weights("finetune")[f"net.{key}"])]
    assert frozen == []  # without adapters, all parameters were trained
    assert any(value.abs().max() > 1e-4 for key, value in joined.named_parameters() if "lora_B" in key)
