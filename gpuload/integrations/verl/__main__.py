"""Print the path of the configuration of gpuload's agent loops, for verl's `agent_loop_config_path`.

verl resolves a relative path from the working directory and from its own installation, which may be a source checkout.
"""

from pathlib import Path

print(Path(__file__).with_name("agent_loop.yaml"))
