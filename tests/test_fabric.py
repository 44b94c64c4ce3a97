"""Links and routes: what the cluster's table implies, and nothing that is of the size of its square."""

import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.spec.cluster import Cluster, cluster, dgx_a100, dgx_h100, llama3_24k
from emulator.spec.device import device
from emulator.spec.errors import JobError
from emulator.spec.fabric import GPU_KINDS, KINDS, SWITCHES, Fabric

LLAMA = Fabric(llama3_24k())
POD = 3072


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Draw small clusters of every shape, with incomplete last racks and pods."""
    return Cluster(
        device=device("h100-sxm"),
        gpus_per_node=draw(st.integers(1, 4)),
        nodes=draw(st.integers(1, 12)),
        nodes_per_rack=draw(st.integers(1, 3)),
        racks_per_pod=draw(st.none() | st.integers(1, 3)),
        pod_oversubscription=draw(st.sampled_from([1, 1.5, 7])),
        rail_optimised=draw(st.booleans()),
    )


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Fabric, int, int]:
    """Draw a fabric and two of its GPUs."""
    fabric = Fabric(draw(clusters()))
    gpu = st.integers(0, fabric.gpus - 1)
    return fabric, draw(gpu), draw(gpu)


def names(fabric: Fabric, src: int, dst: int) -> list[str]:
    return [fabric.name(link) for link in fabric.route(src, dst)]


def test_routes_of_each_level_in_the_llama3_cluster():
    assert names(LLAMA, 0, 7) == ["gpu0.scale_up.out", "gpu7.scale_up.in"]
    assert names(LLAMA, 0, 8) == ["gpu0.nic.out", "gpu8.nic.in"]
    assert names(LLAMA, 3, 16) == ["gpu3.nic.out", "rack0.up", "rack1.down", "gpu16.nic.in"]
    assert names(LLAMA, 17, POD) == [
        "gpu17.nic.out",
        "rack1.up",
        "pod0.up",
        "pod1.down",
        "rack192.down",
        f"gpu{POD}.nic.in",
    ]
    levels = [LLAMA.level(0, gpu) for gpu in (0, 7, 8, 16, POD - 1, POD)]
    assert levels == ["scale_up", "scale_up", "rack", "pod", "pod", "spine"]


def test_capacities_of_the_llama3_cluster_are_the_tables():
    """NVLink 450 GB/s at NCCL's 0.824, 50 GB/s NICs at 0.97, racks of 16, pods of 3,072 at 1:7."""
    rates = {link.kind: link for link in map(LLAMA.link, LLAMA.route(0, 7) + LLAMA.route(17, POD))}
    assert rates["scale_up.out"].line_bytes_per_second == 450 * 10**9
    assert rates["scale_up.out"].capacity_bytes_per_second == 370_800_000_000
    assert rates["nic.out"].line_bytes_per_second == 50 * 10**9
    assert rates["nic.in"].capacity_bytes_per_second == 48_500_000_000
    assert rates["leaf.up"].capacity_bytes_per_second == 16 * 48_500_000_000
    assert rates["pod.up"].line_bytes_per_second == int(Fraction(POD * 50 * 10**9, 7))
    assert rates["pod.down"].capacity_bytes_per_second == int(Fraction(POD * 48_500_000_000, 7))


def test_a_gpu_share_of_the_pod_uplink_is_a_seventh_of_its_nic():
    """The course notes' fourth level: 50 GB/s within a pod, 50/7 = 7.14 GB/s a GPU across."""
    up = LLAMA.route(0, POD)[2]
    assert LLAMA.name(up) == "pod0.up"
    assert LLAMA.line_rate(up) / POD == pytest.approx(50e9 / 7, rel=1e-12)
    assert LLAMA.capacity(up) / LLAMA.line_rate(up) == pytest.approx(0.97, rel=1e-12)


def test_the_llama3_cluster_has_every_link_once():
    """4 ports a GPU, 2 directions a rack and a pod."""
    assert len(LLAMA) == 4 * 24_576 + 2 * 1536 + 2 * 8
    assert LLAMA.name(len(LLAMA) - 1) == "pod7.down"
    assert LLAMA.name(4 * 24_576) == "rack0.up"


def test_rails_join_equal_local_ranks_below_the_spine():
    """GPU i of all 32 nodes of a unit hangs on leaf i; another rail is up over the spine and down."""
    fabric = Fabric(dgx_h100(nodes=64))
    assert names(fabric, 3, 8 * 31 + 3) == ["gpu3.nic.out", "gpu251.nic.in"]
    assert names(fabric, 3, 8 * 31 + 4) == [
        "gpu3.nic.out",
        "pod0.rail3.up",
        "pod0.rail4.down",
        "gpu252.nic.in",
    ]
    assert names(fabric, 3, 8 * 32 + 3)[1:-1] == ["pod0.rail3.up", "pod0.up", "pod1.down", "pod1.rail3.down"]
    assert fabric.line_rate(fabric.route(3, 252)[1]) == 32 * 50 * 10**9
    assert fabric.line_rate(fabric.route(3, 256)[2]) == 256 * 50 * 10**9


def test_one_leaf_and_one_pod_have_no_uplinks():
    """A link with nothing above it would be a link to nowhere."""
    alone = Fabric(Cluster(device=device("h100-sxm"), nodes=2, nodes_per_rack=2))
    assert [link.kind for link in alone.links()] == list(GPU_KINDS) * 16
    assert len(Fabric(dgx_a100(nodes=1))) == 4 * 8 + 2 * 8


def test_scale_up_domains_as_large_as_an_nvl72_or_an_ultraserver():
    """A node is the scale-up domain, whatever its size."""
    server = Fabric(Cluster(device=device("trainium2"), gpus_per_node=64, nodes=2))
    assert server.level(0, 63) == "scale_up"
    assert server.level(63, 64) == "pod"


@pytest.mark.parametrize(("src", "dst"), [(-1, 0), (0, 24_576)])
def test_a_gpu_that_is_not_there_is_named(src: int, dst: int):
    with pytest.raises(JobError, match=r"this cluster has 0 \.\. 24575"):
        LLAMA.route(src, dst)


def test_a_link_that_is_not_there_is_named():
    with pytest.raises(JobError, match="link = 101392"):
        LLAMA.name(len(LLAMA))


def test_large_fabrics_cost_no_more_than_small_ones():
    """Making one and 10,000 routes takes well under a second for 24,576 GPUs."""
    begin = time.perf_counter()
    fabric = Fabric(cluster("llama3-24k"))
    for gpu in range(10_000):
        fabric.route(gpu, 24_575 - gpu)
    assert time.perf_counter() - begin < 2


@given(clusters())
def test_ids_are_in_order_and_names_are_unique(shape: Cluster):
    fabric = Fabric(shape)
    links = list(fabric.links())
    assert len(links) == len(fabric)
    assert len({link.name for link in links}) == len(links)
    for gpu in range(fabric.gpus):
        for kind in GPU_KINDS:
            assert links[fabric.gpu_link(gpu, kind)].name == f"gpu{gpu}.{kind}"


@given(pairs())
def test_the_way_back_is_the_mirror_of_the_way_there(pair: tuple[Fabric, int, int]):
    fabric, src, dst = pair
    mirror = {"out": "in", "in": "out", "up": "down", "down": "up"}
    turned = []
    for name in reversed(names(fabric, src, dst)):
        head, _, direction = name.rpartition(".")
        turned.append(f"{head}.{mirror[direction]}")
    assert names(fabric, dst, src) == turned
    assert fabric.level(dst, src) == fabric.level(src, dst)


@given(pairs())
def test_a_route_climbs_as_far_as_its_level_and_no_further(pair: tuple[Fabric, int, int]):
    """Checked against the places of the two GPUs alone; a same-node route never touches a NIC."""
    fabric, src, dst = pair
    shape = fabric.cluster
    kinds = [fabric.kind(link) for link in fabric.route(src, dst)]
    if src == dst:
        assert kinds == []
    elif src // shape.gpus_per_node == dst // shape.gpus_per_node:
        assert kinds == ["scale_up.out", "scale_up.in"]
    else:
        crosses_pods = shape.pod_of(src) != shape.pod_of(dst)
        same_leaf = (
            src % shape.gpus_per_node == dst % shape.gpus_per_node
            if shape.rail_optimised
            else shape.rack_of(src) == shape.rack_of(dst)
        )
        inner = [] if same_leaf and not crosses_pods else ["leaf.up", "leaf.down"]
        if crosses_pods:
            inner[1:1] = ["pod.up", "pod.down"]
        assert kinds == ["nic.out", *inner, "nic.in"]
        assert SWITCHES[fabric.level(src, dst)] == len(kinds) - 1


@given(pairs())
def test_routes_touch_links_of_their_own_ends_only(pair: tuple[Fabric, int, int]):
    fabric, src, dst = pair
    shape = fabric.cluster
    for link in fabric.route(src, dst):
        name = fabric.name(link)
        end = src if name.endswith((".out", ".up")) else dst
        head = name.split(".")[0]
        assert head in (f"gpu{end}", f"rack{shape.rack_of(end)}", f"pod{shape.pod_of(end)}")


@given(clusters())
def test_full_bisection_below_the_pods_and_the_stated_share_above(shape: Cluster):
    """All NICs of a full leaf fit on its uplink; a pod's fit on its own times the oversubscription."""
    fabric = Fabric(shape)
    nic = fabric.line_rate(fabric.gpu_link(0, "nic.out"))
    for link in fabric.links():
        if link.kind == "leaf.up":
            assert link.line_bytes_per_second == nic * shape.gpus_per_leaf
        if link.kind == "pod.up":
            short = nic * shape.gpus_per_pod / shape.pod_oversubscription - link.line_bytes_per_second
            assert -1 < short <= 1
        assert 0 < link.capacity_bytes_per_second <= link.line_bytes_per_second


@given(clusters())
def test_places_and_links_of_many_gpus_are_those_of_each(shape: Cluster):
    fabric = Fabric(shape)
    gpus = np.arange(fabric.gpus)[::-1]
    each = [(shape.node_of(gpu), shape.leaf_of(gpu), shape.pod_of(gpu)) for gpu in gpus.tolist()]
    assert fabric.places(gpus).T.tolist() == [list(place) for place in each]
    kinds = [KINDS[kind] for kind in fabric.kinds().tolist()]
    assert kinds == [fabric.kind(link) for link in range(len(fabric))]
    for link, kind in enumerate(kinds):
        assert fabric.capacities[KINDS.index(kind)] == fabric.capacity(link)
    for number, kind in enumerate(KINDS):
        ways = {fabric.route(src, dst) for src in gpus.tolist() for dst in gpus.tolist()}
        crossed = {link for way in ways for link in way if fabric.kind(link) == kind}
        assert crossed <= set(fabric.links_of(gpus, number).tolist())
    with pytest.raises(JobError, match=f"gpu = {fabric.gpus}: this cluster has"):
        fabric.places(np.array([fabric.gpus]))


def test_fabrics_of_one_cluster_are_equal():
    assert Fabric(llama3_24k()) == LLAMA
    assert hash(Fabric(llama3_24k())) == hash(LLAMA)
    assert Fabric(llama3_24k(nodes=8)) != LLAMA
