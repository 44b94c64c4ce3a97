"""The catalogue of devices and clusters against datasheets and the course notes' figures."""

import re

import msgspec
import pytest

from emulator.spec.cluster import CLUSTERS, Cluster, Host, cluster, dgx_h100, llama3_24k
from emulator.spec.device import DEVICES, PRECISIONS, Device, device
from emulator.spec.errors import JobError
from emulator.spec.units import GIB, PIB

ALL = pytest.mark.parametrize("part", list(DEVICES.values()), ids=list(DEVICES))

# What vendors print with 2:1 structured sparsity, TFLOP/s (datasheets).
SPARSE = {
    ("a100-40", "bf16"): 624,
    ("a100-80", "bf16"): 624,
    ("h100-sxm", "bf16"): 1979,
    ("h100-sxm", "fp8"): 3958,
    ("h100-96gb-500w", "bf16"): 1979,
    ("h100-96gb-500w", "fp8"): 3958,
    ("h200", "bf16"): 1979,
    ("h200", "fp8"): 3958,
    ("b200", "bf16"): 4500,
    ("b200", "fp8"): 9000,
    ("b200", "fp4"): 18000,
    ("mi325x", "bf16"): 2614.9,
    ("mi325x", "fp8"): 5200,
}


def test_the_catalogue_has_every_device_asked_for():
    nvidia = {"k40", "p100", "v100", "a100-40", "a100-80", "h100-sxm", "h100-96gb-500w", "h200", "b200"}
    assert set(DEVICES) == nvidia | {"tpu-v5p", "mi325x", "trainium2"}


@ALL
def test_entries_are_whole(part: Device):
    """Every peak has an efficiency, every entry a source and a year; vector units beat no matrix unit."""
    assert set(part.gemm_efficiency) == set(part.peak_flops) <= set(PRECISIONS)
    assert any(known in part.source for known in ("stas00", "sysrqmts", "scaling-book", "torchtitan"))
    assert 2013 <= part.year <= 2025
    assert part.vector_flops <= max(part.peak_flops.values())


@ALL
def test_clocks_are_those_that_the_peaks_imply(part: Device):
    """A peak is SMs x FLOP per SM and cycle x clock, on the matrix and on the vector units apart."""
    sixteen_bit = part.peak_flops.get("bf16", part.peak_flops.get("fp16"))
    if part.tensor_flops_per_sm_cycle:
        implied = part.sms * part.tensor_flops_per_sm_cycle * part.tensor_clock_hz
        assert implied == pytest.approx(sixteen_bit, rel=1e-4)
    if part.vector_flops_per_sm_cycle:
        implied = part.sms * part.vector_flops_per_sm_cycle * part.vector_clock_hz
        assert implied == pytest.approx(part.vector_flops, rel=1e-4)
        if part.fp32_units_per_sm and part.name != "mi325x":
            assert part.vector_flops_per_sm_cycle == 2 * part.fp32_units_per_sm


def test_h100_is_as_the_course_notes_describe_it():
    part = device("h100-sxm")
    assert (part.sms, part.sms_on_die) == (132, 144)
    assert (part.tensor_flops_per_sm_cycle, part.vector_flops_per_sm_cycle) == (16 * 4 * 8 * 2 * 4, 128 * 2)
    assert part.tensor_flops_per_sm_cycle == 16 * part.vector_flops_per_sm_cycle
    # The two peaks of the datasheet come from different clocks.
    assert part.tensor_clock_hz == pytest.approx(1.83e9, rel=1e-3)
    assert part.vector_clock_hz == pytest.approx(1.98e9, rel=2e-3)
    assert part.unit("fp32") == "vector"
    assert part.unit("tf32") == part.unit("bf16") == "tensor"
    assert part.peak("bf16") / part.peak("fp32") == pytest.approx(14.8, abs=0.05)


def test_an_80_gb_h100_has_between_79_and_80_gib():
    part = device("h100-sxm")
    assert part.hbm_bytes == 81_559 * 2**20
    assert 79 < part.hbm_bytes / GIB < 80
    assert part.hbm_label_bytes == 80 * GIB


@ALL
def test_capacity_is_within_a_tenth_of_the_label(part: Device):
    """Neither a mistyped number of MiB nor GB for GiB twice over."""
    assert 0.9 * part.hbm_label_gb * 1e9 < part.hbm_bytes < 1.02 * part.hbm_label_bytes


@pytest.mark.parametrize(("name", "precision"), list(SPARSE))
def test_peaks_are_dense(name: str, precision: str):
    """A headline that counts 2:1 sparsity is in the label, never in the peak."""
    assert device(name).peak(precision) == pytest.approx(SPARSE[name, precision] / 2 * 1e12, rel=0.01)
    assert f"peak_flops.{precision}" in device(name).headline


def test_trainium2_peak_is_dense_where_its_headline_counts_4_to_1_sparsity():
    assert device("trainium2").peak("fp8") == 1299e12
    assert "2,563" in device("trainium2").headline["peak_flops.fp8"]


@pytest.mark.parametrize("key", [key for key in SPARSE if key[1] != "fp4"])
def test_a_sparse_peak_is_refused(key: tuple[str, str]):
    """24.3 % MFU was once computed against 1,979 (fms-fsdp#89); whoever sets it is told what the units do."""
    name, precision = key
    part = device(name)
    peaks = part.peak_flops | {precision: SPARSE[key] * 1e12}
    with pytest.raises(JobError, match="peaks are dense, half of a headline with 2:1 sparsity"):
        msgspec.structs.replace(part, peak_flops=peaks)


@ALL
def test_links_count_one_direction(part: Device):
    """Where the headline adds up both directions, the figure used is half of it."""
    text = part.headline.get("scale_up_bytes_per_second", "")
    if "both directions" in text:
        number, unit = re.search(r"([\d.]+) (GB|TB)/s", text).groups()
        assert part.scale_up_bytes_per_second == float(number) * {"GB": 1e9, "TB": 1e12}[unit] / 2


def test_scale_up_efficiency_is_what_nccl_counts_with():
    """NCCL's topo.h: GB/s of one link x links over the line rate."""
    figures = {
        "p100": (18, 4),
        "v100": (20, 6),
        "a100-80": (20, 12),
        "h100-sxm": (20.6, 18),
        "b200": (40.1, 18),
    }
    for name, (per_link, links) in figures.items():
        part = device(name)
        nccl = per_link * links * 1e9
        assert part.scale_up_bytes_per_second * part.scale_up_efficiency == pytest.approx(nccl, rel=1e-3)


def test_gemm_efficiency_is_the_largest_achieved_matmul():
    """Achieved over dense peak (stas00)."""
    mamf = {("a100-80", "bf16"): 271, ("h100-sxm", "bf16"): 794.5, ("h100-sxm", "fp8"): 1403}
    mamf |= {("b200", "bf16"): 1745, ("b200", "fp8"): 3432.5, ("mi325x", "bf16"): 785}
    for (name, precision), tflops in mamf.items():
        part = device(name)
        reached = part.peak(precision) * part.gemm_efficiency[precision]
        assert reached == pytest.approx(tflops * 1e12, rel=2e-3)


def test_the_decade_in_the_course_notes_factors():
    """A thousandfold from K40's FP32 to the B200 headline, seventeen like for like; what is used is less."""
    k40, b200 = device("k40"), device("b200")
    first = float(re.search(r"course notes: ([\d.]+)", k40.headline["peak_flops.fp32"])[1])
    last = float(
        re.search(r"course notes: roughly ([\d,]+)", b200.headline["peak_flops.bf16"])[1].replace(",", "")
    )
    like = float(re.search(r"course notes: ([\d.]+)", b200.headline["peak_flops.fp32"])[1])
    assert last / first == 1000
    assert like / first == pytest.approx(17, abs=0.5)
    assert b200.peak("bf16") / k40.peak("fp32") == pytest.approx(445.5, abs=0.1)
    assert b200.peak("fp32") / k40.peak("fp32") == pytest.approx(15.8, abs=0.1)


def test_unknown_precisions_and_names_say_what_there_is():
    with pytest.raises(JobError, match='precision = "bf16": v100 has no units for it; it has fp32 or fp16'):
        device("v100").peak("bf16")
    with pytest.raises(JobError, match="did you mean h100-sxm or h100-96gb-500w"):
        device("h100")
    with pytest.raises(JobError, match="did you mean mi325x"):
        device("mi352x")
    with pytest.raises(JobError, match="which has k40"):
        device("")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hbm_bytes": 0}, "device.hbm_bytes = 0 must be at least 1"),
        ({"sms": 145}, "device.sms_on_die = 144 must be at least 145"),
        ({"hbm_efficiency": 1.5}, "device.hbm_efficiency = 1.5 must be a fraction"),
        ({"tensor_clock_hz": 0.0}, "device.tensor_clock_hz = 0.0 must be a finite number above 0"),
        ({"peak_flops": {}}, "device.peak_flops is empty"),
        ({"peak_flops": {"int8": 1e12}}, 'device.peak_flops = "int8" must be fp32'),
        ({"gemm_efficiency": {"fp4": 0.5}}, 'device.gemm_efficiency = "fp4" must be fp32'),
        ({"gemm_sustained": {"bf16": 72.8}}, "device.gemm_sustained.bf16 = 72.8 must be a fraction"),
        ({"scale_up_bytes_per_second": float("nan")}, "device.scale_up_bytes_per_second = nan"),
    ],
)
def test_impossible_devices_are_refused(changes: dict[str, object], message: str):
    with pytest.raises(JobError, match=re.escape(message)):
        msgspec.structs.replace(device("h100-sxm"), **changes)


def test_llama3_24k_adds_up_to_the_course_notes_totals():
    totals = cluster("llama3-24k").totals()
    assert (totals.gpus, totals.nodes, totals.racks, totals.pods) == (24_576, 3072, 1536, 8)
    assert totals.hbm_label_bytes / PIB == 1.875
    assert totals.hbm_bytes / PIB == pytest.approx(1.8667, abs=1e-4)
    assert totals.fp32_units == 24_576 * 132 * 128
    assert totals.fp32_units / 1e6 == pytest.approx(415, abs=0.5)
    assert totals.tensor_cores / 1e6 == pytest.approx(13, abs=0.05)
    assert totals.precision == "bf16"
    assert totals.peak_flops / 1e18 == pytest.approx(24.3, abs=0.05)


def test_catalogue_clusters_have_their_reference_networks():
    """400 Gb/s a GPU on H100, 200 on A100; pods of 3,072 GPUs, units of 32 nodes."""
    assert set(CLUSTERS) == {"llama3-24k", "dgx-h100", "dgx-a100"}
    assert cluster("llama3-24k").gpus_per_pod == 3072
    assert cluster("llama3-24k").nic_bytes_per_second == cluster("dgx-h100").nic_bytes_per_second == 50e9
    assert cluster("dgx-a100").nic_bytes_per_second == 25e9
    assert cluster("dgx-h100").gpus_per_pod == 256
    assert cluster("dgx-h100") == dgx_h100(nodes=4)
    assert cluster("dgx-h100:8") == dgx_h100(nodes=8)
    assert llama3_24k(nodes=2048).gpus == 16_384


def test_the_nic_follows_the_device_unless_the_table_says_otherwise():
    part = device("a100-80")
    assert Cluster(device=part, nodes=1).nic_bytes_per_second == part.nic_bytes_per_second
    assert Cluster(device=part, nodes=1, nic_gbit_per_gpu=100).nic_bytes_per_second == 12.5e9


def test_places_of_a_gpu_and_incomplete_last_units():
    """7 nodes in racks of 2 and pods of 2 racks: 4 racks, the last with one node; 2 pods."""
    small = Cluster(device=device("h100-sxm"), gpus_per_node=4, nodes=7, nodes_per_rack=2, racks_per_pod=2)
    assert (small.gpus, small.racks, small.pods, small.nodes_per_pod) == (28, 4, 2, 4)
    assert (small.node_of(27), small.rack_of(27), small.pod_of(27)) == (6, 3, 1)
    assert (small.node_of(15), small.rack_of(15), small.pod_of(15)) == (3, 1, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": 0}, "cluster.nodes = 0 must be at least 1"),
        ({"gpus_per_node": 2.5}, "cluster.gpus_per_node = 2.5 must be a whole number"),
        ({"nodes_per_rack": -1}, "cluster.nodes_per_rack = -1"),
        ({"racks_per_pod": 0}, "cluster.racks_per_pod = 0"),
        ({"nic_gbit_per_gpu": 0}, "cluster.nic_gbit_per_gpu = 0 must be a finite number above 0"),
        ({"pod_oversubscription": 0.5}, "cluster.pod_oversubscription = 0.5 must be at least 1"),
        ({"pod_oversubscription": float("inf")}, "cluster.pod_oversubscription = inf"),
        ({"nic_efficiency": 97}, "cluster.nic_efficiency = 97 must be a fraction"),
        ({"rail_optimised": "yes"}, 'cluster.rail_optimised = "yes" must be true or false'),
        ({"device": "h100-sxm"}, "cluster.device must be a Device"),
    ],
)
def test_impossible_clusters_are_refused(changes: dict[str, object], message: str):
    with pytest.raises(JobError, match=re.escape(message)):
        Cluster(**({"device": device("h100-sxm"), "nodes": 2} | changes))


def test_impossible_hosts_and_unknown_clusters_are_refused():
    with pytest.raises(JobError, match="launch_seconds = -1"):
        Host(launch_seconds=-1)
    with pytest.raises(JobError, match="loader_bytes_per_second = 0"):
        Host(loader_bytes_per_second=0)
    with pytest.raises(JobError, match="did you mean dgx-h100"):
        cluster("dgx-h10")
    for bad in ("dgx-h100:0", "dgx-h100:", "dgx-h100:two", "dgx-h100:-1"):
        with pytest.raises(JobError, match=re.escape('as in "dgx-h100:8"')):
            cluster(bad)
