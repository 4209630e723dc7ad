import json
import sys
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from recipes.finetune import FineTuner, check_folder
from recipes.language_model import TextWriter
from tests.recipes.samples import distance, ragged_sequences, tiny_llama
from tests.support import make_trainer

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("peft", reason="needs transformers")

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("llama"))


def tuner(folder, **options):
    torch.manual_seed(0)
    module = FineTuner(ADAMW, folder=str(folder), **options)
    module.configure_model()
    return module


def test_model_equals_that_of_the_folder(folder):
    from transformers import AutoModelForCausalLM

    theirs, tokens = AutoModelForCausalLM.from_pretrained(folder), torch.arange(10).unsqueeze(0)
    module = tuner(folder)
    assert torch.equal(module(tokens), theirs(tokens).logits)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in module.parameters())
    nats = torch.nn.functional.cross_entropy(theirs(tokens[:, :-1]).logits[0], tokens[0, 1:]).item()
    module.log = lambda *_, **__: None
    output = module.training_step((tokens[:, :-1], tokens[:, 1:]), 0)
    assert output["loss"].item() == pytest.approx(nats, rel=1e-6)
    assert output["weight"] == 9


def test_adapters_keep_the_weights(folder):
    module = tuner(folder, lora_rank=2, lora_modules=["q_proj", "v_proj"])
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 2  # layers, modules, A and B
    assert all("lora_" in name for name in trained)
    (group,) = module.configure_optimizers().param_groups
    assert len(group["params"]) == 8
    module, whole = tuner(folder, lora_rank=2), tuner(folder)
    tokens = torch.arange(10).unsqueeze(0)
    assert torch.allclose(module(tokens), whole(tokens), atol=1e-6)  # B begins as zeros
    assert len(whole.configure_optimizers().param_groups[1]["params"]) == 5  # norms, which do not decay


def test_saved_model_is_trained_and_complete(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tiny_llama(tmp_path / "model")
    LlamaForCausalLM(LlamaConfig.from_pretrained(folder, tie_word_embeddings=True)).save_pretrained(folder)
    for name in ("modeling_llama.py", "__init__.py"):
        (folder / name).write_text("raise SystemExit('run')")  # code in the folder is not run
    module = tuner(folder, save_to=str(tmp_path / "out"))
    make_trainer(tmp_path, precision="bf16-mixed").fit(module, DataLoader(ragged_sequences(300), batch_size=4))
    again = tuner(tmp_path / "out")
    assert distance(module, again) == 0.0
    assert distance(again, tuner(folder)) > 1e-3
    assert json.loads((tmp_path / "out" / "config.json").read_text())["use_cache"] is True
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert not [file for file in (tmp_path / "out").iterdir() if file.suffix in (".bin", ".pt", ".py")]


@pytest.mark.whole
def test_classes(folder, tmp_path):
    texts = torch.randint(1, 300, (12, 6), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(texts, torch.ones_like(texts), texts[:, 0] % 3)
    module = tuner(folder, task="classification", num_classes=3, save_to=str(tmp_path / "out"))
    assert module(texts, torch.ones_like(texts)).shape == (12, 3)
    trainer = make_trainer(tmp_path, max_epochs=12)
    trainer.fit(module, DataLoader(data, batch_size=4))
    (metrics,) = trainer.validate(module, DataLoader(data, batch_size=5), verbose=False)
    logits = module.eval()(texts)
    right = (logits.argmax(1) == texts[:, 0] % 3).float().mean().item()
    nats = torch.nn.functional.cross_entropy(logits, texts[:, 0] % 3).item()
    assert metrics == {"val_acc": pytest.approx(right), "val_loss": pytest.approx(nats, rel=1e-4)}
    assert right > 0.9
    writer = TextWriter(str(tmp_path))
    predicted = torch.cat(make_trainer(tmp_path, callbacks=[writer]).predict(module, DataLoader(data, batch_size=5)))
    assert torch.allclose(predicted, logits.softmax(1), atol=1e-5)
    shares = [float(share) for share in writer.path.read_text().splitlines()[0].split()]
    assert shares == pytest.approx(predicted[0].tolist(), abs=1e-4)
    again = tuner(tmp_path / "out", task="classification", num_classes=3).eval()
    assert torch.allclose(again(texts), logits, atol=1e-6)


def test_written_files(folder, tmp_path):
    module = tuner(folder, sample_length=5).eval()
    trainer = make_trainer(tmp_path, callbacks=[TextWriter(str(tmp_path))])
    ((text,),) = trainer.predict(module, DataLoader(["The "], batch_size=1))
    assert text == "The " + module.write("The ")
    stream = module.tokenizer.encode(["The "])[0]
    for _ in range(5):
        stream.append(int(module(torch.tensor([stream]))[0, -1].argmax()))
    assert module.tokenizer.decode(stream) == text
    batch = torch.ones(2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"there are no prompts\. Set data\.prompts"):
        trainer.predict(module, DataLoader(TensorDataset(batch, batch, batch), batch_size=2))


def test_folders_that_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"folder is nowhere.* does not exist.*Set model\.folder"):
        check_folder("nowhere")
    code = json.dumps({"auto_map": {"AutoModel": "modeling.Mine"}})
    for name, content, message in (  # one after the other
        ("notes.txt", "", r"has no model: it has no config\.json\. Expected"),
        ("adapter_config.json", "{}", "It has only LoRA adapters"),
        ("config.json", "{", r"config\.json is not valid JSON"),
        ("config.json", "{}", r"has no weights: it has no \.safetensors"),
        ("pytorch_model.bin", "", r"are pickles \(pytorch_model\.bin\), which can run code.* not read"),
        ("config.json", code, r"contains custom code .*modeling\.Mine.*is not run"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises((FileNotFoundError, ValueError), match=message):
            check_folder(str(tmp_path))


def test_settings_that_are_refused(folder, monkeypatch):
    with pytest.raises(ValueError, match="task is 'chat', expected 'causal' or 'classification'"):
        FineTuner(ADAMW, folder=str(folder), task="chat")
    with pytest.raises(ValueError, match="num_classes is None, expected at least 2"):
        FineTuner(ADAMW, folder=str(folder), task="classification")
    for package, options in (("peft", {"lora_rank": 2}), ("transformers", {})):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ModuleNotFoundError, match=rf"{package} is needed .* pip install {package}"):
            FineTuner(ADAMW, folder=str(folder), **options)
        monkeypatch.undo()
