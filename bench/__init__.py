"""The benchmarks: `python -m bench`.

inputs.py     which files, which tokenizer
launch.py     one measurement = one fresh process
workers/      what runs in those processes: one contender each, one JSON line out
load.py, batches.py, memory.py, stages.py
              one section of measurements each: repeats, interleaved, as plain data
tables.py, plot.py
              that data → Markdown and a picture
"""
