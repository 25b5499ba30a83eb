"""The Llamas as families of models. No torch here."""

from torchtitan.models.family import Family
from torchtitan.models.llama import LLAMA2, LLAMA3, LLAMA31, LLAMA32
from torchtitan.models.llama.hf_config import CONFIG

# the first is that of a Hugging Face folder without a job
LLAMAS = {
    name: Family(sizes=sizes, config=CONFIG, spec="torchtitan.models.llama.spec:SPEC", home="meta-llama")
    for name, sizes in (("llama3", LLAMA3), ("llama2", LLAMA2), ("llama3.1", LLAMA31), ("llama3.2", LLAMA32))
}
