"""The stages of a load of rows as served on the host."""

from gpuload.engines.host.engine import HostEngine


class ServedEngine(HostEngine):
    """The `Engine` of a load of rows as served. For the arguments see `HostEngine`."""

    @property
    def by_prompt(self) -> bool:
        return True
