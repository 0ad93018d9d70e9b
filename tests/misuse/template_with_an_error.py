"""A template that is no Jinja."""

import gpuload

gpuload.load_chats("chats.jsonl", "tokenizer", chat_template="{% for m in messages }}{% endfor %}")

# TokenizerError: chat_template=...: line 1: unexpected '}': correct the template
