"""The path of a batch is built by one function, and changed by wrappers only."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

import trainer
from tests.support import Regression, loader_of, make_batches, make_trainer
from trainer.loop.batch_path import BatchPath, TrainingPath

PACKAGE = Path(trainer.__file__).parent
LOOPS = {"trainer.loop", "self._loop", "loop", "self.loop", "self._trainer.loop"}


def test_only_loops_assign_to_the_path_of_a_batch():
    names = {"path", *BatchPath.__slots__, *TrainingPath.__slots__}
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in names:
                assert ast.unparse(node.value) not in LOOPS, file


@pytest.mark.filterwarnings("ignore:Nothing to do")
def test_wrapper_lasts_until_it_is_removed_or_the_run_ends(tmp_path):
    class Wrapped(Regression):
        seen: list[int]

        def watch(self, path):
            def step(batch, batch_idx):
                self.seen.append(batch_idx)
                return path.step(batch, batch_idx)

            return replace(path, step=step)

        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 1:
                self.trainer.loop.wrap(self.watch)
            if batch_idx == self.removed_at:
                self.trainer.loop.unwrap(self.watch)

    for removed_at, seen in ((3, [1, 2]), (9, [1, 2, 3])):
        module = Wrapped()
        module.seen, module.removed_at = [], removed_at
        trainer = make_trainer(tmp_path)
        trainer.fit(module, loader_of(make_batches(4)))
        assert module.seen == seen
    module.removed_at = 1
    trainer.fit(module, loader_of(make_batches(1)))
    assert module.seen == [1, 2, 3]
    assert trainer.loop.path.wrappers == ()
