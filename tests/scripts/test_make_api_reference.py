"""docs/api matches the docstrings."""

import _api_reference as reference
import pytest

import trainer
from tests.docs.pages import anchors, links
from trainer import callbacks, errors


@pytest.fixture(scope="module")
def pages():
    return reference.pages()


@pytest.mark.parametrize("name", [*reference.PAGES, "index"])
def test_pages_are_current(name, pages):
    committed = (reference.FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert committed == pages[name], "Run scripts/make_api_reference."


def test_every_public_name_is_documented(pages):
    for name in set(trainer.__all__) - {"__version__"}:
        assert f"\n## {name}\n" in pages["trainer"]
    for name in callbacks.__all__:
        assert f"\n## {name}\n" in pages["callbacks"]
    for name, value in vars(errors).items():
        if isinstance(value, type) and value.__module__ == errors.__name__:
            assert f"\n## {name}\n" in pages["errors"]
    for name in ("Digits", "ImageClassifier"):
        assert f"\n## {name}\n" in pages["recipes"]


def test_arguments_have_type_default_and_meaning(pages):
    assert "| `exact_resume` | `bool` | `True` | not in Lightning. Whether to" in pages["trainer"]
    assert "| `gradient_clip_algorithm` | `str \\| None` | `None` | short for `GradientClipping`. " in pages["trainer"]
    assert "| `PrecisionError` | if the precision is unknown," in pages["trainer"]
    assert "`fit(model, train_dataloaders=None," in pages["trainer"]


def test_each_name_is_linked_to_its_own_heading(pages):
    targets = [link for link in links(pages["index"]) if "#" in link]
    assert len(targets) == len(set(targets)) > 100
    for page, _, anchor in (target.partition(".md#") for target in targets):
        assert anchor in anchors(pages[page])
    assert "[`Block`](recipes.md#block-1)" in pages["index"]
