"""Small decoders with a Neurocache, and documents for them to read."""

import torch

from tests.support.tiny_decoders import LLAMA, MISTRAL, OPT
from torchtitan.config.sections.model import Adapter as Options
from torchtitan.core.random_draws import initialize
from torchtitan.models.llama.model import Llama
from torchtitan.models.mistral.model import Mistral
from torchtitan.models.opt.model import OPT as OPTModel
from torchtitan.plugins.neurocache.adapter import Neurocache
from torchtitan.plugins.neurocache.options import NeurocacheOptions as Cache

FAMILIES = {
    "llama": (Llama, LLAMA["llama3"]),
    "mistral": (Mistral, MISTRAL["window"]),
    "opt": (OPTModel, OPT["350M"]),
}
SMALL = dict(cache_size=24, topk=3, cache_dtype="float32", retrieval_map={"0": 0})


def plain(family="llama", dtype=torch.float32, **sizes):
    from dataclasses import replace

    build, args = FAMILIES[family]
    model = build(replace(args, **sizes))
    initialize(model, 0, model.init_rule)
    return model.to(dtype)


def remembering(family="llama", dtype=torch.float32, layers=2, adapter=None, sizes=None, **cache):
    """Return a small model with a Neurocache and its adapter, with random compression and attention weights."""
    model = plain(family, dtype, n_layers=layers, **sizes or {})
    installed = Neurocache(Options(kind="neurocache", neurocache=Cache(**SMALL | cache), **(adapter or {})))
    from torchtitan.models.spec import MODELS

    installed.plan = installed.install(model, MODELS["llama3" if family == "llama" else family].plan)
    initialize(model, 0, model.init_rule, names=installed.added_parameters)
    installed.init_from_base([model])
    return model, installed


def segments(count, lanes=2, length=8, vocab=64, seed=0):
    """Return `count` batches of tokens [lanes, length], segments of long documents."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count, lanes, length), generator=generator)


def read(model, installed, batches, begins=None, filled=None):
    """Run all batches in order and commit each to the cache; return their logits."""
    out = []
    for index, tokens in enumerate(batches):
        segment_ends = {}
        if begins is not None:
            segment_ends["begins"] = torch.tensor(begins[index])
        if filled is not None:
            segment_ends["filled"] = torch.tensor(filled[index])
        out.append(model(tokens, **segment_ends))
        installed.after_batch([model])
    return torch.stack(out)
