"""StarCoder 2: a published config, and dropout of embeddings, which GPT-NeoX and GPT-J have too."""

from dataclasses import replace

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from tests.support.hf_parity import build, close, tokens_for, twin
from tests.support.tiny_decoders import GATED
from torchtitan.models import SIZES
from torchtitan.models.dropout import Dropout, layer_keys, token_keys
from torchtitan.models.spec import MODELS
from torchtitan.models.starcoder2 import DROPOUTS
from torchtitan.models.starcoder2.model import HF

PUBLISHED_3B = {  # bigcode/starcoder2-3b
    "activation_function": "gelu",
    "architectures": ["Starcoder2ForCausalLM"],
    "attention_dropout": 0.1,
    "attention_softmax_in_fp32": True,
    "embedding_dropout": 0.1,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "layer_norm_epsilon": 1e-05,
    "max_position_embeddings": 16384,
    "mlp_type": "default",
    "model_type": "starcoder2",
    "norm_epsilon": 1e-05,
    "norm_type": "layer_norm",
    "num_attention_heads": 24,
    "num_hidden_layers": 30,
    "num_key_value_heads": 2,
    "residual_dropout": 0.1,
    "rope_theta": 999999.4420358813,
    "scale_attention_softmax_in_fp32": True,
    "scale_attn_weights": True,
    "sliding_window": 4096,
    "use_bias": True,
    "vocab_size": 49152,
}


def test_the_published_config_is_read():
    args = HF.config.args_from_config(PUBLISHED_3B)
    assert args == replace(SIZES["starcoder2"]["3B"], **dict.fromkeys(DROPOUTS, 0.1))
    assert not HF.config.differing_fields(args, SIZES["starcoder2"]["3B"])


@pytest.mark.parametrize(
    "shape, change",
    [
        ("starcoder2", {"residual_dropout": 0.4, "embedding_dropout": 0.3}),
        ("gpt_neox", {"residual_dropout": 0.4}),
        ("gptj", {"residual_dropout": 0.4, "embedding_dropout": 0.3}),
        ("gpt_neox in turn", {"residual_dropout": 0.4}),
    ],
)
def test_dropout_is_where_transformers_has_it(shape, change, monkeypatch):
    """Of embeddings first, and then of attention and feed-forward of each layer, which have two streams."""
    spec, args = MODELS[shape.split()[0]], GATED[shape]
    model = build(spec.build, replace(args, **change)).train()
    config = spec.hf.config_to_hf(args)
    reference = getattr(transformers, config["architectures"][0])
    hf_model = twin(reference, CONFIG_MAPPING[config["model_type"]], model, spec.hf).train()
    tokens = tokens_for(args)
    keys = token_keys(1, 2, torch.arange(2), tokens.shape[1])
    places = iter([(-1, 0), *((layer, stream) for layer in range(args.n_layers) for stream in (0, 1))])

    def dropout(x, p=0.5, training=True, inplace=False):
        if not p:  # of attention probabilities
            return x
        layer, stream = next(places)
        return Dropout(p, stream).train(training)(x, layer_keys(keys, layer))

    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)
    assert close(model(tokens, keys=keys), hf_model(tokens).logits, 2e-6)
    assert not [*places], "transformers drops out embeddings, and twice in each layer"
