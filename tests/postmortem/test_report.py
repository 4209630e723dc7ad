from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from trainer.postmortem.examine import Finding
from trainer.postmortem.probe import Call, Magnitude, Origin
from trainer.postmortem.report import Report, names_of

FINITE, BROKEN = Magnitude(12.0, 0, 64, "float16"), Magnitude(60000.0, 3, 64, "float16")
STEP = Call("", "Model", number=0)
BLOCK = Call("net.blocks.3", "Block", caller=STEP, inputs=FINITE, outputs=FINITE, gradient_in=FINITE)


def layer(**magnitudes):
    return Call("net.blocks.3.norm", "LayerNorm", caller=BLOCK, **({"inputs": FINITE, "outputs": FINITE} | magnitudes))


def report(**found):
    given = {"fails": True, "loss": 2.5, "parameters": ["net.a.weight"], "largest_scale": 1024.0} | found
    finding = Finding(batch_idx=7, position=0, window=1, rank=0, scale=4096.0, **given)
    return Report(12, 3, "16-mixed", 1.0, 1, finding)


def backward(**found):
    return report(origin=Origin(layer(gradient_in=FINITE, gradient_out=BROKEN)), **found)


def test_backward_that_the_scaler_will_fit():
    it = backward()
    assert (it.module, it.phase) == ("net.blocks.3.norm", "backward")
    assert it.verdict == (
        "The backward overflows in 'net.blocks.3.norm' (LayerNorm). A loss scale of 1024 fits: the scaler gets there by"
        " itself."
    )
    assert it.advice == [
        "Nothing, if this is rare. At the start of a run, init_scale=1024 spares it the skipped steps.",
        "precision.fp32_modules=['net.blocks.3.norm']: this module in float32, the others as they are. Its likes in all"
        " layers: ['net.blocks.*.norm'].",
        "precision=bf16-mixed, which has the range of float32, where the device has it.",
    ]


def test_backward_that_takes_a_low_scale():
    it = backward(largest_scale=64.0)
    assert it.verdict.endswith("A loss scale of 64 fits: so low a one that small gradients vanish in float16.")
    assert it.advice[0].startswith("precision.fp32_modules=")
    assert not it.is_harmless
    assert backward(largest_scale=128.0).is_harmless


def test_backward_below_the_floor():
    it = backward(largest_scale=2.0**-12)
    assert it.verdict.endswith("a loss scale of 2^-12, which is below min_scale=1: the scaler never gets there.")
    assert it.advice[0].startswith("precision.fp32_modules=")
    assert it.advice[-1].startswith("A lower learning rate")


def test_backward_at_every_scale():
    it = backward(largest_scale=0.0)
    assert "at every loss scale at which it makes anything but zeros" in it.verdict
    assert ("largest scale that fits", "none") in it.rows()


def test_weight_gradient():
    it = report(origin=Origin(layer(), parameter="net.blocks.3.norm.weight"))
    assert "'net.blocks.3.norm' (LayerNorm), in the gradient of net.blocks.3.norm.weight." in it.verdict


def test_code_between_modules():
    it = report(origin=Origin(BLOCK, after=layer(gradient_in=BROKEN)))
    assert it.module == "net.blocks.3"
    assert "the code of 'net.blocks.3' (Block), which uses the output of 'net.blocks.3.norm' (LayerNorm)." in it.verdict
    it = report(origin=Origin(STEP, after=BLOCK))
    assert it.module == ""
    assert "in training_step, which uses the output of 'net.blocks.3' (Block)." in it.verdict
    assert it.advice[1].startswith("Compute the loss in float32")


def test_forward():
    it = report(loss=math.nan, largest_scale=0.0, first_output=layer(outputs=BROKEN), origin=Origin(BLOCK))
    assert (it.module, it.phase) == ("net.blocks.3.norm", "forward")
    assert it.verdict == "The forward overflows in 'net.blocks.3.norm' (LayerNorm); no loss scale helps."
    assert it.advice[0].startswith("precision.fp32_modules=['net.blocks.3.norm']")


def test_overflow_in_the_forward_with_a_finite_loss():
    """The loss was clamped; its gradient is not finite."""
    assert report(largest_scale=0.0, first_output=layer(outputs=BROKEN), origin=Origin(BLOCK)).phase == "forward"
    # but an output with a mask of infinities is not the cause if some scale fits
    assert report(first_output=layer(outputs=BROKEN), origin=Origin(BLOCK)).phase == "backward"


def test_forward_in_code_between_modules():
    came_in = layer(inputs=BROKEN, outputs=BROKEN)
    it = report(loss=math.nan, largest_scale=0.0, first_output=came_in)
    assert it.module == "net.blocks.3"
    assert "in the code of 'net.blocks.3' (Block), before 'net.blocks.3.norm' (LayerNorm);" in it.verdict
    block = Call("net.blocks.3", "Block", caller=STEP, inputs=BROKEN)
    it = report(loss=math.nan, largest_scale=0.0, first_output=Call("net.blocks.3.norm", "LayerNorm", 2, block, BROKEN))
    assert it.module == ""
    assert "in training_step, before 'net.blocks.3.norm' (LayerNorm, call 2);" in it.verdict


def test_loss():
    it = report(loss=math.inf, largest_scale=0.0)
    assert it.verdict == "The forward overflows in training_step itself, after the last module; no loss scale helps."


def test_float32_does_not_help_against_nan_in_float32():
    single = Magnitude(3.0, 0, 4, "float32")
    call = Call("net.root", "Root", caller=STEP, inputs=single, outputs=single, gradient_in=single)
    it = report(origin=Origin(call), largest_scale=0.0)
    assert it.advice[0].startswith("Look for a division by zero")
    assert not any("fp32_modules" in line or "bf16" in line for line in it.advice)


def test_broken_values_before_the_step():
    it = backward(broken_weights=["net.a.weight"])
    assert it.verdict.startswith("The weights were not finite before this step")
    assert it.advice[0].startswith("Resume from an older checkpoint")
    it = report(loss=math.nan, largest_scale=0.0, first_output=layer(outputs=BROKEN), broken_batch=["batch[0]"])
    assert it.verdict == "The batch was not finite when it came: batch[0]."
    assert it.advice[0].startswith("Mend or leave out the samples")
    # missing values that are not used are not the cause
    assert "overflows in 'net.blocks.3.norm'" in backward(broken_batch=["batch[2]"]).verdict
    assert ("batch not finite", "batch[2]") in backward(broken_batch=["batch[2]"]).rows()
    assert ("buffers not finite before", "net.n.running_var") in backward(broken_buffers=["net.n.running_var"]).rows()


def test_nothing_found():
    it = report(fails=False, parameters=[])
    assert (it.module, it.phase, it.advice) == (None, None, [])
    assert it.verdict.startswith("The replay has found no gradient that is not finite.")
    assert report(fails=False, error="RuntimeError: no").verdict == "The replay broke off: RuntimeError: no"


def test_rows_of_a_window_and_of_ranks():
    finding = Finding(7, 1, 4, 2, 4096.0, fails=True, largest_scale=2.0**30, parameters=list("abcdefghi"))
    rows = dict(Report(12, 3, "16-mixed", 1.0, 8, finding).rows())
    assert rows["batch"] == "batch_idx 7, number 2 of the 4 in its window, on rank 2 of 8"
    assert rows["largest scale that fits"] == "2^30"
    assert rows["gradients not finite"] == "a, b, c, d, e, f and 3 more"


def test_magnitudes_are_written_out():
    rows = dict(backward().rows())
    assert rows["gradient overflows in"] == (
        "'net.blocks.3.norm' (LayerNorm); incoming gradient finite, up to 12 in float16; gradient handed on not finite"
        " in 3 of 64 elements, the others up to 6e+04 in float16 (ends at 65504); input finite, up to 12 in float16;"
        " output finite, up to 12 in float16"
    )
    assert rows["first output not finite"] == "none: all are finite"


def test_compiled_names_are_those_of_the_config():
    call = Call("net._orig_mod.4._checkpoint_wrapped_module", "Linear", caller=STEP, outputs=FINITE)
    assert "fp32_modules=['net.4']" in report(origin=Origin(call)).advice[1]
    assert names_of(["net._orig_mod.4.weight"]) == "net.4.weight"


def test_overflow_fixed_by_the_scaler_has_a_short_report():
    out = io.StringIO()
    it = backward()
    Console(file=out, width=200).print(it.table().drawn())
    printed = " ".join(out.getvalue().split())
    assert it.verdict in printed
    assert "first output not finite" not in printed
    assert "first output not finite" in it.markdown()
    assert not backward(broken_weights=["net.a.weight"]).is_harmless


@pytest.mark.parametrize("width", [60, 200])
def test_table_has_all_of_it(width):
    out = io.StringIO()
    it = backward(largest_scale=2.0**-3)
    Console(file=out, width=width).print(it.table().drawn())
    printed = " ".join(out.getvalue().split())
    for label, _ in it.rows():
        assert label in printed
    assert "Overflow report: optimizer step 12 (skipped, 3 in a row)" in printed
    assert all(name in it.markdown() for name in (it.verdict, it.title, *it.advice))
