import random
import re

import pytest
import torch

from recipes.data import ByteText
from recipes.data.text import END, NO_TARGET, cut, split_documents


def bytes_of(tokens, targets):
    rows = zip(tokens.tolist(), targets.tolist(), (targets != NO_TARGET).sum(1).tolist(), strict=True)
    return [(bytes(row[:length]), bytes(following[:length])) for row, following, length in rows]


def test_documents_are_cut_at_line_ends():
    tokens, targets = cut([b"one\ntwo\nthree\n\nfour"], context=10)
    lines = (b"\0one\ntwo", b"one\ntwo\n"), (b"\nthree\n", b"three\n\n"), (b"\nfour", b"four\0")
    assert bytes_of(tokens, targets) == [*lines]
    assert (tokens.dtype, targets.dtype, tokens.shape) == (torch.int64, torch.int64, (3, 10))
    assert (tokens[1, 7:] == END).all()
    assert (targets[1, 7:] == NO_TARGET).all()
    assert bytes_of(*cut([b"a long line\nx", b"y"], context=4)) == [
        (b"\0a l", b"a lo"), (b"ong ", b"ng l"), (b"line", b"ine\n"), (b"\nx", b"x\0"), (b"\0y", b"y\0"),
    ]  # fmt: skip
    for context in (1, 7):
        pieces = bytes_of(*cut([b"ab\nabcdefghij\n\n", b"", b"c"], context))
        assert b"".join(targets for _, targets in pieces) == b"ab\nabcdefghij\n\n\0\0c\0"
        assert all(tokens[1:] == targets[:-1] for tokens, targets in pieces)
        assert all(0 < len(tokens) <= context for tokens, _ in pieces)


def test_documents_are_split_whole_and_by_size():
    documents = range(1, 21)  # their sizes
    splits = split_documents(documents, 0.2, seed=0)
    assert sorted(place for part in splits.values() for place in part) == list(range(20))
    sizes = {name: sum(documents[place] for place in part) for name, part in splits.items()}
    assert 40 <= sizes["val"] <= 42
    assert 40 <= sizes["test"] <= 42
    state = random.getstate()
    assert split_documents(documents, 0.2, seed=0) == splits
    assert split_documents(documents, 0.2, seed=1) != splits
    assert random.getstate() == state
    with pytest.raises(ValueError, match=r"2 documents cannot be split .* held_out=0.1"):
        split_documents([1, 1], 0.1, seed=0)


def test_custom_file(tmp_path):
    file = tmp_path / "poems.txt"
    file.write_text("".join(f"Zeile {i}: Ö\0l\nund mehr\n\n\n" for i in range(40)) + "\0\n", encoding="utf-8")
    data = ByteText(str(file), context=16, batch_size=4, prompts=["a", "b"])
    data.setup("fit")
    documents = b"".join(targets for _, targets in bytes_of(*data.splits["train"].tensors)).split(b"\0")
    assert len(documents) == 40 - 2 * 4 + 1 == 33  # the text after the last end, which is empty
    assert re.fullmatch("Zeile \\d+: Öl\nund mehr", documents[0].decode())
    assert [list(batch) for batch in data.predict_dataloader()] == [["a"], ["b"]]


def test_invalid_text_and_lengths_are_refused(tmp_path):
    (tmp_path / "latin.txt").write_bytes("Öl".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.txt is not encoded in UTF-8 .* iconv"):
        ByteText(str(tmp_path / "latin.txt")).setup("fit")
    with pytest.raises(ValueError, match="context is 0, expected at least 1 token"):
        ByteText(context=0)
    with pytest.raises(ValueError, match=r"held_out is 0.5, expected.*below 0.5"):
        ByteText(held_out=0.5)
