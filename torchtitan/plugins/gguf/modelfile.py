"""The Ollama Modelfile of an exported model.

Ollama has templates of its own instead of Jinja. The one written here is read off renderings of the tokenizer's
template, and left out if the renderings are not those of one system message, one question and one answer in a row.
"""

import json
from collections.abc import Mapping
from os.path import commonprefix

from torchtitan.datasets.template_process import RenderingFailed, render
from torchtitan.datasets.template_worker import BEGIN, END
from torchtitan.datasets.tokenizer import Tokenizer

SYSTEM, QUESTION, ANSWER = "{{ .System }}", "{{ .Prompt }}", "{{ .Response }}"
PARAMETERS = ("temperature", "top_k", "top_p", "repetition_penalty")


def modelfile(model_file: str, files: Mapping[str, bytes], tokenizer: Tokenizer, context: int) -> str:
    """Return the Modelfile. `files`: of the Hugging Face folder, by name. `context`: the longest, in tokens."""
    generation = json.loads(files["generation_config.json"])
    lines = [f"FROM ./{model_file}", f"PARAMETER num_ctx {context}"]
    for name in PARAMETERS:
        if type(generation.get(name)) in (int, float):
            lines.append(f"PARAMETER {name.replace('repetition', 'repeat')} {generation[name]}")
    ends = generation.get("eos_token_id")
    names = {id_: name for name, id_ in tokenizer.special_tokens.items()}
    for end in ends if isinstance(ends, list) else [ends]:
        if end in names and not {'"', "\n"} & {*names[end]}:  # which would begin other lines
            lines.append(f'PARAMETER stop "{names[end]}"')
    if tokenizer.chat_template is not None and (template := ollama_template(tokenizer)):
        lines.append(f'TEMPLATE """{template}"""')
    return "\n".join(lines) + "\n"


def ollama_template(tokenizer: Tokenizer) -> str | None:
    """Return the tokenizer's chat template for Ollama, without the token that begins a text, which llama.cpp adds.

    None if it cannot be expressed.
    """
    system, user, reply = (
        {"role": role, "content": text}
        for role, text in (("system", SYSTEM), ("user", QUESTION), ("assistant", ANSWER))
    )
    try:
        assert tokenizer.chat_template is not None
        variables = {"bos_token": "", "eos_token": "", **tokenizer.template_tokens, "tools": None, "documents": None}
        short, full = (
            render(tokenizer.chat_template, messages, variables, [(len(messages) - 1, True), (len(messages), False)])
            for messages in ([user, reply], [system, user, reply])
        )
    except RenderingFailed:
        return None
    begin = tokenizer.template_tokens.get("bos_token", "") if tokenizer.bos_id is not None else ""
    prompt, dialog = (_unmarked(text).removeprefix(begin) for text in short)
    system_prompt, system_dialog = (_unmarked(text).removeprefix(begin) for text in full)
    shared = commonprefix([prompt[::-1], system_prompt[::-1]])[::-1]
    without, with_system = prompt.removesuffix(shared), system_prompt.removesuffix(shared)
    if with_system.count(SYSTEM) != 1 or shared.count(QUESTION) != 1 or QUESTION in without + with_system:
        return None
    if not dialog.startswith(prompt + ANSWER) or not system_dialog.startswith(system_prompt + ANSWER):
        return None
    template = "{{ if .System }}" + with_system + ("{{ else }}" + without) * bool(without) + "{{ end }}"
    template += dialog.removeprefix(without)
    return None if '"""' in template else template


def _unmarked(text: str) -> str:
    """Return a rendering without the marks of generated text."""
    return text.replace(BEGIN, "").replace(END, "")
