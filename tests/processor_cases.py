"""Processors of vision models, made from their classes: they need no files of a model."""

from typing import Any

import pytest
import transformers
from transformers import LlavaProcessor, ProcessorMixin, Qwen2VLProcessor

# As models of the two families have them: with parts and with text, and only with parts, of which texts come last.
QWEN_VL = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAVA = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] | trim + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}"
    "{%- if messages[0]['content'] is string -%}{%- set first = messages[0]['content'] + '\n\n' -%}"
    "{%- else -%}{%- set first = messages[0]['content'][0]['text'] + '\n\n' -%}{%- endif -%}"
    "{%- set rest = messages[1:] -%}{%- else -%}{%- set first = '' -%}{%- set rest = messages -%}{%- endif -%}"
    "{%- for message in rest -%}{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
    "{{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') }}"
    "{%- if message['content'] is string -%}{{ message['content'] | trim }}{%- else -%}"
    "{%- for item in message['content'] -%}{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}"
    "{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{ '<end_of_turn>\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)


TRANSFORMERS_4 = int(transformers.__version__.split(".")[0]) < 5


def without_torchvision(name: str) -> Any:
    """A processor of images that needs only PIL; in transformers 4, it is the one without "Fast"."""
    return getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)


def llava(tokenizer: Any) -> Any:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return LlavaProcessor(without_torchvision("CLIPImageProcessor")(), tokenizer, 14, "default", LLAVA, "<image>")


def qwen_vl(tokenizer: Any) -> Any:
    """Without the part for videos, which needs torchvision."""
    names = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
        return Qwen2VLProcessor(without_torchvision("Qwen2VLImageProcessor")(), tokenizer, None, QWEN_VL)
