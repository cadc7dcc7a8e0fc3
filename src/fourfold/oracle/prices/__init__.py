"""What a kernel, a collective and an update cost on a cluster.

Enters: `Cluster`, tables of measured kernels, shapes. Leaves: seconds with their source and spread. Knows nothing of plans.
"""
