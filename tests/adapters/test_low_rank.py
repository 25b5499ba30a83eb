"""Low-rank adapters: logits, gradients and folders equal to peft's, merging, and which modules can be adapted.

test_combinations.py compares the gradients under every plan with one device.
"""

import json
import math
import os
import re
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3ForCausalLM,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.llama import LlamaConfig

from tests.support import judged, tiny_decoders
from tests.support.hf_parity import twin
from tests.support.jobs import full
from tests.support.judged import lines
from tests.support.low_rank_adapters import KINDS, adapter_tensors, moved_model, plain_copy
from tests.support.pool import run_ranks
from torchtitan.adapters import ADAPTERS, peft_config, peft_folder
from torchtitan.adapters.low_rank import (
    DoRA,
    DoRALinear,
    LoRA,
    LoRASettings,
    adaptable_modules,
    adapted_row_norms,
    add_product,
    linear_shape,
)
from torchtitan.adapters.targets import LINEAR_ONLY_KINDS
from torchtitan.config.sections.model import Adapter as Options
from torchtitan.core.errors import JobError
from torchtitan.core.random_draws import initialize
from torchtitan.lr_schedules import LRSchedule
from torchtitan.lr_scheduling import build_lr_schedulers
from torchtitan.models import SIZES
from torchtitan.models.sizes import linears, parameters, split_side
from torchtitan.models.spec import MODELS
from torchtitan.optimizers.build import build_optimizers

anywhere = judged.anywhere
TOKENS = torch.arange(40).view(2, 20) * 7 % 64
SHARED = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
TINY = tiny_decoders.LLAMA | tiny_decoders.DEEPSEEK | tiny_decoders.QWEN2


CASES = [
    ("llama3", "llama3", dict(), LlamaForCausalLM, LlamaConfig),
    ("llama3", "llama3", dict(rslora=True, target=["*wq", "*w2"]), LlamaForCausalLM, LlamaConfig),
    ("llama3", "llama3", dict(kind="dora"), LlamaForCausalLM, LlamaConfig),
    ("llama3.2", "llama3.2", dict(target=["all-linear", "output"], layers=[]), LlamaForCausalLM, LlamaConfig),
    ("llama2", "llama2", dict(layers=[1]), LlamaForCausalLM, LlamaConfig),
    ("qwen2", "plain", dict(kind="dora", target=["*attention*"]), Qwen2ForCausalLM, Qwen2Config),
    # in a model with experts, peft 0.21 adapts the expert stacks for any target below mlp
    ("deepseek", "v3", dict(target=["*attention*", "output"]), DeepseekV3ForCausalLM, DeepseekV3Config),
]


@pytest.mark.parametrize("family, args, options, theirs_class, config_class", CASES)
def test_logits_and_gradients_are_those_of_peft(tmp_path, family, args, options, theirs_class, config_class):
    """The plain model equals the one of transformers to 1e-6, and peft reads the folder that we write."""
    from peft import PeftModel

    args = TINY[args]
    options = Options(**{"kind": "lora", "rank": 4, "alpha": 6.0} | options)
    model, adapter = moved_model(family, args, options)
    hf = MODELS[family].hf
    peft_folder.save(tmp_path, adapter_tensors(model, adapter), options, hf.tensor_map(args), "base")
    peft_model = twin(theirs_class, config_class, plain_copy(model, adapter, family).eval(), hf)
    peft_model = PeftModel.from_pretrained(peft_model, tmp_path, is_trainable=True).eval()
    logits, expected = model(TOKENS), peft_model(TOKENS).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)) / logits.numel()
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    ours = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    ours = peft_folder.to_peft(ours, hf.tensor_map(args))
    peft_gradients = {
        name.replace(".default", "").replace("vector.weight", "vector"): p.grad
        for name, p in peft_model.named_parameters()
        if p.requires_grad
    }
    assert ours.keys() == peft_gradients.keys()
    for name, grad in ours.items():
        assert (grad - peft_gradients[name]).abs().max() <= 1e-5 * peft_gradients[name].abs().max(), name


@pytest.mark.parametrize("target", [["all-linear"], ["*wk", "*w3"]])
def test_pairs_of_matrices_that_are_one_of_unequal_parts_are_those_of_peft(tmp_path, target):
    """Phi's joint matrix has more rows of queries than of keys."""
    from peft import PeftModel

    args, options = tiny_decoders.GATED["phi3"], Options(kind="lora", rank=3, alpha=5.0, target=target)
    model, adapter = moved_model("phi3", args, options)
    hf, tensors = MODELS["phi3"].hf, adapter_tensors(model, adapter)
    peft_folder.save(tmp_path, tensors, options, hf.tensor_map(args), "base")
    peft_model = twin(Phi3ForCausalLM, Phi3Config, plain_copy(model, adapter, "phi3").eval(), hf)
    peft_model = PeftModel.from_pretrained(peft_model, tmp_path).eval()
    torch.testing.assert_close(model(TOKENS), peft_model(TOKENS).logits, rtol=1e-5, atol=1e-5)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    state = peft_folder.load(tmp_path, options, hf.tensor_map(args), shapes)
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_written_by_peft_is_read(tmp_path, kind):
    from peft import LoraConfig, get_peft_model

    args, options = tiny_decoders.LLAMA["llama3"], Options(kind=kind, rank=3, alpha=5.0, target=["*wq", "*w2"])
    model, adapter = moved_model("llama3", args, options)
    peft_model = twin(LlamaForCausalLM, LlamaConfig, plain_copy(model, adapter, "llama3").eval(), MODELS["llama3"].hf)
    config = LoraConfig(r=3, lora_alpha=5.0, target_modules=["q_proj", "down_proj"], use_dora=kind == "dora")
    peft_model = get_peft_model(peft_model, config)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter += 0.1 * torch.randn(parameter.shape)
    peft_model.save_pretrained(tmp_path)
    shapes = {name: tuple(tensor.shape) for name, tensor in adapter_tensors(model, adapter).items()}
    state = peft_folder.load(tmp_path, options, MODELS["llama3"].hf.tensor_map(args), shapes)
    model.load_state_dict(state, strict=False)
    torch.testing.assert_close(model(TOKENS), peft_model.eval()(TOKENS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(rank=3), "r = 4, the job's is 3"),
        (dict(alpha=3.0), "lora_alpha = 32.0, the job's is 3.0"),
        (dict(target=["*wq", "*wk"]), r"it lacks base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"),
        (dict(target=["*w2"]), r"it also holds base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"),
    ],
)
def test_another_adapter_is_refused(tmp_path, change, message):
    args, options = tiny_decoders.LLAMA["llama3"], Options(kind="lora", rank=4, target=["*wq"])
    model, adapter = moved_model("llama3", args, options)
    form = MODELS["llama3"].hf.tensor_map(args)
    peft_folder.save(tmp_path, adapter_tensors(model, adapter), options, form)
    model, adapter = moved_model("llama3", args, replace(options, **change))
    shapes = {name: tuple(tensor.shape) for name, tensor in adapter_tensors(model, adapter).items()}
    with pytest.raises(JobError, match=message):
        peft_folder.load(tmp_path, replace(options, **change), form, shapes)


def test_another_adapter_is_refused_before_a_job_starts(tmp_path):
    """All differing settings of its config are reported together."""
    args, options = tiny_decoders.LLAMA["llama3"], Options(kind="lora", rank=4, target=["*wq"])
    model, adapter = moved_model("llama3", args, options)
    peft_folder.save(tmp_path, adapter_tensors(model, adapter), options, MODELS["llama3"].hf.tensor_map(args))
    options_of_job = [
        "--adapter.kind=dora",
        "--adapter.rank=4",
        "--checkpoint.enable",
        f"--adapter.initial_path={tmp_path}",
    ]
    config = json.loads((tmp_path / peft_folder.CONFIG).read_text())
    (tmp_path / peft_folder.CONFIG).write_text(json.dumps(config | {"r": 8, "init_lora_weights": "pissa"}))
    first, second = lines(*options_of_job)
    assert "adapter_config.json has r = 8, the job's is 4; use_dora = False, the job's is True: give the job" in first
    assert "has init_lora_weights = 'pissa', which changes the matrices" in second
    (tmp_path / peft_folder.CONFIG).write_text("{")
    (fault,) = lines(*options_of_job)
    assert fault.startswith("adapter.initial_path: given") and "no adapter in peft's layout" in fault


def save_peft_folder(folder):
    """Save an adapter in peft's layout; return the family's form, the options, the shapes and the config."""
    args, options = tiny_decoders.LLAMA["llama3"], Options(kind="lora", rank=4, target=["*wq"])
    model, adapter = moved_model("llama3", args, options)
    state, form = adapter_tensors(model, adapter), MODELS["llama3"].hf.tensor_map(args)
    peft_folder.save(folder, state, options, form)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    return form, options, shapes, json.loads((folder / peft_folder.CONFIG).read_text())


def test_per_module_settings_of_a_peft_config_are_refused(tmp_path):
    """Tensors do not show alpha: a module with another one would silently get the scale of the others."""
    form, options, shapes, config = save_peft_folder(tmp_path)
    old = {key: value for key, value in config.items() if key not in ("use_rslora", "use_dora")}
    (tmp_path / peft_folder.CONFIG).write_text(json.dumps(old | {"alpha_pattern": {}, "rank_pattern": None}))
    assert peft_folder.load(tmp_path, options, form, shapes).keys() == shapes.keys()
    (tmp_path / peft_folder.CONFIG).write_text(
        json.dumps(config | {"alpha_pattern": {"layers.0.self_attn.q_proj": 64}})
    )
    with pytest.raises(
        JobError, match="alpha_pattern = .'layers.0.self_attn.q_proj': 64., but the job's rank and alpha"
    ):
        peft_folder.load(tmp_path, options, form, shapes)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"])
def test_inits_that_change_the_base_are_refused_by_name(tmp_path, init):
    """With the published base such an adapter would silently compute something else."""
    form, options, shapes, config = save_peft_folder(tmp_path)
    (tmp_path / peft_folder.CONFIG).write_text(json.dumps(config | {"init_lora_weights": init}))
    with pytest.raises(JobError, match=f"init_lora_weights = '{init}', which changes the matrices"):
        peft_folder.load(tmp_path, options, form, shapes)
    (tmp_path / peft_folder.CONFIG).write_text(json.dumps(config | {"init_lora_weights": "gaussian"}))
    assert peft_folder.load(tmp_path, options, form, shapes).keys() == shapes.keys()


@pytest.mark.parametrize("value", [math.nan, math.inf, torch.int8, torch.float8_e4m3fn])
def test_adapters_that_are_not_numbers_are_refused(tmp_path, value):
    """Whole numbers would be trained on from adapters that were rounded to nothing."""
    form, options, shapes, _ = save_peft_folder(tmp_path)
    tensors = load_file(tmp_path / peft_folder.WEIGHTS)
    name = sorted(tensors)[-1]
    if isinstance(value, float):
        tensors[name].view(-1)[-1] = value
    tensors = tensors if isinstance(value, float) else tensors | {name: tensors[name].to(value)}
    save_file(tensors, tmp_path / peft_folder.WEIGHTS)
    fault = "NaN or infinity" if isinstance(value, float) else str(value).removeprefix("torch.")
    with pytest.raises(JobError, match=f"{peft_folder.WEIGHTS}: {name} holds {fault}; allowed: finite"):
        peft_folder.load(tmp_path, options, form, shapes)


def test_layer_replication_is_refused_by_name(tmp_path):
    form, options, shapes, config = save_peft_folder(tmp_path)
    (tmp_path / peft_folder.CONFIG).write_text(json.dumps(config | {"layer_replication": [[0, 2], [1, 2]]}))
    with pytest.raises(JobError, match=r"layer_replication = \[\[0, 2\], \[1, 2\]\], which is not computed here"):
        peft_folder.load(tmp_path, options, form, shapes)


@pytest.mark.parametrize("change", [{"lora_bias": True}, {"use_bdlora": {"n": 2}}, {"next_month": 1}], ids=str)
def test_unknown_keys_of_an_adapter_are_refused_by_name(tmp_path, change):
    """All that peft itself writes is known; this project's folders lack most of its keys."""
    form, options, shapes, config = save_peft_folder(tmp_path)
    ((key, value),) = change.items()
    written = LoraConfig(r=options.rank, target_modules=["q_proj"]).to_dict() | config
    (tmp_path / peft_folder.CONFIG).write_text(json.dumps(written | change, default=list))
    with pytest.raises(JobError, match=f"{key} = .*which is not computed here"):
        peft_folder.load(tmp_path, options, form, shapes)
    (tmp_path / peft_folder.CONFIG).write_text(json.dumps(written, default=list))
    assert peft_folder.load(tmp_path, options, form, shapes).keys() == shapes.keys()


def test_a_folder_without_an_adapter_is_refused(tmp_path):
    form, options = MODELS["llama3"].hf.tensor_map(tiny_decoders.LLAMA["llama3"]), Options(kind="lora")
    with pytest.raises(JobError, match="no adapter in peft's layout"):
        peft_folder.load(tmp_path, options, form, {})
    (tmp_path / peft_folder.CONFIG).write_text("[]")
    save_file({}, tmp_path / peft_folder.WEIGHTS)
    with pytest.raises(JobError, match="holds no JSON object"):
        peft_folder.load(tmp_path, options, form, {})
    (tmp_path / peft_folder.CONFIG).write_text(json.dumps(peft_config.config_entries(options)))
    for name in (peft_folder.WEIGHTS, peft_folder.CONFIG):  # opening a pipe would block
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        with pytest.raises(JobError, match=f"{name} is not a regular file"):
            peft_folder.load(tmp_path, options, form, {})


MERGED = [
    ("llama3", "llama3", "lora"),
    ("llama3", "llama3", "dora"),
    ("deepseek", "v3", "lora"),
    ("qwen2", "plain", "dora"),
]


@pytest.mark.parametrize("family, args, kind", MERGED)
def test_merging_does_not_change_the_logits(family, args, kind):
    args = TINY[args]
    options = Options(kind=kind, rank=4, target=["*attention*"] if kind == "dora" else ["all-linear", "output"])
    model, adapter = moved_model(family, args, options)
    model, plain = model.double(), MODELS[family].build(args).double()
    plain.load_state_dict({name: value.detach() for name, value in adapter.merged_tensors([model]).items()})
    torch.testing.assert_close(plain.eval()(TOKENS), model(TOKENS), rtol=1e-10, atol=1e-10)


def merged_on_ranks(kind, degrees):
    """Return the full merged tensors of an adapted model under a plan."""
    from tests.plans.combinations import Combination
    from tests.support.table_rows import assembled

    model = assembled(Combination(adapter=kind, precision="float64", **degrees))
    return {name: full(tensor.detach()).numpy() for name, tensor in model.adapter.merged_tensors(model.parts).items()}


PLANS = [
    ("lora", dict(ranks=2, dp_shard=2)),
    ("dora", dict(ranks=2, dp_shard=2)),
    ("dora", dict(ranks=2, tp=2)),
    ("lora", dict(ranks=4, dp_shard=2, tp=2)),
    ("dora", dict(ranks=4, dp_shard=2, tp=2)),
    ("lora", dict(ranks=2, pp=2)),
    ("lora", dict(ranks=2, dp_shard=2, ep=2, model="qwen3_moe")),
    ("lora", dict(ranks=2, tp=2, model="qwen2")),
    ("documented", dict(ranks=2, tp=2)),
    ("documented", dict(ranks=4, dp_shard=2, tp=2)),
]


@pytest.mark.parametrize("kind, degrees", PLANS, ids=str)
def test_every_plan_merges_to_the_same_tensors(kind, degrees):
    merged = {}
    for state in run_ranks(degrees["ranks"], merged_on_ranks, kind, degrees):
        merged |= state
    expected = reference_merged(kind, degrees)
    assert merged.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(torch.from_numpy(merged[name]), tensor, rtol=1e-12, atol=1e-12, msg=name)


def reference_merged(kind, degrees):
    """Return the merged tensors of the same adapter on one device."""
    from tests.plans.combinations import Combination
    from tests.support.adapted import perturb_biases, perturb_parameters
    from tests.support.table_rows import build_adapted

    row = Combination(adapter=kind, precision="float64", **degrees)
    model, _, adapter = build_adapted(row)
    initialize(model, 7, model.init_rule)
    adapter.init_from_base([model])
    perturb_parameters(model.named_parameters())
    perturb_biases(model.named_parameters())
    return {name: value.detach() for name, value in adapter.merged_tensors([model]).items()}


def test_a_merge_is_summed_in_float32_and_not_rounded():
    """Frozen weights in bfloat16 and A and B in float32 or bfloat16; whoever stores the sum rounds it."""
    weight, first, second = (torch.randn(shape) for shape in ((32, 24), (32, 4), (4, 24)))
    for factors in ((first, second), (first.bfloat16(), second.bfloat16())):
        exact = weight.bfloat16().double() + 0.5 * (factors[0].double() @ factors[1].double())
        merged = add_product(weight.bfloat16(), *factors, 0.5)
        assert merged.dtype == torch.float32
        torch.testing.assert_close(merged, exact.float())


def test_a_bias_in_float32_does_not_widen_the_output_under_autocast():
    """Replicas compute so: autocast covers products but not sums."""
    linear = DoRALinear(64, 32)
    linear.add_low_rank_parameters(LoRASettings(rank=4, scale=0.5))
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(torch.randn(2, 3, 64)).dtype == torch.bfloat16


def test_row_norms_of_dora_are_in_float32():
    """Several ranks compute with all weights in bfloat16; norms of a sum rounded to it would differ by 1e-3."""
    linear = DoRALinear(64, 32, bias=False)
    linear.add_low_rank_parameters(LoRASettings(rank=4, scale=0.5))
    torch.nn.init.normal_(linear.lora_A)
    linear.bfloat16()
    torch.nn.init.normal_(linear.lora_B)
    exact = linear.weight.double() + 0.5 * (linear.lora_B.double() @ linear.lora_A.double())
    norms = adapted_row_norms(linear)
    assert norms.dtype == torch.float32
    torch.testing.assert_close(norms.double(), exact.norm(dim=1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("family", SIZES)
def test_names_and_sizes_are_known_without_the_model(family):
    for flavor, args in SIZES[family].items():
        if not hasattr(args, "block_linears") or args.n_layers > 40:
            continue
        with torch.device("meta"):
            model = MODELS[family].build(args)
        assert {name: linear_shape(module) for name, module in adaptable_modules(model)} == linears(args), flavor
        assert {name for name, _ in model.named_parameters(remove_duplicate=False)} == set(parameters(args)), flavor


@pytest.mark.parametrize("family", SIZES)
def test_split_dimensions_are_known_without_the_model(family):
    args, plan = SIZES[family]["debugmodel"], MODELS[family].plan

    def side(name: str) -> int | None:
        inside = re.sub(r"^layers\.\d+\.", "", name)
        if name in (plan.embedding, plan.head[1]) or any(fnmatchcase(inside, pattern) for pattern in plan.column):
            return 0
        return 1 if any(fnmatchcase(inside, pattern) for pattern in plan.row) else None

    names = [*linears(args), "tok_embeddings"]
    assert {name: split_side(name) for name in names} == {name: side(name) for name in names}


@pytest.mark.parametrize("family", ["gpt2", "opt", "roberta", "deepseek"])
def test_names_of_heads_and_multi_token_depths_are_known_without_the_model(family):
    small = SIZES[family]["debugmodel"]
    changes = {"n_mtp_layers": 2, "q_lora_rank": 32, "n_dense_layers": 0} if family == "deepseek" else {"n_classes": 3}
    args = replace(small, **changes)
    with torch.device("meta"):
        model = MODELS[family].build(args)
    assert sorted(name for name, _ in model.named_parameters(remove_duplicate=False)) == sorted(parameters(args))


def test_llama2_7b_has_the_published_number_of_trained_parameters():
    """Rank 32 at all linears of Llama 2 7B has 79.95 million (fine-tuning specification, section 7)."""
    with torch.device("meta"):
        model = MODELS["llama2"].build(SIZES["llama2"]["7B"])
    adapter = LoRA(Options(kind="lora", rank=32))
    adapter.install(model, MODELS["llama2"].plan)
    assert adapter.num_trained == 79_953_920


@pytest.mark.parametrize(
    "options, message",
    [
        (["--adapter.rank=0"], "adapter.rank: given 0; allowed: a whole number >= 1"),
        (["--adapter.rank=257"], "adapter.rank: given 257; allowed: at most 256, the smaller side of layers.0"),
        (['--adapter.target=["*q_proj"]'], "allowed: patterns that fit one of layers.*.attention.wq, "),
        (["--adapter.target=[]"], "adapter.target: given []; allowed: at least one of layers.*"),
        (["--adapter.layers=[2, 6, 7]"], "adapter.layers: given [2, 6, 7]; allowed: layers from 0 to 5; drop 6, 7"),
        (['--adapter.target=["output"]', "--adapter.layers=[1]"], "adapter.target: given"),
    ],
    ids=str,
)
def test_faults(options, message):
    if "rank=0" in options[0]:
        with pytest.raises(JobError, match="rank: given 0"):
            lines("--adapter.kind=lora", *options)
        return
    (fault,) = lines("--adapter.kind=lora", *options)
    assert message in fault


@pytest.mark.parametrize("kind", LINEAR_ONLY_KINDS)
@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek"])
def test_stacked_experts_are_refused_by_name(kind, model):
    (fault,) = lines(
        f"--adapter.kind={kind}", "--adapter.rank=4", f"--model.name={model}", '--adapter.target=["layers.*"]'
    )
    assert (
        fault.startswith('adapter.target: given ["layers.*"]; allowed: linears')
        and "stacks of experts; leave out" in fault
    )
    assert "layers.*.moe.experts" in fault


def test_the_adapter_refuses_unsupported_experts_and_too_large_ranks():
    with torch.device("meta"):
        model = MODELS["qwen3_moe"].build(SIZES["qwen3_moe"]["debugmodel"])
    with pytest.raises(JobError, match=r"adapter.kind = 'mine' has no form for layers.0.moe.experts"):
        DoRA(Options(kind="mine", target=["*experts"])).install(model, MODELS["qwen3_moe"].plan)
    with pytest.raises(JobError, match=r"adapter.rank: allowed: at most 128"):
        LoRA(Options(kind="lora", rank=200)).install(model, MODELS["qwen3_moe"].plan)


def test_a_written_peft_config_names_modules_and_base(tmp_path):
    args, options = tiny_decoders.LLAMA["llama3"], Options(kind="lora", rank=4, rslora=True, target=["*wq"])
    model, adapter = moved_model("llama3", args, options)
    peft_folder.save(
        tmp_path, adapter_tensors(model, adapter), options, MODELS["llama3"].hf.tensor_map(args), "where/it/is"
    )
    config = json.loads((tmp_path / peft_folder.CONFIG).read_text())
    assert config["target_modules"] == ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]
    assert config["base_model_name_or_path"] == "where/it/is" and config["use_rslora"] and not config["use_dora"]
    assert config["revision"] is None
    assert set(ADAPTERS) >= {"lora", "dora"}


def test_a_base_of_the_hub_is_named_as_there(monkeypatch):
    """Its folder in the cache is of this machine."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/home/me/hub")
    form = MODELS["llama3"].hf.tensor_map(tiny_decoders.LLAMA["llama3"])
    base = f"/home/me/hub/models--owner--name/snapshots/{'a' * 40}"
    config = peft_folder.peft_config(Options(kind="lora"), ["layers.0.attention.wq.lora_A"], form, base)
    assert (config["base_model_name_or_path"], config["revision"]) == ("owner/name", "a" * 40)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(train_fully=["norm.weight"]), r"trained too \(norm.weight\); write the whole model"),
        (
            dict(train_dense_rest=True),
            r"trained too \(layers.\*.attention_norm.weight, .*tok_embeddings.weight\); write",
        ),
        (
            dict(lora_only=True),
            r"a matrix, which this model lacks \(adapter.lora_only\); write the whole model",
        ),
        (dict(train_scaling=True), r"cannot hold a trained scale \(adapter.train_scaling\); write the whole model"),
    ],
    ids=str,
)
def test_a_peft_folder_without_all_trained_weights_is_refused(options, message, tmp_path):
    args = tiny_decoders.LLAMA["llama3"]
    model, adapter = moved_model("llama3", args, Options(kind="lora", rank=4, **options))
    with pytest.raises(JobError, match=message):
        adapter.write_folder(
            tmp_path / "adapter", MODELS["llama3"].hf.tensor_map(args), adapter.full_tensors([model]), ""
        )
    assert not (tmp_path / "adapter").exists()


def test_lora_plus_gives_b_a_higher_learning_rate():
    """The schedule multiplies both rates; the logged one is A's."""
    model, adapter = moved_model("llama3", tiny_decoders.LLAMA["llama3"], Options(kind="lora", rank=4, lr_ratio_b=16.0))
    built = build_optimizers(
        [model], name="AdamW", lr=1e-3, weight_decay=0.1, shared=SHARED, rate_of=adapter.lr_multiplier
    )
    schedulers = build_lr_schedulers(built.optimizers, LRSchedule(total_steps=10, warmup_steps=4))
    names = {parameter: name for name, parameter in model.named_parameters()}
    rates = {names[p][-1]: group["lr"] for group in built.param_groups for p in group["params"]}
    assert rates == {"A": 0.25e-3, "B": 4e-3} and schedulers.last_lr == 0.25e-3


def test_lora_only_replaces_the_base_matrix():
    """A model with A and B in place of its matrices has low rank, and merges into a plain model."""
    args, options = tiny_decoders.LLAMA["llama3"], Options(kind="lora", rank=4, alpha=8.0, lora_only=True)
    model, adapter = moved_model("llama3", args, options)
    model, plain = model.double(), MODELS["llama3"].build(args).double()
    plain.load_state_dict({name: value.detach() for name, value in adapter.merged_tensors([model]).items()})
    torch.testing.assert_close(plain.eval()(TOKENS), model(TOKENS), rtol=1e-10, atol=1e-10)
    linear = model.layers["0"].attention.wq
    assert linear.weight is None and "layers.0.attention.wq.weight" in adapter.removed_shapes
    torch.testing.assert_close(plain.layers["0"].attention.wq.weight, 2.0 * linear.lora_B @ linear.lora_A)
    numbers = sum(p.numel() for p in model.parameters())
    assert adapter.num_parameters == numbers and adapter.num_trained == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )
    spec, added = MODELS["llama3"], sum(math.prod(shape) for shape in adapter.added_shapes.values())
    flops = adapter.flops_per_token(spec.flops_per_token(args, 16), args.num_matmul_parameters, 16)
    attention = spec.flops_per_token(args, 16).full - 6 * args.num_matmul_parameters
    assert flops.full == 6 * added + 4 * args.dim * args.vocab_size + attention, "the head is frozen"


@pytest.mark.parametrize(
    "options, message",
    [
        (["--adapter.kind=qlora"], "adapter.lora_only: given true; allowed: false with adapter.kind"),
        (
            ["--adapter.kind=lora", "--adapter.relora.every=10", "--adapter.relora.reset=none"],
            "adapter.relora.every: given 10; allowed: unset with adapter.lora_only; there is no matrix to merge into",
        ),
        (
            ["--adapter.kind=lora", "--checkpoint.enable", "--checkpoint.initial_load_path=nowhere"],
            'checkpoint.initial_load_path: given "nowhere"; allowed: unset with adapter.lora_only',
        ),
        (
            ["--adapter.kind=lora", "--checkpoint.enable", "--adapter.last_save_in_peft"],
            "adapter.last_save_in_peft: given true; allowed: false with adapter.lora_only",
        ),
        (
            ["--adapter.kind=lora", '--adapter.target=["*wq", "output"]'],
            "adapter.lora_only: given true; allowed: false with output in adapter.target",
        ),
    ],
    ids=str,
)
def test_faults_of_lora_only(options, message):
    assert any(message in line for line in lines("--adapter.lora_only", *options))
