"""Memory forecasts of layouts compared with the peak that torch's profiler measures on real gloo ranks."""

import pytest

from benchmarks.forecast.layouts import BATCH, ROWS, Setting, compare_with_ranks, measure_updates, predict
from headway.layouts.whole_updates import ownership
from tests.distributed.ranks import run_ranks

BY_NAME = {str(setting): setting for _, setting in ROWS}


def check_forecast(model: str, setting: Setting) -> None:
    """Check that the forecast is within 3 % of the smallest peak that a rank has in three runs, or in nine.

    gloo's threads sometimes free memory a moment late, more often on a busy machine, which adds to a peak. So more runs can
    show that the forecast is not too low, but none can hide that it is too high.
    """
    predicted, least, most = compare_with_ranks(model, setting, runs=3)
    if predicted < 0.97 * least:
        _, *again = compare_with_ranks(model, setting, runs=6)
        least, most = min(least, again[0]), max(most, again[1])
    assert predicted == pytest.approx(least, rel=0.03)
    assert predicted <= most * 1.03


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "setting"),
    [
        ("GPT", "fsdp, 2 ranks, bf16, accumulated over 2"),
        pytest.param("GPT", "ddp, 2 ranks, float32, gradients as views", marks=pytest.mark.matrix),
        ("Llama", "fsdp+tp=2, 4 ranks, float32"),
        pytest.param("Llama", "ddp, 2 ranks, bf16, half residual, recomputed", marks=pytest.mark.matrix),
        pytest.param("Llama, chunked loss", "fsdp, 2 ranks, float32", marks=pytest.mark.matrix),
        pytest.param("Llama, chunked loss", "ddp, 2 ranks, bf16, half residual, recomputed", marks=pytest.mark.matrix),
        pytest.param("Mixtral", "ep, 2 ranks, float32", marks=pytest.mark.matrix),
        pytest.param("Mixtral", "fsdp=2+ep=2, 4 ranks, bf16", marks=pytest.mark.matrix),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_forecast_peak_matches_real_ranks(model, setting):
    check_forecast(model, BY_NAME[setting])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_forecast_includes_moving_averages():
    check_forecast("GPT", Setting("fsdp", 2, averages=2))


@pytest.mark.parametrize(
    ("model", "optimizer", "strategy", "num_ranks", "bucket_bytes"),
    [
        ("GPT", "muon", "fsdp", 2, 2 << 20),  # several buckets, of which up to three exist at a time
        ("GPT", "adafactor", "fsdp", 2, 64 << 20),
        pytest.param("Llama", "muon", "fsdp", 2, 64 << 20, marks=pytest.mark.slow),
        pytest.param("GPT", "adafactor", "tp", 2, 64 << 20, marks=pytest.mark.slow),
        pytest.param("GPT", "adafactor", "fsdp+tp=2", 4, 64 << 20, marks=pytest.mark.slow),
        pytest.param("GPT", "muon", "hsdp=2", 4, 64 << 20, marks=pytest.mark.slow),
        pytest.param("GPT", "adafactor_transformers", "fsdp", 2, 64 << 20, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_forecast_of_whole_updates_matches_real_ranks(model, optimizer, strategy, num_ranks, bucket_bytes, monkeypatch):
    """The forecast covers the buckets that move parameters to their owners, and the state that each owner keeps."""
    setting = Setting(strategy, num_ranks, optimizer=optimizer, bucket_bytes=bucket_bytes)
    batch = (
        1 if model == "Llama" else BATCH
    )  # with more samples, Llama's backward pass needs more memory than its update
    monkeypatch.setattr(ownership, "BUCKET_BYTES", bucket_bytes)
    found = predict(model, setting, batch)
    peaks, states = zip(*run_ranks(measure_updates, num_ranks, model, setting, batch))
    assert found.split["optimizer state"] in states
    if found.peak.endswith("update"):
        assert found.split["buckets"] > 0
        assert found.allocated == pytest.approx(max(peaks), rel=0.03)
    else:  # with more ranks or smaller buckets, the backward pass needs more memory
        assert found.allocated > 0.97 * max(peaks)
    assert not any("are not counted" in line for line in found.caveats)
