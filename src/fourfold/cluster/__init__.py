"""Descriptions of machines: devices, nodes, links by level, and what was measured on them. No torch."""

from fourfold.cluster.catalog import LOCAL, cluster_named, efficiency_data, preset, preset_names
from fourfold.cluster.files import cluster_text, load_cluster, save_calibration, save_cluster
from fourfold.cluster.local import local
from fourfold.cluster.measured import COLLECTIVES, NON_WAITING, Collective, Curve, Measured, Waits
from fourfold.cluster.parts import KINDS, PRECISIONS, Device, Kind, Link, Nodes, Precision, Sources
from fourfold.cluster.spec import Cluster

__all__ = [
    "COLLECTIVES",
    "KINDS",
    "LOCAL",
    "NON_WAITING",
    "PRECISIONS",
    "Cluster",
    "Collective",
    "Curve",
    "Device",
    "Kind",
    "Link",
    "Measured",
    "Nodes",
    "Precision",
    "Sources",
    "Waits",
    "cluster_named",
    "cluster_text",
    "efficiency_data",
    "load_cluster",
    "local",
    "preset",
    "preset_names",
    "save_calibration",
    "save_cluster",
]
