"""Named chat templates, for tokenizers without one or with another one. They mark the model's answers.

Each template follows the format that its model's publisher describes. Its special tokens must exist in the tokenizer,
which encoding.py checks.
"""

from torchtitan.core.errors import JobError
from torchtitan.core.files import read_file

CHATML = """\
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
    {%- else %}
        {{- m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
LLAMA3 = """\
{{- bos_token }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}{{ m.content | trim + '<|eot_id|>' }}{% endgeneration %}
    {%- else %}
        {{- m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
# The system message becomes part of the first question.
LLAMA2 = """\
{%- set said = namespace(system='') %}
{%- for m in messages %}
    {%- if m.role == 'system' %}
        {%- if not loop.first %}{{ raise_exception('a system message that is not the first') }}{% endif %}
        {%- set said.system = '<<SYS>>\\n' + m.content | trim + '\\n<</SYS>>\\n\\n' %}
    {%- elif m.role == 'user' %}
        {{- bos_token + '[INST] ' + said.system + m.content | trim + ' [/INST]' }}
        {%- set said.system = '' %}
    {%- elif m.role == 'assistant' %}
        {%- generation %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endgeneration %}
    {%- else %}
        {{- raise_exception('no role ' + m.role) }}
    {%- endif %}
{%- endfor %}
"""
ALPACA = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'system' %}
        {{- m.content | trim + '\\n\\n' }}
    {%- elif m.role == 'user' %}
        {{- '### Instruction:\\n' + m.content | trim + '\\n\\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '### Response:\\n' }}{% generation %}{{ m.content | trim + eos_token }}{% endgeneration %}{{ '\\n\\n' }}
    {%- else %}
        {{- raise_exception('no role ' + m.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}
"""
LARGEST_TEMPLATE = 2**20
"""Largest template file in bytes. Published templates have a few thousand."""
NAMED = {"chatml": CHATML, "llama3": LLAMA3, "llama2": LLAMA2, "alpaca": ALPACA}


def resolve_template(template: str) -> str:
    """Return the Jinja template of a name in NAMED, of a file, or the template itself. Raises JobError otherwise."""
    if template in NAMED:
        return NAMED[template]
    if "{{" in template or "{%" in template:
        return template
    if not template.endswith(".jinja"):
        raise JobError(f"{template!r} is no template; give {', '.join(NAMED)}, a file that ends in .jinja, or Jinja")
    return read_file(template, LARGEST_TEMPLATE).decode(errors="replace")
