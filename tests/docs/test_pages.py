"""Everything in README and docs works: commands, programs, configs, outputs, links."""

import re
import shutil
from functools import cache

import pytest

from tests.docs.execute import run
from tests.docs.pages import PAGES, ROOT, anchors, links, read, without_blocks
from tests.support import needs_fsdp2

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="the commands are written for a shell")

UNCHECKED = {
    "docs/architecture.md": 1,  # the layers
    "docs/fast-on-a-gpu.md": 1,  # a GPU
    "docs/migrating-from-lightning.md": 1,  # the one import that changes
    "docs/recipes.md": 1,  # a folder of images
    "docs/scaling.md": 3,  # Slurm, Ray, and elastic nodes
    "docs/sweeps.md": 3,  # the lines of jobs, a table, Slurm
}
"""Number of unchecked blocks per page: "text" and "diff" without a marker, and those that are not run; 0 if not listed.

Raise a number only for a block that cannot run on a machine with one CPU and no network.
"""


MARKS = {
    "README.md": pytest.mark.representative,
    "docs/reliability.md": needs_fsdp2,
    "docs/scaling.md": needs_fsdp2,
}
SEARCHED = (
    "Accelerate", "accumulate", "branch", "callback", "class weights", "clip", "confusion matrix", "datasets",
    "DDP", "discriminative learning rates", "early", "EMA", "export", "freeze", "FSDP", "GAN", "Hugging Face",
    "images", "imbalanced", "hyperparameters", "k-fold", "Keras", "learning-rate schedule", "load_run",
    "load_sweep", "LoRA", "MLflow", "NaN", "ONNX", "Optuna", "out of memory", "profile", "quantize", "resume",
    "samplers", "Slurm", "SWA", "SyncDetector", "torch.export", "torchrun", "transformers", "two GPUs",
    "validation sets", "W&B", "WeightedRandomSampler",
)  # fmt: skip
"""Search terms that must occur in a heading of a guide, or in the paragraph below it."""


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def test_number_of_unchecked_blocks():
    unchecked = {name_of(page): sum(not block.is_checked for block in read(page)) for page in PAGES}
    assert {page: number for page, number in unchecked.items() if number} == UNCHECKED


@pytest.mark.whole
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=MARKS.get(name_of(page), ())) for page in PAGES], ids=name_of
)
def test_everything_runs(page, tmp_path, request):
    folder = tmp_path / "folder"
    folder.mkdir()
    blocks = read(page)
    has_deepspeed = any("trainer=deepspeed" in block.text for block in blocks)
    python = request.getfixturevalue("python_with_deepspeed" if has_deepspeed else "python")
    run(blocks, folder, tmp_path / "tools", python, timeout=280)


def test_links_have_targets():
    for page in PAGES:
        for link in links(page.read_text(encoding="utf-8")):
            if "://" in link:
                continue
            target, _, anchor = link.partition("#")
            path = (page.parent / target).resolve() if target else page
            assert path.exists(), (page, link)
            if anchor and path.suffix == ".md":
                assert anchor in _anchors(path), (page, link)


def test_tables_begin_with_a_heading():
    for page in PAGES:
        for table in re.findall(r"^\|.*(?:\n\|.*)*", without_blocks(page.read_text(encoding="utf-8")), re.MULTILINE):
            assert re.match(r".*\n\|[-:| ]+(\n|$)", table), (page, table)


@cache
def _anchors(page):
    return anchors(page.read_text(encoding="utf-8"))


def test_search_terms_occur_in_the_guides():
    beginnings = ""
    for page in (page for page in PAGES if page.parent.name == "docs"):
        text = without_blocks(page.read_text(encoding="utf-8"))
        for section in re.split(r"^#+ ", text, flags=re.MULTILINE)[1:]:
            heading, _, body = section.partition("\n")
            beginnings += f"{heading} {body.strip().split(chr(10) * 2)[0]}\n"
    missing = [words for words in SEARCHED if not re.search(rf"\b{re.escape(words)}\b", beginnings, re.IGNORECASE)]
    assert missing == []
