"""What users and the planner write down: plans, their schedules, policies and placements, and their files.

Enters: a graph's names, JSON files. Leaves: `Plan` and its parts, checked. Knows nothing of how a plan is lowered.
"""
