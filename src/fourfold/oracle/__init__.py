"""What a plan costs before it runs: time, memory, whether it fits and what limits it.

Enters: a lowered plan, a `Cluster`, tables of measured kernels. Leaves: a `Prediction`. No torch; nothing is decided about the
plan. Inner rooms: `prices`, `time`, `memory`, `findings`, `paradl`.
"""
