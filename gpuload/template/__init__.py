"""The chat template compiler.

    program = ChatProgram(TemplateCall(tokenizer))

It renders whole columns of conversations. Every prompt equals, byte for byte, what
`tokenizer.apply_chat_template(messages, tokenize=False)` returns. The modules, in the order of the work:

    trace.py      renders the template once with symbolic texts and records what it does with them
    bounds.py     sizes of values, before they are built: the limits of tracing
    rope.py       these symbolic texts (symbol.py: what all symbolic values reject)
    sandbox.py    transformers' own Jinja environment, instrumented for symbolic texts
    probe.py      compares each trace with transformers on adversarial texts before it is used
    program.py    the result: decision trees as plain data
    compiler.py   `ChatProgram`: the trees of one load, which grow as new kinds of rows arrive

This package does not run programs on columns. The engines do: `gpuload.engines.host.render.render(program, prompts)`.
"""
