"""An accelerator as its datasheet and its driver describe it."""

import msgspec


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accelerator. Peaks are dense; links are one direction, per device."""

    name: str
    peak_flops: dict[str, float]
    """Dense matrix-unit FLOP/s by precision (fp32 tf32 fp16 bf16 fp8 fp4); fp32 is the vector units' FMA peak."""
    vector_flops: float
    """FP32 FLOP/s of the vector units (CUDA cores), where norms, softmax and elementwise kernels run."""
    hbm_bytes: int
    """Memory capacity as the driver reports it."""
    hbm_bytes_per_second: float
    l2_bytes: int
    l1_bytes_per_sm: int = 0
    register_bytes_per_sm: int = 0
    sms: int
    """Streaming multiprocessors in use (compute units, tensor cores of a TPU, Neuron cores)."""
    sms_on_die: int
    """What the die holds; the rest is switched off for yield."""
    fp32_units_per_sm: int = 0
    tensor_cores_per_sm: int = 0
    tensor_flops_per_sm_cycle: int = 0
    """bf16/fp16 FLOP per SM and cycle on the matrix units; 0 where there are none."""
    vector_flops_per_sm_cycle: int = 0
    tensor_clock_hz: float = 0.0
    """The clock the bf16 peak implies: peak / (sms x FLOP per SM and cycle)."""
    vector_clock_hz: float = 0.0
    """The clock the FP32 peak implies; a datasheet's two clocks can differ."""
    scale_up_bytes_per_second: float
    """NVLink, xGMI, ICI, NeuronLink or PCIe port, one direction, all links of the device."""
    nic_bytes_per_second: float
    """Scale-out share of one device, one direction, in the vendor's reference system."""
    host_link_bytes_per_second: float
    """PCIe or C2C to the host, one direction: the copy engines' ceiling."""
    gemm_efficiency: dict[str, float]
    """Largest fraction of the dense peak that a long run of big matrix products reaches, by precision."""
    hbm_efficiency: float
    """Achieved fraction of the HBM bandwidth in a copy or triad."""
    scale_up_efficiency: float
    """Payload fraction of the scale-up line rate that collectives reach with the bulk protocol."""
    headline: dict[str, str]
    """What the vendor's headline or the seeds print where it differs from the figures above, by field."""
    source: str

    def peak(self, precision: str) -> float:
        """Dense FLOP/s of a matrix product in this precision; KeyError-free: raises JobError (see check)."""
        raise NotImplementedError
