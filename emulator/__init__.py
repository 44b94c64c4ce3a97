"""Discrete-event emulator of GPU training clusters.

    from emulator import Job, Layout, clusters, models, simulate

    job = Job(model=models.LLAMA3_8B, cluster=clusters.dgx_h100(nodes=8), layout=Layout(dp_shard=64), ...)
    result = simulate(job)
    print(result.report)
"""
