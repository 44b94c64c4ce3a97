"""A cluster: devices in nodes, nodes in racks, racks in pods."""

import msgspec

from emulator.spec.device import Device


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The CPU side of one GPU."""

    launch_seconds: float = 6e-6
    """Host time to issue one kernel or collective from an eager framework."""
    loader_bytes_per_second: float = 1e9
    """Rate at which the loader prepares input for one GPU."""


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes of GPUs on a rack/pod fabric. Ranks are placed in order: rank r is GPU r."""

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
    """GPU i of every node of a unit hangs on leaf i, instead of all GPUs of a rack on one leaf."""
    nic_efficiency: float = 0.97
    """Payload fraction of the NIC's line rate."""
    host: Host = Host()
    source: str = ""
