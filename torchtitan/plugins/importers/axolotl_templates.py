"""Axolotl's chat templates by name: those of ours, of the model's tokenizer, and those that its names stand for."""

from collections.abc import Iterable

from torchtitan.plugins.importers.llama_factory_templates import TEMPLATES as TURNS
from torchtitan.plugins.importers.llama_factory_templates import chat_template

TEMPLATES = {"chatml": "chatml", "llama2": "llama2", "llama-2": "llama2", "llama3": "llama3", "llama-3": "llama3"}
TEMPLATES |= {"alpaca": "alpaca"}
TOKENIZER_TEMPLATE, JINJA = ("tokenizer", "tokenizer_default"), "jinja"
MODELS_OF_TEMPLATES = {
    "cohere": "c4ai-command-r aya-",
    "deepseek_v2": "deepseek-v2",
    "deepseek_v3": "deepseek-v3",
    "falcon_h1": "falcon-h1",
    "gemma": "gemma-2b gemma-7b gemma-2-",
    "gemma3": "gemma-3-",
    "gemma3n": "gemma-3n",
    "gemma4": "gemma-4",
    "gemma4_unified": "gemma-4",
    "jamba": "jamba- ai21-jamba-",
    "llama3_2_vision": "llama-3.2",
    "llama4": "llama-4",
    "llava": "llava-",
    "phi_3": "phi-3-",
    "phi_35": "phi-3.5",
    "phi_4": "phi-4",
    "pixtral": "pixtral-",
    "qwen2_vl": "qwen2-vl- qwen2.5-vl-",
    "qwen_25": "qwen2.5",
    "qwen3": "qwen3-",
    "qwen3_5": "qwen3.5",
}
"""Axolotl's templates -> how the names of the models begin, separated by blanks, whose tokenizers have such a one."""
OWN = {"falcon_h1": "falcon_h1", "gemma3": "gemma3", "gemma3n": "gemma3", "phi_35": "phi", "qwen_25": "qwen"}
"""Axolotl's templates that write what ours of LLaMA-Factory's names write."""
TRIMMED = ("gemma3", "gemma3n")
"""Those of them that take the blanks around a message away."""


def is_of_model(template: str, model: str, model_types: Iterable[str]) -> bool:
    """Return True if a template is named after the model to train: its type, or the last part of its name."""
    name = model.rstrip("/").rpartition("/")[2].lower()
    is_of_family = template.replace("_", "") in [model_type.replace("_", "") for model_type in model_types]
    return is_of_family or any(map(name.startswith, MODELS_OF_TEMPLATES.get(template, "").split()))


def own_template(name: str) -> str | None:
    """Return a chat template that writes what Axolotl's of this name does; None if there is none."""
    if name not in OWN:
        return None
    options = {"trims": name in TRIMMED, "keeps_empty": name != "phi_35", "alternates": True}
    return chat_template(TURNS[OWN[name]], **options)
