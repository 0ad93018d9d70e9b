"""The benchmarks: `python -m bench`, and of a GPU `python -m bench.gpu_record`.

inputs.py     which files, which tokenizer
launch.py     one measurement = one fresh process
workers/      what runs in those processes: one contender each, one JSON line out
load.py, sections.py
              one section of measurements each: repeats, interleaved, as plain data
tables.py, plot.py
              that data → Markdown and a picture

gpu_record.py the record of a GPU, section by section; records/README.md says how one is made
gpu_run.py    a section in a process of its own
gpu_rig.py    the kernels and the clock, gpu_data.py the files and texts
gpu_machine.py, gpu_exact.py, gpu_stages.py, gpu_tokens.py, gpu_loads.py, gpu_checks.py
              the sections; gpu_small.py is what compute-sanitizer runs
gpu_tables.py that record → Markdown
"""
