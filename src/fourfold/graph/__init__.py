"""The captured network as a plain value. `capture` alone touches torch, and is imported by name."""

from fourfold.graph.spec import Constant, Device, Dtype, Graph, Op, Parameter, Ref, Size, TensorSpec

__all__ = ["Constant", "Device", "Dtype", "Graph", "Op", "Parameter", "Ref", "Size", "TensorSpec"]
