"""The processes of one machine: started, watched, ended; temporary files.

Enters: functions to run. Leaves: their answers, or the first failure with its rank. Knows nothing of plans.
"""
