"""The search for a plan: how every op is split, where stages begin, which of many plans is fastest and fits. No torch here."""

from fourfold.planner.search import Candidate, Ranking, Refusal, Task, search

__all__ = ["Candidate", "Ranking", "Refusal", "Task", "search"]
