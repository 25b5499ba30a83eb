"""Low-rank pairs of experts: outputs, gradients and folders are those of peft on the stacks of transformers 5."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tests.support import judged, tiny_decoders
from tests.support.family_folders import BY_MODEL_TYPE
from tests.support.hf_parity import close, peer_class, twin
from tests.support.judged import lines
from tests.support.low_rank_adapters import adapter_tensors, moved_model, plain_copy
from torchtitan.adapters import peft_folder
from torchtitan.adapters.low_rank import LoRASettings, LowRankExperts
from torchtitan.adapters.targets import is_expert_stack, layer_of, unreadable_by_peft
from torchtitan.config.sections.model import Adapter as Options
from torchtitan.core.errors import JobError
from torchtitan.models import family_for_model_type
from torchtitan.models.moe.layer import ClampedGated, Experts
from torchtitan.models.sizes import linears
from torchtitan.models.spec import MODELS

anywhere = judged.anywhere
TOKENS = torch.arange(40).view(2, 20) * 7 % 64
DIM, WIDTH, EXPERTS, ROWS, RANK, ALPHA = 6, 4, 3, 13, 2, 3.0
LAYER = "layers.0.moe.experts"
STACKS = {"w1": "gate_up_proj", "w2": "down_proj", "w3": "gate_up_proj"}


class Layer(nn.Module):
    """The experts of transformers, of which each row goes to one."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x, ids):
        return self.experts(x, ids[:, None], x.new_ones(len(x), 1))


def experts_of_both(alternating, matrices, gate_up_rank):
    """Return our experts with pairs, those of transformers with peft's, and the map of names; all in float64."""
    family = "gpt_oss" if alternating else "qwen3_moe"
    gated = ClampedGated(0.3, 1.702) if alternating else None
    ours = Experts(DIM, WIDTH, EXPERTS, alternating, gated).double()
    config = SimpleNamespace(num_local_experts=EXPERTS, num_experts=EXPERTS, hidden_size=DIM)
    config.intermediate_size = config.moe_intermediate_size = WIDTH
    config.hidden_act, config.swiglu_alpha, config.swiglu_limit = "silu", 1.702, 0.3
    config._experts_implementation = "eager"
    peer = (GptOssExperts if alternating else Qwen3MoeExperts)(config).double()
    form = MODELS[family].hf.tensor_map(tiny_decoders.GATED["gpt_oss" if alternating else "qwen3_moe window"])
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_()
        state = {f"{LAYER}.{name}": value for name, value in ours.state_dict().items()}
        stacked = form.with_stacks()
        if alternating:
            state = stacked.to_hf(state)
        else:
            gate_up = torch.cat([ours.w1, ours.w3], dim=2).transpose(1, 2)
            state = {"experts.gate_up_proj": gate_up, "experts.down_proj": ours.w2.transpose(1, 2)}
        peer.load_state_dict({name.rpartition(".")[2]: value for name, value in state.items()})
    ours.requires_grad_(False)
    ours.__class__ = LowRankExperts
    ours.add_low_rank_parameters(LoRASettings(RANK, ALPHA / RANK, matrices=matrices, gate_up_rank=gate_up_rank))
    parameters = [f"experts.{name}" for name in dict.fromkeys(STACKS[matrix] for matrix in matrices)]
    joined = gate_up_rank or RANK * len({"w1", "w3"} & {*matrices})
    pattern = {"experts.gate_up_proj": joined} if joined else {}
    peft_config = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=[],
        target_parameters=parameters,
        rank_pattern=pattern,
        alpha_pattern={name: ALPHA * rank / RANK for name, rank in pattern.items()},
    )
    return ours, get_peft_model(Layer(peer), peft_config).double(), form


def peft_names(tensors):
    """Return tensors of a model of peft by the names of its files, in layer 0."""
    moved = {name.replace("base_model.model.", "base_model.model.model.layers.0.mlp."): t for name, t in tensors}
    return {name.replace(".default", ""): t for name, t in moved.items() if "lora_" in name}


@pytest.mark.parametrize("alternating", [False, True], ids=["in a row", "alternating"])
@pytest.mark.parametrize(
    "matrices, gate_up_rank",
    [
        (("w1", "w2", "w3"), 2),
        (("w1", "w2", "w3"), 5),
        (("w1", "w3"), 3),
        (("w1", "w2", "w3"), 0),
        (("w2",), 0),
        (("w1", "w3"), 0),
        (("w3", "w2"), 0),
    ],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_peft_in_float64(alternating, matrices, gate_up_rank):
    torch.manual_seed(len(matrices) + gate_up_rank)
    ours, peer, form = experts_of_both(alternating, matrices, gate_up_rank)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name.startswith("lora_"):
                parameter.normal_()
        state = {f"{LAYER}.{name}": p for name, p in ours.named_parameters() if p.requires_grad}
        files = peft_folder.to_peft(state, form)
        loaded = peft_names(peer.state_dict().items())
        assert {name: t.shape for name, t in files.items()} == {name: t.shape for name, t in loaded.items()}
        for name, tensor in loaded.items():
            tensor.copy_(files[name])
    ids = torch.randint(EXPERTS, (ROWS,)).sort().values
    x, weights = torch.randn(ROWS, DIM).double(), torch.randn(ROWS, DIM).double()
    y, expected = ours(x, ids.bincount(minlength=EXPERTS)), peer(x, ids)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    (y * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = {name: p.grad for name, p in peer.named_parameters() if p.grad is not None}
    shapes = {name: tuple(p.shape) for name, p in state.items()}
    if not gate_up_rank:  # B of peft also has the blocks that are 0 here
        mask = peft_folder.to_peft({name: torch.ones_like(p) for name, p in state.items()}, form)
        gradients = {name: g * mask[next(iter(peft_names([(name, g)])))] for name, g in gradients.items()}
    read = peft_folder.from_peft(peft_names(gradients.items()), form, shapes)
    assert read.keys() == state.keys() and len(peft_names(gradients.items())) == len(files)
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, read[f"{LAYER}.{name}"], rtol=1e-11, atol=1e-12)


FAMILIES = {
    "qwen3_moe": "qwen3_moe window",
    "llama4": "llama4",
    "mixtral": "mixtral",
    "gpt_oss": "gpt_oss",
    "qwen2_moe": "qwen2_moe",
    "glm4_moe": "glm4_moe",
    "qwen3_next": "qwen3_next",
    "qwen3_5_moe": "qwen3_5_moe",
    "granite4": "granite4",
    "lfm2_moe": "lfm2_moe",
    "nemotron_h": "nemotron_h",
    "mistral4": "mistral4",
    "minimax_m2": "minimax_m2",
    "afmoe": "afmoe",
    "gemma4": "gemma4 experts",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_reads_the_folder_and_computes_the_same(tmp_path, family):
    """All linears and experts: also the linears that peft would take for experts by their names."""
    args = tiny_decoders.GATED[FAMILIES[family]]
    has_mixers = family in ("granite4", "nemotron_h")  # of Mamba, which peft refuses
    target = ["*moe*", "*attention.w*"] if has_mixers else ["all-linear"]
    rank = 4 * (family in ("gpt_oss", "qwen2_moe"))
    options = Options(kind="lora", rank=3, alpha=5.0, target=target, gate_up_rank=rank)
    model, adapter = moved_model(family, args, options)
    hf, tensors = MODELS[family].hf, adapter_tensors(model, adapter)
    form = hf.tensor_map(args).within("model.")
    peft_folder.save(tmp_path, tensors, options, form, "base")
    config = hf.config_to_hf(args)
    config_class = type(AutoConfig.for_model(**config))
    base = twin(peer_class(config), config_class, plain_copy(model, adapter, family), hf)
    peft_model = PeftModel.from_pretrained(base.eval(), tmp_path).eval()
    with torch.no_grad():
        logits, expected = model(TOKENS), peft_model(TOKENS).logits
    assert close(logits, expected, 2e-5)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    state = peft_folder.load(tmp_path, options, form, shapes)
    assert state.keys() == tensors.keys() and all(torch.equal(state[name], t) for name, t in tensors.items())


DORA = ["deepseek_v3", "qwen3_next", "afmoe", "qwen2_moe"]


@pytest.mark.parametrize("model_type", DORA)
def test_peft_reads_the_dora_of_linears_that_it_takes_for_no_experts(tmp_path, model_type):
    """Of all others it refuses the folder: then they are no longer to be left out."""
    args, family = BY_MODEL_TYPE[model_type], family_for_model_type(model_type)
    names = [name for name in linears(args) if name.startswith("layers.") and not is_expert_stack(name)]
    options = Options(kind="dora", rank=3, alpha=5.0, target=names)
    refused = unreadable_by_peft(family, names, options)
    assert bool(refused) == (family != "qwen2_moe")
    hf = MODELS[family].hf
    config, form = hf.config_to_hf(args), hf.tensor_map(args).within("model.")
    for target in ([name for name in names if name not in refused], refused[-1:]):
        if not target:
            continue
        chosen = replace(options, target=target)
        model, adapter = moved_model(family, args, chosen)
        peft_folder.save(tmp_path, adapter_tensors(model, adapter), chosen, form, "base")
        plain = plain_copy(model, adapter, family)
        base = twin(peer_class(config), type(AutoConfig.for_model(**config)), plain, hf).eval()
        if target == refused[-1:]:
            with pytest.raises(ValueError, match="use_dora=True|fused into gate_up_proj"):
                PeftModel.from_pretrained(base, tmp_path)
            continue
        with torch.no_grad():
            assert close(model(TOKENS), PeftModel.from_pretrained(base, tmp_path).eval()(TOKENS).logits, 2e-5)


def test_a_folder_that_peft_would_refuse_is_refused_before_training(anywhere):
    job = ["--model.name=afmoe", "--adapter.kind=dora", "--adapter.rank=8", "--adapter.last_save_in_peft"]
    (line,) = [line for line in lines(*job) if "peft" in line]
    assert 'false with adapter.kind = "dora" of layers.*.attention.wg, layers.*.feed_forward.w1, ' in line
    assert not [line for line in lines(*job, '--adapter.target=["*attention.w[qkvo]"]') if "peft" in line]


@pytest.mark.parametrize("model_type", BY_MODEL_TYPE)
def test_modules_have_the_names_that_they_have_in_the_memory_of_transformers(model_type):
    args = BY_MODEL_TYPE[model_type]
    hf = MODELS[family_for_model_type(model_type)].hf
    config = hf.config_to_hf(args)
    with torch.device("meta"):
        peer = peer_class(config)._from_config(AutoConfig.for_model(**config))
    form, modules, stacks = hf.tensor_map(args).within("model."), set(), set()
    for name in linears(args):
        if (layer_of(name) or 0) >= args.n_layers:  # of multi-token prediction
            continue
        if is_expert_stack(name):
            stacks |= {form.with_stacks().hf_names(f"{name}.{matrix}")[0] for matrix in ("w1", "w2")}
        else:
            modules.add(form.hf_names(f"{name}.weight")[0].removesuffix(".weight"))
    assert modules <= {name for name, _ in peer.named_modules()}
    assert stacks <= {name for name, _ in peer.named_parameters()}


def tuned_by_peft(family, args, config, model, adapter):
    """Return a model of transformers with an adapter of peft's with random values."""
    hf = MODELS[family].hf
    fields = hf.config_to_hf(args)
    peer = type(AutoConfig.for_model(**fields))
    base = twin(peer_class(fields), peer, plain_copy(model, adapter, family).eval(), hf)
    tuned = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter += 0.1 * torch.randn(parameter.shape)
    return tuned.eval()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("separate", [True, False])
def test_a_folder_that_peft_wrote_is_read(tmp_path, family, separate):
    """Pairs with an A of their own start as two with the same A."""
    args = tiny_decoders.GATED[FAMILIES[family]]
    target = ["*moe.experts", "*attention.wq"]
    options = Options(kind="lora", rank=3, alpha=5.0, target=target, gate_up_rank=0 if separate else 3)
    model, adapter = moved_model(family, args, options)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=3, lora_alpha=5.0, target_modules=["q_proj"], target_parameters=parameters)
    tuned = tuned_by_peft(family, args, config, model, adapter)
    tuned.save_pretrained(tmp_path)
    form, shapes = MODELS[family].hf.tensor_map(args), adapter.added_shapes
    model.load_state_dict(peft_folder.load(tmp_path, options, form, shapes), strict=False)
    with torch.no_grad():
        assert close(model(TOKENS), tuned(TOKENS).logits, 2e-5)


def singles(stacks, family, form):
    """Return pairs of single experts of our separate pairs, as peft wrote them for the linears of transformers 4."""
    tensors = {}
    for name, value in stacks.items():
        module, _, matrix = name.rpartition("_")
        kind = module.rpartition(".")[2]
        for hf_name, part in zip(form.hf_names(f"{module.rpartition('.')[0]}.{matrix}"), value, strict=True):
            tensors[f"base_model.model.{hf_name.removesuffix('weight')}{kind}.weight"] = part.t().contiguous()
    return tensors


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("gate_up_rank", [0, 6])
def test_pairs_of_single_experts_are_read_as_peft_reads_them(tmp_path, family, gate_up_rank):
    args = tiny_decoders.GATED[FAMILIES[family]]
    options = Options(kind="lora", rank=3, alpha=5.0, target=["*moe.experts"])
    model, adapter = moved_model(family, args, options)
    form = MODELS[family].hf.tensor_map(args)
    save_file(singles(adapter_tensors(model, adapter), family, form), tmp_path / "adapter_model.safetensors")
    names = ["w1", "w2", "w3"] if family == "mixtral" else ["gate_proj", "up_proj", "down_proj"]
    LoraConfig(r=3, lora_alpha=5.0, target_modules=names).save_pretrained(tmp_path)
    other = Options(kind="lora", rank=3, alpha=5.0, target=["*moe.experts"], gate_up_rank=gate_up_rank)
    reading, reader = moved_model(family, args, other)
    reading.load_state_dict(peft_folder.load(tmp_path, other, form, reader.added_shapes), strict=False)
    with torch.no_grad():
        expected = model(TOKENS)
        assert close(reading(TOKENS), expected, 1e-5)
    base = tuned_by_peft(family, args, LoraConfig(target_modules=["q_proj"]), model, adapter).unload()
    tuned = PeftModel.from_pretrained(base, tmp_path).eval()
    with torch.no_grad():
        assert close(tuned(TOKENS).logits, expected, 2e-5)
    tuned.save_pretrained(tmp_path / "again")  # as stacks, with patterns of ranks
    loaded = peft_folder.load(tmp_path / "again", other, form, reader.added_shapes)
    assert all(torch.equal(loaded[name], t) for name, t in adapter_tensors(reading, reader).items())


MISFITS = [  # adapter options of the job, and the refusal of a folder with one A of rank 3 for gate and up
    (dict(target=["*moe.experts.w1", "*moe.experts.w2"]), r"reaches all of model.layers.0.mlp.experts.gate_up_proj"),
    (dict(target=["*moe.experts.w2"]), r"it also holds base_model.model.model.layers.0.mlp.experts.base_layer.lora_A"),
    (dict(gate_up_rank=4), r"base_layer.\* has A \(18, 32\) and B \(32, 18\), the job's A \(24, 32\) and B \(32, 24\)"),
]


def folder_with_one_a(folder, rank, **options):
    args = tiny_decoders.GATED["qwen3_moe window"]
    options = Options(kind="lora", rank=3, alpha=5.0, target=["*moe.experts"], gate_up_rank=rank, **options)
    model, adapter = moved_model("qwen3_moe", args, options)
    form = MODELS["qwen3_moe"].hf.tensor_map(args)
    peft_folder.save(folder, adapter_tensors(model, adapter), options, form)
    return args, form


@pytest.mark.parametrize("options, message", MISFITS, ids=lambda value: str(value)[:40])
def test_another_adapter_of_experts_is_refused(tmp_path, options, message):
    args, form = folder_with_one_a(tmp_path, 3)
    options = Options(**dict(kind="lora", rank=3, alpha=5.0, target=["*moe.experts"]) | options)
    shapes = moved_model("qwen3_moe", args, options)[1].added_shapes
    with pytest.raises(JobError, match=message):
        peft_folder.load(tmp_path, options, form, shapes)


def test_two_pairs_cannot_be_one_with_rows_that_reach_both(tmp_path):
    args, form = folder_with_one_a(tmp_path, 6)
    options = Options(kind="lora", rank=3, alpha=5.0, target=["*moe.experts"])
    shapes = moved_model("qwen3_moe", args, options)[1].added_shapes
    with pytest.raises(JobError, match=r"reaches both matrices from every row of A: set adapter.gate_up_rank = 6"):
        peft_folder.load(tmp_path, options, form, shapes)


def test_a_config_names_parameters_and_their_ranks(tmp_path):
    folder_with_one_a(tmp_path, 6)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    names = [f"model.layers.{layer}.mlp.experts.{name}" for layer in (0, 1) for name in ("gate_up_proj", "down_proj")]
    assert config["target_parameters"] == names and config["target_modules"] == []
    assert config["rank_pattern"] == dict.fromkeys(names[::2], 6)
    assert config["alpha_pattern"] == dict.fromkeys(names[::2], 10.0)
    assert len(load_file(tmp_path / "adapter_model.safetensors")) == 8


FAULTS = [
    (["nemotron_h", "--adapter.gate_up_rank=4", '--adapter.target=["*moe.experts"]'], "without a gate"),
    (["nemotron_h", '--adapter.target=["*moe.experts.w3", "*.w2"]'], "which have no gate"),
    (["--adapter.gate_up_rank=8"], "adapter.gate_up_rank: given 8; allowed: 0 without w1 and w3 of experts"),
    (
        ["--adapter.gate_up_rank=8", '--adapter.target=["*moe.experts.w1"]'],
        "adapter.gate_up_rank: given 8; allowed: 0 without w1 and w3 of experts",
    ),
    (
        ["--adapter.gate_up_rank=999", '--adapter.target=["*moe.experts"]'],
        "adapter.gate_up_rank: given 999; allowed: at most 256, the smaller side of gate and up together",
    ),
    (['--adapter.target=["*moe.experts.w4"]'], "adapter.target"),
    (['--adapter.target=["*moe.experts.w2", "*.w1"]'], '"*.w1" fits none'),
]


@pytest.mark.parametrize("options, message", FAULTS, ids=str)
def test_options_that_do_not_fit_are_refused(options, message):
    model = "qwen3_moe" if options[0].startswith("--") else options[0]
    arguments = [option for option in options if option.startswith("--")]
    (fault,) = lines(f"--model.name={model}", "--adapter.kind=lora", "--adapter.rank=4", *arguments)
    assert message in fault
