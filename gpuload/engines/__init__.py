"""The stages of a load, once per machine: engine.py says what an engine does, cpu.py does it on the host."""
