import pytest
import torch

from tests.diagnosis.layers import Amplifier, sequential
from tests.support import Regression, assert_same, fit_and_watch, make_batches, native_fp16
from trainer.callbacks import AnomalyDetection

OVERFLOWS = {1: 1e30, 3: 1e6}


def fit(folder, module, gains=OVERFLOWS, **arguments):
    given = {"precision": native_fp16(init_scale=1024.0), "detect_anomaly": True} | arguments
    return fit_and_watch(folder, module, make_batches(5, gains=gains), **given)


def test_run_is_the_same_with_it(tmp_path):
    ours = fit(tmp_path, Regression(sequential()))[1]
    assert ours.skipped == [False, True, False, True, False]
    assert_same(ours, fit(tmp_path, Regression(sequential()), detect_anomaly=False)[1])


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_real_nan_stops_the_run_with_the_traceback_of_its_forward(tmp_path):
    module = Regression(change=lambda loss, batch_idx: loss + torch.sqrt(loss - loss) * 0 if batch_idx == 2 else loss)
    with (
        pytest.warns(UserWarning, match=r"(?s)Error detected in SqrtBackward0.*torch.sqrt\(loss - loss\)"),
        pytest.raises(RuntimeError, match="Function 'SqrtBackward0' returned nan values"),
    ):
        fit(tmp_path, module, accumulate_grad_batches=5)
    assert not torch.is_anomaly_enabled()


def test_infinity_is_not_nan(tmp_path):
    """torch's mode looks for NaN; values that overflow at every scale are reported by OverflowReport."""
    net = torch.nn.Sequential(torch.nn.Linear(6, 3), Amplifier(6e4), Amplifier(6e4))
    _, trace = fit(tmp_path, Regression(net), gains=None)
    assert all(trace.skipped)


def test_mode_of_each_precision(tmp_path, caplog):
    for precision, scales in ((native_fp16(), True), (native_fp16(loss_scaling=False), False), ("bf16-mixed", False)):
        seen, module = [], Regression()
        caplog.clear()
        module.on_before_backward = lambda loss, seen=seen: seen.append(torch.is_anomaly_enabled())
        with caplog.at_level("INFO"):
            trainer, _ = fit(tmp_path, module, precision=precision, limit_train_batches=1)
        assert seen == [not scales]
        assert ("significantly slow" in caplog.text) is not scales
        assert any(isinstance(callback, AnomalyDetection) for callback in trainer.callbacks) is scales
