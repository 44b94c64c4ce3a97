"""A cluster: devices in nodes, nodes in racks, racks in pods."""

from fractions import Fraction

import msgspec

from emulator.spec.checks import finite, flag, hint, listed, whole
from emulator.spec.device import DEVICES, SLOWEST, Device
from emulator.spec.errors import JobError


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The CPU side of one GPU."""

    launch_seconds: float = 6e-6
    """Host time to issue one kernel or collective from an eager framework: the 2.5 to 5 us of an asynchronous
    CUDA launch and the framework's own dispatch on top; both from general knowledge, unmeasured."""
    loader_bytes_per_second: float = 1e9
    """Rate at which the loader prepares input for one GPU: one core that copies and collates tokens; a
    guess that no published step comes near."""

    def __post_init__(self) -> None:
        """Check ranges; raises JobError."""
        finite("cluster.host.launch_seconds", self.launch_seconds)
        finite("cluster.host.loader_bytes_per_second", self.loader_bytes_per_second, positive=True)
        if self.loader_bytes_per_second < 1:
            raise JobError(
                f"cluster.host.loader_bytes_per_second = {self.loader_bytes_per_second:g} must be at least 1"
            )


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes of GPUs on a rack/pod fabric. Ranks are placed in order: rank r is GPU r.

    A node is one scale-up domain. The last rack and the last pod may be incomplete: their switches are built
    like the others, with fewer nodes on them.
    """

    name: str = "custom"
    device: Device
    gpus_per_node: int = 8
    nodes: int
    nic_gbit_per_gpu: float | None = None
    """Scale-out line rate of one GPU, Gbit/s, one direction; None takes the device's reference system."""
    nodes_per_rack: int = 1
    racks_per_pod: int | None = None
    """None: one pod holds all racks."""
    pod_oversubscription: float = 1.0
    """Pod injection bandwidth over the pod's uplink bandwidth; 7 means 1:7."""
    rail_optimised: bool = False
    """GPU i of every node of a pod hangs on leaf i, instead of all GPUs of a rack on one leaf."""
    nic_efficiency: float = 0.97
    """Payload fraction of the NIC's line rate: ib_write_bw 193.7 of 200 Gb/s (stas00/ml-engineering)."""
    host: Host = Host()
    source: str = ""

    def __post_init__(self) -> None:
        """Check sizes and rates; raises JobError."""
        if not isinstance(self.device, Device):
            raise JobError(
                f'cluster.device must be a Device, such as device("h100-sxm"), not {self.device!r}'
            )
        for field in ("gpus_per_node", "nodes", "nodes_per_rack"):
            whole(f"cluster.{field}", getattr(self, field))
        if self.racks_per_pod is not None:
            whole("cluster.racks_per_pod", self.racks_per_pod)
        if self.nic_gbit_per_gpu is not None:
            finite("cluster.nic_gbit_per_gpu", self.nic_gbit_per_gpu, positive=True)
        finite("cluster.pod_oversubscription", self.pod_oversubscription, positive=True)
        if self.pod_oversubscription < 1:
            raise JobError(
                f"cluster.pod_oversubscription = {self.pod_oversubscription} must be at least 1 "
                "(1 is full bisection, 7 means 1:7)"
            )
        flag("cluster.rail_optimised", self.rail_optimised)
        finite("cluster.nic_efficiency", self.nic_efficiency, positive=True)
        if self.nic_efficiency > 1:
            raise JobError(f"cluster.nic_efficiency = {self.nic_efficiency} must be a fraction of at most 1")
        self._check_slowest()

    def _check_slowest(self) -> None:
        """Refuse rates that are next to nothing once they are whole numbers of bytes a second."""
        payload = self.nic_bytes_per_second * self.nic_efficiency
        if payload < SLOWEST:
            raise JobError(
                f"cluster.nic_gbit_per_gpu: {self.nic_bytes_per_second * 8 / 1e9:g} Gbit/s x "
                f"nic_efficiency({self.nic_efficiency:g}) = {payload:g} bytes a second; "
                f"it must be at least {SLOWEST:g}"
            )
        uplink = payload * self.gpus_per_pod / self.pod_oversubscription
        if self.pods > 1 and uplink < SLOWEST:
            raise JobError(
                f"cluster.pod_oversubscription = {self.pod_oversubscription:g}: {self.gpus_per_pod} GPUs x "
                f"{payload:g} / {self.pod_oversubscription:g} = {uplink:g} bytes a second out of a pod; "
                f"it must be at least {SLOWEST:g}"
            )

    @property
    def gpus(self) -> int:
        """GPUs in all nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def racks(self) -> int:
        """Racks, the last one perhaps incomplete."""
        return -(-self.nodes // self.nodes_per_rack)

    @property
    def nodes_per_pod(self) -> int:
        """Nodes of a full pod; all nodes where one pod holds all racks."""
        return self.nodes if self.racks_per_pod is None else self.racks_per_pod * self.nodes_per_rack

    @property
    def pods(self) -> int:
        """Pods, the last one perhaps incomplete."""
        return -(-self.nodes // self.nodes_per_pod)

    @property
    def gpus_per_pod(self) -> int:
        """GPUs of a full pod."""
        return self.nodes_per_pod * self.gpus_per_node

    @property
    def leaves(self) -> int:
        """Leaf switches: one a rack, or one a rail in every pod."""
        return self.pods * self.gpus_per_node if self.rail_optimised else self.racks

    @property
    def gpus_per_leaf(self) -> int:
        """GPUs on a full leaf."""
        return self.nodes_per_pod if self.rail_optimised else self.nodes_per_rack * self.gpus_per_node

    @property
    def nic_line_rate(self) -> Fraction:
        """Scale-out bytes per second of one GPU, one direction, exact."""
        if self.nic_gbit_per_gpu is None:
            return Fraction(repr(float(self.device.nic_bytes_per_second)))
        return Fraction(repr(float(self.nic_gbit_per_gpu))) * 10**9 / 8

    @property
    def nic_bytes_per_second(self) -> float:
        """Scale-out line rate of one GPU, one direction."""
        return float(self.nic_line_rate)

    def node_of(self, gpu: int) -> int:
        """Node that holds a GPU."""
        return gpu // self.gpus_per_node

    def rack_of(self, gpu: int) -> int:
        """Rack that holds a GPU."""
        return self.node_of(gpu) // self.nodes_per_rack

    def pod_of(self, gpu: int) -> int:
        """Pod that holds a GPU."""
        return self.node_of(gpu) // self.nodes_per_pod

    def leaf_of(self, gpu: int) -> int:
        """Leaf switch on which a GPU's NIC hangs."""
        if self.rail_optimised:
            return self.pod_of(gpu) * self.gpus_per_node + gpu % self.gpus_per_node
        return self.rack_of(gpu)

    def totals(self) -> "Totals":
        """Add up the devices."""
        device, gpus = self.device, self.gpus
        best = next(p for p in ("bf16", "fp16", "fp32") if p in device.peak_flops)
        return Totals(
            gpus=gpus,
            nodes=self.nodes,
            racks=self.racks,
            pods=self.pods,
            hbm_label_bytes=gpus * device.hbm_label_bytes,
            hbm_bytes=gpus * device.hbm_bytes,
            fp32_units=gpus * device.sms * device.fp32_units_per_sm,
            tensor_cores=gpus * device.sms * device.tensor_cores_per_sm,
            precision=best,
            peak_flops=gpus * device.peak(best),
        )


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster read as one machine."""

    gpus: int
    nodes: int
    racks: int
    pods: int
    hbm_label_bytes: int
    """The devices' labels read as GiB: 24,576 x 80 GiB = 1.875 PiB (the course notes write PB)."""
    hbm_bytes: int
    """What the drivers report."""
    fp32_units: int
    tensor_cores: int
    precision: str
    """What the peak counts: bf16, or fp16 or fp32 where the devices have no bf16."""
    peak_flops: float
    """Dense FLOP/s of all devices."""


def llama3_24k(nodes: int = 3072) -> Cluster:
    """Meta's Llama 3 cluster: 2 servers a rack, 192 racks a pod at full bisection, 8 pods, 1:7 above."""
    return Cluster(
        name="llama3-24k",
        device=DEVICES["h100-sxm"],
        gpus_per_node=8,
        nodes=nodes,
        nic_gbit_per_gpu=400,
        nodes_per_rack=2,
        racks_per_pod=192,
        pod_oversubscription=7,
        source="arXiv 2407.21783 section 3.3.1: RoCE, three-layer Clos, 400 Gb/s a GPU",
    )


def dgx_h100(nodes: int = 4) -> Cluster:
    """DGX H100 SuperPOD: scalable units of 32 nodes, rail-optimised, full fat tree."""
    return Cluster(
        name="dgx-h100",
        device=DEVICES["h100-sxm"],
        gpus_per_node=8,
        nodes=nodes,
        nic_gbit_per_gpu=400,
        nodes_per_rack=4,
        racks_per_pod=8,
        rail_optimised=True,
        source="scaling-book: unit of 32 nodes, 8 x 400 Gb/s NDR; general knowledge: rails, 4 nodes a rack",
    )


def dgx_a100(nodes: int = 4) -> Cluster:
    """DGX A100 SuperPOD: scalable units of 20 nodes, rail-optimised, full fat tree."""
    return Cluster(
        name="dgx-a100",
        device=DEVICES["a100-80"],
        gpus_per_node=8,
        nodes=nodes,
        nic_gbit_per_gpu=200,
        nodes_per_rack=4,
        racks_per_pod=5,
        rail_optimised=True,
        source="general knowledge: 8 x 200 Gb/s HDR, unit of 20 nodes, rails, 4 nodes a rack",
    )


BUILDERS = {"llama3-24k": llama3_24k, "dgx-h100": dgx_h100, "dgx-a100": dgx_a100}

CLUSTERS = {name: build() for name, build in BUILDERS.items()}
"""Every cluster of the catalogue by name, at its default size."""


def cluster(name: str) -> Cluster:
    """Cluster of the catalogue, at another number of nodes if one follows a colon ("dgx-h100:8").

    Raises JobError with the closest name where there is none.
    """
    base, colon, nodes = name.partition(":")
    if base not in BUILDERS:
        near = hint(base, BUILDERS)
        raise JobError(f'cluster = "{name}" is not in the catalogue, which has {listed(BUILDERS)}{near}')
    if not colon:
        return CLUSTERS[base]
    if not (nodes.isascii() and nodes.isdigit() and int(nodes)):
        raise JobError(f'cluster = "{name}": after the colon stands the number of nodes, as in "{base}:8"')
    return BUILDERS[base](nodes=int(nodes))
