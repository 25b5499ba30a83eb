"""Multi-token prediction: loss and gradients by the formula, packed documents, counts of weights and FLOPs, faults.

test_combinations.py tests the plans, test_hf_deepseek.py the folders.
"""

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.support import jobs, judged
from tests.support.hf_parity import build, tokens_for
from tests.support.judged import CP, EP, MOE, PP, TP, lines
from tests.support.pool import run_ranks
from tests.support.tiny_decoders import MULTI_TOKEN
from torchtitan.core.errors import JobError
from torchtitan.core.random_draws import Constant, Normal
from torchtitan.losses.objective import IGNORE_INDEX, SummedCrossEntropy
from torchtitan.metrics.json_lines import read_records
from torchtitan.models import SIZES
from torchtitan.models.attention import AttentionKernel
from torchtitan.models.deepseek.model import IGNORED, PLAN, Deepseek, LatentAttention
from torchtitan.models.moe import layer as experts
from torchtitan.models.moe.layer import MoEBlock
from torchtitan.models.spec import MODELS
from torchtitan.parallelisms.data_parallel import apply_data_parallel

anywhere = judged.anywhere
LENGTHS = [5, 1, 2, 4]


class Recording(SummedCrossEntropy):
    """A cross-entropy that records the value of each call."""

    def __init__(self, num_chunks=1):
        super().__init__(num_chunks)
        self.values = []

    def forward(self, hidden, head, batch):
        loss = super().forward(hidden, head, batch)
        self.values.append(loss.item())
        return loss


def training_model(args=MULTI_TOKEN, **recording):
    model = build(Deepseek, args, dtype=torch.float64).train()
    model.loss = Recording(**recording)
    return model


def tokens_and_labels(args=MULTI_TOKEN, batch=2, length=12):
    """Return tokens and labels, some of them ignored."""
    drawn = torch.cat((tokens_for(args, batch, length), tokens_for(args, batch, length).flip(0, 1)[:, :1]), dim=1)
    labels = drawn[:, 1:].clone()
    labels[0, :3] = labels[-1, 7] = IGNORE_INDEX
    return drawn[:, :-1], labels


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


# -- the formula ------------------------------------------------------------------------------------------------------


def rms(x, weight, eps):
    """Compute RMSNorm in plain torch."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def block_of(model, weights, prefix):
    """Return a function that runs a plain block with these weights."""
    block = MoEBlock(model.args, LatentAttention(model.args, AttentionKernel())).double().train()
    parameters = {name: weights[prefix + name] for name in block.state_dict()}
    return lambda *inputs: torch.func.functional_call(block, parameters, inputs)


def formula(model, tokens, labels):
    """Compute the formula in plain torch.

    Returns the loss sums of the main model and each depth, and the gradients of main + weight / depths * sum(depths).
    """
    args = model.args
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name, _ in model.named_parameters():
        weights[name].requires_grad_()
    plain = Deepseek(replace(args, n_mtp_layers=0)).double().train()
    plain.output = None
    main = {name: weights[name] for name in plain.state_dict()}
    h = torch.func.functional_call(plain, main, (tokens,))
    sums = []
    for depth in range(args.n_mtp_layers + 1):
        length = tokens.shape[1] - depth
        if depth:
            layer = f"layers.{args.n_layers + depth - 1}."
            part = {name.removeprefix(layer): value for name, value in weights.items() if name.startswith(layer)}
            next_embeddings = weights["tok_embeddings.weight"][tokens[:, depth:]]
            e = rms(next_embeddings, part["enorm.weight"], args.norm_eps)
            h = rms(h[:, :length], part["hnorm.weight"], args.norm_eps)
            x = torch.cat((e, h), -1) @ part["eh_proj.weight"].T
            y = block_of(model, weights, layer)(x, plain.shared_for_layer(plain.context(x), 0))
            h = rms(y, part["norm.weight"], args.norm_eps)
        logs = (h @ weights["output.weight"].T).log_softmax(-1)
        term = [
            -logs[sample, position, labels[sample, position + depth]]
            for sample in range(tokens.shape[0])
            for position in range(length)
            if labels[sample, position + depth] != IGNORE_INDEX
        ]
        sums.append(torch.stack(term).sum())
    extra = sum(sums[1:]) * args.mtp_loss_weight / max(args.n_mtp_layers, 1)
    (sums[0] + extra).backward()
    grads = {name: weights[name].grad for name, _ in model.named_parameters()}
    return [value.item() for value in sums], grads


@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize("depths", [0, 1, 2])
def test_equal_to_the_formula(depths, num_chunks):
    model = training_model(replace(MULTI_TOKEN, n_mtp_layers=depths), num_chunks=num_chunks)
    tokens, labels = tokens_and_labels()
    loss = model(tokens, labels=labels)
    loss.backward()
    sums, expected = formula(model, tokens, labels)
    assert model.loss.values == pytest.approx(sums, rel=1e-12)
    assert loss.item() == pytest.approx(sums[0], rel=1e-12)  # the value stays the main one
    extra_losses = model.take_extra_losses()
    assert extra_losses == ({"mtp_loss": pytest.approx(sum(sums[1:]) / depths, rel=1e-12)} if depths else {})
    for parameter, grad in gradients(model).items():
        assert expected[parameter].any(), parameter
        torch.testing.assert_close(grad, expected[parameter], rtol=1e-9, atol=1e-12, msg=parameter)


def test_only_training_runs_the_depths():
    """Validation, logits and generation use only the main model."""
    model, (tokens, labels) = training_model(), tokens_and_labels()
    main = build(Deepseek, replace(MULTI_TOKEN, n_mtp_layers=0), dtype=torch.float64)
    main.load_state_dict({name: model.state_dict()[name] for name in main.state_dict()})
    main.loss = Recording()
    model.eval()
    assert torch.equal(model(tokens), main(tokens))
    assert torch.equal(model(tokens, labels=labels), main(tokens, labels=labels))
    assert len(model.loss.values) == 1
    assert torch.equal(model.train()(tokens), main(tokens))


def test_ignored_labels_are_those_of_the_loss():
    assert IGNORED == IGNORE_INDEX


def test_packed_documents_have_the_loss_of_separate_ones():
    """Some documents are shorter than the number of depths."""
    packed, separate = training_model(), training_model()
    tokens, labels = tokens_and_labels(batch=1)
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))[None]
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    packed(tokens, positions=positions, document_ids=ids, labels=labels).backward()
    for piece, piece_labels in zip(tokens.split(LENGTHS, 1), labels.split(LENGTHS, 1), strict=True):
        separate(piece, labels=piece_labels).backward()
    sums = torch.tensor(separate.loss.values).view(-1, 3).sum(0)
    torch.testing.assert_close(torch.tensor(packed.loss.values), sums)
    for parameter, grad in gradients(packed).items():
        torch.testing.assert_close(grad, gradients(separate)[parameter], rtol=1e-9, atol=1e-12, msg=parameter)
    free = training_model()
    free(tokens, positions=positions, labels=labels)
    assert free.loss.values[1:] != pytest.approx(packed.loss.values[1:], rel=1e-3)


def test_a_sample_shorter_than_a_depth_adds_no_loss():
    model = training_model()
    tokens, labels = tokens_and_labels(batch=1)
    model(tokens[:, 8:9], labels=labels[:, 8:9]).backward()
    assert model.loss.values[0] > 0 and model.loss.values[1:] == [0, 0]
    assert not model.layers["4"].eh_proj.weight.grad.any()


def test_under_autocast_a_depth_has_the_dtype_of_the_layers():
    model, (tokens, labels) = build(Deepseek, MULTI_TOKEN).train(), tokens_and_labels()
    model.loss, dtypes = Recording(), []
    model.layers["3"].register_forward_pre_hook(lambda module, inputs: dtypes.extend(x.dtype for x in inputs[:2]))
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens, labels=labels).backward()
    assert dtypes == [torch.bfloat16, torch.bfloat16]


def test_the_depth_loss_accumulates_until_it_is_read():
    model, (tokens, labels) = training_model(), tokens_and_labels()
    for _ in range(2):
        model(tokens, labels=labels)
    depths = [value for number, value in enumerate(model.loss.values) if number % 3]
    assert model.take_extra_losses() == {"mtp_loss": pytest.approx(sum(depths) / 2, rel=1e-12)}
    assert model.take_extra_losses() == {"mtp_loss": 0}
    model.eval()(tokens, labels=labels)
    assert model.take_extra_losses() == {"mtp_loss": 0}


def test_the_depth_loss_starts_at_zero_and_stays_in_float64(monkeypatch):
    """It does not depend on uninitialized memory, and is not part of checkpoints."""
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: empty_like(*args, **kwargs).fill_(7))
    with torch.device("meta"):
        model = Deepseek(MULTI_TOKEN)
    model.to_empty(device="cpu").bfloat16()
    assert model.mtp_loss.dtype == torch.float64 and model.take_extra_losses() == {"mtp_loss": 0}
    assert "mtp_loss" not in model.state_dict()


def test_the_compiled_model_compiles_once_for_all_microbatches():
    model, (tokens, labels) = build(Deepseek, MULTI_TOKEN).train(), tokens_and_labels()
    model.loss, compiled, numbers = SummedCrossEntropy(), [], []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    torch._dynamo.reset()
    model.compile(backend=backend)
    for _ in range(3):
        model(tokens, labels=labels).backward()
        numbers.append(len(compiled))
    assert numbers[0] > 0 and numbers[1:] == numbers[:1] * 2


def gathered_layers(prefetch, training):
    """Return the layers with gathered weights, or with a gather in flight, after a forward."""
    model = build(Deepseek, MULTI_TOKEN)
    model.loss = SummedCrossEntropy()
    mesh, types = init_device_mesh("cpu", (2,)), dict(param_dtype=torch.float32, reduce_dtype=torch.float32)
    apply_data_parallel(model, mesh, PLAN, **types, prefetch=prefetch)
    tokens, labels = tokens_and_labels()
    with torch.set_grad_enabled(training):
        model.train(training)(tokens, labels=labels)
    groups = {name: block._get_fsdp_state()._fsdp_param_group for name, block in model.layers.items()}
    return [name for name, group in groups.items() if group._all_gather_result is not None or group.is_unsharded]


def test_evaluation_prefetches_no_depth():
    """Evaluation does not run the depth, so it would never free the gathered weights."""
    for training in (False, True):
        assert run_ranks(2, gathered_layers, 2, training) == [[]] * 2


def test_initial_weights_are_those_of_layers():
    model = Deepseek(MULTI_TOKEN)
    assert model.init_rule("layers.3.eh_proj.weight") == Normal(0.02)
    assert model.init_rule("layers.4.attention.wo.weight") == Normal(0.02 / 10**0.5)
    assert {model.init_rule(f"layers.3.{norm}.weight") for norm in ("enorm", "hnorm", "norm")} == {Constant(1.0)}


# -- counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [MULTI_TOKEN, replace(SIZES["deepseek"]["671B"], n_mtp_layers=1)], ids=["tiny", "V3"])
def test_weights_are_counted(args):
    with torch.device("meta"):
        model = Deepseek(args)
    assert sum(p.numel() for p in model.parameters()) == args.num_parameters
    linear = [m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear)]
    routed = (args.n_layers - args.n_dense_layers + args.n_mtp_layers) * args.top_k * args.expert_parameters
    head = args.dim * args.vocab_size
    assert sum(linear) + routed + args.n_mtp_layers * head == args.num_matmul_parameters
    idle = routed // args.top_k * (args.n_experts - args.top_k)
    assert args.num_parameters - args.num_active_parameters == idle


def test_the_published_depth_has_its_published_size():
    """README_WEIGHTS of DeepSeek-V3 gives 11.5e9 parameters, and 2.4e9 active ones with embedding and head.

    Both are right without eh_proj (0.1e9), though the published weights contain it.
    """
    main, more = (replace(SIZES["deepseek"]["671B"], n_mtp_layers=depths) for depths in (0, 1))
    num_added = more.num_parameters - main.num_parameters
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * (512 + 64) + 512 * 128 * 256 + 128 * 128 * 7168
    moe = 7168 * 256 + 257 * 3 * 7168 * 2048
    joining = 2 * 7168**2
    assert num_added == attention + moe + joining + 5 * 7168 + 1536 + 512
    assert round((num_added - joining) / 1e9, 1) == 11.5
    active = more.num_active_parameters - main.num_active_parameters + 2 * 129280 * 7168
    assert round((active - joining) / 1e9, 1) == 2.4


@pytest.mark.parametrize("depths", [1, 2])
def test_flops_equal_torchs_counter(depths, monkeypatch):
    """torch counts grouped products and fused attention as nothing, see test_flops.py."""
    monkeypatch.setattr(experts, "_native", None)
    sizes = dict(n_layers=2, n_heads=2, vocab_size=256, ffn_dim=128, kv_lora_rank=64, n_mtp_layers=depths)
    args = replace(SIZES["deepseek"]["debugmodel"], **sizes)
    model = build(Deepseek, args).train()
    model.loss = SummedCrossEntropy()
    tokens = tokens_for(args, 2, 64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, labels=tokens).backward()
    expected = MODELS["deepseek"].flops_per_token(args, 64).full
    assert counter.get_total_flops() / tokens.numel() == pytest.approx(expected, rel=5e-3)


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"n_mtp_layers": -1}, {"mtp_loss_weight": -0.1}])
def test_impossible_sizes_are_refused(change):
    ((key, value),) = change.items()
    with pytest.raises(JobError, match=f"{key} = {value}: must not be negative"):
        replace(MULTI_TOKEN, **change)


DEPTH = "--model.overrides={n_mtp_layers = 1}"
WHY = "allowed: 1 with multi-token prediction (n_mtp_layers = 1 in model.overrides)"
REFUSED = [
    (
        [MOE, DEPTH, TP + "2"],
        f"tensor_parallel_degree: given 2; {WHY}, whose last norm and head are not split; write 1, or leave "
        "n_mtp_layers out",
    ),
    (
        [MOE, DEPTH, CP + "2"],
        f"context_parallel_degree: given 2; {WHY}, which needs tokens of other ranks; write 1, or leave n_mtp_layers "
        "out",
    ),
    (
        [MOE, DEPTH, PP + "2"],
        f"pipeline_parallel_degree: given 2; {WHY}, which needs the embedding in the last stage; write 1, or leave "
        "n_mtp_layers out",
    ),
    *(
        (
            [MOE, f"--model.overrides={{{sizes}mtp_loss_weight = 0.1}}"],
            "model.overrides: given mtp_loss_weight = 0.1; allowed: mtp_loss_weight with n_mtp_layers of at least 1, "
            "whose loss it weighs; set n_mtp_layers too, or leave it out",
        )
        for sizes in ("", "n_mtp_layers = 0, ")
    ),
]


@pytest.mark.parametrize("case", REFUSED, ids=judged.name)
def test_unsupported_plans_and_weights_without_a_depth_are_refused(case):
    options, *expected = case
    assert lines(*options) == expected


SHARDS, REPLICAS = (f"--parallelism.data_parallel_{kind}_degree=" for kind in ("shard", "replicate"))
ALLOWED = [
    [MOE, DEPTH],
    [MOE, DEPTH, SHARDS + "4", EP + "2", "--activation_checkpoint.mode=full"],
    [MOE, DEPTH, REPLICAS + "2", SHARDS + "2", "--training.document_mask"],
    [MOE, DEPTH, "--compile.enable"],
    [MOE, "--model.overrides={n_mtp_layers = 1, mtp_loss_weight = 0.1}"],
    [MOE, TP + "2", "--model.overrides={n_mtp_layers = 0}"],
]


@pytest.mark.parametrize("options", ALLOWED, ids=" ".join)
def test_other_plans_are_allowed(options):
    assert lines(*options) == []


# -- through the trainer ----------------------------------------------------------------------------------------------

SMALL = "{dim=32, n_layers=2, n_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, "
SMALL += "ffn_dim=48, expert_dim=16, vocab_size=260, n_mtp_layers=1}"
JOB = dict(model__name="deepseek", model__overrides=SMALL, optimizer__lr=1e-3, training__document_mask=True)
JOB |= dict(lr_scheduler__total_steps=6, validation__enable=True, validation__freq=3, validation__steps=2)
JOB |= dict(validation__dataset="text", checkpoint__enable=True, checkpoint__interval=3)


def test_a_job_with_a_depth_resumes_under_another_plan(tmp_path):
    texts = jobs.write_texts(tmp_path / "texts")
    job = JOB | dict(validation__dataset_path=str(texts))
    sharded = dict(parallelism__expert_parallel_degree=2, training__local_batch_size=4, validation__local_batch_size=4)
    for folder, ranks, steps, plan in (("plain", 1, 6, {}), ("both", 2, 3, sharded), ("both", 1, 6, {})):
        argv = jobs.arguments(tmp_path / folder, texts, **job | plan, training__steps=steps)
        run_ranks(ranks, jobs.train, argv)
    plain, both = (read_records(tmp_path / folder / "metrics.jsonl") for folder in ("plain", "both"))
    for key, count in {"loss": 6, "validation_loss": 2, "expert_load_max": 6, "mtp_loss": 6}.items():
        expected = [record[key] for record in plain if key in record]
        assert [record[key] for record in both if key in record] == pytest.approx(expected, rel=1e-5)
        assert len(expected) == count
