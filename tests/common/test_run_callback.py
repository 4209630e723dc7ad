import pytest

from tests.support import Regression, loader_of, make_batches, make_trainer
from trainer.callbacks import Compile, NonFiniteGuard, OverflowReport


@pytest.mark.parametrize(
    ("kind", "unused", "used", "hook"),
    [
        (OverflowReport, {}, {"at_step": 1}, "on_before_optimizer_step"),
        (Compile, {"backend": "eager"}, {"mode": "reduce-overhead"}, "on_after_backward"),
        (NonFiniteGuard, {"every_step": False}, {}, "on_after_optimizer_step"),
    ],
)
def test_unused_hooks_are_omitted_unless_a_subclass_overrides_them(tmp_path, kind, unused, used, hook):
    calls = []
    own = type("Own", (kind,), {hook: lambda *_: calls.append(hook)})(**unused)
    make_trainer(tmp_path, callbacks=[own]).fit(Regression(), loader_of(make_batches(3)))
    assert calls == [hook] * 3
    assert [getattr(kind(**options), hook) is None for options in (unused, used)] == [True, False]
