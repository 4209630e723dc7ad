"""Text as bytes, in sequences of unequal length, for a small language model."""

import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from recipes.data.loading import SplitDataModule

END = 0  # the byte before and after a document; texts do not contain it
NO_TARGET = -100  # ignored by torch's cross-entropy
VOCABULARY = 256  # bytes

Batch = tuple[Tensor, Tensor]


class TextData(SplitDataModule):
    """Splits of text, and prompts.

    Args:
        context: tokens in a sequence.
        split_seed: seed of the split into training, validation and test documents.
        held_out: share of the text for the validation, and the same share for the test.
        prompts: one or several prompts that ``predict`` continues. Each prompt is a batch: a list of one string. None:
            ``predict`` uses the test sequences.
        **loader: arguments of `SplitDataModule`.

    Raises:
        ValueError: ``context`` is below 1, or ``held_out`` is not above 0 and below 0.5.
    """

    def __init__(
        self, context: int, split_seed: int, held_out: float, prompts: str | Sequence[str] | None, **loader: Any
    ) -> None:
        super().__init__(**loader)
        if context < 1:
            raise ValueError(f"context is {context}, expected at least 1 token in a sequence.")
        if not 0.0 < held_out < 0.5:
            raise ValueError(
                f"held_out is {held_out}, expected a share of the text above 0 and below 0.5: validation and"
                " test each use this share."
            )
        self.context = context
        self.split_seed = split_seed
        self.held_out = held_out
        self.prompts = [prompts] if isinstance(prompts, str) else prompts

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return the prompts, one at a time, or the test sequences if there are no prompts."""
        return self._loader("test") if self.prompts is None else DataLoader(list(self.prompts), batch_size=1)


class ByteText(TextData):
    """Documents as sequences of bytes (UTF-8): the language reference of Python, or a custom file.

    Without a ``path``, the text is the output of ``help()`` for Python's topics (`pydoc_data.topics`): about 370,000
    characters of English. Every Python includes this text; it differs a little between versions. Paragraphs that
    several topics share are kept in only one topic, so that no validation text occurs in training.

    A batch is ``(tokens, targets)``, both int64 of shape (batch, ``context``). A target is the byte after its
    token. A document is cut at the ends of lines into the longest sequences that fit; shorter sequences are padded with
    targets of -100 and tokens of 0. Thus sequences, and batches, differ in their numbers of targets. Every byte of a
    document is the target of one token, and so is its end, a 0.

    Args:
        path: a text file in UTF-8 with documents separated by ``separator``; None for Python's topics.
        separator: a regular expression for the text between two documents of the file. Default: two or more empty
            lines.
        context: tokens in a sequence.
        batch_size: sequences in a batch, on one rank.
        num_workers: processes that prepare batches; 0 suffices, because there is nothing to prepare.
        split_seed: seed of the split into training, validation and test documents.
        held_out: share of the bytes for the validation, and the same share for the test.
        prompts: one or several prompts that ``predict`` continues. Each prompt is a batch: a list of one string.

    Raises:
        ValueError: ``context`` is below 1, ``held_out`` is not above 0 and below 0.5, the file is not in UTF-8, or
            a split has no document.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        separator: str = r"\n\n\n+",
        context: int = 256,
        batch_size: int = 4,
        num_workers: int = 0,
        split_seed: int = 0,
        held_out: float = 0.1,
        prompts: str | Sequence[str] = ("The ",),
    ) -> None:
        super().__init__(context, split_seed, held_out, prompts, batch_size=batch_size, num_workers=num_workers)
        self.path = path
        self.separator = separator

    def setup(self, stage: str) -> None:
        """Read, split and cut the text. A second call is a no-op."""
        if self.splits:
            return
        if self.path is None:
            documents = python_topics()
        else:
            documents = re.split(self.separator, read_text(Path(self.path).expanduser()))
        clean = [document.replace("\0", "").strip("\n") for document in documents]
        encoded = [document.encode() for document in clean if document.strip()]
        sizes = [len(document) for document in encoded]
        for name, places in split_documents(sizes, self.held_out, self.split_seed).items():
            self.splits[name] = TensorDataset(*cut([encoded[place] for place in places], self.context))


def read_text(file: Path) -> str:
    """Return the text in ``file``.

    Raises:
        ValueError: the file is not in UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file.resolve()} is not encoded in UTF-8 ({error}). Convert it, for example: iconv -f LATIN1 -t UTF-8."
        ) from error


def python_topics() -> list[str]:
    """Return the output of ``help()`` for each of Python's topics, without paragraphs that an earlier topic contains.

    The text is read from the running Python, and has the Python Software Foundation's license.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    documents = []
    # shortest first, because a long topic keeps most of its text without the paragraphs that it shares
    for name in sorted(topics, key=lambda name: (len(topics[name]), name)):
        paragraphs = []
        for paragraph in re.split(r"\n[ ]*\n", topics[name].replace("\0", "")):
            if paragraph.strip() not in seen:
                paragraphs.append(paragraph)
            seen.add(paragraph.strip())
        if paragraphs:
            documents.append("\n\n".join(paragraphs))
    return documents


def split_documents(sizes: Sequence[int], held_out: float, seed: int) -> dict[str, list[int]]:
    """Split whole documents into those for training, validation and test. Return their positions in ``sizes``.

    Args:
        sizes: sizes of the documents, in bytes or characters; above 0.
        held_out: share of the total size for the test, and the same share for the validation. A document that
            would exceed this share is left to the next split.
        seed: seed of the order of the documents.

    Raises:
        ValueError: a split has no document.
    """
    order = list(range(len(sizes)))
    random.Random(seed).shuffle(order)
    wanted = held_out * sum(sizes)
    splits: dict[str, list[int]] = {"train": [], "val": [], "test": []}
    for name in ("test", "val"):
        taken = 0
        rest = []
        for document in order:
            if taken + sizes[document] <= wanted:
                splits[name].append(document)
                taken += sizes[document]
            else:
                rest.append(document)
        order = rest
    splits["train"] = order
    if not all(splits.values()):
        raise ValueError(
            f"{len(sizes)} documents cannot be split into sets for training, validation and test with"
            f" held_out={held_out}. Use more or shorter documents (data.separator), or increase data.held_out."
        )
    return splits


def cut(documents: Iterable[bytes], context: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, both int64 of shape (sequences, ``context``), as described in `ByteText`.

    Args:
        documents: documents as bytes, without a 0.
        context: largest number of tokens in a sequence.
    """
    sequences = []
    for document in documents:
        stream = bytes([END]) + document + bytes([END])
        start = 0
        while start < len(stream) - 1:
            end = min(start + context, len(stream) - 1)
            if end < len(stream) - 1:  # end this sequence after its last full line
                line_end = stream.rfind(b"\n", start + 1, end + 1)
                end = line_end if line_end > 0 else end
            sequences.append(stream[start : end + 1])
            start = end
    tokens = torch.full((len(sequences), context), END)
    targets = torch.full((len(sequences), context), NO_TARGET)
    for row, sequence in enumerate(sequences):
        values = torch.tensor(list(sequence))
        tokens[row, : len(values) - 1] = values[:-1]
        targets[row, : len(values) - 1] = values[1:]
    return tokens, targets
