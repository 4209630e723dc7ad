"""Custom examples for fine-tuning: texts, prompts with their completions, or texts with classes."""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from recipes.data.loading import fold_of
from recipes.data.packed_text import json_lines
from recipes.data.text import NO_TARGET, TextData, split_documents
from recipes.data.tokenizers import FileTokenizer, load_tokenizer, read_object

Example = tuple[list[int], list[int] | int]

_KINDS = (["prompt", "completion"], ["text", "label"], ["text"])


class Examples(TextData):
    """Lines of a ``.jsonl`` file, one example each, in batches that are padded to their longest example.

    The fields of a line determine its kind:

    - ``{"prompt": ..., "completion": ...}``: a language model learns the completion and its end;
    - ``{"text": ..., "label": 0}``: a classifier learns the class, an integer from 0 on, or a word;
    - ``{"text": ...}``: a language model learns the whole text.

    Each text gets the special tokens of the tokenizer, as in ``transformers``. A language model also learns the end.

    A batch is ``(tokens, mask, targets)``, all int64. ``tokens`` and ``mask`` have shape (batch, length); the mask is 0
    for padding. The targets of a language model have the same shape, with -100 for ignored positions. Classes have
    shape (batch,).

    Args:
        path: the file.
        tokenizer: a folder with a ``tokenizer.json``, or that file; None for bytes.
        context: largest number of tokens of an example; a longer example loses its end, or its beginning if
            it has a prompt. Special tokens are kept.
        batch_size: examples in a batch, on one rank.
        num_workers: processes that prepare batches; 0 suffices, because there is little to prepare.
        split_seed: seed of the split into training, validation and test examples.
        held_out: share of the text for the validation, and the same share for the test.
        prompts: prompts that ``predict`` continues. Default: None, ``predict`` uses the test examples.
        fold: number of the fold to validate, from 0, for cross-validation: the examples that are not in the test split
            are divided into ``folds``, and the other folds are trained on. Default: None, no cross-validation.
        folds: number of folds.
        classes: the words of the classes, in order. Default: None, those of ``id2label`` in the ``config.json`` next to
            the tokenizer, or else all words of the file in sorted order.

    Attributes:
        classes: the words of the classes after `setup`; None if labels are integers.

    Raises:
        FileNotFoundError: the file or the tokenizer does not exist.
        ModuleNotFoundError: ``tokenizers`` is needed and not installed.
        ValueError: a line is not an example or is of another kind than the first line, a label is unknown, or a split
            has no example.
    """

    def __init__(
        self,
        path: str,
        *,
        tokenizer: str | None = None,
        context: int = 256,
        batch_size: int = 4,
        num_workers: int = 0,
        split_seed: int = 0,
        held_out: float = 0.1,
        prompts: str | Sequence[str] | None = None,
        fold: int | None = None,
        folds: int = 5,
        classes: Sequence[str] | None = None,
    ) -> None:
        self.tokenizer = load_tokenizer(tokenizer)
        collate = partial(_collate, self.tokenizer.end)
        super().__init__(
            context, split_seed, held_out, prompts, batch_size=batch_size, num_workers=num_workers, collate_fn=collate
        )
        self.path = path
        self.fold, self.folds = fold, folds
        self.classes = classes

    def setup(self, stage: str) -> None:
        """Read and tokenize the examples. A second call is a no-op."""
        if self.splits:
            return
        file = Path(self.path).expanduser()
        if not file.is_file():
            raise FileNotFoundError(
                f"path is {self.path}, but the file {file.resolve()} does not exist. Set data.path."
            )
        first = next(iter(json_lines(file, [])), None)
        given = [*first] if isinstance(first, dict) else []
        fields = _kind_of(given)
        if fields is None:
            raise ValueError(
                f"{file.resolve()} begins with {given or first or 'nothing'}, expected lines with"
                " 'prompt' and 'completion', 'text' and 'label', or 'text'."
            )
        rows = list(json_lines(file, fields))
        for number, row in enumerate(rows, start=1):
            if (actual := _kind_of(row)) != fields:
                raise ValueError(
                    f"{file}: example {number} has {actual}, and example 1 has {fields}: expected one kind."
                )
        examples = self._examples(rows, fields, file)
        sizes = [len(tokens) for tokens, _ in examples]
        splits = split_documents(sizes, self.held_out, self.split_seed)
        if self.fold is not None:
            strata = [target if isinstance(target, int) else 0 for _, target in examples]
            splits["train"], splits["val"] = fold_of(
                strata, splits["test"], self.split_seed, fold=self.fold, folds=self.folds
            )
        for name, places in splits.items():
            self.splits[name] = [examples[place] for place in places]

    def _examples(self, rows: Sequence[dict[str, Any]], fields: Sequence[str], file: Path) -> list[Example]:
        end, begin, after = self.tokenizer.end, self.tokenizer.begin, self.tokenizer.after
        texts = [field for field in fields if field != "label"]
        for number, row in enumerate(rows, start=1):
            if wrong := [field for field in texts if not isinstance(row[field], str)]:
                raise ValueError(f"{file}: {wrong[0]} of example {number} is {row[wrong[0]]!r}, expected text.")
        encoded = [self.tokenizer.encode([row[field] for row in rows]) for field in texts]
        if fields[-1] == "label":
            room = max(0, self.context - len(begin) - len(after))
            labels = self._labels([row["label"] for row in rows], file)
            return [
                ([*begin, *tokens[:room], *after] or [end], label)
                for tokens, label in zip(encoded[0], labels, strict=True)
            ]
        examples: list[Example] = []
        room = max(0, self.context - len(begin))
        for parts in zip(*encoded, strict=True):
            body = [*(token for tokens in parts for token in tokens), end]
            targets = body if len(parts) == 1 else [NO_TARGET] * len(parts[0]) + body[len(parts[0]) :]
            cut = slice(room + 1) if len(parts) == 1 else slice(-room - 1, None)
            before = begin or [end] * (len(body) == 1)  # the end of an empty text follows a token, too
            ids, targets = [*before, *body[cut]], [*[NO_TARGET] * len(before), *targets[cut]]
            examples.append((ids[:-1], targets[1:]))
        return examples

    def _labels(self, labels: Sequence[Any], file: Path) -> list[int]:
        """Return the class of each label. Words are replaced by their places in ``classes``, which is set."""
        of_words = isinstance(labels[0], str)
        for number, label in enumerate(labels, start=1):
            if type(label) is not type(labels[0]) or (not of_words and (type(label) is not int or label < 0)):
                expected = "a word, as in example 1" if of_words else "0, 1, ..., or words in all examples"
                raise ValueError(f"{file}: the label of example {number} is {label!r}, expected {expected}.")
        if not of_words:
            return list(labels)
        self.classes = self.classes or self._words_of_model({*labels}) or sorted({*labels})
        place_of = {word: place for place, word in enumerate(self.classes)}
        if unknown := sorted({*labels} - {*place_of}):
            raise ValueError(
                f"{file}: the label {unknown[0]!r} is not one of the classes {', '.join(map(repr, self.classes))}"
                " (data.classes, or id2label in the model's config.json). To train a classifier of other classes, list"
                f" them: data.classes=[{','.join(sorted({*labels}))}]."
            )
        return [place_of[label] for label in labels]

    def _words_of_model(self, labels: set[str]) -> list[str]:
        """Return the words of ``id2label`` in order; none if they are the default, ``LABEL_0``, ``LABEL_1``, ..."""
        if not isinstance(self.tokenizer, FileTokenizer):
            return []
        named = read_object(self.tokenizer.file.parent / "config.json").get("id2label", {})
        words = [named[key] for key in sorted(named, key=int)]
        is_default = words == [f"LABEL_{place}" for place in range(len(words))]
        return [] if is_default and not labels <= {*words} else words


def _kind_of(names: Iterable[str]) -> list[str] | None:
    """Return the fields that determine the kind of an example with these names, or None if it is not an example."""
    given = {*names}
    return next((kind for kind in _KINDS if given.issuperset(kind)), None)


def _collate(end: int, examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    rows = [torch.tensor(tokens) for tokens, _ in examples]
    tokens = pad_sequence(rows, batch_first=True, padding_value=end)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    if isinstance(examples[0][1], int):
        return tokens, mask, torch.tensor([target for _, target in examples])
    targets = [torch.tensor(target) for _, target in examples]
    return tokens, mask, pad_sequence(targets, batch_first=True, padding_value=NO_TARGET)
