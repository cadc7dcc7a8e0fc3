"""The best cuts into stages.

Enters: a graph, numbers of stages and micro-batches, prices. Leaves: plans with stages and their cost. Boundaries are moved by
full replays, handed in.
"""
