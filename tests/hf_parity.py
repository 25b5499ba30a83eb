"""Transformers' twin of a model with experts: the same weights, in float32 or exactly in float64."""

import contextlib
from types import ModuleType

import torch

from torchtitan.initialization import initialize


def build(family, args, seed=0, dtype=torch.float32):
    """A model whose norms are not ones and whose biases are not zero, which would hide mistakes."""
    model = family(args)
    initialize(model, seed, model.init_rule)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict(keep_vars=True).items():
        with torch.no_grad():
            if "norm" in name:
                tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
            elif "router.gate" in name:  # scores far enough apart for a choice that rounding does not change
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            elif "expert_bias" in name:
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    return model.to(dtype).eval()


def fused(state, args):
    """Ours in the form of a folder -> the names of transformers 5 in memory, where experts are stacked again."""
    named = {name: value for name, value in state.items() if ".experts." not in name}
    for layer in sorted({name.split(".mlp.experts.")[0] for name in state if ".mlp.experts." in name}):
        experts = [f"{layer}.mlp.experts.{expert}" for expert in range(args.n_experts)]
        gates = [torch.cat([state[f"{e}.gate_proj.weight"], state[f"{e}.up_proj.weight"]]) for e in experts]
        named[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack(gates)
        named[f"{layer}.mlp.experts.down_proj"] = torch.stack([state[f"{e}.down_proj.weight"] for e in experts])
    return named


def twin(theirs_class, config, model, hf, dtype):
    theirs = theirs_class._from_config(config, attn_implementation="sdpa", experts_implementation="eager")
    state = fused(hf.to_hf(model.state_dict(), model.args), model.args)
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert missing == (["lm_head.weight"] if model.args.tied_embeddings else []) and not unexpected
    return theirs.to(dtype).eval()


class _Wide:
    """torch, with float64 in the places where transformers asks for float32."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextlib.contextmanager
def exact(modeling: ModuleType, model, theirs, monkeypatch):
    """Norms, routers and angles of both in float64, with transformers' frequencies: ours may differ in the last bit."""
    with monkeypatch.context() as patch:
        patch.setattr(modeling, "torch", _Wide())
        frequencies = theirs.model.rotary_emb.inv_freq.double()

        def rotation(positions):
            angles = positions[..., None, None].double() * frequencies
            return torch.stack((angles.cos(), angles.sin()), dim=-1)

        model.rotary.forward = rotation
        yield


def close(ours, theirs, tolerance):
    return (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def compare(model, theirs, hf, tolerance):
    """Logits and every gradient."""
    args = model.args
    tokens = torch.randint(0, args.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
    ours_logits, their_logits = model(tokens), theirs(tokens).logits
    assert close(ours_logits, their_logits, tolerance)
    weight = torch.randn(ours_logits.shape, dtype=ours_logits.dtype, generator=torch.Generator().manual_seed(1)) / 100
    (ours_logits * weight).sum().backward()
    (their_logits * weight).sum().backward()
    gradients = fused(hf.to_hf({name: p.grad for name, p in model.named_parameters()}, args), args)
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    assert set(gradients) == set(expected)
    for name, gradient in gradients.items():
        assert expected[name].any(), name
        assert close(gradient, expected[name], tolerance), name
