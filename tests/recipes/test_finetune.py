import json
import math
import random
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from recipes.data import Examples
from recipes.finetune import FineTuner, check_folder
from recipes.language_model import TextWriter
from tests.recipes.samples import distance, ragged_sequences, tiny_llama, word_model
from tests.support import make_trainer
from trainer.cli import main

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
    with pytest.warns(UserWarning, match=r"no head with 3 classes: score\.weight are new"):
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


TEXTS = [
    " ".join(random.Random(seed).choices(["the", "a", "film", "was", "very", "so"], k=seed % 5))
    + f" {('good', 'bad', 'fine')[seed % 3]}"
    for seed in range(30)
]


def write_rows(file, rows):
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


def in_transformers(folder, texts):
    """Return the loss and the accuracy of a folder's classifier of the last words, or the loss of its language model.

    One text at a time, by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    is_classifier = "Classification" in json.loads((folder / "config.json").read_text())["architectures"][0]
    kind = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
    model = kind.from_pretrained(folder)
    total = count = right = 0.0
    for text in texts:
        text = text if is_classifier else text + tokenizer.eos_token
        inputs = tokenizer(text, return_tensors="pt")
        label = torch.tensor([["bad", "fine", "good"].index(text.split()[-1])]) if is_classifier else inputs.input_ids
        with torch.no_grad():
            output = model(**inputs, labels=label)
        weight = 1 if is_classifier else label.numel() - 1
        total, count = total + weight * output.loss.item(), count + weight
        right += (output.logits.argmax(-1) == label).float().mean().item() if is_classifier else 0.0
    other = {"val_acc": right / count} if is_classifier else {"val_perplexity": math.exp(total / count)}
    return pytest.approx({"val_loss": total / count} | other, rel=1e-4)


@pytest.mark.parametrize(("kind", "classes"), [("Bert", 3), ("Llama", 3), ("Llama", None)])
def test_scores_equal_those_of_transformers_before_and_after(kind, classes, tmp_path):
    folder = word_model(tmp_path / "model", kind, classes)
    rows = [{"text": text} | ({"label": text.split()[-1]} if classes else {}) for text in TEXTS]
    data = Examples(write_rows(tmp_path / "rows.jsonl", rows), tokenizer=str(folder), held_out=0.3, context=16)
    task = "causal" if classes is None else "classification"
    adam = partial(torch.optim.Adam, lr=3e-3)
    module = FineTuner(adam, folder=str(folder), task=task, save_to=str(tmp_path / "out"))
    data.setup("fit")
    held_out = [data.tokenizer.decode(tokens) for tokens, _ in data.splits["val"]]
    (before,) = make_trainer(tmp_path).validate(module, data, verbose=False)
    assert before == in_transformers(folder, held_out)
    make_trainer(tmp_path, max_epochs=8).fit(module, data)
    (after,) = make_trainer(tmp_path).validate(module, data, verbose=False)
    assert after == in_transformers(tmp_path / "out", held_out)
    assert abs(after["val_loss"] - before["val_loss"]) > 0.01
    if classes:
        assert json.loads((tmp_path / "out" / "config.json").read_text())["id2label"]["1"] == "fine"


@pytest.mark.parametrize(("kind", "pad"), [("Bert", 0), ("Llama", 0), ("Llama", None)])
def test_padding_does_not_change_logits(kind, pad, tmp_path):
    folder = word_model(tmp_path / "model", kind, 2, pad_token_id=pad)
    tokens = torch.tensor([[2, 10, 3, 3, 3], [2, 4, 6, 7, 11]])  # padded with the end token, as Examples do
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]])
    module = tuner(folder, task="classification").eval()
    alone = torch.cat([module(row[None, : length.sum()]) for row, length in zip(tokens, mask, strict=True)])
    assert torch.allclose(module(tokens, mask), alone, atol=1e-6)
    assert module.net.config.pad_token_id == 0


def test_head_of_another_size_is_created(tmp_path):
    folder = word_model(tmp_path / "model", "Bert", 2)
    with pytest.warns(
        UserWarning, match=r"model has no head with 3 classes: classifier\.bias, classifier\.weight are new"
    ):
        module = tuner(folder, task="classification", num_classes=3)
    assert module(torch.tensor([[2, 10, 3]])).shape == (1, 3)
    assert module.hparams["num_classes"] == 3
    with pytest.warns(UserWarning, match=r"no head: .* are new"):  # a classifier as a language model
        tuner(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 16}))
    with pytest.raises(ValueError, match=r"bert\..* has shape .*32.*, but its config\.json implies .*16"):
        tuner(folder, task="classification", num_classes=3)


def test_words_of_labels(tmp_path):
    folder = word_model(tmp_path / "model", "Bert", 3, id2label={0: "good", 1: "fine", 2: "bad"})
    rows = [{"text": text, "label": text.split()[-1]} for text in TEXTS]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    data = Examples(file, tokenizer=str(folder))
    data.setup("fit")
    assert data.classes == ["good", "fine", "bad"]  # the model's order
    for tokens, place in data.splits["train"]:
        assert data.tokenizer.decode(tokens).endswith(data.classes[place])
    module = FineTuner(ADAMW, folder=str(folder), task="classification")
    make_trainer(tmp_path).validate(module, data, verbose=False)
    assert module.net.config.id2label == {0: "good", 1: "fine", 2: "bad"}
    write_rows(tmp_path / "rows.jsonl", [*rows, {"text": "poor", "label": "poor"}])
    with pytest.raises(
        ValueError, match=r"'poor' is not .* 'good', 'fine', 'bad' .*data\.classes=\[bad,fine,good,poor\]"
    ):
        Examples(file, tokenizer=str(folder)).setup("fit")
    data = Examples(file, tokenizer=str(folder), classes=["poor", "bad", "fine", "good"])
    with pytest.warns(UserWarning, match="no head with 4 classes"):
        make_trainer(tmp_path).validate(
            FineTuner(ADAMW, folder=str(folder), task="classification"), data, verbose=False
        )


def test_words_of_a_checkpoint(tmp_path):
    folder = word_model(tmp_path / "model", "Bert", 2)
    options = {"folder": str(folder), "task": "classification"}

    def data(*words):
        rows = [{"text": word, "label": word} for word in words * 10]
        return Examples(write_rows(tmp_path / "rows.jsonl", rows), tokenizer=str(folder))

    trainer = make_trainer(tmp_path)
    trainer.fit(FineTuner(ADAMW, **options), data("good", "bad"))
    trainer.save_checkpoint(file := tmp_path / "last.ckpt")
    with pytest.raises(
        ValueError, match=r"data are 'bad', 'fine', but .* are 'bad', 'good'\. Set data\.classes=\[bad,good\]"
    ):
        make_trainer(tmp_path).validate(FineTuner(ADAMW, **options), data("bad", "fine"), ckpt_path=file)
    with pytest.raises(ValueError, match=r"\['bad'\] has 1 class, expected at least 2"):
        make_trainer(tmp_path).validate(FineTuner(ADAMW, **options), data("bad"))
    module = FineTuner.load_from_checkpoint(file, optimizer=ADAMW)
    assert module.net.config.id2label == {0: "bad", 1: "good"}


def test_number_of_classes_that_differs_from_the_words(tmp_path):
    folder = word_model(tmp_path / "model", "Bert", 2)
    rows = [{"text": text, "label": text.split()[-1]} for text in TEXTS]
    data = Examples(write_rows(tmp_path / "rows.jsonl", rows), tokenizer=str(folder))
    with pytest.raises(
        ValueError, match=r"num_classes is 4, but the data has the 3 classes 'bad', 'fine', 'good'\. Set"
    ):
        make_trainer(tmp_path).fit(FineTuner(ADAMW, folder=str(folder), task="classification", num_classes=4), data)


@pytest.mark.whole
@pytest.mark.parametrize("file", ["examples.jsonl", "labelled.jsonl"])
def test_documented_command_with_own_examples(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = {"examples.jsonl": {"prompt": "the film was"}, "labelled.jsonl": {}}[file]
    rows = [words | {"completion": text, "text": text, "label": text.split()[-1]} for text in TEXTS]
    rows = [{name: row[name] for name in row if words or name in ("text", "label")} for row in rows]
    write_rows(Path(file), rows)
    word_model(Path("FOLDER"), *(("Llama",) if words else ("Bert", 3)))
    recipe = (Path(__file__).parents[2] / "conf" / "recipe" / "finetune.yaml").read_text().replace("\n#     ", " ")
    (command,) = [line for line in recipe.splitlines() if file in line]
    assert main([*shlex.split(command)[4:], "trainer=cpu", "hydra.run.dir=run"]) == 0
    assert json.loads(Path("run/run.json").read_text())["status"] == "completed"


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
    with pytest.raises(ValueError, match="num_classes is 1, expected at least 2, or null"):
        FineTuner(ADAMW, folder=str(folder), task="classification", num_classes=1)
    for package, options in (("peft", {"lora_rank": 2}), ("transformers", {})):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ModuleNotFoundError, match=rf"{package} is needed .* pip install {package}"):
            FineTuner(ADAMW, folder=str(folder), **options)
        monkeypatch.undo()
