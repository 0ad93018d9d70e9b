"""The measured programs: `python -m bench.contenders.NAME TASK`, where TASK is JSON.

Each prints one line of JSON at its end. Those that measure verl run in verl's environment, so `common` imports only
NumPy, which both environments have.
"""
