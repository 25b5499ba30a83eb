"""Mistral 4: DeepSeek's model with another config.json, and with stacks of experts in its folders."""

from dataclasses import replace

from torchtitan.models.deepseek import DeepseekArgs
from torchtitan.models.deepseek.model import SPEC as DEEPSEEK
from torchtitan.models.deepseek.model import tensor_map
from torchtitan.models.hf.names import TensorMap
from torchtitan.models.mistral4 import CONFIG


def stacked_map(args: DeepseekArgs) -> TensorMap:
    return tensor_map(args).with_stacks()


HF = replace(DEEPSEEK.hf, config=CONFIG, tensor_map=stacked_map)
SPEC = replace(DEEPSEEK, hf=HF)
