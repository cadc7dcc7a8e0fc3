"""The search for a plan: how every op is split, where stages begin, which of many plans is fastest and fits.

Enters: a graph, a batch, prices of a cluster. Leaves: a `Ranking` of plans with their predictions, and why others cannot be. No
torch; kernels are timed by a function that is handed in. Inner rooms: `splits`, `stages`.
"""

from fourfold.planner.search import Ranking, Refusal, SearchTask, search

__all__ = ["Ranking", "Refusal", "SearchTask", "search"]
