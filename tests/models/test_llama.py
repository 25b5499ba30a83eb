"""The Llama of this project: widths, tying, initial weights, compilation. See also test_decoder and test_hf."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.support.pool import run_ranks
from torchtitan.core.errors import JobError
from torchtitan.core.random_draws import Constant, Normal, initialize
from torchtitan.models import SIZES, apply_overrides
from torchtitan.models.attention import AttentionKernel
from torchtitan.models.decoder import DECODER_PLAN
from torchtitan.models.llama import LLAMA3, LLAMA31, LLAMA32, LlamaArgs
from torchtitan.models.llama.model import Llama
from torchtitan.models.sizes import RopeScaling
from torchtitan.parallelisms.plan import ParallelPlan, match_modules

TINY = LlamaArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=64, multiple_of=16, max_seq_len=128)


def build(args=TINY, seed=0, dtype=torch.float32):
    model = Llama(args)
    initialize(model, seed, model.init_rule)
    return model.to(dtype)


def tokens(batch=2, length=12):
    return torch.randint(0, TINY.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "family, flavor, ffn_dim, head_dim, scaling_factor",
    [
        ("llama2", "7B", 11008, 128, None),
        ("llama2", "13B", 13824, 128, None),
        ("llama2", "70B", 28672, 128, None),
        ("llama3", "8B", 14336, 128, None),
        ("llama3", "70B", 28672, 128, None),
        ("llama3", "405B", 53248, 128, 8.0),
        ("llama3.1", "8B", 14336, 128, 8.0),
        ("llama3.2", "1B", 8192, 64, 32.0),
        ("llama3.2", "3B", 8192, 128, 32.0),
    ],
)
def test_widths_and_rotary_scaling_as_published(family, flavor, ffn_dim, head_dim, scaling_factor):
    args = SIZES[family][flavor]
    assert (args.ffn_dim, args.head_dim) == (ffn_dim, head_dim)
    assert (args.rope_scaling and args.rope_scaling.factor) == scaling_factor
    assert args.tied_embeddings == (family == "llama3.2")


def test_sizes_are_known_without_importing_torch():
    code = "import sys, torchtitan.models; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"n_heads": 3}, "dim = 32 with n_heads = 3"),
        ({"n_heads": 32}, "even"),
        ({"n_kv_heads": 3}, "n_kv_heads = 3 with n_heads = 4.*divide"),
        ({"n_kv_heads": 0}, "n_kv_heads = 0"),
        ({"n_layers": 0}, "n_layers = 0.*at least 1"),
    ],
)
def test_impossible_sizes_are_refused(change, message):
    with pytest.raises(JobError, match=message):
        dataclasses.replace(TINY, **change)


def test_positions_default_to_counting_from_zero():
    model, x = build(), tokens()
    assert torch.equal(model(x), model(x, positions=torch.arange(12).expand(2, 12)))
    shuffled = torch.arange(12).flip(0).expand(2, 12)
    assert not torch.allclose(model(x), model(x, positions=shuffled))


def test_a_kernel_can_be_swapped_for_all_blocks():
    class Nothing(AttentionKernel):
        def forward(self, q, k, v, mask):
            return torch.zeros_like(q)

    model, x = build(), tokens()
    changed = x.clone()
    changed[:, 0] = (changed[:, 0] + 1) % TINY.vocab_size
    model.set_attention_kernels([Nothing()])
    assert torch.equal(model(x)[:, 1:], model(changed)[:, 1:]), "without attention a token sees only itself"


TIED = dataclasses.replace(TINY, tied_embeddings=True)


def test_tied_weights_stay_one_through_the_meta_device_and_casts():
    with torch.device("meta"):
        model = Llama(TIED)
    model.to_empty(device="cpu").to(torch.float64)
    assert model.output.weight is model.tok_embeddings.weight
    initialize(model, 0, model.init_rule)
    model(tokens()).square().mean().backward()
    used_as_head = model.output.weight.grad[torch.arange(64)[~torch.isin(torch.arange(64), tokens())]]
    assert used_as_head.any(), "rows of tokens that do not occur get their gradient through the head"


def test_initial_weights_follow_the_recipe():
    model = build(LlamaArgs(dim=256, n_layers=2, n_heads=4, vocab_size=512))
    w = dict(model.named_parameters())
    expected = {
        "tok_embeddings.weight": 1.0,
        "output.weight": 256**-0.5,
        "layers.0.attention.wq.weight": 0.02,
        "layers.1.attention.wv.weight": 0.02,
        "layers.1.feed_forward.w1.weight": 0.02,
        "layers.0.attention.wo.weight": 0.02 / 2**0.5,
        "layers.1.attention.wo.weight": 0.02 / 4**0.5,
        "layers.1.feed_forward.w2.weight": 0.02 / 4**0.5,
        "layers.1.feed_forward.w3.weight": 0.02 / 4**0.5,
    }
    for name, std in expected.items():
        # cutting a normal at 3 leaves 0.9866 of its standard deviation
        assert w[name].std().item() == pytest.approx(0.9866 * std, rel=0.02), name
        assert w[name].abs().max() <= 3 * std
    assert all((w[name] == 1).all() for name in w if "norm" in name)
    assert Llama(TIED).init_rule("tok_embeddings.weight") == Normal(TIED.dim**-0.5)
    assert model.init_rule("layers.0.ffn_norm.weight") == Constant(1.0)
    for bias in ("layers.0.ffn_norm.bias", "layers.1.attention.wo.bias", "norm.bias", "output.bias"):
        assert model.init_rule(bias) == Constant(0.0)  # no Llama has one, but families that build on the same parts do


def test_a_fresh_model_knows_nothing():
    model, x = build(dataclasses.replace(TINY, vocab_size=64)), tokens(8, 64)
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.roll(-1, 1).flatten())
    assert abs(loss.item() - 4.159 - 0.5) < 0.3  # ln 64, and half the variance of the logits, which is about 1


def test_blocks_share_one_graph_without_breaks():
    args = dataclasses.replace(TINY, rope_scaling=RopeScaling())
    model, x = build(args), tokens()
    documents = torch.arange(12).div(5, rounding_mode="floor").expand(2, 12)
    expected = model(x, document_ids=documents)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for block in model.layers.values():
        block.compile(backend=count, fullgraph=True)
    torch.testing.assert_close(model(x, document_ids=documents), expected, rtol=1e-5, atol=1e-5)
    assert len(graphs) == 1
    compiled = torch.compile(build(args), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, document_ids=documents), expected, rtol=1e-5, atol=1e-5)


def angles_in_blocks():
    model = build()
    rotations = []
    for block in model.layers.values():
        block.register_forward_pre_hook(lambda module, args: rotations.append(args[1].rotation))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)  # as data_parallel.py has it
    mesh = init_device_mesh("cpu", (2,))
    for block in model.layers.values():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    logits = model(tokens())
    return logits.dtype, rotations


def test_angles_stay_exact_under_fsdp_in_bfloat16():
    exact = build().kinds[0].rotary(torch.arange(12)[None])
    for dtype, rotations in run_ranks(2, angles_in_blocks):
        assert dtype == torch.bfloat16
        assert len(rotations) == 2 and all(torch.equal(rotation, exact) for rotation in rotations)


def test_patterns_find_modules_through_wrappers():
    model = build()
    model.layers["1"] = checkpoint_wrapper(model.layers["1"])
    blocks = match_modules(model, DECODER_PLAN.blocks)
    assert [name for name, _ in blocks] == ["layers.0", "layers.1"]
    assert blocks[1][1] is model.layers["1"]
    assert [name for name, _ in match_modules(model, "layers.*.attention.w[qk]")] == [
        f"layers.{layer}.attention.{matrix}" for layer in (0, 1) for matrix in ("wq", "wk")
    ]
    for pattern in (DECODER_PLAN.embedding, *DECODER_PLAN.head):
        assert match_modules(model, pattern) == [(pattern, model.get_submodule(pattern))]


def test_a_pattern_without_a_module_is_refused():
    with pytest.raises(ValueError, match="no module of Llama is called 'blocks.*'.*layers, norm, output"):
        match_modules(build(), ParallelPlan(blocks="blocks.*").blocks)


def test_tables_of_sizes_are_changed_in_part():
    """model.overrides: a table changes some entries of a table, false removes it, others stay."""
    assert apply_overrides(LLAMA31["8B"], {"rope_scaling": {"factor": 4.0}}).rope_scaling == RopeScaling(factor=4.0)
    assert apply_overrides(LLAMA3["8B"], {"rope_scaling": {"factor": 4.0}}).rope_scaling == RopeScaling(factor=4.0)
    assert apply_overrides(LLAMA31["8B"], {"rope_scaling": False, "n_layers": 2}).rope_scaling is None
    scaled = apply_overrides(LLAMA32["1B"], {"rope_scaling": {"low_freq_factor": 2.0}}).rope_scaling
    assert (scaled.factor, scaled.low_freq_factor) == (32.0, 2.0)
    with pytest.raises(TypeError):
        apply_overrides(LLAMA3["8B"], {"rope_scaling": {"facto": 4.0}})
