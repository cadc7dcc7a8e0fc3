"""Whole runs: training, the Python interface, and `verify` with what it compares with.

Enters: a workload, a plan, ranks. Leaves: losses, verdicts, measured times and peaks. Knows nothing of clusters and
predictions.
"""
