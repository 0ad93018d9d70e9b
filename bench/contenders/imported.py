"""What loads import while they run, in some thread: contenders import it before their clock starts.

The answer of `Meter` names the modules that are missing here.
"""

from importlib import import_module

_OF_ALL = (
    "encodings.cp437 encodings.idna encodings.unicode_escape email.contentmanager email.headerregistry email.policy "
    "importlib_metadata._adapters multiprocess.managers multiprocess.popen_fork multiprocess.queues "
    "multiprocess.synchronize multiprocessing.synchronize pandas pandas.core.arrays.arrow.extension_types "
    "pyarrow.dataset pyarrow.pandas_compat pyarrow.parquet pyarrow.substrait pyarrow.vendored.version "
    "zipp.compat.overlay"
).split()
_OURS = "awkward gigatoken gpuload.engines.device.cuda gpuload.engines.device.cudf gpuload.kinds.load".split()


def import_ahead(ours: bool) -> None:
    """Import what a load of gpuload, or of another library, imports lazily, as far as this environment has it."""
    for name in _OF_ALL + _OURS * ours:
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
