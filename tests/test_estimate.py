"""Arithmetic before any run: the course notes' numbers, published training times, and what is refused."""

import json
import math

import pytest

from emulator.spec.device import DEVICES
from emulator.spec.errors import JobError
from emulator.spec.model import Model, model
from emulator.study.estimate import Estimate, estimate, judge, training_seconds

H100 = DEVICES["h100-sxm"]
DAY = 86_400


def llama(**changes: object) -> Estimate:
    given = {"tokens": 15.6e12, "gpus": 16_384, "device": H100, "tflops": 400.0, "mfu": None, **changes}
    return estimate(model("llama3-405b"), **given)  # type: ignore[arg-type]


def test_course_notes_compute_and_time() -> None:
    """The course notes' Equation 12.1: 3.8e25 FLOP, 5.8e6 s at 400 TFLOP/s on 16,384 GPUs."""
    e = llama()
    assert f"{e.flops:.1e}" == "3.8e+25"
    assert f"{e.seconds:.1e}" == "5.8e+06"
    assert e.days == pytest.approx(67.09, abs=0.01)
    assert e.gpu_hours == pytest.approx(16_384 * e.days * 24)
    assert e.assumptions == ()


def test_course_notes_state() -> None:
    """Equation 12.3: 8 bytes a parameter, some 3.2 TB, forty H100s' worth of 80 GB, ten billion on one."""
    notes, shards, master = llama().states
    assert notes.accounting.bytes_per_parameter == 8
    assert math.floor(notes.bytes / 1e11) / 10 == 3.2
    assert math.floor(notes.devices) == 40
    assert notes.devices_needed == 41  # the course notes round 40.6 down
    assert notes.largest_model == 10e9
    assert (shards.accounting.bytes_per_parameter, master.accounting.bytes_per_parameter) == (16, 18)
    assert master.bytes == 18 * 405_853_388_800
    assert master.device_bytes == H100.hbm_bytes
    assert master.devices == pytest.approx(18 * 405_853_388_800 / H100.hbm_bytes)


def test_course_notes_activations() -> None:
    """Equation 12.5: 126 x 8192 x 16384 x 2 bytes, about 33.8 GB."""
    assert llama().activation_bytes_one_tensor == 126 * 8192 * 16384 * 2
    assert "33.8 GB" in llama().text()


def test_no_sequence_is_longer_than_the_positions_of_the_model() -> None:
    """GPT-3 has 2,048 of them."""
    e = estimate(model("gpt3-175b"), tokens=1e9, gpus=1, device=H100, tflops=400, mfu=None)
    assert e.activation_bytes_one_tensor == 96 * 2048 * 12288 * 2
    assert "one sequence of 2048 tokens" in e.text()


@pytest.mark.parametrize(
    ("days", "parameters", "tokens", "gpus", "rate", "recompute"),
    [
        (22.4, 175e9, 300e9, 1536, 141e12, True),  # arXiv 2104.04473: 8TP/(nX)
        (39.96, 70e9, 15e12, 4096, 0.45 * 990e12, False),  # scaling-book, "40"
        (44.3, 70e9, 15e12, 8960, 0.40 * 459e12, False),  # scaling-book on TPU v5p, "44"
        (144.0, 70e9, 15e12, 1024, 0.50 * 989e12, False),  # CS336, lecture 2
    ],
)
def test_training_times_of_u094(
    days: float, parameters: float, tokens: float, gpus: int, rate: float, recompute: bool
) -> None:
    seconds = training_seconds(parameters, tokens, gpus, rate, recompute=recompute)
    assert seconds / DAY == pytest.approx(days, abs=0.05)


def test_gpt3_with_recomputation() -> None:
    """8ND of GPT-3 175B on 1,536 A100s at 141 TFLOP/s is 22.4 days by 8TP/(nX) of arXiv 2104.04473."""
    e = estimate(model("gpt3-175b"), tokens=None, gpus=1536, device=DEVICES["a100-80"], tflops=141, mfu=None)
    assert e.seconds_with_full_recompute / DAY == pytest.approx(22.4, abs=0.05)
    assert e.seconds_with_full_recompute / e.seconds == pytest.approx(8 / 6)


@pytest.mark.parametrize(
    ("mfu", "band"),
    [
        (0.05, "broken"),
        (0.199, "broken"),
        (0.25, "below good"),
        (0.30, "below good"),
        (0.301, "good"),
        (0.40, "good"),
        (0.43, "excellent"),
        (0.56, "beyond published"),
        (1.01, "impossible"),
    ],
)
def test_verdicts(mfu: float, band: str) -> None:
    """Over 30 % good, over 40 % excellent, well below 30 % broken, and plain words between and beyond."""
    assert judge(mfu)[0] == band
    assert judge(mfu)[1].startswith(f"MFU {mfu:.1%} is")


def test_rate_and_mfu_are_two_names_for_one_thing() -> None:
    by_rate, by_mfu = llama(), llama(tflops=None, mfu=400 / 989)
    assert by_mfu.seconds == pytest.approx(by_rate.seconds)
    assert by_rate.mfu == pytest.approx(400 / 989)


def test_defaults_are_stated() -> None:
    """Every option not given is in the text, with the value taken and where it comes from."""
    e = llama(tokens=None, gpus=None, tflops=None)
    assert (e.tokens, e.gpus, e.mfu) == (15.6e12, 1, pytest.approx(0.40))
    assert [line.split()[0] for line in e.assumptions] == ["--tokens", "--gpus", "--mfu"]
    assert all(line in e.text() for line in e.assumptions)


def test_unknown_model_takes_twenty_tokens_a_parameter() -> None:
    m = Model(name="m", layers=2, hidden=64, ffn_hidden=256, heads=4, kv_heads=4, vocab=100)
    e = estimate(m, tokens=None, gpus=1, device=H100, tflops=None, mfu=0.5)
    assert e.tokens == 20 * m.parameters
    assert "Hoffmann" in e.text()


def test_devices_without_bf16_use_what_they_have() -> None:
    """V100 has fp16 tensor cores, K40 nothing below fp32."""
    for name, precision in (("v100", "fp16"), ("k40", "fp32"), ("h100-sxm", "bf16")):
        e = llama(device=DEVICES[name], tflops=None, mfu=0.3)
        assert (e.precision, e.peak_flops_per_second) == (precision, DEVICES[name].peak(precision))


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_gives_text_and_json(device: str) -> None:
    e = llama(device=DEVICES[device], tflops=None, mfu=0.35)
    assert json.loads(json.dumps(e.to_dict()))["states"][0]["devices_needed"] >= 1
    assert device in e.text()
    assert "good" in e.text()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mfu": 0.4}, "tflops = 400 and mfu = 0.4 both"),
        ({"tflops": 1979.0}, "tflops = 1979 is more than the dense bf16 peak of h100-sxm, 989"),
        ({"tflops": 0.0}, "tflops = 0.0"),
        ({"tflops": -3.0}, "tflops = -3.0"),
        ({"tflops": None, "mfu": 40.0}, "for 40 % write 0.4"),
        ({"tflops": None, "mfu": float("nan")}, "mfu = nan"),
        ({"tokens": 0.0}, "tokens = 0.0"),
        ({"tokens": float("inf")}, "tokens = inf"),
        ({"tokens": 1e300}, "tokens = 1e+300 must be at most 1e+24"),
        ({"gpus": 0}, "gpus = 0 must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(changes: dict[str, object], says: str) -> None:
    with pytest.raises(JobError) as refused:
        llama(**changes)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
