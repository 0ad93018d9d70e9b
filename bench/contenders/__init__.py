"""The measured programs: `python -m bench.contenders.NAME TASK`, where TASK is JSON.

Each prints one line of JSON at its end. Those that measure verl run in verl's own environment, so modules here import
only what both environments have, and `common` only NumPy.
"""
