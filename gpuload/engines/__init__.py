"""The stages of a load, once per machine: `protocol.py` says what an engine does, `host/` and `device/` do it."""
