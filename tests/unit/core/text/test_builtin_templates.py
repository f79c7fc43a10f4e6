"""The built-in chat templates write what llama.cpp writes for the same names."""

import pytest

from engine.core.text.builtin_templates import BUILTIN_TEMPLATES
from engine.core.text.chat_template import ChatTemplate
from engine.core.text.tokenizer import SpecialTokens, Tokenizer
from tests.support.files.tokenizer_files import byte_level_metadata

MESSAGES = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": " b "},
    {"role": "user", "content": "c"},
]
# Of llama.cpp's own function, for these messages
WRITTEN = {
    "chatml": (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistan"
        "t\n b <|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    ),
    "chatglm4": "[gMASK]<sop><|system|>\nS<|user|>\na<|assistant|>\n b <|user|>\nc<|assistant|>\n",
    "command-r": (
        "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>S<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>"
        "<|USER_TOKEN|>a<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>b"
        "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|>c<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    ),
    "deepseek": (
        "S### Instruction:\na\n### Response:\n b \n<|EOT|>\n### Instruction:\nc\n### Response:\n"
    ),
    "deepseek2": "S\n\nUser: a\n\nAssistant:  b <｜end▁of▁sentence｜>User: c\n\nAssistant:",
    "deepseek3": (
        "S\n\n<｜User｜>a<｜Assistant｜> b <｜end▁of▁sentence｜><｜User｜>c<｜Assistant｜>"
    ),
    "falcon3": "<|system|>\nS\n<|user|>\na\n<|assistant|>\n b \n<|user|>\nc\n<|assistant|>\n",
    "gemma": (
        "<start_of_turn>user\nS\n\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n"
        "<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\n"
    ),
    "granite": (
        "<|start_of_role|>system<|end_of_role|>S<|end_of_text|>\n<|start_of_role|>user"
        "<|end_of_role|>a<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|> b "
        "<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>c<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>"
    ),
    "llama2": "[INST] S\na [/INST] b </s>[INST] c [/INST]",
    "llama2-sys": "[INST] <<SYS>>\nS\n<</SYS>>\n\na [/INST] b </s>[INST] c [/INST]",
    "llama2-sys-bos": "[INST] <<SYS>>\nS\n<</SYS>>\n\na [/INST] b </s><s>[INST] c [/INST]",
    "llama2-sys-strip": "[INST] <<SYS>>\nS\n<</SYS>>\n\na [/INST]b</s>[INST] c [/INST]",
    "llama3": (
        "<|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\na<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nb"
        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nc<|eot_id|><|start_header_id|>"
        "assistant<|end_header_id|>\n\n"
    ),
    "llama4": (
        "<|header_start|>system<|header_end|>\n\nS<|eot|><|header_start|>user<|header_end|>\n"
        "\na<|eot|><|header_start|>assistant<|header_end|>\n\nb<|eot|><|header_start|>user"
        "<|header_end|>\n\nc<|eot|><|header_start|>assistant<|header_end|>\n\n"
    ),
    "minicpm": "S<用户>a<AI>b<用户>c<AI>",
    "mistral-v1": " [INST] S\n\na [/INST]  b </s> [INST] c [/INST]",
    "mistral-v3": "[INST] S\n\na[/INST] b</s>[INST] c[/INST]",
    "mistral-v3-tekken": "[INST]S\n\na[/INST] b </s>[INST]c[/INST]",
    "mistral-v7": "[SYSTEM_PROMPT] S[/SYSTEM_PROMPT][INST] a[/INST]  b </s>[INST] c[/INST]",
    "mistral-v7-tekken": "[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]a[/INST] b </s>[INST]c[/INST]",
    "monarch": (
        "system\nS</s>\n<s>user\na</s>\n<s>assistant\n b </s>\n<s>user\nc</s>\n<s>assistant\n"
    ),
    "openchat": (
        "S<|end_of_turn|>GPT4 Correct User: a<|end_of_turn|>GPT4 Correct Assistant:  b "
        "<|end_of_turn|>GPT4 Correct User: c<|end_of_turn|>GPT4 Correct Assistant:"
    ),
    "phi3": (
        "<|system|>\nS<|end|>\n<|user|>\na<|end|>\n<|assistant|>\n b <|end|>\n<|user|>\nc"
        "<|end|>\n<|assistant|>\n"
    ),
    "phi4": (
        "<|im_start|>system<|im_sep|>S<|im_end|><|im_start|>user<|im_sep|>a<|im_end|>"
        "<|im_start|>assistant<|im_sep|> b <|im_end|><|im_start|>user<|im_sep|>c<|im_end|>"
        "<|im_start|>assistant<|im_sep|>"
    ),
    "smolvlm": (
        "<|im_start|>S\n\nUser: a<end_of_utterance>\nAssistant:  b <end_of_utterance>\nUser: "
        "c<end_of_utterance>\nAssistant:"
    ),
    "vicuna": "S\n\nUSER: a\nASSISTANT:  b </s>\nUSER: c\nASSISTANT:",
    "vicuna-orca": "SYSTEM: S\nUSER: a\nASSISTANT:  b </s>\nUSER: c\nASSISTANT:",
    "zephyr": (
        "<|system|>\nS<|endoftext|>\n<|user|>\na<|endoftext|>\n<|assistant|>\n b "
        "<|endoftext|>\n<|user|>\nc<|endoftext|>\n<|assistant|>\n"
    ),
}


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
def test_a_built_in_template_writes_what_llamacpp_writes(name: str) -> None:
    template = ChatTemplate(BUILTIN_TEMPLATES[name], bos="<s>", eos="</s>")
    rendered = template.render(MESSAGES, SpecialTokens({}))
    assert "".join(map(str, rendered.segments)) == WRITTEN[name]


@pytest.mark.parametrize(("adds_bos", "begin"), [(True, "{{ bos_token }}"), (False, "")])
def test_a_built_in_template_begins_with_the_bos_of_a_tokenizer_that_adds_one(
    adds_bos: bool, begin: str
) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(add_bos_token=adds_bos))
    given = tokenizer.with_template(BUILTIN_TEMPLATES["chatml"])
    assert given.chat_template == begin + BUILTIN_TEMPLATES["chatml"]
    assert tokenizer.with_template("{{ x }}").chat_template == "{{ x }}"
