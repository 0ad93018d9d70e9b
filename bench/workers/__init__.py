"""The programs that are measured, one contender each: `python -m bench.workers.NAME JOB` (JOB is JSON).

Each prints one JSON line at its end. Those for verl run with the Python of verl's own environment, so nothing in here
may be imported that is not in both: `common` needs NumPy and nothing else.
"""
