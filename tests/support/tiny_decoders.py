"""Tiny model sizes of every family, in the variants that compute something different."""

from dataclasses import replace

from torchtitan.models.afmoe import AfmoeArgs
from torchtitan.models.apertus import ApertusArgs
from torchtitan.models.arcee import ArceeArgs
from torchtitan.models.cohere import CohereArgs
from torchtitan.models.deepseek import DeepseekArgs, YarnScaling
from torchtitan.models.falcon import FalconArgs
from torchtitan.models.falcon_h1 import FalconH1Args
from torchtitan.models.gemma import Gemma1Args
from torchtitan.models.gemma2 import Gemma2Args
from torchtitan.models.gemma3 import Gemma3Args
from torchtitan.models.gemma4 import Gemma4Args, Gemma4MoEArgs
from torchtitan.models.glm4 import Glm4Args
from torchtitan.models.glm4_moe import Glm4MoEArgs
from torchtitan.models.gpt2 import GPT2Args
from torchtitan.models.gpt_neox import GPTNeoXArgs
from torchtitan.models.gpt_oss import GptOssArgs
from torchtitan.models.gptj import GPTJArgs
from torchtitan.models.granite import GraniteArgs
from torchtitan.models.granite4 import Granite4Args, Granite4MoEArgs
from torchtitan.models.hunyuan import HunyuanArgs
from torchtitan.models.lfm2 import Lfm2Args, Lfm2MoEArgs
from torchtitan.models.llama import LlamaArgs
from torchtitan.models.llama4 import ROUTING, Llama4Args
from torchtitan.models.minimax_m2 import MiniMaxM2Args
from torchtitan.models.mistral import MistralArgs
from torchtitan.models.mistral4 import Mistral4Args
from torchtitan.models.mixtral import MixtralArgs
from torchtitan.models.nemotron import NemotronArgs
from torchtitan.models.nemotron_h import NemotronHArgs, NemotronHMoEArgs
from torchtitan.models.olmo import OlmoArgs
from torchtitan.models.opt import OPTArgs
from torchtitan.models.phi import PhiArgs
from torchtitan.models.phi3 import Phi3Args
from torchtitan.models.qwen2 import Qwen2Args
from torchtitan.models.qwen2_moe import Qwen2MoEArgs
from torchtitan.models.qwen3 import Qwen3Args
from torchtitan.models.qwen3_moe import Qwen3MoEArgs
from torchtitan.models.qwen3_next import Qwen3NextArgs, Qwen35Args, Qwen35MoEArgs
from torchtitan.models.roberta import RobertaArgs
from torchtitan.models.seed_oss import SeedOssArgs
from torchtitan.models.sizes import LongRope, RopeScaling
from torchtitan.models.smollm3 import SmolLM3Args
from torchtitan.models.stablelm import StableLMArgs
from torchtitan.models.starcoder2 import Starcoder2Args

_LLAMA2 = LlamaArgs(dim=32, n_layers=2, n_heads=4, vocab_size=64, multiple_of=16, max_seq_len=128)
# of the 4 frequencies, one is kept, one blended and two are stretched
SCALING = RopeScaling(factor=8.0, original_max_seq_len=100)
LLAMA = {
    "llama2": _LLAMA2,
    "llama3": replace(_LLAMA2, n_kv_heads=2, rope_theta=500000.0),
    "llama3.1": replace(_LLAMA2, n_kv_heads=2, rope_theta=5000.0, rope_scaling=SCALING),
    "llama3.2": replace(_LLAMA2, n_kv_heads=1, tied_embeddings=True, rope_theta=5000.0, rope_scaling=SCALING),
}

_LATENT: dict = dict(dim=32, n_layers=3, n_heads=2, vocab_size=64, ffn_dim=48, kv_lora_rank=16, qk_nope_head_dim=8)
_LATENT |= dict(qk_rope_head_dim=16, v_head_dim=12, expert_dim=16, n_experts=8, top_k=3, max_seq_len=128)
_PLAIN = DeepseekArgs(**_LATENT, n_dense_layers=1, n_shared_experts=2, rope_scaling=None)
YARN = YarnScaling(factor=4.0, original_max_seq_len=20, mscale=0.7, mscale_all_dim=0.5)
YARN_EVEN = replace(YARN, mscale=1.0, mscale_all_dim=0.0)  # scores stay
DEEPSEEK = {
    "v2 lite": replace(_PLAIN, rope_scaling=YARN),
    "v2": replace(_PLAIN, q_lora_rank=20, n_groups=4, top_groups=2, route_scale=16.0),
    "v3": replace(
        _PLAIN,
        q_lora_rank=20,
        score="sigmoid",
        normalize_top_k=True,
        expert_bias=True,
        n_groups=4,
        top_groups=2,
        group_score="top2",
        route_scale=2.5,
        n_shared_experts=1,
        n_dense_layers=2,
        rope_scaling=YARN,
    ),
    "v3 plain": replace(
        _PLAIN, score="sigmoid", expert_bias=True, n_dense_layers=0, tied_embeddings=True, norm_eps=1e-5
    ),
}
DEEPSEEK["kimi k2"] = replace(
    DEEPSEEK["v3"], n_groups=1, top_groups=1, group_score="max", rope_scaling=replace(YARN, beta_fast=1.0)
)
MULTI_TOKEN = replace(DEEPSEEK["v3"], n_mtp_layers=2, mtp_loss_weight=0.4)

_MISTRAL = MistralArgs(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=48, vocab_size=64, max_seq_len=128
)
MISTRAL = {
    "window": replace(_MISTRAL, sliding_window=5, rope_theta=5000.0),
    "no window, tied": replace(_MISTRAL, head_dim=8, tied_embeddings=True, norm_eps=1e-6),
}

_GEMMA3 = Gemma3Args(
    dim=64,  # with a square root that transformers' float32 holds exactly
    n_layers=3,  # of which the second is global
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,  # 4 x 8 is not 64
    ffn_dim=48,
    vocab_size=64,
    rope_theta=5000.0,
    local_rope_theta=50.0,
    sliding_window=5,
    global_interval=2,
    query_scalar=24,
    max_seq_len=128,
)
GEMMA3 = {
    "plain": _GEMMA3,
    "scaled, not tied": replace(
        _GEMMA3,
        n_layers=4,
        n_kv_heads=1,
        global_interval=3,
        query_scalar=8,
        rope_scaling=RopeScaling(8.0, kind="linear"),
        tied_embeddings=False,
    ),
}

_QWEN2 = Qwen2Args(
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    ffn_dim=48,
    vocab_size=64,
    rope_theta=5000.0,
    max_seq_len=128,
)
QWEN2 = {"plain": _QWEN2, "tied": replace(_QWEN2, tied_embeddings=True, n_kv_heads=4, head_dim=16, norm_eps=1e-5)}

_DENSE_QWEN3 = Qwen3Args(
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,  # 4 x 16 is not 32
    ffn_dim=48,
    vocab_size=64,
    rope_theta=5000.0,
    max_seq_len=128,
)
QWEN3 = {"plain": _DENSE_QWEN3, "tied": replace(_DENSE_QWEN3, tied_embeddings=True, n_kv_heads=4, norm_eps=1e-5)}

_QWEN3 = Qwen3MoEArgs(
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,  # 4 x 16 is not 32
    vocab_size=64,
    expert_dim=16,
    n_experts=6,
    top_k=2,
    normalize_top_k=True,
    rope_theta=5000.0,
    max_seq_len=128,
)
QWEN3_MOE = {
    "published": _QWEN3,
    "not normalized, tied": replace(_QWEN3, normalize_top_k=False, tied_embeddings=True, norm_eps=1e-5),
}

_GPT2 = GPT2Args(dim=32, n_layers=2, n_heads=4, ffn_dim=48, vocab_size=64, max_seq_len=128)
GPT2 = {"words": _GPT2, "classes": replace(_GPT2, n_classes=4)}
_ROBERTA = RobertaArgs(dim=32, n_layers=2, n_heads=4, ffn_dim=48, vocab_size=64, max_seq_len=126, n_types=2)
ROBERTA = {"words": _ROBERTA, "classes": replace(_ROBERTA, n_classes=4)}
_OPT = OPTArgs(dim=32, n_layers=2, n_heads=4, ffn_dim=48, vocab_size=64, max_seq_len=128)
OPT = {
    "words": _OPT,
    "350M": replace(_OPT, order="post", embed_dim=16),
    "narrow words": replace(_OPT, embed_dim=24),
    "classes": replace(_OPT, n_classes=4),
}

_TINY_EXPERTS: dict = dict(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, vocab_size=64, max_seq_len=128)
_TINY_EXPERTS |= dict(expert_dim=16, n_experts=6, top_k=2, rope_theta=5000.0)
_MIXTRAL, _QWEN2_MOE = MixtralArgs(**_TINY_EXPERTS), Qwen2MoEArgs(**_TINY_EXPERTS, n_shared_experts=2)
_GLM4_MOE = Glm4MoEArgs(
    **_TINY_EXPERTS | dict(n_layers=3, n_experts=8, top_k=3),
    ffn_dim=48,
    rotary_dim=8,
    score="sigmoid",
    normalize_top_k=True,
    expert_bias=True,
    n_shared_experts=1,
)
_GPT_OSS = GptOssArgs(
    **_TINY_EXPERTS | dict(n_layers=3, n_experts=8, top_k=3),
    rope_scaling=RopeScaling(factor=4.0, original_max_seq_len=16, kind="yarn", truncate=False),
    sliding_window=5,
    swiglu_limit=0.2,  # some gates are larger
)
# of four layers, two have experts and one has no rotary positions
_LLAMA4 = Llama4Args(
    **_TINY_EXPERTS | ROUTING | dict(n_layers=4, chunk_size=5, ffn_dim=48, moe_interval=2, no_rope_interval=3),
    rope_scaling=SCALING,
    query_growth=0.5,
    query_period=4,
)
_DELTA: dict = dict(n_layers=3, full_interval=2, delta_key_heads=2, delta_value_heads=4, delta_key_dim=8)
_DELTA |= dict(delta_value_dim=6, head_dim=16, rotary_dim=8)
_QWEN3_NEXT = Qwen3NextArgs(**_TINY_EXPERTS | _DELTA)
_EXPERTS = {
    "glm4_moe": replace(_GLM4_MOE, qk_norm=True, n_groups=4, top_groups=2, group_score="top2", route_scale=2.5),
    "glm4_moe without biases": replace(
        _GLM4_MOE, qkv_bias=False, normalize_top_k=False, rotary_dim=16, n_dense_layers=0
    ),
    "glm4_moe_lite": replace(DEEPSEEK["v3"], v_head_dim=20, norm_eps=1e-5, rope_scaling=None),
    "glm4_moe_lite plain": replace(
        DEEPSEEK["v3 plain"], rope_scaling=YARN, n_dense_layers=1, n_groups=1, normalize_top_k=True
    ),
    "mistral4": Mistral4Args(**_LATENT, q_lora_rank=20, rope_scaling=YARN, query_growth=0.3, query_period=20),
    "mistral4 in groups": Mistral4Args(
        **_LATENT | dict(q_lora_rank=0, n_dense_layers=1, tied_embeddings=True, norm_eps=1e-5, rope_theta=5000.0),
        **dict(n_groups=4, top_groups=2, group_score="top2", route_scale=2.5, n_shared_experts=2),
        **dict(normalize_top_k=False, rope_scaling=YARN_EVEN, query_growth=0.0),
    ),
    "minimax_m2": MiniMaxM2Args(**_TINY_EXPERTS, rotary_dim=6),
    "minimax_m2 tied": MiniMaxM2Args(
        **_TINY_EXPERTS | dict(n_kv_heads=4, top_k=3), rotary_dim=16, tied_embeddings=True, rope_scaling=SCALING
    ),
    "afmoe": AfmoeArgs(**_TINY_EXPERTS | dict(n_layers=3), ffn_dim=48, sliding_window=5, global_interval=2),
    "afmoe scaled, biased": AfmoeArgs(
        **_TINY_EXPERTS | dict(dim=64, n_layers=3, top_k=3, n_kv_heads=4),  # with a square root that is exact
        **dict(ffn_dim=48, n_dense_layers=0, sliding_window=5, global_interval=3, route_scale=2.5, n_shared_experts=2),
        **dict(scaled_embeddings=True, attention_bias=True, tied_embeddings=True, rope_scaling=SCALING),
    ),
    "gpt_oss": _GPT_OSS,
    "gpt_oss without biases": replace(
        _GPT_OSS, attention_bias=False, global_interval=3, rope_scaling=None, tied_embeddings=True, swiglu_alpha=2.0
    ),
    "llama4": _LLAMA4,
    "llama4 plain": replace(
        _LLAMA4,
        moe_interval=1,
        unit_heads=False,
        attention_bias=True,
        query_growth=0.0,
        rope_scaling=None,
        chunk_size=12,
        tied_embeddings=True,
        top_k=1,
    ),
    "mixtral": _MIXTRAL,
    "mixtral window": replace(_MIXTRAL, sliding_window=5, tied_embeddings=True, top_k=3),
    "qwen2_moe": _QWEN2_MOE,
    "qwen2_moe windows": replace(_QWEN2_MOE, n_layers=3, sliding_window=5, window_layers="0,2"),
    "qwen3_moe window": Qwen3MoEArgs(**_TINY_EXPERTS, sliding_window=5),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_next tied": replace(
        _QWEN3_NEXT, delta_key_heads=4, conv_taps=2, full_interval=3, tied_embeddings=True, normalize_top_k=False
    ),
    "qwen3_5_moe": Qwen35MoEArgs(**_TINY_EXPERTS | _DELTA, n_shared_experts=2),
    "qwen2_moe without biases": replace(_QWEN2_MOE, qkv_bias=False, normalize_top_k=True, n_shared_experts=1),
}
_GATED = dict(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=48, vocab_size=64, max_seq_len=128)
_CAPS = dict(score_cap=0.3, logit_cap=0.5)  # so low that they matter
YARN_FACTOR = RopeScaling(factor=4.0, original_max_seq_len=16, kind="yarn")
# factors that float32 holds exactly, as transformers rounds some
_FACTORS: dict = dict(embedding_multiplier=3.0, head_multiplier=2.0, key_multiplier=1.5, attention_in_multiplier=1.25)
_FACTORS |= dict(attention_out_multiplier=0.75, ssm_in_multiplier=2.5, ssm_out_multiplier=0.5, gate_multiplier=1.75)
_FACTORS |= dict(down_multiplier=0.375, ssm_z_multiplier=1.25, ssm_x_multiplier=0.75, ssm_b_multiplier=1.5)
_FACTORS |= dict(ssm_c_multiplier=0.625, ssm_dt_multiplier=2.0)
_GEMMA4_KINDS: dict = dict(rope_theta=5000.0, local_rope_theta=50.0, sliding_window=5, global_interval=2, logit_cap=3.0)
_GEMMA4_KINDS |= dict(global_head_dim=16, global_kv_heads=2, global_rotary_dim=8, keys_are_values=True)
_GEMMA4 = Gemma4Args(**_GATED | _GEMMA4_KINDS | dict(dim=64, n_layers=3, n_kv_heads=4))
_FALCON_H1 = FalconH1Args(
    **_GATED,
    **_FACTORS,
    ssm_heads=4,
    ssm_head_dim=6,
    ssm_state_dim=5,
    ssm_groups=2,
    ssm_norm=True,
    rope_theta=5000.0,
)
_FALCON_BIASES: dict = dict(attention_bias=True, mlp_bias=True, ssm_bias=True, ssm_out_bias=True)
_MIXER: dict = dict(ssm_heads=4, ssm_head_dim=8, ssm_state_dim=5, ssm_groups=2, layer_pattern="MM*")
_GRANITE4: dict = _MIXER | dict(embedding_multiplier=3.0, attention_multiplier=0.4, logits_divisor=0.5)
GATED = {
    "llama3 biased": replace(LLAMA["llama3"], head_width=12, attention_bias=True, mlp_bias=True),
    "granite": GraniteArgs(**_GATED, embedding_multiplier=3.0, attention_multiplier=0.4, logits_divisor=0.5),
    "mistral growing": MistralArgs(
        **_GATED, query_growth=0.3, query_period=16, rope_scaling=replace(YARN_FACTOR, attention_factor=0.8)
    ),
    "mistral growing, not scaled": MistralArgs(**_GATED, query_growth=0.3, query_period=10, sliding_window=5),
    "olmo2": OlmoArgs(**_GATED),
    "olmo2 biased": OlmoArgs(**_GATED, rope_scaling=SCALING, tied_embeddings=True, attention_bias=True),
    "olmo3": OlmoArgs(**_GATED | dict(n_layers=3), sliding_window=5, global_interval=2, rope_theta=5000.0),
    "olmo3 scaled": OlmoArgs(**_GATED, rope_scaling=SCALING, sliding_window=5, global_interval=2),
    "falcon": FalconArgs(**_GATED | dict(n_kv_heads=1), rotary_dim=8),
    "falcon new": FalconArgs(**_GATED, rotary_dim=8, norms=2, bias=True, rope_scaling=SCALING, tied_embeddings=False),
    "falcon one norm": FalconArgs(**_GATED, rotary_dim=8, tied_embeddings=False),
    "falcon in turn": FalconArgs(**_GATED | dict(n_kv_heads=4), rotary_dim=8, norms=0, bias=True),
    "hunyuan_v1_dense": HunyuanArgs(**_GATED, rope_scaling=RopeScaling(30.0, kind="ntk")),
    "hunyuan_v1_dense biased": HunyuanArgs(
        **_GATED | dict(head_dim=12), attention_bias=True, tied_embeddings=False, rope_theta=5000.0
    ),
    "nemotron": NemotronArgs(**_GATED | dict(head_dim=12), rotary_dim=6, rope_theta=5000.0),
    "nemotron biased": NemotronArgs(
        **_GATED, rotary_dim=8, attention_bias=True, mlp_bias=True, tied_embeddings=True, rope_scaling=SCALING
    ),
    "cohere": CohereArgs(**_GATED, rope_theta=5000.0, logit_scale=0.25),
    "cohere biased": CohereArgs(
        **_GATED | dict(head_dim=12), attention_bias=True, tied_embeddings=False, rope_scaling=SCALING
    ),
    "cohere2": CohereArgs(**_GATED | dict(n_layers=3), sliding_window=5, global_interval=2, logit_scale=0.5),
    "gpt_neox": GPTNeoXArgs(**_GATED | dict(n_kv_heads=4), rotary_dim=4, rope_theta=5000.0),
    "gpt_neox in turn": GPTNeoXArgs(
        **_GATED | dict(n_kv_heads=4),
        rotary_dim=8,
        side_by_side=False,
        attention_bias=False,
        approximate_gelu=True,
        tied_embeddings=True,
        rope_scaling=SCALING,
    ),
    "gptj": GPTJArgs(**_GATED | dict(n_kv_heads=4), rotary_dim=4),
    "gptj tied": GPTJArgs(**_GATED | dict(n_kv_heads=4, ffn_dim=64), rotary_dim=8, tied_embeddings=True, norm_eps=1e-6),
    "starcoder2": Starcoder2Args(**_GATED, sliding_window=5, rope_theta=5000.0),
    "starcoder2 without biases": Starcoder2Args(
        **_GATED | dict(head_dim=12), bias=False, tied_embeddings=False, rope_scaling=YARN_FACTOR
    ),
    "phi": PhiArgs(**_GATED | dict(n_kv_heads=4), rotary_dim=4, rope_theta=5000.0),
    "phi normed": PhiArgs(**_GATED, rotary_dim=6, qk_norm=True, tied_embeddings=True, rope_scaling=SCALING),
    "phi3": Phi3Args(**_GATED, sliding_window=5),
    "phi4": Phi3Args(**_GATED | dict(n_kv_heads=4), tied_embeddings=True),
    "phi4 long": Phi3Args(
        **_GATED,
        rotary_factor=0.75,
        longrope=LongRope((1.0, 1.4, 2.5), (1.5, 9.0, 30.0), attention_factor=1.3, original_max_seq_len=64),
    ),
    "seed_oss": SeedOssArgs(**_GATED | dict(head_dim=12), rope_theta=5000.0),
    "seed_oss other biases": SeedOssArgs(
        **_GATED, attention_bias=False, attention_out_bias=True, mlp_bias=True, tied_embeddings=True
    ),
    "smollm3": SmolLM3Args(**_GATED | dict(n_layers=3), no_rope_interval=2, tied_embeddings=False),
    "smollm3 biased": SmolLM3Args(**_GATED, no_rope_interval=3, mlp_bias=True, attention_bias=True),
    "stablelm": StableLMArgs(**_GATED, rotary_dim=4, qkv_bias=True),
    "stablelm side by side": StableLMArgs(
        **_GATED, rotary_dim=6, qk_norm=True, side_by_side=True, tied_embeddings=True, rope_scaling=YARN_FACTOR
    ),
    "qwen2 windows": Qwen2Args(**_GATED | dict(n_layers=4), sliding_window=5, window_layers="1,3"),
    "qwen3 windows": Qwen3Args(**_GATED | dict(n_layers=3), sliding_window=5, window_layers="1-2"),
    "qwen3 window": Qwen3Args(**_GATED, sliding_window=5),
    "glm4": Glm4Args(**_GATED | dict(n_layers=3), rotary_dim=4),
    "glm4 without biases": Glm4Args(**_GATED, rotary_dim=8, qkv_bias=False, tied_embeddings=True),
    "glm": Glm4Args(**_GATED | dict(head_dim=12), rotary_dim=6, output_norms=False),
    "gemma": Gemma1Args(**_GATED | dict(dim=64, n_kv_heads=1)),
    "gemma biased, not tied": Gemma1Args(
        **_GATED | dict(dim=64), attention_bias=True, tied_embeddings=False, rope_scaling=SCALING
    ),
    "apertus": ApertusArgs(**_GATED | dict(head_dim=12), rope_theta=5000.0, rope_scaling=SCALING),
    "apertus biased": ApertusArgs(**_GATED, attention_bias=True, tied_embeddings=True, rope_scaling=None),
    "arcee": ArceeArgs(**_GATED | dict(head_dim=12), rope_theta=5000.0),
    "arcee biased": ArceeArgs(
        **_GATED, attention_bias=True, mlp_bias=True, tied_embeddings=True, rope_scaling=YARN_FACTOR
    ),
    "gemma2": Gemma2Args(**_GATED | dict(dim=64, n_layers=3), sliding_window=5, query_scalar=24, **_CAPS),
    "gemma4": _GEMMA4,
    "gemma4 experts": Gemma4MoEArgs(**_TINY_EXPERTS | _GEMMA4_KINDS | dict(dim=64, n_layers=3, n_kv_heads=4)),
    "gemma4 with values": replace(_GEMMA4, keys_are_values=False, global_kv_heads=4, logit_cap=0.0, n_layers=4),
    "gemma2 not capped, not tied": Gemma2Args(
        **_GATED | dict(dim=64),
        sliding_window=5,
        global_interval=3,
        score_cap=0.0,
        logit_cap=0.0,
        tied_embeddings=False,
    ),
    "qwen3_5": Qwen35Args(**_GATED | _DELTA, rope_theta=5000.0),
    "qwen3_5 tied": Qwen35Args(**_GATED | _DELTA | dict(n_layers=2), tied_embeddings=True, conv_taps=3),
    "falcon_h1": _FALCON_H1,
    "falcon_h1 biased, tied": replace(
        _FALCON_H1, ssm_norm=False, ssm_groups=1, conv_taps=3, tied_embeddings=True, head_dim=12, **_FALCON_BIASES
    ),
    "falcon_h1 normed first": replace(_FALCON_H1, norm_before_gate=True, conv_bias=False, ssm_head_dim=4),
    "granite4": Granite4MoEArgs(**_TINY_EXPERTS | _GRANITE4 | dict(n_layers=4)),
    "granite4 dense": Granite4Args(
        **_GATED | _GRANITE4 | dict(n_layers=3, layer_pattern="*M", ssm_head_dim=16, conv_taps=3, conv_bias=False),
        **dict(rotary=True, tied_embeddings=True, attention_bias=True, ssm_bias=True, ssm_out_bias=True),
    ),
    "nemotron_h": NemotronHMoEArgs(
        **{name: size for name, size in (_TINY_EXPERTS | _MIXER).items() if name != "rope_theta"}
        | dict(n_layers=5, layer_pattern="ME*EM", min_step=1.3125, ssm_head_dim=6),  # above half of the steps
        **dict(route_scale=2.5, normalize_top_k=True, n_groups=2, top_groups=1, group_score="top2"),
    ),
    "nemotron_h dense": NemotronHArgs(
        **_GATED | _MIXER | dict(n_layers=4, layer_pattern="-M*-", mlp_bias=True, ssm_bias=True, ssm_out_bias=True)
    ),
    "lfm2": Lfm2Args(**_GATED | dict(n_layers=3), layer_pattern="CC*", rope_theta=5000.0),
    "lfm2 biased": Lfm2Args(
        **_GATED, layer_pattern="*C", conv_bias=True, conv_taps=4, tied_embeddings=False, rope_scaling=SCALING
    ),
    "lfm2_moe": Lfm2MoEArgs(
        **_TINY_EXPERTS | dict(n_layers=4, ffn_dim=48, n_dense_layers=1, layer_pattern="C*", route_scale=2.5)
    ),
    "lfm2_moe without biases": Lfm2MoEArgs(
        **_TINY_EXPERTS | dict(ffn_dim=48, n_dense_layers=0, layer_pattern="*C", expert_bias=False),
        normalize_top_k=False,
    ),
    "granite tied, biased": GraniteArgs(**_GATED, tied_embeddings=True, attention_bias=True, mlp_bias=True),
    **_EXPERTS,
}
"""Shapes of families that are gated decoders with other options; the first word is the family."""
