"""Divided optimizer state (ZeRO-1) and divided weights (ZeRO-3): gathered, released, reduced.

Enters: actions on divided weights, autograd's hooks. Leaves: weights where ops read them. The lists say when to fetch.
"""
