"""Discrete-event emulator of GPU training clusters.

from emulator import Job, Layout, clusters, models, simulate

job = Job(model=models.LLAMA3_8B, cluster=clusters.dgx_h100(nodes=8), layout=Layout(dp_shard=64),
seq_len=8192, global_batch=64)
result = simulate(job)
print(result.report)
"""

from emulator.simulation import DoesNotFitError, Result, simulate
from emulator.spec import cluster as clusters
from emulator.spec import device as devices
from emulator.spec import model as models
from emulator.spec.cluster import Cluster
from emulator.spec.device import Device
from emulator.spec.errors import JobError
from emulator.spec.job import DataParallel, FixedTimes, Job, Layout, Pipeline
from emulator.spec.model import Model
from emulator.version import __version__

__all__ = [
    "Cluster",
    "DataParallel",
    "Device",
    "DoesNotFitError",
    "FixedTimes",
    "Job",
    "JobError",
    "Layout",
    "Model",
    "Pipeline",
    "Result",
    "__version__",
    "clusters",
    "devices",
    "models",
    "simulate",
]
