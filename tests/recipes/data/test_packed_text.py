import json
import pickle
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.data import PackedText
from recipes.data.text import NO_TARGET, python_topics
from recipes.data.tokenizers import Bytes, FileTokenizer, load_tokenizer
from tests.recipes.samples import tiny_llama, word_model

needs_tokenizers = pytest.mark.skipif(not find_spec("tokenizers"), reason="needs transformers")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def ready(path=None, **options):
    data = PackedText(path, **{"context": 8, "held_out": 0.25} | options)
    data.prepare_data()
    data.setup("fit")
    return data


def targets_of(data, split):
    """All targets, in order."""
    return [int(t) for _, targets in data.splits[split] for t in targets if t != NO_TARGET]


def test_every_token_is_a_target_once():
    texts = [f"{'abcdefgh'[i % 8] * (3 + i)}" for i in range(12)]
    Path("text.txt").write_text("\n\n\n".join(texts))
    data = ready("text.txt")
    found = [targets_of(data, split) for split in ("train", "val", "test")]
    documents = [bytes(part).decode() for split in found for part in bytes(split).split(b"\0") if part]
    assert sorted(documents) == sorted(texts)
    assert all(split[-1] == 0 for split in found)
    tokens, targets = data.splits["train"][0]
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens[0] == 0  # the end of nothing begins the first document
    assert torch.equal(tokens[1:], targets[:-1])
    for split in data.splits.values():
        assert all((targets != NO_TARGET).all() for _, targets in [split[i] for i in range(len(split) - 1)])  # packed
        assert split[0][0].shape == (8,)
    (row,) = ready("text.txt", context=1000).splits["train"]
    count = int((row[1] != NO_TARGET).sum())
    assert 0 < count < 1000
    assert (row[0][count:] == 0).all()
    assert (row[1][count:] == NO_TARGET).all()


def test_tokens_are_found_again_and_memory_mapped():
    data = ready()
    (folder,) = Path(".tokens").iterdir()
    before = (folder / "train.bin").stat().st_mtime_ns
    again = ready()
    assert (folder / "train.bin").stat().st_mtime_ns == before
    assert torch.equal(again.splits["train"][3][0], data.splits["train"][3][0])
    assert isinstance(data.splits["train"]._stream, np.memmap)
    assert len(pickle.dumps(data.splits["train"])) < 1000  # a worker maps the file itself
    assert torch.equal(pickle.loads(pickle.dumps(data.splits["train"]))[3][1], data.splits["train"][3][1])
    Path("text.txt").write_text("\n\n\n".join("abcdefghij"))
    ready("text.txt")
    Path("text.txt").write_text("\n\n\n".join("klmnopqrstu"))
    assert set(targets_of(ready("text.txt"), "train")) <= {0, *b"klmnopqrstu"}
    ready("text.txt", split_seed=1)
    assert len(list(Path(".tokens").iterdir())) == 4


def test_lines_and_folders():
    Path("texts/more").mkdir(parents=True)
    lines = [json.dumps({"body": text}) for text in ("one", "two", "three", "four")]
    Path("texts/a.jsonl").write_text("\n".join(lines) + "\n\n")
    Path("texts/more/b.txt").write_text("five\n\n\nsix")
    data = ready("texts", field="body")
    documents = b"".join(bytes(targets_of(data, split)) for split in data.splits).split(b"\0")
    assert sorted(filter(None, documents)) == sorted([b"one", b"two", b"three", b"four", b"five", b"six"])
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1 has 'body', expected an object with 'text'"):
        ready("texts")
    Path("texts/a.jsonl").write_text("{nothing")
    with pytest.raises(ValueError, match=r"line 1 is not valid JSON"):
        ready("texts")
    with pytest.raises(FileNotFoundError, match=r"path is nowhere.*has no text.*Expected"):
        ready("nowhere")


def test_data_set_of_the_library_datasets(monkeypatch):
    Path("set").mkdir()
    Path("set/state.json").write_text("{}")
    Path("set/data-0.arrow").write_text("")
    monkeypatch.setitem(sys.modules, "datasets", None)  # not installed
    with pytest.raises(ModuleNotFoundError, match=r"which is not installed: pip install datasets"):
        ready("set")


@pytest.mark.whole
@needs_tokenizers
def test_special_tokens_before_a_document():
    pytest.importorskip("transformers", reason="writes a model")
    folder = word_model(Path("model"), "Llama")
    Path("text.txt").write_text("\n\n\n".join(["the film", "a film"] * 5))
    data = PackedText("text.txt", tokenizer=str(folder), context=4)
    data.prepare_data()
    data.setup("fit")
    tokens, targets = data.splits["test"][0]
    assert tokens.tolist()[:2] == [3, 2]  # </s> <s>
    assert targets.tolist()[-2:] == [6, 3]  # film </s>


@pytest.mark.whole
@needs_tokenizers
def test_tokenizer_of_a_model():
    folder = tiny_llama(Path("model"))
    tokenizer = load_tokenizer(str(folder))
    (ids,) = tokenizer.encode(["The statement"])
    assert len(ids) < len("The statement")
    assert tokenizer.decode(ids) == "The statement"
    assert tokenizer.end == 0  # named by tokenizer_config.json
    data = ready(tokenizer=str(folder), vocabulary=320)
    assert data.splits["train"].dtype == np.uint16
    text = tokenizer.decode([t for t in targets_of(data, "val") if t])
    assert any(document[:40] in text for document in python_topics())
    with pytest.raises(ValueError, match=r"vocabulary is 256, but the tokenizer has 300.*data\.vocabulary=300.* 320,"):
        ready(tokenizer=str(folder), vocabulary=256)
    (folder / "tokenizer_config.json").unlink()
    assert FileTokenizer(str(folder / "tokenizer.json")).end == 0  # </s> is one of the usual ones
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer file"):
        load_tokenizer(str(folder))


def test_without_a_tokenizer(monkeypatch):
    assert load_tokenizer(None).encode(["ä\0b"]) == [[0xC3, 0xA4, 0x62]]
    assert Bytes().decode([0xC3, 0xA4, 300, 0x62]) == "äb"
    with pytest.raises(FileNotFoundError, match=r"tokenizer is nowhere.*null for bytes"):
        load_tokenizer("nowhere")
    Path("tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install tokenizers"):
        load_tokenizer(".")
