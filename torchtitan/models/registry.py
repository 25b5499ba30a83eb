"""Model families by name. A new family is one folder and one line here (and its sizes in models/__init__.py)."""

from torchtitan.models import SIZES
from torchtitan.models.deepseek.hf import HF as DEEPSEEK_HF
from torchtitan.models.deepseek.model import Deepseek
from torchtitan.models.deepseek.plan import PLAN as DEEPSEEK_PLAN
from torchtitan.models.flops import flops_per_token, latent_flops_per_token
from torchtitan.models.llama.hf import HF as LLAMA_HF
from torchtitan.models.llama.model import Llama
from torchtitan.models.llama.plan import PLAN as LLAMA_PLAN
from torchtitan.models.moe import balance
from torchtitan.models.qwen3_moe.hf import HF as QWEN3_MOE_HF
from torchtitan.models.qwen3_moe.model import Qwen3MoE
from torchtitan.models.qwen3_moe.plan import PLAN as QWEN3_MOE_PLAN
from torchtitan.models.spec import ModelSpec

LLAMAS = ("llama2", "llama3", "llama3.1", "llama3.2")
_llama = dict(build=Llama, plan=LLAMA_PLAN, hf=LLAMA_HF, flops_per_token=flops_per_token)
_deepseek = dict(
    build=Deepseek, plan=DEEPSEEK_PLAN, hf=DEEPSEEK_HF, flops_per_token=latent_flops_per_token, balance=balance
)
_qwen3_moe = dict(
    build=Qwen3MoE, plan=QWEN3_MOE_PLAN, hf=QWEN3_MOE_HF, flops_per_token=flops_per_token, balance=balance
)

MODELS: dict[str, ModelSpec] = {
    **{name: ModelSpec(sizes=SIZES[name], **_llama) for name in LLAMAS},
    "deepseek": ModelSpec(sizes=SIZES["deepseek"], **_deepseek),
    "qwen3_moe": ModelSpec(sizes=SIZES["qwen3_moe"], **_qwen3_moe),
}
