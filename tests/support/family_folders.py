"""Shapes of tiny folders, a family each."""

from transformers import (
    CONFIG_MAPPING,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    RobertaConfig,
)

from tests.support.tiny_decoders import (
    DEEPSEEK,
    GATED,
    GEMMA3,
    GPT2,
    LLAMA,
    MISTRAL,
    OPT,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    ROBERTA,
)
from torchtitan.models import CONFIG_CONVERTERS

SHAPES = {
    "llama2": (LLAMA["llama2"], LlamaConfig),
    "llama3": (LLAMA["llama3"], LlamaConfig),
    "llama3.1": (LLAMA["llama3.1"], LlamaConfig),
    "llama3.2": (LLAMA["llama3.2"], LlamaConfig),
    "deepseek v2": (DEEPSEEK["v2"], DeepseekV2Config),
    "deepseek v3": (DEEPSEEK["v3"], DeepseekV3Config),
    "deepseek plain": (DEEPSEEK["v3 plain"], DeepseekV3Config),
    "gemma3": (GEMMA3["plain"], Gemma3TextConfig),
    "gemma3 scaled": (GEMMA3["scaled, not tied"], Gemma3TextConfig),
    "gpt2": (GPT2["words"], GPT2Config),
    "mistral": (MISTRAL["window"], MistralConfig),
    "opt": (OPT["words"], OPTConfig),
    "opt 350M": (OPT["350M"], OPTConfig),
    "qwen2": (QWEN2["plain"], Qwen2Config),
    "qwen3": (QWEN3["plain"], Qwen3Config),
    "qwen3_moe": (QWEN3_MOE["published"], Qwen3MoeConfig),
    "roberta": (ROBERTA["words"], RobertaConfig),
} | {
    shape: (args, CONFIG_MAPPING[CONFIG_CONVERTERS[shape.split()[0]].to_hf(args)["model_type"]])
    for shape, args in GATED.items()
}
BY_MODEL_TYPE = {
    CONFIG_CONVERTERS[shape.split()[0]].to_hf(args)["model_type"]: args for shape, (args, _) in reversed(SHAPES.items())
}
"""The sizes of the first shape with each model_type of config.json."""
