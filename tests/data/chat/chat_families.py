"""Hold short chat templates of six families, a tokenizer with their tokens, and conversations.

`expected.json` beside this file holds what `transformers` and `trl` make of them; the slow test of
`test_chat_parity.py` makes it again and compares.
"""

import json
from datetime import date
from pathlib import Path
from typing import Any

from headrace.data.chat.template import CHATML_TEXT, ChatTemplate
from headrace.data.tokenizer import Tokenizer, train_tokenizer

HERE = Path(__file__).parent
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>"),
    "<|end|>",
)
LLAMA_3 = (
    "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' "
    "+ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
QWEN_2_5 = (
    "{%- if messages[0]['role'] == 'system' %}\n"
    "    {{- '<|im_start|>system\\n' + messages[0]['content'] }}\n"
    "{%- else %}\n    {{- '<|im_start|>system\\nYou are Qwen.' }}\n{%- endif %}\n"
    "{%- if tools %}\n    {{- '\\n\\n# Tools\\n<tools>' }}\n    {%- for tool in tools %}\n"
    "        {{- '\\n' }}\n        {{- tool | tojson }}\n    {%- endfor %}\n"
    "    {{- '\\n</tools>' }}\n{%- endif %}\n{{- '<|im_end|>\\n' }}\n"
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls)"
    " %}\n        {{- '<|im_start|>' + message.role + '\\n' + message.content }}\n"
    "        {{- '<|im_end|>\\n' }}\n"
    "    {%- elif message.role == 'assistant' %}\n        {{- '<|im_start|>assistant' }}\n"
    "        {%- for call in message.tool_calls %}\n            {%- set call = call.function %}\n"
    '            {{- \'\\n<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' }}\n'
    "            {{- call.arguments | tojson }}\n            {{- '}\\n</tool_call>' }}\n"
    "        {%- endfor %}\n        {{- '<|im_end|>\\n' }}\n"
    "    {%- elif message.role == 'tool' %}\n"
    "        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}\n"
    "        {{- '\\n</tool_response><|im_end|>\\n' }}\n    {%- endif %}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
PHI_3 = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}"
    "{% else %}{{ eos_token }}{% endif %}"
)
SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are SmolLM.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEMPLATES = {
    "llama-3": LLAMA_3,
    "qwen-2.5": QWEN_2_5,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "phi-3": PHI_3,
    "smollm": SMOLLM,
    "chatml": CHATML_TEXT,
}
"""By family; the built-in one marks answers with `{% generation %}`, the others do not."""
NO_SYSTEM = ("mistral", "gemma")
TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": " Where does the r\u00edver end? <b>'1'</b> \n"},
    {"role": "assistant", "content": "  At the mill,\nor the sea \U0001f30a"},
    {"role": "user", "content": "And the water?"},
    {"role": "assistant", "content": "Below."},
]
TOOLS = [{"type": "function", "function": {"name": "level", "parameters": {"gate": "string"}}}]
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "How high?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "level", "arguments": {"gate": "east <1>"}}}],
    },
    {"role": "tool", "content": '{"metres": 3.5}'},
    {"role": "assistant", "content": "3.5 metres."},
]


def conversations(family: str) -> list[dict[str, Any]]:
    """Return the conversations that a family's template takes."""
    turns = TURNS[family in NO_SYSTEM :]
    made = [{"messages": turns}, {"messages": TURNS[1:3]}]
    return [*made, {"messages": CALLS, "tools": TOOLS}] if family == "qwen-2.5" else made


def template(family: str) -> ChatTemplate:
    """Return a family's template."""
    return ChatTemplate(TEMPLATES[family], NAMES, date(2024, 7, 26))


def chat_tokenizer() -> Tokenizer:
    """Return a small tokenizer with the tokens of all families."""
    texts = [f"{turn['content']} the water and the mill below the river" for turn in TURNS]
    return train_tokenizer(texts * 3, vocab=300, trainer="counts", special_tokens=SPECIAL)


def expected() -> dict[str, list[dict[str, Any]]]:
    """Return what transformers and trl make of each conversation, by family."""
    return json.loads((HERE / "expected.json").read_text())
