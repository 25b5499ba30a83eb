"""Model families by name. A new family is one folder and one line here (and its sizes in models/__init__.py)."""

from torchtitan.models import SIZES
from torchtitan.models.flops import flops_per_token
from torchtitan.models.llama import hf as llama_hf
from torchtitan.models.llama.model import Llama
from torchtitan.models.llama.plan import PLAN as LLAMA_PLAN
from torchtitan.models.spec import ModelSpec

MODELS: dict[str, ModelSpec] = {
    name: ModelSpec(sizes=sizes, build=Llama, plan=LLAMA_PLAN, hf=llama_hf, flops_per_token=flops_per_token)
    for name, sizes in SIZES.items()
}
