"""Jobs on 1,024 to 131,072 GPUs, each measured in a process of its own.

`python tests/big_jobs.py '{"gpus": 16384}' 3` does one of them three times.
Prints one line of JSON: what was emulated, the seconds of each part, the most memory, and how many timeouts a
second bare SimPy made before and after, on the same core.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from pathlib import Path

import msgspec
import simpy

from emulator.plan import plan
from emulator.report import measure
from emulator.run.executor import Executor
from emulator.spec.cluster import llama3_24k
from emulator.spec.job import DataParallel, Job, Layout, Pipeline
from emulator.spec.model import LLAMA3_405B


class Case(msgspec.Struct, frozen=True):
    """Llama 3 405B's layers on 16 stages with GPipe, at kernel detail."""

    gpus: int = 16_384
    sharding: str = "fsdp"
    microbatches: int = 16
    layers: int = 126
    uplink: bool = False
    """Two pods, and between them an uplink that the stages' rings of data parallelism fill."""

    def job(self) -> Job:
        """The job; its cluster is that of Llama 3, as large as it must be."""
        replicas = self.gpus // 16
        cluster = llama3_24k(nodes=self.gpus // 8)
        if self.uplink:
            # Each of the 16 rings would fill a NIC across the uplink, which carries what eight NICs do.
            racks = cluster.racks // 2
            cluster = msgspec.structs.replace(
                cluster, racks_per_pod=racks, pod_oversubscription=self.gpus / 2 / 8
            )
        return Job(
            model=msgspec.structs.replace(LLAMA3_405B, layers=self.layers),
            cluster=cluster,
            seq_len=8192,
            micro_batch=1,
            global_batch=self.microbatches * replicas,
            layout=Layout(pp=16, **{"dp_shard" if self.sharding == "fsdp" else "dp_replicate": replicas}),
            pipeline=Pipeline("gpipe"),
            data_parallel=DataParallel(sharding=self.sharding),  # type: ignore[arg-type]
        )


def simpy_timeouts(count: int = 100_000) -> float:
    """Timeouts a second of one process that yields them: the yardstick."""

    def process(env: simpy.Environment) -> simpy.events.ProcessGenerator:
        for _ in range(count):
            yield env.timeout(1)

    env = simpy.Environment()
    env.process(process(env))
    began = time.perf_counter()
    env.run()
    return count / (time.perf_counter() - began)


def peak_bytes() -> int:
    """Most memory this process had at once; what it was started from does not count, where Linux tells."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measured(case: Case, repeats: int = 3) -> dict[str, object]:
    """Plan, play and report a job some times; medians of the seconds, and of the yardstick between them."""
    job = case.job()
    parts: dict[str, list[float]] = {name: [] for name in ("plan", "lower", "run", "report", "total")}
    yard = [simpy_timeouts()]
    for _ in range(repeats):
        began = time.perf_counter()
        program = plan(job)
        planned = time.perf_counter()
        executor = Executor(program, job.steps)
        lowered = time.perf_counter()
        trace = executor.run()
        played = time.perf_counter()
        report = measure(trace)
        ended = time.perf_counter()
        edges = (began, planned, lowered, played, ended)
        for name, start, end in zip(parts, (*edges[:-1], began), (*edges[1:], ended), strict=True):
            parts[name].append(end - start)
        yard.append(simpy_timeouts())
    contended = [executor.lowered.resource_names[r] for r in sorted(executor.pool.ever_contended)]
    return {
        "case": msgspec.to_builtins(case),
        "ranks": program.ranks,
        "classes": len(program.classes),
        "spans": len(trace),
        "events": trace.events,
        "full": [name for name in contended if name.startswith("pod")],
        "step_seconds": report.step_seconds,
        "seconds": {name: statistics.median(values) for name, values in parts.items()},
        "peak_bytes": peak_bytes(),
        "timeouts_per_second": statistics.median(yard),
    }


if __name__ == "__main__":
    print(json.dumps(measured(msgspec.json.decode(sys.argv[1], type=Case), int(sys.argv[2]))))
