"""Text of any size as packed sequences of tokens, read from memory-mapped files."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from recipes.data.text import NO_TARGET, Batch, TextData, python_topics, read_text, split_documents
from recipes.data.tokenizers import Tokenizer, check_vocabulary, load_tokenizer

_AT_ONCE = 1000  # documents that are tokenized together
_FORMAT = 2  # version of the format of the token files


class PackedText(TextData):
    """Documents as one long stream of tokens, cut into sequences of equal length.

    Only the last sequence of each split may need padding; a sequence may contain the end of one document and the
    beginning of the next, with the tokenizer's end token between them, and the special tokens that it puts before a
    text. A batch is ``(tokens, targets)``, both int64 of shape (batch, ``context``). A target is the next token, or
    -100 after the end of the last sequence. Every token of a document is the target of one token, and so is its end.

    The text is tokenized once, by one process of each machine, into files below ``cache``. Later runs with the same
    text and tokenizer use these files. They are memory-mapped: they need not fit into memory, and workers share them.

    Args:
        path: a text file in UTF-8 with documents separated by ``separator``; a ``.jsonl`` file with one object
            per line, which has the document under ``field``; a folder of such files; or a folder that
            ``Dataset.save_to_disk`` of the library ``datasets`` wrote, with the documents in the column ``field``. None
            for Python's topics, as in `ByteText`.
        separator: a regular expression for the text between two documents of a file. Default: two or more empty lines.
        field: the key of the document in a line of a ``.jsonl`` file, or its column in a data set.
        tokenizer: a folder with a ``tokenizer.json``, or that file (needs ``tokenizers``); None for bytes.
        vocabulary: number of tokens of the model, at least that of the tokenizer; None: that of the tokenizer.
        context: tokens in a sequence.
        batch_size: sequences in a batch, on one rank.
        num_workers: processes that prepare batches; 0 prepares them in the training process.
        split_seed: seed of the split into training, validation and test documents.
        held_out: share of the text for the validation, and the same share for the test.
        prompts: one or several prompts that ``predict`` continues. Each prompt is a batch: a list of one string.
        cache: folder of the token files.

    Attributes:
        splits: the data by name: ``"train"``, ``"val"`` and ``"test"``.

    Raises:
        FileNotFoundError: there is no text, or no tokenizer, at the given path.
        ModuleNotFoundError: ``tokenizers`` or ``datasets`` is needed and not installed.
        ValueError: ``context`` is below 1, ``held_out`` is not above 0 and below 0.5, ``vocabulary`` is too small,
            the content of a file does not match its extension, or a split has no document.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        separator: str = r"\n\n\n+",
        field: str = "text",
        tokenizer: str | None = None,
        vocabulary: int | None = None,
        context: int = 256,
        batch_size: int = 4,
        num_workers: int = 0,
        split_seed: int = 0,
        held_out: float = 0.1,
        prompts: str | Sequence[str] = ("The ",),
        cache: str = ".tokens",
    ) -> None:
        super().__init__(context, split_seed, held_out, prompts, batch_size=batch_size, num_workers=num_workers)
        self.path = path
        self.separator = separator
        self.field = field
        self.tokenizer_path = tokenizer
        self.vocabulary = vocabulary
        self.cache = cache

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the text; checked against ``vocabulary``."""
        tokenizer = load_tokenizer(self.tokenizer_path)
        if self.vocabulary is not None:
            check_vocabulary(self.vocabulary, tokenizer)
        return tokenizer

    def prepare_data(self) -> None:
        """Write the token files if they do not exist."""
        self._write(*self._documents)

    def setup(self, stage: str) -> None:
        """Open the token files. A second call is a no-op."""
        if self.splits:
            return
        folder = self._documents[1]
        for name in ("train", "val", "test"):
            self.splits[name] = PackedSequences(folder / f"{name}.bin", self._dtype, self.context, self.tokenizer.end)

    @property
    def _dtype(self) -> npt.DTypeLike:
        """The dtype of the token files: the smallest that represents every token."""
        return np.min_scalar_type(self.tokenizer.vocabulary - 1)

    @cached_property
    def _documents(self) -> tuple[Callable[[], Iterator[str]], Path]:
        """Return two values: a function that opens an iterator over the documents, and the folder of their tokens."""
        if self.path is None:
            topics = python_topics()
            return partial(iter, topics), self._folder(hashlib.sha256("\0".join(topics).encode()).hexdigest())
        place = Path(self.path).expanduser()
        if (place / "state.json").is_file() or (place / "dataset_dict.json").is_file():
            files, read = sorted(place.rglob("*.arrow")), partial(_of_dataset, place, self.field)
        else:
            files = [place] if place.is_file() else sorted((*place.rglob("*.txt"), *place.rglob("*.jsonl")))
            read = partial(_of_files, files, self.separator, self.field)
        if not files:
            raise FileNotFoundError(
                f"path is {self.path}, but {place.resolve()} has no text. Expected a text file, a .jsonl, a"
                " folder with such files, or a folder written by Dataset.save_to_disk of the library datasets."
            )
        stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        return read, self._folder([stats, self.separator, self.field])

    def _folder(self, origin: Any) -> Path:
        """Return the folder of the token files; its name is a hash of their sources."""
        tokenizer = getattr(self.tokenizer, "file", None)
        made_from = [
            _FORMAT, origin, self.split_seed, self.held_out, self.tokenizer.end,
            tokenizer and hashlib.sha256(tokenizer.read_bytes()).hexdigest(),
        ]  # fmt: skip
        return Path(self.cache) / hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]

    def _write(self, read: Callable[[], Iterator[str]], folder: Path) -> None:
        """Tokenize the documents into a file for each split. Rename the temporary folder when it is complete."""
        if folder.is_dir():
            return
        sizes = [_size(document) for document in read()]
        used = [place for place, size in enumerate(sizes) if size]
        split_of = {
            used[place]: name
            for name, places in split_documents(
                [sizes[place] for place in used], self.held_out, self.split_seed
            ).items()
            for place in places
        }
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        unfinished.mkdir(parents=True, exist_ok=True)
        last = self.tokenizer.end
        begin = [token for token in self.tokenizer.begin if token != last]  # one end separates two documents
        files = {name: (unfinished / f"{name}.bin").open("wb") for name in ("train", "val", "test")}
        for file in files.values():
            file.write(np.asarray([last], self._dtype).tobytes())
        documents = ((place, text) for place, text in enumerate(read()) if place in split_of)
        while batch := list(islice(documents, _AT_ONCE)):
            for (place, _), tokens in zip(batch, self.tokenizer.encode([text for _, text in batch]), strict=True):
                files[split_of[place]].write(np.asarray([*begin, *tokens, last], self._dtype).tobytes())
        for file in files.values():
            file.close()
        try:
            unfinished.rename(folder)
        except OSError:  # another process was first
            if not folder.is_dir():
                raise


class PackedSequences(Dataset[Batch]):
    """A file of tokens, cut into sequences. The first read opens it, so that each worker has its own memory map.

    Args:
        file: the tokens, one after the other.
        dtype: dtype of the tokens.
        context: tokens in a sequence.
        end: the token that pads the last sequence.
    """

    def __init__(self, file: Path, dtype: npt.DTypeLike, context: int, end: int) -> None:
        self.file = file
        self.dtype = np.dtype(dtype)
        self.context = context
        self.end = end
        self._stream: npt.NDArray[Any] | None = None

    def __len__(self) -> int:
        return -(-(self.file.stat().st_size // self.dtype.itemsize - 1) // self.context)

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(f"Got sequence {index} of {len(self)}.")
        if self._stream is None:
            self._stream = np.memmap(self.file, self.dtype, mode="r")
        start = index * self.context
        piece = torch.from_numpy(self._stream[start : start + self.context + 1].astype(np.int64))
        missing = self.context + 1 - len(piece)
        return _padded(piece[:-1], missing, self.end), _padded(piece[1:], missing, NO_TARGET)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_stream": None}


def _padded(values: Tensor, missing: int, value: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, missing), value=value) if missing else values


def _size(document: Any) -> int:
    """Return the number of characters in a document; 0 for null."""
    if not isinstance(document, str | None):
        raise ValueError(f"A document is {document!r}, expected text. Set data.field to the name of the text field.")
    return len(document or "")


def _of_files(files: Sequence[Path], separator: str, field: str) -> Iterator[str]:
    for file in files:
        if file.suffix == ".jsonl":
            for row in json_lines(file, [field]):
                yield row[field]
        else:
            for document in re.split(separator, read_text(file)):
                yield document.strip("\n")


def json_lines(file: Path, fields: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a ``.jsonl`` file.

    Args:
        file: a file with an object in each line that is not empty.
        fields: the keys that each object must have.

    Raises:
        ValueError: a line is not such an object.
    """
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{file.resolve()}, line {number} is not valid JSON: {error}.") from error
            missing = [field for field in fields if not isinstance(row, dict) or field not in row]
            if missing:
                has = ", ".join(map(repr, row)) if isinstance(row, dict) else f"a {type(row).__name__}"
                wanted = ", ".join(map(repr, missing))
                raise ValueError(f"{file.resolve()}, line {number} has {has}, expected an object with {wanted}.")
            yield row


def _of_dataset(folder: Path, field: str) -> Iterator[str]:
    try:
        from datasets import DatasetDict, load_from_disk
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{folder} is a data set of the library datasets, which is not installed: pip install datasets. Or convert"
            " it to a .jsonl file on another machine (Dataset.to_json).",
            name=error.name,
        ) from error
    stored = load_from_disk(str(folder))
    for dataset in stored.values() if isinstance(stored, DatasetDict) else [stored]:
        if field not in dataset.column_names:
            columns = ", ".join(map(repr, dataset.column_names))
            raise ValueError(f"field is {field!r}, but {folder.resolve()} has the columns {columns}.")
        for row in dataset.select_columns(field):
            yield row[field]
