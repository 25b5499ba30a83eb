"""What stands before the answer of an instruct record, by a prompt of one's own or by Stanford Alpaca's.

Places are filled by plain replacement, all at once: what a record says is never read as a place, or as a format.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from torchtitan.limits import LimitError

PLACES = ("instruction", "input", "system")
_PLACE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Prompt:
    """`format` and, for records without an input, `no_input_format`: with the places {instruction}, {input} and
    {system}. `system_format`: what stands before them where something is said as system and they have no place for it;
    `system_prompt` is said where a record says nothing. `separator`: between prompt and answer.
    """

    format: str = (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}"
        "\n\n### Response:\n"
    )
    no_input_format: str = (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Response:\n"
    )
    system_format: str = "{system}\n\n"
    system_prompt: str = ""
    separator: str = ""

    @classmethod
    def of(cls, template: Mapping[str, str]) -> "Prompt":
        """What is not said is Alpaca's; a format alone is also that of records without an input. LimitError for a part
        that is not known, a place that nothing fills, or one that is missing."""
        parts = [part.name for part in fields(cls)]
        for name, text in template.items():
            key, said = "training.template", f"{name} = {text!r}"
            if name not in parts:
                raise LimitError(key, said, f"parts that are known: {', '.join(parts)}", "correct its name")
            wanted = {"format": "instruction", "no_input_format": "instruction", "system_format": "system"}.get(name)
            places = _PLACE.findall(text) if wanted else []
            if wanted and (wanted not in places or set(places) - set(PLACES)):
                known = ", ".join(f"{{{place}}}" for place in PLACES)
                raise LimitError(key, said, f"text with {{{wanted}}}; places are {known}", "correct them")
        if "format" in template:
            template = {"no_input_format": template["format"]} | dict(template)
        return replace(cls(), **template)

    def text(self, instruction: str, given: str, system: str) -> str:
        """`given`: the input; empty where there is none, as `system` is."""
        values = {"instruction": instruction, "input": given, "system": system or self.system_prompt}
        body = self.format if given else self.no_input_format
        head = self.system_format if values["system"] and "{system}" not in body else ""
        return _PLACE.sub(lambda place: values[place[1]], head + body) + self.separator


ALPACA = Prompt()
