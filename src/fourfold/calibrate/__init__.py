"""Machines and kernels measured for the oracle.

Enters: processes on the machine, on processors or GPUs (`gpu_*`), lowered plans whose kernels are to be timed. Leaves: a
`Cluster` with measured curves, tables of kernel times. Stands on the runtime, which knows nothing of costs.
"""
