"""From programs to the lists of actions that time replay, memory replay and the executor follow.

Enters: programs, a `Placement`, a `Policy`. Leaves: a lowered plan with each rank's schedule and the lists of its stages, and
the records a run can be compared with. Every decision on when and how something is sent is made here; costs are not known.
"""
