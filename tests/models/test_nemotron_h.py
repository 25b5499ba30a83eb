"""Nemotron-H: what it has beyond the gated decoders, which test_gated.py compares."""

import torch

from tests.support.hf_parity import build, tokens_for
from tests.support.tiny_decoders import GATED
from torchtitan.models import SIZES
from torchtitan.models.nemotron_h.model import HF, NemotronH

PUBLISHED = {  # nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16, whose keys test_folder_config.py has
    "architectures": ["NemotronHForCausalLM"],
    "conv_kernel": 4,
    "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_num_heads": 64,
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "model_type": "nemotron_h",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "routed_scaling_factor": 2.5,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_min": 0.001,
    "topk_group": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 131072,
}


OF_8B = {  # nvidia/Nemotron-H-8B-Base-8K
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_head_dim": 128,
    "chunk_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "hidden_dropout": 0.0,
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "intermediate_size": 21504,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 52,
    "num_key_value_heads": 8,
    "num_logits_to_keep": 1,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "rms_norm_eps": 1e-05,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "use_bias": False,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}


def test_published_configs_are_read():
    nano = SIZES["nemotron_h"]["3-Nano-30B-A3B"]
    assert HF.config.args_from_config(PUBLISHED) == nano
    assert HF.config.args_from_config(OF_8B) == SIZES["nemotron_h"]["8B"]
    assert [nano.letters.count(letter) for letter in "ME*"] == [23, 23, 6]
    assert (round(nano.num_parameters / 1e9, 2), round(nano.num_active_parameters / 1e9, 2)) == (31.58, 3.58)
    assert round(SIZES["nemotron_h"]["8B"].num_parameters / 1e9, 2) == 8.1


def test_tokens_exchange_nothing_in_layers_without_attention():
    model = build(NemotronH, GATED["nemotron_h dense"])
    assert [block.attention is None for block in model.layers.values()] == [True, False, False, True]
    tokens = tokens_for(model.args)
    alone = torch.cat([model(tokens[:, :6]), model(tokens[:, 6:], positions=torch.arange(6)[None])], dim=1)
    documents = (torch.arange(12) >= 6).long().expand(2, -1)
    torch.testing.assert_close(model(tokens, document_ids=documents), alone)
