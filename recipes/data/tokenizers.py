"""Conversion of text to tokens and back: bytes, or a Hugging Face tokenizer from a local folder."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from recipes.data.text import END, VOCABULARY

_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
"""Tokens that end a document in the families of GPT, Llama, Mistral, Gemma, Qwen and BERT."""


class Tokenizer(Protocol):
    """The interface that the data modules and the language models use.

    Attributes:
        vocabulary: number of tokens.
        end: the token that ends a document.
        begin: the special tokens that come before a text; may be empty.
        after: the special tokens that come after a text that is classified; may be empty.
    """

    vocabulary: int
    end: int
    begin: list[int]
    after: list[int]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, without special tokens."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``, with "�" for bytes that are not valid text."""


class Bytes:
    """UTF-8: 256 tokens. The token 0 ends a document and is removed from texts."""

    vocabulary = VOCABULARY
    end = END
    begin: list[int] = [END]
    after: list[int] = []

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the bytes of each text."""
        return [list(text.replace("\0", "").encode()) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of these bytes."""
        return bytes(token for token in tokens if token < VOCABULARY).decode(errors="replace")


class FileTokenizer:
    """The tokenizer of a ``tokenizer.json``, which the library ``tokenizers`` reads. Such a file contains no code.

    Args:
        path: the file, or a folder with it, such as a model's.

    Raises:
        FileNotFoundError: the file does not exist.
        ModuleNotFoundError: ``tokenizers`` is not installed.
        ValueError: the file does not contain a tokenizer, or the token that ends a document is unknown.

    Attributes:
        pad: the token that pads a text, or None if the folder's ``tokenizer_config.json`` names none.
    """

    def __init__(self, path: str) -> None:
        place = Path(path).expanduser()
        file = place / "tokenizer.json" if place.is_dir() else place
        if not file.is_file():
            raise FileNotFoundError(
                f"tokenizer is {path}, but the file {file.resolve()} does not exist. Expected a folder with a"
                " tokenizer.json, written by tokenizer.save_pretrained(FOLDER) of transformers, or null for bytes."
            )
        try:
            from tokenizers import Tokenizer as Library
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{file} requires the package tokenizers, which is not installed: pip install tokenizers."
                " Without it, tokenizer=null reads text as bytes.",
                name=error.name,
            ) from error
        self.file = file
        try:
            self._library = Library.from_file(str(file))
        except Exception as error:  # the library raises its own exception class
            raise ValueError(f"{file.resolve()} is not a tokenizer file: {error}") from error
        self._library.no_padding()  # as transformers does, unless the caller passes padding or truncation
        self._library.no_truncation()
        self.vocabulary: int = self._library.get_vocab_size(with_added_tokens=True)
        config = read_object(file.parent / "tokenizer_config.json")
        self.end = self._find_end(_text_of(config.get("eos_token")))
        pad = _text_of(config.get("pad_token"))
        self.pad: int | None = self._library.token_to_id(pad) if pad else None
        example = self._library.encode(self._library.id_to_token(self.end))  # one token, for any vocabulary
        place = example.sequence_ids.index(0)  # special tokens have None
        self.begin: list[int] = example.ids[:place]
        self.after: list[int] = example.ids[place + 1 :]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, computed for all texts at once on all cores."""
        return [encoding.ids for encoding in self._library.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``."""
        return str(self._library.decode(list(tokens)))

    def _find_end(self, named: str | None) -> int:
        """Return the end token that the folder's config names, or else the first of ``_USUAL_ENDS`` that exists."""
        for token in [named, *_USUAL_ENDS]:
            number = self._library.token_to_id(token) if token else None
            if number is not None:
                return int(number)
        raise ValueError(
            f"{self.file.resolve()} has none of the tokens {', '.join(_USUAL_ENDS)}, and no tokenizer_config.json"
            ' next to it names another one. Write one with {"eos_token": TOKEN}, the token that separates documents.'
        )


def load_tokenizer(path: str | None) -> Tokenizer:
    """Return `Bytes` if ``path`` is None, otherwise a `FileTokenizer`."""
    return Bytes() if path is None else FileTokenizer(path)


def check_vocabulary(given: int, tokenizer: Tokenizer) -> None:
    """Raise a ValueError if the tokenizer has more tokens than the model, which has ``given``."""
    if given < tokenizer.vocabulary:
        raise ValueError(
            f"vocabulary is {given}, but the tokenizer has {tokenizer.vocabulary} tokens. Set"
            f" data.vocabulary={tokenizer.vocabulary}, or the next multiple of 64,"
            f" {-(-tokenizer.vocabulary // 64) * 64}, for faster matrix products on GPUs."
        )


def read_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if the file has no object or cannot be read."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _text_of(token: Any) -> str | None:
    """Return the text of a token in a config: a string, or a dict that contains it."""
    return token.get("content") if isinstance(token, dict) else token
