import json

import pytest
import torch

from recipes.data import Examples
from recipes.data.text import NO_TARGET


def examples(tmp_path, rows, **options):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    data = Examples(str(file), **{"held_out": 0.3, "batch_size": 2} | options)
    data.setup("fit")
    return data


def test_completions_are_learned_and_prompts_are_not(tmp_path):
    data = examples(tmp_path, [{"prompt": "ab", "completion": letter} for letter in "cdefgh"])
    tokens, mask, targets = data.splits["train"][0][0], *next(iter(data.val_dataloader()))[1:]
    assert (tokens[:3], targets[0].tolist()[:2]) == ([0, *b"ab"], [NO_TARGET, NO_TARGET])
    assert targets[0, 2] in b"cdefgh"
    assert targets[0, 3] == 0  # and that it ends
    assert mask.all()


def test_batches_are_padded_to_their_longest(tmp_path):
    data = examples(tmp_path, [{"text": "x" * size} for size in (1, 3, 5, 7, 9, 11, 13)], context=10)
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        for tokens, mask, targets in loader:
            lengths = mask.sum(1)
            assert tokens.shape[1] == lengths.max() <= 10
            assert torch.equal(mask.bool(), torch.arange(tokens.shape[1]) < lengths[:, None])
            assert ((targets != NO_TARGET) == mask.bool()).all()
            assert (targets[:, 0] == ord("x")).all()


def test_long_prompt_loses_its_beginning(tmp_path):
    data = examples(tmp_path, [{"prompt": "a" * 30, "completion": "bc"}] * 4, context=6)
    tokens, targets = data.splits["train"][0]
    assert tokens == [0, *b"aaabc"]
    assert targets == [NO_TARGET] * 3 + [*b"bc", 0]


def test_classes(tmp_path):
    data = examples(tmp_path, [{"text": "abc"[: 1 + i % 3], "label": i % 3} for i in range(12)])
    tokens, mask, labels = next(iter(data.test_dataloader()))
    assert labels.tolist() == [size - 2 for size in mask.sum(1).tolist()]
    assert tokens[0, :2].tolist() == [0, ord("a")]
    assert len(next(iter(data.predict_dataloader()))) == 3
    data.prompts = ["one", "two"]
    assert list(data.predict_dataloader()) == [["one"], ["two"]]


@pytest.mark.parametrize(
    "rows", [[{"text": "abc"[: 1 + i % 3], "label": i % 3} for i in range(30)], [{"text": "a"}] * 30]
)
def test_folds(tmp_path, rows):
    whole, *folds = [examples(tmp_path, rows, fold=fold, folds=3).splits for fold in (None, 0, 1, 2)]
    assert all(split["test"] == whole["test"] for split in folds)
    held_out = [example for split in folds for example in split["val"]]
    assert sorted(held_out, key=str) == sorted(whole["train"] + whole["val"], key=str)
    assert all(len(split["train"] + split["val"]) == len(held_out) for split in folds)
    with pytest.raises(ValueError, match="fold is 3, expected 0 to 2"):
        examples(tmp_path, rows, fold=3, folds=3)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"question": "?"}], r"begins with \['question'\], expected lines with 'prompt' and 'completion'"),
        ([], "begins with nothing"),
        ([{"text": None}], "text of example 1 is None, expected text"),
        ([{"text": "a", "label": True}], "the label of example 1 is True, expected 0, 1, ..., or words"),
        ([{"text": "a", "label": "x"}, {"text": "a", "label": 1}], "label of example 2 is 1, expected a word, as in"),
        ([{"text": "a", "label": 1}, {"text": "a"}], "line 2 has 'text', expected an object with 'label'"),
        ([{"text": "a"}, {"text": "a", "label": 1}], r"example 2 has \['text', 'label'\], and example 1 has "),
    ],
)
def test_invalid_examples(tmp_path, rows, expected):
    with pytest.raises(ValueError, match=expected):
        examples(tmp_path, rows)


def test_no_file():
    with pytest.raises(FileNotFoundError, match=r"path is nowhere\.jsonl.*Set data\.path"):
        Examples("nowhere.jsonl").setup("fit")
