"""A cluster: devices in nodes, nodes in racks, racks in pods."""

from fractions import Fraction

import msgspec

from emulator.spec.device import Device


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The CPU side of one GPU."""

    launch_seconds: float = 6e-6
    """Host time to issue one kernel or collective from an eager framework."""
    loader_bytes_per_second: float = 1e9
    """Rate at which the loader prepares input for one GPU."""


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
    """Payload fraction of the NIC's line rate."""
    host: Host = Host()
    source: str = ""

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
