"""The best splits of one mesh, by a sum of costs that can be optimised exactly.

Enters: a graph, a mesh, prices. Leaves: plans of one mesh with their cost by the surrogate. Replays nothing in full.
"""
