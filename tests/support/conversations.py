"""Conversations in a template like that of Qwen."""

from tests.support.tokenizer_folders import files_of, write

USER, ANSWER = {"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "Four."}
ONLY_TWO_ROLES = """\
{%- for m in messages %}{% if m.role == 'user' %}{{ '<|user|>' + m.content + '<|end|>' }}
{%- elif m.role == 'assistant' %}{{ '<|assistant|>' }}{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}
{%- endif %}{% endfor %}"""


def qwen_like(path, **config):
    files = files_of("byte level")
    added = files["tokenizer.json"]["added_tokens"]
    for place in (files["tokenizer.json"]["model"]["vocab"],):
        place["<|endoftext|>"] = place.pop("<s>")
    for entry in (added, files["tokenizer_config.json"]["added_tokens_decoder"].values()):
        next(t for t in entry if t["content"] == "<s>")["content"] = "<|endoftext|>"
    files["tokenizer_config.json"] |= {"bos_token": None, "chat_template": ONLY_TWO_ROLES} | config
    files["special_tokens_map.json"] = {"eos_token": "</s>", "unk_token": "<unk>"}
    return write(path, files)
