"""Shifted group attention (S2-Attn): equal to written-out attention, causal, and switched off in evaluation."""

import dataclasses
import math

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from tests.support.hf_parity import build, close, tokens_for
from tests.support.tiny_decoders import GEMMA3, LLAMA, MISTRAL, OPT
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.config.manager import load
from torchtitan.core.errors import JobError
from torchtitan.job import ResolvedJob
from torchtitan.models import attention
from torchtitan.models.attention import AttentionKernel, ShiftedGroups, use_shifted_groups
from torchtitan.models.gemma3.model import Gemma3
from torchtitan.models.kv_cache import CachedDecoder
from torchtitan.models.llama.model import Llama
from torchtitan.models.mistral.model import Mistral
from torchtitan.models.opt.model import OPT as OPTModel
from torchtitan.parallelisms.context_parallel import check_kernel_method
from torchtitan.parallelisms.sequence_layout import Tokens
from torchtitan.rules import check

LENGTH, SIZE = 24, 8
PLACES = torch.arange(LENGTH)
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 9 + [2] * 10, [0] * 24])


def inputs(heads, key_heads):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, count, LENGTH, 16) for count in (heads, key_heads, key_heads)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def visibility_mask(heads, documents=None):
    """Compute the mask [2, H, S, S] pair by pair: same group (shifted in half of the heads), causal, same document."""
    mask = torch.zeros(2, heads, LENGTH, LENGTH, dtype=torch.bool)
    for head in range(heads):
        shift = 0 if head < heads // 2 else SIZE // 2
        for query in range(LENGTH):
            for key in range(query + 1):
                mask[:, head, query, key] = math.floor((query + shift) / SIZE) == math.floor((key + shift) / SIZE)
    return mask if documents is None else mask & (documents[:, None, :, None] == documents[:, None, None, :])


def reference_attention(q, k, v, mask):
    """Compute attention with explicit scores, [B, H, S, E]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return ((q @ k.mT) * q.shape[-1] ** -0.5).masked_fill(~mask, -math.inf).softmax(-1) @ v


@pytest.mark.parametrize("heads, key_heads", [(4, 4), (6, 2), (4, 1), (6, 3)])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "documents"])
def test_equal_to_written_out_attention_inside_groups(heads, key_heads, documents):
    """Also where query heads of both kinds share a key."""
    q, k, v = inputs(heads, key_heads)
    kernel = ShiftedGroups(SIZE, heads)
    got = kernel(q, k, v, kernel.prepare(Tokens(PLACES, documents)))
    torch.testing.assert_close(
        got, reference_attention(q, k, v, visibility_mask(heads, documents)), rtol=1e-10, atol=1e-12
    )


def test_number_of_visible_pairs():
    """S tokens in groups of G make S / G triangles of side G; shifted heads have one fewer, and two of side G / 2."""
    tokens = Tokens(PLACES, None)
    masks = [half.dense_mask(tokens, tokens).sum().item() for half in ShiftedGroups(SIZE, 4).halves]

    def triangle(n):
        return n * (n + 1) // 2

    assert masks == [3 * triangle(8), 2 * triangle(8) + 2 * triangle(4)] and sum(masks) < triangle(LENGTH)
    assert ShiftedGroups(LENGTH, 4).prepare(tokens)[0] is None  # one group hides nothing


def test_flex_attention_skips_hidden_blocks():
    """Of 16 x 16 blocks of 128 tokens it computes triangles of side 4 (side 2 at the ends for shifted heads)."""
    masks = ShiftedGroups(512, 4, "flex").prepare(Tokens(torch.arange(2048), None))
    num_blocks = [256 * (1 - mask.sparsity() / 100) for mask in masks]
    assert num_blocks == pytest.approx([4 * 10, 3 * 10 + 2 * 3])


def test_flex_attention_masks_the_same(monkeypatch):
    monkeypatch.setattr(attention, "compile_lazily", lambda function: function)  # compiling changes no mask
    q, k, v = (x.float() for x in inputs(4, 2))
    for documents in (None, DOCUMENTS):
        kernel = ShiftedGroups(SIZE, 4, "flex")
        masks = kernel.prepare(Tokens(PLACES, documents))
        assert all(isinstance(mask, BlockMask) for mask in masks)
        with torch.no_grad():
            got = kernel(q, k, v, masks)
        torch.testing.assert_close(
            got, reference_attention(q, k, v, visibility_mask(4, documents)), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_parts_of_heads_and_of_queries_equal_the_full_result(key_heads):
    """Tensor parallel splits the heads, context parallel the queries."""
    q, k, v = inputs(8, key_heads)
    full_kernel, part = ShiftedGroups(SIZE, 8), ShiftedGroups(SIZE, 8)
    mask = full_kernel.prepare(Tokens(PLACES, DOCUMENTS))
    expected = full_kernel(q, k, v, mask)
    every = [x.repeat_interleave(8 // key_heads, dim=1) for x in (k, v)]
    for ranks, rank in ((2, 0), (2, 1), (4, 1), (4, 2)):
        part.head_shard, local_heads = rank, slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
        got = part(q[:, local_heads], *(x[:, local_heads] for x in every), mask)
        torch.testing.assert_close(got, expected[:, local_heads], rtol=1e-10, atol=1e-12)
    some = torch.tensor([1, 9, 12, 23])
    of_some = full_kernel.prepare(Tokens(some, DOCUMENTS[:, some]), Tokens(PLACES, DOCUMENTS))
    torch.testing.assert_close(full_kernel(q[:, :, some], k, v, of_some), expected[:, :, some], rtol=1e-10, atol=1e-12)


def grouped_model():
    model = build(Llama, LLAMA["llama3"], dtype=torch.float64)
    use_shifted_groups(model, SIZE)
    return model.train()


def change_token(tokens, place):
    changed = tokens.clone()
    changed[:, place] = (tokens[:, place] + 1) % LLAMA["llama3"].vocab_size
    return changed


@torch.no_grad()
def test_no_token_sees_a_later_one():
    """The shifted groups must not wrap around: the first half group would see the sequence's end."""
    model, tokens = grouped_model(), tokens_for(LLAMA["llama3"], 1, LENGTH)
    logits = model(tokens)
    for place in range(LENGTH):
        differs = (model(change_token(tokens, place)) != logits).any(-1)[0]
        assert differs[place] and not differs[:place].any()


@torch.no_grad()
def test_shifted_groups_connect_neighbouring_groups():
    """With two layers the first token reaches its group, and half a group further."""
    model, tokens = grouped_model(), tokens_for(LLAMA["llama3"], 1, LENGTH)
    differs = (model(change_token(tokens, 0)) != model(tokens)).any(-1)[0]
    assert differs.nonzero().flatten().tolist() == list(range(12))


@torch.no_grad()
def test_evaluation_and_generation_see_everything():
    plain, model = build(Llama, LLAMA["llama3"], dtype=torch.float64), grouped_model()
    tokens = tokens_for(LLAMA["llama3"], 2, LENGTH)
    assert not close(model(tokens), plain(tokens), 1e-2)
    assert torch.equal(model.eval()(tokens), plain(tokens))
    remembering = CachedDecoder(model)
    for end in (3, 20, 21):
        logits = remembering(tokens[:1, :end])
        assert close(logits, plain(tokens[:1, :end])[:, -logits.shape[1] :], 1e-12)


def test_a_jobs_model_attends_in_groups():
    config = load(["--model.s2_group_size=8", "--model.attention_backend=sdpa", "--model.tokenizer_path=bytes"])
    model = ModelBuilder(ResolvedJob(config)).adapted_model()[0]
    (kernel,) = {*model.kernels, *(block.attention.kernel for block in model.layers.values())}
    assert type(kernel) is ShiftedGroups and (kernel.size, kernel.heads, kernel.backend) == (8, 16, "sdpa")
    assert (
        type(ModelBuilder(ResolvedJob(load(["--model.tokenizer_path=bytes"]))).adapted_model()[0].kernels[0])
        is AttentionKernel
    )


def faults(ranks, *options):
    all_faults = check(load(["--model.tokenizer_path=bytes", "--training.seq_len=64", *options]), ranks, "cpu")
    return [line for line in map(str, all_faults) if "s2_group_size" in line]


WRONG = [
    (
        ["--model.s2_group_size=64"],
        "less than training.seq_len = 64, as a group is a part of the sequence; write 16, or 0",
    ),
    (
        ["--model.s2_group_size=15"],
        "given 15; allowed: an even number, as groups are shifted by half a group; write 14",
    ),
    (["--model.name=mistral"], "0 for a model with a sliding window (64); write 0, or model.overrides = {sliding_w"),
    (["--model.name=gemma2"], "a model with a sliding window (64) and capped attention scores (50.0); write 0"),
    (["--model.name=gemma3"], "0 for a model with a sliding window (64); write 0"),
    (["--model.name=llama4"], "0 for a model with attention within chunks (128); write 0"),
    (["--model.name=qwen3_5"], "0 for a model with layers with a state (6); write 0"),
    (["--model.name=falcon_h1"], "0 for a model with layers with a state (6); write 0"),
    (["--model.name=gpt2", "--model.overrides={attention_dropout = 0.1}"], "a model with attention_dropout (0.1)"),
    (["--model.name=roberta"], "0 for roberta, which has bidirectional attention; write 0, or train a decoder"),
    (["--model.overrides={n_heads = 1, dim = 16}"], "n_heads = 1, an odd number: half of the heads use shifted groups"),
    (["--task.kind=dpo"], '0 with task.kind = "dpo", which compares answers with a reference in evaluation mode'),
    (["--task.kind=documents"], '0 with task.kind = "documents", which replays cached documents'),
]


@pytest.mark.parametrize("options, message", WRONG, ids=[options[-1] for options, _ in WRONG])
def test_incompatible_options_are_refused(options, message):
    size = [] if "s2_group_size" in options[0] else ["--model.s2_group_size=16"]
    assert [message in line for line in faults(1, *size, *options)] == [True]


@pytest.mark.parametrize("method", ["ring", "alltoall", "ulysses"])
def test_context_parallel_methods_with_their_own_attention_are_refused(method):
    message = f'context_parallel_rotate_method: given "{method}"; allowed: "allgather" with model.s2_group_size'
    check_kernel_method(ShiftedGroups(8, 4), "allgather")
    with pytest.raises(JobError, match=message):
        check_kernel_method(ShiftedGroups(8, 4), method)
    options = ["--model.s2_group_size=16", "--parallelism.context_parallel_degree=2"]
    (line,) = faults(2, *options, f"--parallelism.context_parallel_rotate_method={method}")
    assert message in line and faults(2, *options) == []


DROPPING = dataclasses.replace(OPT["words"], attention_dropout=0.1)


@pytest.mark.parametrize("model, args", [(Mistral, MISTRAL["window"]), (Gemma3, GEMMA3["plain"]), (OPTModel, DROPPING)])
def test_models_with_other_attention_are_refused(model, args):
    with pytest.raises(JobError, match="given 8; allowed: 0 for .*, whose attention .* is not plainly causal"):
        use_shifted_groups(model(args), 8)
