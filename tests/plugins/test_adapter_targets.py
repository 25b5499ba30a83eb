"""Target modules of files for peft: the same modules get an adapter here as peft gives one on a transformers model."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    OPTConfig,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
)
from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN

from torchtitan.adapters.low_rank import LoRA
from torchtitan.adapters.peft_folder import to_peft
from torchtitan.adapters.targets import target_linears
from torchtitan.config.sections.model import Adapter as Options
from torchtitan.models import CONFIG_CONVERTERS, family_for_model_type
from torchtitan.models import SIZES as SIZES_OF_FAMILIES
from torchtitan.models.sizes import linears
from torchtitan.models.spec import MODELS as SPECS
from torchtitan.plugins.importers.adapter_targets import (
    RENAMED,
    ParameterError,
    TargetError,
    has_experts,
    model_modules,
    translate_targets,
)

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
MODELS = {
    "llama": LlamaConfig(num_hidden_layers=11, **SIZES),
    "gemma3": Gemma3TextConfig(num_hidden_layers=2, head_dim=8, **SIZES),
    "gpt2": GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=3, n_head=4),
    "opt": OPTConfig(vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
                     word_embed_proj_dim=32, max_position_embeddings=64),
    "experts": Qwen3MoeConfig(num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                              head_dim=8, **SIZES),
    "deepseek": DeepseekV3Config(num_hidden_layers=2, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
                                 topk_group=1, moe_intermediate_size=32, first_k_dense_replace=1, q_lora_rank=16,
                                 kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
                                 **SIZES | {"num_key_value_heads": 4}),
    "gpt_oss": GptOssConfig(num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, head_dim=8, **SIZES),
    "qwen3_5": Qwen3_5MoeTextConfig(num_hidden_layers=4, num_experts=4, num_experts_per_tok=2, head_dim=8,
                                    moe_intermediate_size=32, shared_expert_intermediate_size=32,
                                    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
                                    linear_value_head_dim=8, **SIZES),
    "gemma4": Gemma4TextConfig(num_hidden_layers=2, head_dim=8, global_head_dim=8, hidden_size_per_layer_input=0,
                               enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32,
                               **SIZES),
}  # fmt: skip
TARGETS = [  # a model and its target modules
    ("llama", ["q_proj", "down_proj"]),
    ("llama", ["q_proj", "out_proj", "query"]),
    ("llama", ["self_attn.q_proj", "model.layers.10.mlp.up_proj", "1.mlp.up_proj"]),
    ("llama", ["lm_head", "q_proj"]),
    ("llama", "model.layers.[\\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj"),
    ("llama", r".*\.layers\.(3|7)\.self_attn\.(q|k|v|o)_proj|.*\.mlp\.(gate|up|down)_proj"),
    ("llama", "model.layers.1.(_checkpoint_wrapped_module.)?(mlp|self_attn).(up|q)_proj"),
    ("llama", ".*[qk]_proj"),
    ("llama", "(model|other).layers.(1|(2|[3-5]))?0?.self_attn.v_proj"),
    ("gemma3", ["q_proj", "gate_proj"]),
    ("gpt2", ["c_attn"]),
    ("gpt2", ["c_proj", "mlp.c_fc"]),
    ("gpt2", r"transformer\.h\.[0-1]\..*c_proj"),
    ("opt", ["q_proj", "out_proj", "o_proj", "fc1"]),
    ("experts", ["q_proj", "o_proj"]),
    ("experts", "model.layers.*.self_attn.(q|k)_proj"),
    ("deepseek", ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        config.save_pretrained(folder / name)
    return folder


def chosen_names(name, folder, patterns):
    """Return Hugging Face's names of the linear layers that these targets choose."""
    family = family_for_model_type(MODELS[name].model_type)
    args = CONFIG_CONVERTERS[family].args_from_folder(folder)
    modules = model_modules(family, args)
    chosen = target_linears(linears(args), Options(kind="lora", target=patterns))
    assert set(chosen) <= set(modules.linears), "no stacks, and no blocks that transformers lacks"
    return {modules.linears[ours] for ours in chosen}


@pytest.mark.parametrize("name, modules", TARGETS, ids=[f"{name}-{modules}"[:60] for name, modules in TARGETS])
def test_the_same_modules_get_an_adapter_as_in_peft(name, modules, folders):
    family = family_for_model_type(MODELS[name].model_type)
    targets = translate_targets(modules, False, family, str(folders / name))
    tuned = get_peft_model(AutoModelForCausalLM.from_config(MODELS[name]), LoraConfig(target_modules=modules, r=2))
    assert chosen_names(name, folders / name, targets.patterns) == set(tuned.targeted_module_names)
    if isinstance(modules, list):
        all_names = tuned.targeted_module_names
        assert targets.unmatched == [
            target for target in modules if not any(f".{name}".endswith(f".{target}") for name in all_names)
        ]


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "experts"])
def test_all_linear_layers_are_those_of_transformers(name, folders):
    """The experts of transformers 5 are no linear layers."""
    family = family_for_model_type(MODELS[name].model_type)
    targets = translate_targets([], True, family, str(folders / name))
    model = AutoModelForCausalLM.from_config(MODELS[name])
    linear = {name for name, module in model.named_modules() if type(module).__name__ in ("Linear", "Conv1D")}
    assert chosen_names(name, folders / name, targets.patterns) == linear - {"lm_head"}
    assert not targets.is_partial


def test_saved_modules_get_no_adapter(folders):
    modules, folder = ["lm_head", "q_proj"], folders / "llama"
    targets = translate_targets(modules, False, "llama3", str(folder), saved=["lm_head", "embed_tokens"])
    config = LoraConfig(target_modules=modules, modules_to_save=["lm_head", "embed_tokens"], r=2)
    tuned = get_peft_model(AutoModelForCausalLM.from_config(MODELS["llama"]), config)
    assert chosen_names("llama", folder, targets.patterns) == set(tuned.targeted_module_names)


REFUSED = [  # a model, its target modules, and parts of the refusal
    ("llama", ["embed_tokens", "q_proj"], "model.embed_tokens is none: leave it out"),
    ("llama", ["mlp"], "model.layers.0.mlp is none"),
    ("llama", "model.*", "linear layers: model.layers.*.self_attn.q_proj"),
    ("llama", ["in_proj"], "some of model.layers.*.self_attn.q_proj"),
    ("llama", "model.language_model.layers.[\\d]+.mlp.up_proj", "some of model.layers.*.self_attn.q_proj"),
    ("llama", "(?=model).*q_proj", "a regex without a group of another kind"),
    ("experts", ["q_proj", "gate_proj"], "both gate_proj and up_proj with experts; peft has one stack"),
    ("experts", ["mlp.gate", "q_proj"], "model.layers.0.mlp.gate is none"),
    ("experts", ["experts", "q_proj"], "model.layers.0.mlp.experts is none"),
    ("experts", "model.layers.1.self_attn.(q|k)_proj", "none of the modules with a name, as peft takes all of them"),
    ("deepseek", ["o_proj", "shared_experts.up_proj"], "both gate_proj and up_proj with experts"),
    ("deepseek", r".*\.(o|gate)_proj", "both gate_proj and up_proj with experts"),
]


@pytest.mark.parametrize("name, modules, message", REFUSED, ids=[str(modules) for _, modules, _ in REFUSED])
def test_what_has_no_adapter_here_is_refused(name, modules, message, folders):
    family = family_for_model_type(MODELS[name].model_type)
    with pytest.raises(TargetError) as refusal:
        translate_targets(modules, False, family, str(folders / name))
    assert message in str(refusal.value)


OF_EXPERTS = [  # a model, its target modules and its target parameters
    ("experts", ["q_proj", "up_proj", "gate_proj"], None),
    ("experts", ["down_proj", "gate_proj", "up_proj"], None),
    ("experts", ["q_proj"], ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    ("experts", ["q_proj"], ["1.mlp.experts.down_proj", "experts.other"]),
    ("experts", [], ["gate_up_proj"]),
    ("experts", r".*\.(q|down)_proj", None),
    ("experts", r".*experts\.(up|gate|down)_proj|.*\.o_proj", None),
    ("deepseek", ["o_proj", "shared_experts.up_proj", "gate_proj"], None),
    ("deepseek", ["o_proj", "gate_proj", "up_proj"], ["experts.gate_up_proj"]),
    ("deepseek", r".*\.(o|gate|up|down)_proj", None),
    ("qwen3_5", ["q_proj", "gate_proj"], ["experts.down_proj"]),
    ("gpt_oss", ["q_proj"], ["experts.gate_up_proj"]),
    ("gemma4", ["q_proj", "gate_proj"], ["experts.down_proj"]),
]


@pytest.mark.parametrize("name, modules, parameters", OF_EXPERTS, ids=str)
def test_the_same_pairs_as_in_peft_with_experts(name, modules, parameters, folders):
    """Names, and with them the ranks: shapes of all A, by modules and stacks of transformers."""
    family = family_for_model_type(MODELS[name].model_type)
    targets = translate_targets(modules, False, family, str(folders / name), parameters=parameters or ())
    config = LoraConfig(target_modules=modules, target_parameters=parameters, r=2)
    tuned = get_peft_model(AutoModelForCausalLM.from_config(MODELS[name]), config)
    options = Options(kind="lora", rank=2, target=targets.patterns, gate_up_rank=2 * targets.gate_up)
    args = CONFIG_CONVERTERS[family].args_from_folder(folders / name)
    with torch.device("meta"):
        model = SPECS[family].build(args)
    adapter = LoRA(options)
    adapter.install(model, SPECS[family].plan)
    state = {name: torch.empty(shape, device="meta") for name, shape in adapter.added_shapes.items()}
    shapes = {name: t.shape for name, t in to_peft(state, SPECS[family].hf.tensor_map(args)).items()}
    expected = {n.replace(".default", ""): p.shape for n, p in tuned.named_parameters() if "lora_" in n}
    assert shapes == expected
    assert targets.unmatched == [n for n in parameters or () if "other" in n]


WRONG_PARAMETERS = [
    ("experts", ["mlp.gate.weight"], "model.layers.0.mlp.gate.weight is none of them"),
    ("experts", ["q_proj.weight"], "model.layers.0.self_attn.q_proj.weight is none of them"),
    ("experts", ["experts.w1"], "allowed: model.layers.*.mlp.experts.gate_up_proj, model.layers.*.mlp.experts.down"),
    ("llama", ["experts.gate_up_proj"], "nothing for a model without experts"),
]


@pytest.mark.parametrize("name, parameters, message", WRONG_PARAMETERS, ids=str)
def test_other_parameters_are_refused(name, parameters, message, folders):
    family = family_for_model_type(MODELS[name].model_type)
    with pytest.raises(ParameterError) as refusal:
        translate_targets(["q_proj"], False, family, str(folders / name), parameters=parameters)
    assert message in str(refusal.value)


def test_the_families_in_which_peft_renames_targets_are_those_of_transformers():
    kinds = _MODEL_TO_CONVERSION_PATTERN | {"mixtral": "mixtral", "qwen2_moe": "qwen2_moe"}
    families = {family for family in SIZES_OF_FAMILIES if has_experts(family)}
    kinds_of = {family: {kinds.get(t) for t in CONFIG_CONVERTERS[family].model_types} for family in families}
    assert {family for family, found in kinds_of.items() if found & {"mixtral", "qwen2_moe"}} == RENAMED


def test_a_model_that_is_not_here_has_names_but_no_regexes(tmp_path):
    targets = translate_targets(["q_proj"], False, "llama3", "my/llama")
    assert targets.patterns == ["layers.*.attention.wq"]
    assert translate_targets([], True, "qwen3_moe", "my/moe").patterns == [f"layers.*.attention.w{x}" for x in "qkvo"]
    for folder in ("my/llama", str(tmp_path)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
        with pytest.raises(TargetError, match=f"its config.json in {folder}; download the model"):
            translate_targets("model.*q_proj", False, "llama3", folder)


@pytest.mark.parametrize(
    "family, names",
    [("gemma4", ["q_proj", "gate_proj"]), ("deepseek", ["q_a_proj", "kv_b_proj"]), ("granite4", [])],
)
def test_names_of_other_modules_in_a_size_with_experts_need_its_folder(family, names):
    """Gemma 4 has a feed-forward beside its experts, and a name that DeepSeek V2 Lite lacks was left out of V3."""
    with pytest.raises(TargetError, match=f"names that are the same modules in all sizes of {family}, or its config"):
        translate_targets(names, not names, family, "my/model")
    assert translate_targets(["o_proj"], False, family, "my/model").patterns == ["layers.*.attention.wo"]


def test_a_regex_is_tried_on_the_names_of_a_model_that_reads_images(tmp_path):
    """Such a regex is in Axolotl's examples; without its beginning it would choose layers of images too."""
    text = Gemma3TextConfig(num_hidden_layers=2, head_dim=8, **SIZES)
    Gemma3Config(text_config=text).save_pretrained(tmp_path)
    regex = r"model.language_model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|q)_proj"
    targets = translate_targets(regex, False, "gemma3", str(tmp_path))
    args = CONFIG_CONVERTERS["gemma3"].args_from_folder(tmp_path)
    chosen = target_linears(linears(args), Options(kind="lora", target=targets.patterns))
    assert set(chosen) == {f"layers.{layer}.{name}" for layer in (0, 1) for name in ("attention.wq", "feed_forward.w3")}
