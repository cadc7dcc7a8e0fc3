"""The papers' experiments, rerun with the planner, oracle and runtime that users run, beside the papers' figures."""
