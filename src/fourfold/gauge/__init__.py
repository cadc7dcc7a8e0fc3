"""The machine measured for the oracle: kernels, collectives, rates. Stands on the runtime, which knows nothing of costs."""
