"""Chat templates, compiled: render a column of conversations instead of one after the other.

    program = gpuload.template.compile(tokenizer)
    rendered = program.render(table["prompt"])      # rendered.text: a column of prompts

Every prompt is byte for byte what `tokenizer.apply_chat_template(messages, tokenize=False)` gives. How: `trace.py` runs
the vendor's template on unknown texts, `probe.py` tries to prove the result wrong, `program.py` is the result,
`arrow.py` runs it.
"""

from gpuload.template.compiler import ChatProgram, compile

__all__ = ["ChatProgram", "compile"]
