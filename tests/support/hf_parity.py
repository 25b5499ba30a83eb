"""Comparisons of our models with transformers: outputs, gradients, names, configs and folders, for every family.

`hf` is a family's `HuggingFace` object; a twin is the transformers model with the same weights.
"""

import contextlib
import json
import re
from functools import partial
from types import ModuleType

import pytest
import torch
import transformers
from safetensors.torch import save_file

from torchtitan.core.errors import JobError
from torchtitan.core.random_draws import initialize
from torchtitan.models import attention
from torchtitan.models.hf.config import INDEX, SINGLE


def build(family, args, seed=0, dtype=torch.float32):
    """Build a model with random norms and biases: initial ones and zeros would hide mistakes."""
    model = family(args)
    initialize(model, seed, model.init_rule)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict(keep_vars=True).items():
        with torch.no_grad():
            # without rotation most of the attention gradients of biased values cancels: in float32 rounding is left
            is_scale = "norm" in name or "router.scale" in name
            if is_scale or (name.endswith(("_bias", ".bias")) and model.kinds[0].rotary is not None):
                tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
            elif "router.gate" in name or "sinks" in name:  # far apart, so rounding does not change the chosen experts
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model.to(dtype).eval()


_MEMORY_EXPERTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_BY_LETTER = {f".{stored}.weight": f".{name}.weight" for stored, name in _MEMORY_EXPERTS.items()}
MEMORY_NAMES = {
    "GPTNeoXArgs": {"^embed_out": "lm_head"},
    **dict.fromkeys(("MixtralArgs", "MiniMaxM2Args"), {"block_sparse_moe": "mlp"} | _BY_LETTER),
    "Lfm2MoEArgs": {rf"(experts\.\d+){key}": rf"\1{name}" for key, name in _BY_LETTER.items()},
    **dict.fromkeys(("NemotronHArgs", "NemotronHMoEArgs"), {"^backbone": "model"}),
    "Granite4MoEArgs": {
        "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
        "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
    },
}
"""Parts of names in the folders of a family, as patterns, and what transformers 5 calls them in memory."""


def to_memory_names(state, args):
    """Convert a folder's tensors to the in-memory names of transformers 5, which stacks the experts."""
    for stored, name in MEMORY_NAMES.get(type(args).__name__, {}).items():
        state = {re.sub(stored, name, key): value for key, value in state.items()}
    tensors = {name: value for name, value in state.items() if not re.search(r"\.experts\.\d", name)}
    for stack in sorted({name.split(".experts.")[0] + ".experts" for name in state.keys() - tensors.keys()}):
        experts = [f"{stack}.{expert}" for expert in range(args.n_experts)]
        first = ("gate_proj", "up_proj") if args.gated_experts else ("up_proj",)
        gates = [torch.cat([state[f"{e}.{name}.weight"] for name in first]) for e in experts]
        tensors[f"{stack}.{'gate_' * args.gated_experts}up_proj"] = torch.stack(gates)
        tensors[f"{stack}.down_proj"] = torch.stack([state[f"{e}.down_proj.weight"] for e in experts])
    return tensors


def eager(args):
    """Return the options that make transformers run experts one by one."""
    return {"experts_implementation": "eager"} if hasattr(args, "n_experts") else {}


def peer_class(config):
    """Return the class of transformers that a config.json names: AutoModelForCausalLM does not know all."""
    return getattr(transformers, config["architectures"][0])


def twin(theirs_class, config_class, model, hf, dtype=torch.float32, tied=("lm_head.weight",)):
    """Return the transformers model with our weights. `tied`: its parameters that share the embedding's tensor."""
    config = config_class(**hf.config_to_hf(model.args))
    attention = "sdpa" if theirs_class._supports_sdpa else "eager"
    hf_model = theirs_class._from_config(config, attn_implementation=attention, **eager(model.args))
    state = to_memory_names(hf.to_hf(model.state_dict(), model.args), model.args)
    missing, unexpected = hf_model.load_state_dict(state, strict=False)
    assert set(missing) == (set(tied) if model.args.tied_embeddings else set()) and not unexpected
    return hf_model.to(dtype).eval()


class _Wide:
    """The torch module with float64 in place of float32."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextlib.contextmanager
def exact(modeling: ModuleType, model, hf_model, monkeypatch):
    """Run norms, routers and rotary angles of both models in float64.

    Both use the frequencies of transformers, since ours may differ in the last bit; GPT-J has a table of angles.
    """
    rotating = [kind for kind in model.kinds if kind.rotary is not None]
    in_float32 = [kind.rotary.frequencies(torch.device("cpu")) for kind in rotating]
    with monkeypatch.context() as patch:
        patch.setattr(modeling, "torch", _Wide())
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)

        def rotation(frequencies, magnitude, positions):
            angles = positions[..., None, None].double() * frequencies
            return torch.stack((angles.cos(), angles.sin()), dim=-1) * magnitude

        body = getattr(hf_model, "model", None) or hf_model.get_submodule(hf_model.base_model_prefix)
        embedding = getattr(body, "rotary_emb", getattr(body, "pos_emb", None))
        for module in (module for module in hf_model.modules() if hasattr(module, "embed_positions")):  # of GPT-J
            module.embed_positions = modeling.create_sinusoidal_positions(*module.embed_positions.shape)
        for kind, plain in zip(rotating, in_float32, strict=True):
            name = "sliding_attention_inv_freq" if kind.window else "full_attention_inv_freq"
            name = "inv_freq" if hasattr(embedding, "inv_freq") else name
            frequencies = getattr(embedding, name, plain).double()
            kind.rotary.forward = partial(rotation, frequencies, kind.rotary.magnitude)
        if "llama4" in modeling.__name__:  # the only one that computes the growth in what `float` returns
            growth = attention.growth_of_queries
            patch.setattr(attention, "growth_of_queries", lambda places, *rest: growth(places.double(), *rest))
        yield


def close(ours, reference, tolerance):
    """True if the largest difference is within `tolerance` of the largest value."""
    return (ours - reference).abs().max() <= tolerance * reference.abs().max()


def tokens_for(args, batch=2, length=12):
    """Return random tokens, without the one that transformers treats as padding."""
    tokens = torch.randint(0, args.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))
    return torch.where(tokens == getattr(args, "pad_id", -1), tokens + 1, tokens)


def compare(model, hf_model, hf, tolerance, length=40):
    """Compare the logits and all gradients."""
    args = model.args
    tokens = tokens_for(args, 2, length)
    ours_logits, hf_logits = model(tokens), hf_model(tokens).logits
    assert close(ours_logits, hf_logits, tolerance)
    weight = torch.randn(ours_logits.shape, dtype=ours_logits.dtype, generator=torch.Generator().manual_seed(1)) / 100
    (ours_logits * weight).sum().backward()
    (hf_logits * weight).sum().backward()
    gradients = to_memory_names(hf.to_hf({name: p.grad for name, p in model.named_parameters()}, args), args)
    expected = {name: p.grad for name, p in hf_model.named_parameters() if p.requires_grad}
    assert set(gradients) == set(expected)
    norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in expected.values()]))
    for name, gradient in gradients.items():
        assert expected[name].any(), name
        # without rotation a bias of all keys does not change the softmax: only rounding
        layer = next((int(piece) for piece in name.split(".") if piece.isdecimal()), 0)
        has_rotary = model.kinds[model.kind_index(layer)].rotary is not None
        if not has_rotary and name.endswith(("key.bias", "k_proj.bias")):
            assert (gradient - expected[name]).abs().max() <= tolerance * norm, name
        else:
            assert close(gradient, expected[name], tolerance), name


def compare_positions(model, hf_model, first=0):
    """Compare logits at positions that do not begin at 0. `first`: transformers' number of our position 0."""
    tokens, positions = tokens_for(model.args), torch.arange(4, 16)[None].expand(2, -1)
    assert close(model(tokens, positions=positions), hf_model(tokens, position_ids=positions + first).logits, 2e-6)


def same(state, other):
    """True if two state dicts have the same names and bit-equal tensors."""
    return set(state) == set(other) and all(torch.equal(state[name], other[name]) for name in state)


def check_names_convert_both_ways(model, hf):
    """Convert a state dict to Hugging Face names and back."""
    state = model.state_dict()
    assert same(hf.from_hf(hf.to_hf(state, model.args), model.args), state)


def configs(args, hf, config_class, folder):
    """Return config.json as we write it, and as current transformers does (rope_parameters, dtype)."""
    config = hf.config_to_hf(args, torch.bfloat16)
    config_class(**config).save_pretrained(folder)
    return config, json.loads((folder / "config.json").read_text())


def save_and_load(family, args, hf, theirs_class, folder, shard_bytes):
    """Save a model in files of `shard_bytes`, and load it here and in transformers."""
    model, other = build(family, args), build(family, args, seed=1)
    hf.save_hf(folder, model.state_dict(), args, shard_bytes=shard_bytes)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 2 if shard_bytes < 10**9 else files == ["model-00001-of-00001.safetensors"]
    stored = sum(tensor.nbytes for name, tensor in model.named_parameters())
    stored += sum(tensor.nbytes for name, tensor in model.named_buffers() if name in model.state_dict())
    assert json.loads((folder / INDEX).read_text())["metadata"]["total_size"] == stored
    hf.load_hf(folder, other, args)
    assert same(model.state_dict(), other.state_dict())
    hf_model = theirs_class.from_pretrained(folder, **eager(args)).eval()
    tokens = tokens_for(args)
    assert close(model(tokens), hf_model(tokens).logits, 2e-6)


def refuse_folder(family, model_args, hf, folder, message, args=None):
    """Check that loading the folder fails with `message` and leaves the model unchanged."""
    model = build(family, model_args, seed=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(JobError, match=message):
        hf.load_hf(folder, model, args or model_args)
    assert same(before, model.state_dict())


def refuse_config(args, hf, change, message):
    """Check that a config with this change is refused."""
    with pytest.raises(JobError, match=message):
        hf.config.args_from_config(hf.config_to_hf(args) | change)


def write_folder(folder, tensors, args, hf, index=None, config=None):
    """Write a Hugging Face folder of these tensors, with changes of its config and an index if given."""
    (folder / "config.json").write_text(json.dumps(hf.config_to_hf(args) | (config or {})))
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / SINGLE)
    if index is not None:
        (folder / INDEX).write_text(json.dumps({"weight_map": index}))
