"""ParaDL's own formulas as a second cost model.

Enters: a graph's layers, prices of a cluster. Leaves: a projection of each strategy. Knows nothing of programs and lists.
"""
