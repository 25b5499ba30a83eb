"""Models that read images or sound too: their text part is read as transformers computes it, and saved as a model."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from tests.support.hf_parity import close, peer_class
from tests.support.wrapper_folders import PARTS_OF, text_config, write_flat_config, write_memory_names, write_wrapper
from torchtitan.adapters.low_rank import LoRA
from torchtitan.assembly import parts
from torchtitan.config.sections.model import Adapter
from torchtitan.core.errors import JobError
from torchtitan.models import CONFIG_CONVERTERS, family_for_model_type, family_in
from torchtitan.models.hf.save import build_extra_files, read_source
from torchtitan.models.hf.wrappers import DEFAULTS, TEXT, TIED, WRAPPERS, text_part
from torchtitan.models.spec import MODELS

TOLERANCE = 4e-6
"""Of the largest logit: both compute in float32."""
KINDS = [*WRAPPERS]
OTHER_TEXTS = {("mistral3", "ministral3"), ("llava", "mistral"), ("llava_next", "qwen2"), ("internvl", "qwen3")}
OTHER_TEXTS |= {("llava_onevision", "gemma3_text"), ("mistral3", "mistral4")}
ROWS = [(kind, None) for kind in KINDS] + sorted(OTHER_TEXTS)


def tokens_for(text):
    return torch.randint(4, text["vocab_size"], (2, 24), generator=torch.Generator().manual_seed(0))


def load(folder):
    """Return the family, the sizes and the model that this project reads from a folder."""
    family = family_in(folder)
    hf = MODELS[family].hf
    args = hf.config.args_from_folder(folder)
    model = hf.build(args)
    hf.load_hf(folder, model, args)
    return family, args, model.eval()


@torch.no_grad()
@pytest.mark.parametrize("kind, text_type", ROWS)
def test_the_text_part_computes_as_the_whole_model(kind, text_type, tmp_path, caplog):
    text = text_config(kind, text_type)
    reference = write_wrapper(tmp_path / "saved", kind, text)
    write_memory_names(tmp_path / "saved", reference, tmp_path / "names")
    if WRAPPERS[kind].may_be_flat:
        write_flat_config(tmp_path / "saved", tmp_path / "flat")
    tokens = tokens_for(text)
    logits = reference(input_ids=tokens, use_cache=False).logits
    of_text = ("model.language_", "language_model.", "model.text_", "lm_")
    unread = sum(not name.startswith(of_text) for name in reference.state_dict())
    for folder in tmp_path.iterdir():
        caplog.clear()
        family, args, model = load(folder)
        assert close(model(tokens), logits, TOLERANCE)
        assert f"a {kind} model, of which the text part" in caplog.text
        assert f"; {unread} tensors of its other parts are not read" in caplog.text
    hf, target = MODELS[family].hf, tmp_path / "exported"
    files = build_extra_files(
        hf.config, args, torch.float32, source=read_source(folder), tokenizer_files={}, bos_id=1, end_ids=[2]
    )
    hf.save_hf(target, model.state_dict(), args, extra_files=files)
    exported = peer_class(json.loads(files["config.json"])).from_pretrained(target, dtype=torch.float32).eval()
    assert close(exported(tokens, use_cache=False).logits, logits, TOLERANCE)


def test_all_wrappers_are_tried():
    assert WRAPPERS.keys() == PARTS_OF.keys()


def sizes_in(config):
    config = text_part(config)
    return CONFIG_CONVERTERS[family_for_model_type(config["model_type"])].args_from_config(config)


PAIRS = [(kind, text) for kind in KINDS for text in DEFAULTS if WRAPPERS[kind].text_type == text or kind == "mistral3"]


@pytest.mark.parametrize("kind, text_type", PAIRS)
def test_absent_keys_are_read_as_transformers_fills_them(kind, text_type, tmp_path):
    text = {} if WRAPPERS[kind].text_type == text_type else {"model_type": text_type}
    text |= {"hidden_size": 2560} if text_type == "gemma3_text" else {}
    text |= {"hidden_size_per_layer_input": 0} if text_type == "gemma4_text" else {}
    if text_type == "ministral3":  # without the table its growth of queries is refused
        text["rope_parameters"] = CONFIG_MAPPING[text_type]().rope_parameters
    CONFIG_MAPPING[kind](text_config=text).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert sizes_in({"model_type": kind, TEXT: text}) == sizes_in(written)


GEMMA3 = {"model_type": "gemma3", TEXT: text_config("gemma3"), "vision_config": {"hidden_size": 8}}
QWEN3_VL = {"model_type": "qwen3_vl", TEXT: text_config("qwen3_vl"), "vision_config": {"hidden_size": 8}}
QWEN2_VL = {"model_type": "qwen2_vl", TEXT: text_config("qwen2_vl"), "vision_config": {"hidden_size": 8}}


@pytest.mark.parametrize(
    "config, change, message",
    [
        (GEMMA3, {TEXT: None}, "text_config = None; allowed: an object"),
        (
            GEMMA3,
            {TEXT: {"model_type": "gemma3n_text"}},
            "text_config has model_type = 'gemma3n_text'; allowed: gemma3_te",
        ),
        (GEMMA3, {TEXT: {"model_type": ["llama"]}}, r"text_config has model_type = \['llama'\]; allowed: gemma3_text"),
        (GEMMA3, {"next_month": 1}, r'outside of text_config it has a key.*next_month = 1; .*_keys = \["next_month"\]'),
        (GEMMA3, {TEXT: GEMMA3[TEXT] | {"next_month": 1}}, "it has a key that this program does not know.*next_month"),
        (GEMMA3, {"hidden_size": 8}, "hidden_size: text_config's is 64, but the one outside of it is 8"),
        (GEMMA3, {TIED: "yes"}, "tied_embeddings = 'yes'"),
        (GEMMA3, {"quantization_config": {"quant_method": "gptq"}}, "Convert the weights to bfloat16 first"),
        (QWEN2_VL, {TEXT: QWEN2_VL[TEXT] | {"rope_scaling": {"mrope_section": [1, 2]}}}, "allowed: three numbers of"),
        (QWEN2_VL, {TEXT: QWEN2_VL[TEXT] | {"rope_scaling": None}}, r"\[16, 24, 24\]; allowed: three numbers that add"),
        (
            QWEN2_VL,
            {TEXT: QWEN2_VL[TEXT] | {"head_dim": 2}},
            "head_dim = 2; allowed: hidden_size / num_attention_heads",
        ),
        (
            QWEN3_VL,
            {TEXT: QWEN3_VL[TEXT] | {"use_sliding_window": True}},
            "use_sliding_window = True; transformers ign",
        ),
    ],
)
def test_what_would_be_another_model_is_refused(config, change, message):
    sizes_in(config)
    with pytest.raises(JobError, match=message):
        sizes_in(config | change)


def test_keys_of_published_files_that_transformers_leaves_unread_are_known():
    """Of google/gemma-4-31B-it."""
    config = {"model_type": "gemma4", TEXT: text_config("gemma4") | {"hidden_size_per_layer_input": 0}}
    assert sizes_in(config | {"eoa_token_id": 258883, "vision_soft_tokens_per_image": 280}) == sizes_in(config)


def test_keys_outside_of_the_text_can_be_ignored():
    config = text_part(GEMMA3 | {"next_month": 1})
    assert CONFIG_CONVERTERS["gemma3"].ignoring(["next_month"]).args_from_config(config) == sizes_in(GEMMA3)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"language_model.model.norm": "model.norm"}, "norm.weight is missing; model.norm.weight is not part of the"),
        ({}, "language_model.model.extra.weight is not part of the model"),
        ({"vision_tower": "vision_turret"}, "vision_turret.* is not part of the model"),
    ],
)
def test_unknown_tensors_are_refused(changes, message, tmp_path):
    write_wrapper(tmp_path, "gemma3", text_config("gemma3"))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name, other in changes.items():
        tensors = {key.replace(name, other): tensor for key, tensor in tensors.items()}
    if not changes:
        tensors["language_model.model.extra.weight"] = torch.zeros(1)
    save_file(tensors, file)
    with pytest.raises(JobError, match=message):
        load(tmp_path)


def test_a_tensor_under_two_names_is_refused(tmp_path):
    write_wrapper(tmp_path, "gemma3", text_config("gemma3"))
    tensors = load_file(tmp_path / "model.safetensors")
    norm = tensors["language_model.model.norm.weight"]
    save_file(tensors | {"model.language_model.norm.weight": norm + 1}, tmp_path / "model.safetensors")
    with pytest.raises(JobError, match="are both model.norm.weight of the text part; remove one of them"):
        load(tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["gemma3", "idefics3", "qwen2_vl"])
def test_an_adapter_of_the_text_part_is_one_of_the_whole_model_in_peft(kind, tmp_path):
    from peft import PeftModel

    reference = write_wrapper(tmp_path / "base", kind, text_config(kind))
    family, args, model = load(tmp_path / "base")
    options = Adapter(kind="lora", rank=2, alpha=4.0)
    adapter = LoRA(options)
    adapter.install(model, MODELS[family].plan)
    added = {
        name: tensor.normal_(std=0.3) for name, tensor in model.state_dict().items() if name in adapter.added_parameters
    }
    job_model = SimpleNamespace(
        initial_load_path=str(tmp_path / "base"), model=SimpleNamespace(name=family), args=args, adapter=options
    )
    parts.save_peft(job_model, tmp_path / "adapter", adapter, added)
    peft_model = PeftModel.from_pretrained(reference, tmp_path / "adapter").eval()
    tokens = tokens_for(text_config(kind))
    assert close(model(tokens), peft_model(input_ids=tokens, use_cache=False).logits, 2e-5)
