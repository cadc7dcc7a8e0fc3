"""The named strategies: recipes from a graph and a number of ranks to a `Plan`.

Enters: `Graph`, a strategy's name and options. Leaves: `Plan`. Knows nothing of costs.
"""
