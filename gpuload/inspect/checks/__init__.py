"""`gpuload check`: what would spoil a training run, found in its data before it starts.

findings.py    a finding; the rules, with their levels and thresholds
messages.py    the messages of all rows, as columns
texts.py       checks of messages, and of what the template makes of them
tokens.py      checks of tokens and their loss
served.py      the same for rows as served
prompts.py     empty prompts, duplicates, and prompts that another file has, too
run.py         one pass over the data
lines.py       the lines that configure a trainer
"""
