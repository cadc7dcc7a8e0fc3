"""The time of a step: the lists of a lowered plan, priced and replayed.

Enters: lists of actions, prices. Leaves: `Estimate`: seconds, terms, timeline. Decides nothing about what is sent or when.
"""
