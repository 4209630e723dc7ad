"""Small samples in the right format of data that needs a download."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn
from torch.utils.data import TensorDataset

from recipes.data.text import NO_TARGET, python_topics

NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
THINGS = ["001.ak47", "056.dog", "145.motorbikes-101", "252.car-side-101"]


def cifar10(folder: Path, *, images: int = 40) -> Path:
    """Write ``cifar-10-batches-py`` with six files of ``images`` images each, in ten well separated classes."""
    target = folder / "cifar-10-batches-py"
    target.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        labels = [index % 10 for index in range(images)]
        pixels = np.stack([_bars(label, draw) for label in labels]).reshape(images, -1)
        files = [f"{NAMES[label]}_{index:06d}.png" for index, label in enumerate(labels)]
        content = {"batch_label": name, "labels": labels, "data": pixels, "filenames": files}
        (target / name).write_bytes(pickle.dumps(content))
    meta = {"num_cases_per_batch": images, "label_names": NAMES, "num_vis": 3072}
    (target / "batches.meta").write_bytes(pickle.dumps(meta))
    return folder


def caltech256(folder: Path, *, images: int = 12) -> Path:
    """Write ``256_ObjectCategories`` with four classes of JPEGs (one gray), the clutter class, and other files."""
    target = folder / "256_ObjectCategories"
    draw = np.random.default_rng(0)
    for number, name in enumerate([*THINGS, "257.clutter"]):
        (target / name).mkdir(parents=True)
        for index in range(1, images + 1):
            photo = _shape(number, draw)
            photo = photo.convert("L") if (number, index) == (1, 3) else photo
            photo.save(target / name / f"{name[:3]}_{index:04d}.jpg", quality=95)
    (target / THINGS[0] / "RENAME2").write_text("#!/bin/sh\n")  # the original has such a file in 198.spider
    (target / THINGS[1] / "greg").mkdir()  # and such a folder in 056.dog
    Image.new("RGB", (8, 8)).save(target / THINGS[1] / "thumbnail.png")
    return folder


def ragged_sequences(vocabulary: int = 256, context: int = 16) -> TensorDataset:
    """Return random tokens and targets, in sequences of very different lengths."""
    draw = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(0, vocabulary, (8, context), generator=draw) for _ in range(2))
    lengths = torch.tensor([16, 1, 3, 16, 2, 2, 1, 9])
    return TensorDataset(tokens, targets.masked_fill(torch.arange(context) >= lengths[:, None], NO_TARGET))


def distance(module: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of two weights."""
    return max((a - b).abs().max().item() for a, b in zip(module.parameters(), other.parameters(), strict=True))


def tiny_llama(folder: Path, *, classes: int | None = None) -> Path:
    """Write a folder like `save_pretrained`: a Llama with two layers, and a tokenizer trained on Python's topics.

    Args:
        folder: created if it is missing.
        classes: number of classes of a classifier; None for a language model.
    """
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(python_topics()[:20], trainer)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=library.get_vocab_size(), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    if classes is not None:
        config.num_labels = classes
    kind = transformers.LlamaForCausalLM if classes is None else transformers.LlamaForSequenceClassification
    kind(config).save_pretrained(folder)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


def word_model(folder: Path, kind: str, classes: int | None = None, **config: Any) -> Path:
    """Write a folder like `save_pretrained`: a tiny model of words, and a tokenizer with special tokens.

    Args:
        folder: created if it is missing.
        kind: ``"Bert"``, with ``[CLS] text [SEP]``, or ``"Llama"``, with ``<s> text``.
        classes: number of classes of a classifier; None for a language model.
        **config: settings of the model.
    """
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    begin, end = ("[CLS]", "[SEP]") if kind == "Bert" else ("<s>", "</s>")
    words = ["[PAD]", "[UNK]", begin, end, "the", "a", "film", "was", "very", "so", "good", "bad", "fine"]
    library = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(words[:4])
    template = f"{begin} $A {end}" if kind == "Bert" else f"{begin} $A"
    library.post_processor = processors.TemplateProcessing(template, special_tokens=[(begin, 2), (end, 3)])
    library.enable_truncation(4)  # as many files have it; both libraries ignore it
    names = {"cls_token": begin, "sep_token": end} if kind == "Bert" else {"bos_token": begin, "eos_token": end}
    transformers.PreTrainedTokenizerFast(tokenizer_object=library, pad_token="[PAD]", **names).save_pretrained(folder)
    library.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0, "num_labels": classes or 2}
    settings = getattr(transformers, f"{kind}Config")(vocab_size=len(words), **sizes | special | config)
    task = "ForSequenceClassification" if classes else "ForCausalLM"
    getattr(transformers, f"{kind}{task}")(settings).save_pretrained(folder)
    return folder


def _bars(label: int, draw: np.random.Generator) -> np.ndarray:
    """Return uint8 images, shape (3, 32, 32): noise, and a bright bar with a position and color per class."""
    image = draw.integers(0, 100, (3, 32, 32), dtype=np.uint8)
    place = label % 5 * 6 + int(draw.integers(0, 3))
    image[label // 5, :, place : place + 5] = 255
    return image


def _shape(number: int, draw: np.random.Generator) -> Image.Image:
    """Return a disc or a bar on noise, in one of two colors, of any aspect ratio."""
    width, height = (int(side) for side in draw.integers(60, 120, 2))
    image = Image.fromarray(draw.integers(0, 90, (height, width, 3), dtype=np.uint8))
    colour = (250, 60, 40) if number % 2 else (40, 80, 250)
    box = (0.2 * width, 0.2 * height, 0.8 * width, 0.8 * height)
    pen = ImageDraw.Draw(image)
    if number // 2:
        pen.ellipse(box, fill=colour)
    else:
        pen.rectangle((0, 0.4 * height, width, 0.6 * height), fill=colour)
    return image
