"""How tensors lie on a mesh, and how they get from one layout to another.

Enters: sizes of dims and meshes. Leaves: `Mesh`, `Own`, `Layout` and the steps of an `Exchange`. Knows nothing of graphs, ops
or plans.
"""
