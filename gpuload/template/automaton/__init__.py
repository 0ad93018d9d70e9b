"""Templates whatever the shape of a conversation: an automaton of what a template asks and prints.

nodes.py        the automaton, as plain data
functions.py    the automaton as Python functions, which render rows
printed.py      what the functions print, and where it comes from
symbols.py      what the template is given in place of messages, texts and numbers
built.py        what a template builds of them
loops.py        the variable `loop`
filters.py      filters and tests of Jinja for such symbols
rewriting.py    loops with conditions, as two loops
environment.py  the template, in transformers' Jinja environment, with such symbols
recorder.py     one execution of the template becomes nodes of the automaton
rows.py         renders rows, records where no row has been, and compares with transformers
"""
