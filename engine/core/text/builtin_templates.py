"""Chat templates by the names that llama.cpp has for them, for models whose files have none.

They are for messages alone: a model that calls tools needs a template of its own. None of them
writes a BOS at the beginning; `Tokenizer.with_template` adds that of a tokenizer that has one.
"""

_EACH = "{% for message in messages %}"
_END = "{% endfor %}{% if add_generation_prompt %}"


def _turns(before: str, after: str, opening: str, content: str = "") -> str:
    """A template whose turns differ only in the name of the role: `before` has it as `@`. `opening`
    begins the answer.
    """
    text = "{{ message.content" + content + " }}"
    turn = before.replace("@", "{{ message.role }}") + text + after
    return f"{_EACH}{turn}{_END}{opening}{{% endif %}}"


def _by_role(system: str, user: str, assistant: str, opening: str, content: str = "") -> str:
    """A template with a form for each role, with the content as `@`."""
    text = "{{ message.content" + content + " }}"
    forms = (
        f"{{% if message.role == 'system' %}}{system}"
        f"{{% elif message.role == 'assistant' %}}{assistant}{{% else %}}{user}{{% endif %}}"
    )
    return f"{_EACH}{forms.replace('@', text)}{_END}{opening}{{% endif %}}"


def _instructions(
    system: str, user: str, assistant: str, *, begin: str, content: str = "", trims: str = ""
) -> str:
    """A template whose turns each have an instruction, with the system message, and an answer.
    `begin` opens an instruction. `trims` is a filter for answers.
    """
    text = "{{ message.content" + content + " }}"
    return (
        "{% set open = namespace(turn=false) %}"
        + _EACH
        + "{% if not open.turn %}"
        + begin
        + "{% set open.turn = true %}{% endif %}"
        + "{% if message.role == 'system' %}"
        + system.replace("@", text)
        + "{% elif message.role == 'user' %}"
        + user.replace("@", text)
        + "{% else %}"
        + assistant.replace("@", "{{ message.content" + trims + " }}")
        + "{% set open.turn = false %}{% endif %}{% endfor %}"
    )


def _llama2(system: str, begin: str, content: str = "") -> str:
    return _instructions(system, "@ [/INST]", "@</s>", begin=begin, content=content, trims=content)


_SYS = "<<SYS>>\n@\n<</SYS>>\n\n"
_GEMMA_ROLE = "{{ 'model' if message.role == 'assistant' else message.role }}"
BUILTIN_TEMPLATES = {
    "chatml": _turns("<|im_start|>@\n", "<|im_end|>\n", "<|im_start|>assistant\n"),
    "chatglm4": "[gMASK]<sop>" + _turns("<|@|>\n", "", "<|assistant|>\n"),
    "command-r": _by_role(
        "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>@<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>@<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>@<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        " | trim",
    ),
    "deepseek": _by_role(
        "@",
        "### Instruction:\n@\n",
        "### Response:\n@\n<|EOT|>\n",
        "### Response:\n",
    ),
    "deepseek2": _by_role(
        "@\n\n", "User: @\n\n", "Assistant: @<｜end▁of▁sentence｜>", "Assistant:"
    ),
    "deepseek3": _by_role(
        "@\n\n",
        "<｜User｜>@",
        "<｜Assistant｜>@<｜end▁of▁sentence｜>",
        "<｜Assistant｜>",
    ),
    "falcon3": _turns("<|@|>\n", "\n", "<|assistant|>\n"),
    "gemma": (
        "{% set first = namespace(system='') %}"
        + _EACH
        + "{% if message.role == 'system' %}{% set first.system = message.content | trim %}"
        + "{% else %}<start_of_turn>"
        + _GEMMA_ROLE
        + "\n{% if first.system and message.role != 'assistant' %}{{ first.system }}\n\n"
        + "{% set first.system = '' %}{% endif %}"
        + "{{ message.content | trim }}<end_of_turn>\n{% endif %}"
        + _END
        + "<start_of_turn>model\n{% endif %}"
    ),
    "granite": _turns(
        "<|start_of_role|>@<|end_of_role|>",
        "<|end_of_text|>\n",
        "<|start_of_role|>assistant<|end_of_role|>",
    ),
    "llama2": _llama2("@\n", "[INST] "),
    "llama2-sys": _llama2(_SYS, "[INST] "),
    "llama2-sys-bos": _llama2(_SYS, "{% if not loop.first %}<s>{% endif %}[INST] "),
    "llama2-sys-strip": _llama2(_SYS, "[INST] ", " | trim"),
    "llama3": _turns(
        "<|start_header_id|>@<|end_header_id|>\n\n",
        "<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        content=" | trim",
    ),
    "llama4": _turns(
        "<|header_start|>@<|header_end|>\n\n",
        "<|eot|>",
        "<|header_start|>assistant<|header_end|>\n\n",
        content=" | trim",
    ),
    "minicpm": _by_role("@", "<用户>@<AI>", "@", "", " | trim"),
    "mistral-v1": _instructions("@\n\n", "@ [/INST]", " @</s>", begin=" [INST] "),
    "mistral-v3": _instructions("@\n\n", "@[/INST]", " @</s>", begin="[INST] ", trims=" | trim"),
    "mistral-v3-tekken": _instructions("@\n\n", "@[/INST]", "@</s>", begin="[INST]"),
    "mistral-v7": _by_role("[SYSTEM_PROMPT] @[/SYSTEM_PROMPT]", "[INST] @[/INST]", " @</s>", ""),
    "mistral-v7-tekken": _by_role(
        "[SYSTEM_PROMPT]@[/SYSTEM_PROMPT]", "[INST]@[/INST]", "@</s>", ""
    ),
    "monarch": _turns("{% if not loop.first %}<s>{% endif %}@\n", "</s>\n", "<s>assistant\n"),
    "openchat": _by_role(
        "@<|end_of_turn|>",
        "GPT4 Correct User: @<|end_of_turn|>",
        "GPT4 Correct Assistant: @<|end_of_turn|>",
        "GPT4 Correct Assistant:",
    ),
    "phi3": _turns("<|@|>\n", "<|end|>\n", "<|assistant|>\n"),
    "phi4": _turns("<|im_start|>@<|im_sep|>", "<|im_end|>", "<|im_start|>assistant<|im_sep|>"),
    "smolvlm": "<|im_start|>"
    + _by_role(
        "@\n\n",
        "User: @<end_of_utterance>\n",
        "Assistant: @<end_of_utterance>\n",
        "Assistant:",
    ),
    "vicuna": _by_role("@\n\n", "USER: @\n", "ASSISTANT: @</s>\n", "ASSISTANT:"),
    "vicuna-orca": _by_role("SYSTEM: @\n", "USER: @\n", "ASSISTANT: @</s>\n", "ASSISTANT:"),
    "zephyr": _turns("<|@|>\n", "<|endoftext|>\n", "<|assistant|>\n"),
}
