"""The fabric: every link that a cluster's table implies, by arithmetic alone.

Three layers. In a node the scale-up switch is non-blocking, so only the GPU's own port limits it. Above
the NICs stands a leaf: the rack's switch, or, in a rail-optimised cluster, leaf i of a pod, on which GPU i
of every node hangs. Leaves of one pod meet at full bisection; pods meet over uplinks that carry the pod's
injection bandwidth divided by its oversubscription.

Ids are integers in a fixed order: four links per GPU, then two per leaf, then two per pod. Leaf links exist
only where there are at least two leaves to join, pod links only where there are at least two pods. Nothing
here is of the size of the cluster, so a fabric of 24,576 GPUs costs as much as one of eight.
"""

from collections.abc import Iterator
from fractions import Fraction
from typing import Literal

import msgspec
import numpy as np

from emulator.spec.arrays import Int64
from emulator.spec.cluster import Cluster
from emulator.spec.errors import JobError

Level = Literal["scale_up", "rack", "pod", "spine"]
"""How far a route climbs: the node's switch, one leaf, the pod's spine layer, or above the pods."""

Kind = Literal[
    "scale_up.out", "scale_up.in", "nic.out", "nic.in", "leaf.up", "leaf.down", "pod.up", "pod.down"
]

GPU_KINDS: tuple[Kind, ...] = ("scale_up.out", "scale_up.in", "nic.out", "nic.in")
LINKS_PER_GPU = len(GPU_KINDS)
KINDS: tuple[Kind, ...] = (*GPU_KINDS, "leaf.up", "leaf.down", "pod.up", "pod.down")

SWITCHES: dict[Level, int] = {"scale_up": 1, "rack": 1, "pod": 3, "spine": 5}
"""Switches that a packet crosses: up through leaf and pod layer and down again."""


class Link(msgspec.Struct, frozen=True):
    """One direction of one link."""

    name: str
    kind: Kind
    line_bytes_per_second: int
    """Nominal rate on the wire."""
    capacity_bytes_per_second: int
    """Payload that fits: line rate x efficiency of the port's class."""


class Fabric:
    """Links and routes of one cluster. Links are named by integer ids, 0 .. len(fabric) - 1.

    Fabrics of one cluster are equal.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.gpus = cluster.gpus
        self.leaves = cluster.leaves
        """Leaf switches: racks, or pods x gpus_per_node where rail-optimised."""
        self.pods = cluster.pods
        self.first_leaf_link = LINKS_PER_GPU * self.gpus
        self.first_pod_link = self.first_leaf_link + (2 * self.leaves if self.leaves > 1 else 0)
        self._links = self.first_pod_link + (2 * self.pods if self.pods > 1 else 0)
        self._rates = _rates(cluster)

    def __len__(self) -> int:
        """Return the number of links."""
        return self._links

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fabric):
            return NotImplemented
        return self.cluster is other.cluster or self.cluster == other.cluster

    def __hash__(self) -> int:
        return hash((self.cluster.name, self.gpus, self._links))

    @property
    def capacities(self) -> tuple[int, ...]:
        """Payload bytes per second of a link of each of KINDS."""
        return tuple(self._rates[kind][1] for kind in KINDS)

    def places(self, gpus: Int64) -> Int64:
        """Node, leaf and pod of each GPU: three rows, each shaped like `gpus`."""
        if gpus.size:
            self._check("gpu", int(gpus.min()), self.gpus)
            self._check("gpu", int(gpus.max()), self.gpus)
        each = self.cluster.gpus_per_node
        node = gpus // each
        pod = node // self.cluster.nodes_per_pod
        rail = pod * each + gpus - node * each
        leaf = rail if self.cluster.rail_optimised else node // self.cluster.nodes_per_rack
        return np.stack([node, leaf, pod])

    def links_of(self, gpus: Int64, kind: int) -> Int64:
        """For each GPU its link of KINDS[kind]: its own port, or that of its leaf or its pod."""
        if kind < LINKS_PER_GPU:
            return LINKS_PER_GPU * gpus + kind
        leaf: Int64
        pod: Int64
        _, leaf, pod = self.places(gpus)
        if kind < LINKS_PER_GPU + 2:
            return self.first_leaf_link + 2 * leaf + kind % 2
        return self.first_pod_link + 2 * pod + kind % 2

    def kinds(self) -> Int64:
        """For every link its kind, as an index of KINDS."""
        leaves, pods = self.first_pod_link - self.first_leaf_link, self._links - self.first_pod_link
        ports, leaf, pod = np.split(np.arange(len(KINDS)), [LINKS_PER_GPU, LINKS_PER_GPU + 2])
        return np.concatenate(
            [np.tile(ports, self.gpus), np.tile(leaf, leaves // 2), np.tile(pod, pods // 2)]
        )

    def gpu_link(self, gpu: int, kind: Kind) -> int:
        """Id of a GPU's own port: one of GPU_KINDS."""
        return LINKS_PER_GPU * gpu + GPU_KINDS.index(kind)

    def kind(self, link: int) -> Kind:
        """Class of a link; all links of a class have the same rates."""
        self._check("link", link, self._links)
        if link < self.first_leaf_link:
            return GPU_KINDS[link % LINKS_PER_GPU]
        if link < self.first_pod_link:
            return "leaf.down" if (link - self.first_leaf_link) % 2 else "leaf.up"
        return "pod.down" if (link - self.first_pod_link) % 2 else "pod.up"

    def name(self, link: int) -> str:
        """Readable name: gpu17.nic.out, rack3.up, pod0.rail5.down, pod0.up."""
        kind = self.kind(link)
        if link < self.first_leaf_link:
            return f"gpu{link // LINKS_PER_GPU}.{kind}"
        direction = kind.partition(".")[2]
        if link >= self.first_pod_link:
            return f"pod{(link - self.first_pod_link) // 2}.{direction}"
        leaf = (link - self.first_leaf_link) // 2
        if self.cluster.rail_optimised:
            pod, rail = divmod(leaf, self.cluster.gpus_per_node)
            return f"pod{pod}.rail{rail}.{direction}"
        return f"rack{leaf}.{direction}"

    def capacity(self, link: int) -> int:
        """Payload bytes per second of a link."""
        return self._rates[self.kind(link)][1]

    def line_rate(self, link: int) -> int:
        """Nominal bytes per second of a link."""
        return self._rates[self.kind(link)][0]

    def link(self, link: int) -> Link:
        """All that is known of a link."""
        kind = self.kind(link)
        return Link(self.name(link), kind, *self._rates[kind])

    def links(self) -> Iterator[Link]:
        """Every link in order of its id; made one by one."""
        return map(self.link, range(self._links))

    def level(self, src_gpu: int, dst_gpu: int) -> Level:
        """How far the route climbs, which sets its latency; a GPU to itself counts as scale_up."""
        self._check("src_gpu", src_gpu, self.gpus)
        self._check("dst_gpu", dst_gpu, self.gpus)
        cluster = self.cluster
        if cluster.node_of(src_gpu) == cluster.node_of(dst_gpu):
            return "scale_up"
        if cluster.leaf_of(src_gpu) == cluster.leaf_of(dst_gpu):
            return "rack"
        if cluster.pod_of(src_gpu) == cluster.pod_of(dst_gpu):
            return "pod"
        return "spine"

    def route(self, src_gpu: int, dst_gpu: int) -> tuple[int, ...]:
        """Links that data cross on the way, in order; empty from a GPU to itself.

        One path per pair: the equal-cost paths of a layer are one fat link, without ECMP's hash collisions.
        """
        level = self.level(src_gpu, dst_gpu)
        source, target = LINKS_PER_GPU * src_gpu, LINKS_PER_GPU * dst_gpu
        if level == "scale_up":
            return () if src_gpu == dst_gpu else (source, target + 1)
        up: tuple[int, ...] = (source + 2,)
        down: tuple[int, ...] = (target + 3,)
        if level != "rack":
            up += (self.first_leaf_link + 2 * self.cluster.leaf_of(src_gpu),)
            down = (self.first_leaf_link + 2 * self.cluster.leaf_of(dst_gpu) + 1, *down)
        if level == "spine":
            up += (self.first_pod_link + 2 * self.cluster.pod_of(src_gpu),)
            down = (self.first_pod_link + 2 * self.cluster.pod_of(dst_gpu) + 1, *down)
        return up + down

    @staticmethod
    def _check(what: str, index: int, count: int) -> None:
        if not 0 <= index < count:
            raise JobError(f"{what} = {index}: this cluster has 0 .. {count - 1}")


def _rates(cluster: Cluster) -> dict[Kind, tuple[int, int]]:
    """Line rate and payload capacity of each class of link, bytes per second.

    Uplinks are sized for a full leaf or pod: the switch of an incomplete last one is built like the others.
    """
    device = cluster.device
    port = Fraction(repr(float(device.scale_up_bytes_per_second)))
    nic = cluster.nic_line_rate
    leaf = nic * cluster.gpus_per_leaf
    pod = nic * cluster.gpus_per_pod / Fraction(repr(float(cluster.pod_oversubscription)))
    on_port = Fraction(repr(float(device.scale_up_efficiency)))
    on_nic = Fraction(repr(float(cluster.nic_efficiency)))
    layers: tuple[tuple[Kind, Kind, Fraction, Fraction], ...] = (
        ("scale_up.out", "scale_up.in", port, on_port),
        ("nic.out", "nic.in", nic, on_nic),
        ("leaf.up", "leaf.down", leaf, on_nic),
        ("pod.up", "pod.down", pod, on_nic),
    )
    rates: dict[Kind, tuple[int, int]] = {}
    for up, down, line, efficiency in layers:
        rates[up] = rates[down] = (int(line), int(line * efficiency))
    return rates
