"""`torchtitan import` of trl's lines: every argument of sft and dpo, their defaults, and mutations."""

import contextlib
import io
import json
import random

import pytest
import yaml

from tests.support.importing import difference
from torchtitan.config.layers import layer_of
from torchtitan.core.errors import JobError
from torchtitan.plugins.importers import parse, programs, split, trl
from torchtitan.plugins.importers.command import translate
from torchtitan.plugins.importers.hf_trainer import ARGUMENTS
from torchtitan.plugins.importers.translation import KINDS, flag_value

SFT = "trl sft --num_processes 2 --model_name_or_path llama --dataset_name owner/set"
DPO = SFT.replace("sft", "dpo")
REWARD = SFT.replace("sft", "reward")
LORA = f"{SFT} --use_peft"
HELD_OUT = f"{SFT} --eval_strategy steps"
MIXTURE = {"datasets": [{"path": "owner/a", "name": "en"}, {"path": "json", "data_files": "b.jsonl"}]}


SIZES = dict(hidden_size=64, num_hidden_layers=8, num_attention_heads=2, vocab_size=64, rms_norm_eps=1e-6)
SIZES |= dict(num_key_value_heads=2, intermediate_size=64, head_dim=32, max_position_embeddings=64)


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, config in {
        "llama": {"model_type": "llama"},
        "stored": {"model_type": "llama", "torch_dtype": "bfloat16"},
        "half": {"model_type": "llama", "torch_dtype": "float16"},
        "experts": {"model_type": "qwen3_moe"},
        "gpt2": {"model_type": "gpt2"},
        "sized": SIZES | {"model_type": "llama"},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        (tmp_path / name / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    (tmp_path / "z3.json").write_text('{"zero_optimization": {"stage": 3}}')
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(MIXTURE))
    (tmp_path / "rate.yaml").write_text("learning_rate: 1e-3\npacking: true\nlora_target_modules: [q_proj]\n")


def import_line(line):
    return trl.read(parse(split([line])))


def test_the_defaults_are_those_of_trl():
    job = import_line(SFT)
    assert job.faults == []
    assert job.values == {
        "activation_checkpoint.mode": "full",
        "checkpoint.enable": True,
        "checkpoint.initial_load_in_hf": True,
        "checkpoint.initial_load_path": "llama",
        "checkpoint.interval": 500,
        "checkpoint.keep_latest_k": 0,
        "checkpoint.last_save_in_hf": True,
        "checkpoint.last_save_model_only": True,
        "data.packing": "off",
        "data.too_long": "truncate",
        "data.train_on": "all",
        "debug.seed": 42,
        "job.dump_folder": "trainer_output",
        "lr_scheduler.convention": "transformers",
        "lr_scheduler.decay_type": "linear",
        "lr_scheduler.min_lr_factor": 0.0,
        "lr_scheduler.warmup_steps": 0,
        "metrics.log_freq": 10,
        "model.flavor": "from_hf",
        "model.hf_folder": "llama",
        "model.name": "llama3",
        "model.tokenizer_path": "llama",
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.999,
        "optimizer.decay_norms_and_biases": False,
        "optimizer.eps": 1e-8,
        "optimizer.lr": 2e-5,
        "optimizer.name": "AdamW",
        "optimizer.weight_decay": 0.0,
        "parallelism.data_parallel_replicate_degree": 2,
        "parallelism.data_parallel_shard_degree": 1,
        "task.kind": "sft",
        "training.dtype": "float32",
        "training.epochs": 3,
        "training.global_batch_size": 16,
        "training.local_batch_size": 8,
        "training.max_norm": 1.0,
        "training.mixed_precision_param": "bfloat16",
        "training.seq_len": 1024,
        "data.max_tokens": 1024,
        "training.sources": [{"dataset": "huggingface", "dataset_path": "owner/set"}],
    }
    changed, _ = difference(job, import_line(DPO))
    assert changed == {
        "data.packing": None,
        "data.too_long": "drop",
        "data.train_on": None,
        "dpo.beta": 0.1,
        "optimizer.lr": 1e-6,
        "task.kind": "dpo",
    }
    changed, _ = difference(job, import_line(REWARD))
    assert changed == {
        "data.packing": None,
        "data.too_long": "drop",
        "data.train_on": None,
        "model.overrides": {"n_classes": 1},
        "optimizer.lr": 1e-4,
        "task.kind": "reward",
    }


def test_an_adapter_of_a_reward_model_trains_its_head():
    job = import_line(f"{REWARD} --use_peft")
    assert job.values["adapter.train_fully"] == ["output.weight"] and job.values["adapter.dropout"] == 0
    notes = [" ".join(import_line(f"{REWARD} --use_peft {flags}").notes) for flags in ("", "--lora_task_type SEQ_CLS")]
    assert ["the new head is trained; by trl only with" in text for text in notes] == [True, False]


EXPERTS = SFT.replace("llama", "experts")
TRANSLATED = [  # flags, the line that they are added to, and the options of the job that change
    ("--model_name_or_path Qwen/Qwen3-4B", SFT, {"model.name": "qwen3", "model.hf_folder": "Qwen/Qwen3-4B"}),
    ("--dataset_config en", SFT, {"training.sources": [{"dataset": "huggingface", "dataset_path": "owner/set:en"}]}),
    ("--dataset_name a.jsonl", SFT, {"training.sources": [{"dataset": "text", "dataset_path": "a.jsonl"}]}),
    (
        "--dataset_train_split validation",
        SFT,
        {"training.sources": [{"dataset": "huggingface_validation", "dataset_path": "owner/set"}]},
    ),
    (
        "--eval_strategy steps --eval_steps 50 --per_device_eval_batch_size 2",
        SFT,
        {
            "validation.enable": True,
            "validation.freq": 50,
            "validation.local_batch_size": 2,
            "validation.samples": 0,
            "validation.sources": [{"dataset": "huggingface_test", "dataset_path": "owner/set"}],
        },
    ),
    (
        "--dataset_test_split validation",
        HELD_OUT,
        {"validation.sources": [{"dataset": "huggingface_validation", "dataset_path": "owner/set"}]},
    ),
    (
        "--config mixture.yaml --test_split_size 0.1",
        SFT.replace(" --dataset_name owner/set", ""),
        {
            "training.mixing": "sizes",
            "training.sources": [
                {"dataset": "huggingface", "dataset_path": "owner/a:en"},
                {"dataset": "text", "dataset_path": "b.jsonl"},
            ],
            "validation.enable": True,
            "validation.freq": "epoch",
            "validation.local_batch_size": 8,
            "validation.samples": 0,
            "validation.split": 0.1,
        },
    ),
    ("--config rate.yaml", SFT, {"optimizer.lr": 1e-3, "data.packing": "best_fit"}),
    ("--learning_rate 0.1 --config rate.yaml --packing False", SFT, {"optimizer.lr": 0.1}),
    ("--dataset_num_proc 3", SFT, {"data.num_proc": 3}),
    ("--max_length 64", SFT, {"training.seq_len": 64, "data.max_tokens": 64}),
    ("--packing", SFT, {"data.packing": "best_fit"}),
    (
        "--packing --packing_strategy bfd_split",
        SFT,
        {"data.packing": "best_fit", "data.too_long": "split", "data.max_tokens": None},
    ),
    ("--completion_only_loss True", SFT, {"data.train_on": "completion"}),
    ("--completion_only_loss False", SFT, {}),
    ("--assistant_only_loss", SFT, {"data.train_on": "completion"}),
    ("--dataset_text_field content", SFT, {"training.text_field": "content"}),
    ("--chat_template_path a.jinja", SFT, {"data.chat_template": "a.jinja"}),
    ("--eos_token </s>", SFT, {}),
    ("--loss_type nll --truncation_mode keep_start", SFT, {}),
    ("--loss_type chunked_nll", SFT, {}),
    ("--dtype bfloat16", SFT, {"training.dtype": "bfloat16"}),
    ("--dtype auto", SFT.replace("llama", "stored"), {"training.dtype": "bfloat16"}),
    ("--torch_dtype bfloat16", LORA, {}),
    ("--bf16 False", SFT, {"training.mixed_precision_param": "float32"}),
    ("--no_bf16", SFT, {"training.mixed_precision_param": "float32"}),
    ("--no_gradient_checkpointing", SFT, {"activation_checkpoint.mode": "none"}),
    ("--router_aux_loss_coef 0.01", EXPERTS, {"model.overrides": {"aux_loss_weight": 0.01, "bias_rate": 0.0}}),
    (
        "--use_peft",
        SFT,
        {
            "adapter.kind": "lora",
            "adapter.rank": 16,
            "adapter.alpha": 32.0,
            "adapter.dropout": 0.05,
            "adapter.target": ["layers.*.attention.wq", "layers.*.attention.wv"],
            "adapter.save": "alone",
            "adapter.last_save_in_peft": True,
            "checkpoint.last_save_in_hf": None,
            "checkpoint.last_save_model_only": None,
        },
    ),
    (
        "--lora_r 8 --lora_alpha 4 --lora_dropout 0",
        LORA,
        {"adapter.rank": 8, "adapter.alpha": 4.0, "adapter.dropout": 0.0},
    ),
    ("--lora_target_modules all-linear", LORA, {"adapter.target": ["all-linear"]}),
    ("--lora_target_modules c_attn", LORA.replace("llama", "gpt2"), {}),
    (
        "--lora_target_modules .*mlp.up_proj",
        LORA.replace("llama", "sized"),
        {"adapter.target": ["layers.*.feed_forward.w3"]},
    ),
    (
        "--lora_target_modules q_proj --lora_target_parameters experts.gate_up_proj experts.down_proj",
        f"{LORA.replace('llama', 'experts')} --lora_dropout 0 --lora_target_modules k_proj",
        {"adapter.target": ["layers.*.attention.wq", "layers.*.moe.experts"], "adapter.gate_up_rank": 16},
    ),
    (
        "--lora_target_modules q_proj o_proj",
        LORA,
        {"adapter.target": ["layers.*.attention.wq", "layers.*.attention.wo"]},
    ),
    (
        "--config rate.yaml",
        LORA,
        {"adapter.target": ["layers.*.attention.wq"], "optimizer.lr": 1e-3, "data.packing": "best_fit"},
    ),
    (
        "--lora_modules_to_save lm_head",
        LORA,
        {"adapter.train_fully": ["output.weight"], "adapter.last_save_in_peft": None},
    ),
    ("--use_rslora", LORA, {"adapter.rslora": True}),
    ("--use_dora", LORA, {"adapter.kind": "dora", "adapter.last_save_in_peft": None}),
    ("--load_in_8bit", LORA, {"adapter.kind": "lora_int8", "training.dtype": "bfloat16"}),
    ("--load_in_4bit --use_bnb_nested_quant", LORA, {"adapter.kind": "qlora", "training.dtype": "bfloat16"}),
    ("--bnb_4bit_quant_type nf4 --lora_task_type CAUSAL_LM", LORA, {}),
    ("--center_rewards_coefficient 0.01", REWARD, {"task.options": {"center_coefficient": 0.01}}),
    ("--disable_dropout true --chat_template_path a.jinja", REWARD, {"data.chat_template": "a.jinja"}),
    ("--lora_modules_to_save score", f"{REWARD} --use_peft --lora_task_type SEQ_CLS", {}),
    ("--loss_type ipo --beta 0.3", DPO, {"task.kind": "ipo", "dpo.beta": 0.3}),
    ("--loss_type sigmoid --loss_weights 1.0 --f_divergence_type reverse_kl --disable_dropout True", DPO, {}),
    ("--model_name_or_path gpt2 --dtype float32", DPO, {"model.overrides": {"dropout": 0.0, "attention_dropout": 0.0}}),
    ("--report_to wandb tensorboard", SFT, {"metrics.trackers": ["wandb", "tensorboard"]}),
    ("--deepspeed z3.json", SFT, {"parallelism.fsdp_reshard_after_forward": "always"}),
    (
        "--warmup_ratio 0.1 --gradient_accumulation_steps 2",
        SFT,
        {"lr_scheduler.warmup_steps": 0.1, "training.global_batch_size": 32},
    ),
]


@pytest.mark.parametrize("flags, before, expected", TRANSLATED, ids=lambda value: str(value)[:50])
def test_translated(flags, before, expected):
    first = import_line(before if "mixture" not in flags else SFT)
    changed, _ = difference(first, import_line(f"{before} {flags}"))
    assert {key: changed.get(key) for key in expected} == expected
    of_model = {"model.name", "model.hf_folder", "model.tokenizer_path", "checkpoint.initial_load_path"}
    degrees = {f"parallelism.data_parallel_{kind}_degree" for kind in ("replicate", "shard")}
    assert changed.keys() - expected.keys() <= of_model | degrees


@pytest.mark.parametrize(
    "flags, weight", [("", 0.02), ("--router_aux_loss_coef 0.1", 0.1), ("--router_aux_loss_coef 0", 0)]
)
@pytest.mark.parametrize("line", [SFT, DPO], ids=["sft", "dpo"])
def test_experts_are_balanced_as_config_json_says_unless_a_flag_does(line, flags, weight, tmp_path):
    """trl adds transformers' loss of a mean over layers, of which Qwen 3 here has the sum; Qwen 2 has the mean."""
    sizes = SIZES | dict(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
    sizes |= dict(model_type="qwen3_moe", router_aux_loss_coef=0.02)
    (tmp_path / "experts" / "config.json").write_text(json.dumps(sizes))
    job = import_line(f"{line.replace('llama', 'experts')} {flags}")
    assert job.values["model.overrides"] == {"aux_loss_weight": weight * 2 / 8, "bias_rate": 0.0}
    (tmp_path / "experts" / "config.json").write_text(json.dumps(sizes | {"model_type": "qwen2_moe"}))
    values = import_line(f"{line.replace('llama', 'experts')} {flags}").values
    assert values.get("model.overrides") == ({"aux_loss_weight": weight, "bias_rate": 0.0} if flags else None)
    sizes |= {"model_type": "gpt_oss", "num_local_experts": sizes.pop("num_experts")}
    del sizes["moe_intermediate_size"]
    (tmp_path / "experts" / "config.json").write_text(json.dumps(sizes))  # without output_router_logits
    values = import_line(f"{line.replace('llama', 'experts')} {flags}").values
    assert values["model.overrides"] == {"aux_loss_weight": weight, "bias_rate": 0.0}


def test_experts_without_transformers_loss_are_not_balanced(tmp_path):
    (tmp_path / "experts" / "config.json").write_text('{"model_type": "deepseek_v3"}')
    job = import_line(EXPERTS)
    assert job.values["model.overrides"] == {"aux_loss_weight": 0.0, "bias_rate": 0.0}
    assert "nothing for deepseek" in str(import_line(f"{EXPERTS} --router_aux_loss_coef 0.1").faults[0])


REFUSED = [  # flags, the line that they are added to, the key and the text of a fault
    ("--model_name_or_path other/Model", SFT, "model_name_or_path", "no other family is here"),
    ("--dataset_train_split train_sft", SFT, "dataset_train_split", "write the split into a file"),
    ("--dataset_test_split dev", HELD_OUT, "dataset_test_split", "write the split into a file"),
    ("--dataset_name a.jsonl", HELD_OUT, "dataset_test_split", "name the file of these records in [validation]"),
    ("--packing_strategy wrapped", SFT, "packing_strategy", "records are kept apart"),
    ("--loss_type dft", SFT, "loss_type", "other losses are not supported"),
    ("--truncation_mode keep_end", SFT, "truncation_mode", "trl gives it up too"),
    ("--chat_template_path folder", SFT, "chat_template_path", "copy the template of that folder into one"),
    ("--lora_task_type CAUSAL_LM", REWARD, "lora_task_type", "trl trains no head otherwise"),
    ("--disable_dropout false", REWARD, "disable_dropout", "without dropout"),
    ("--center_rewards_coefficient -1", REWARD, "center_rewards_coefficient", "at least 0"),
    ("--eos_token '<|im_end|>'", REWARD, "eos_token", "write it into tokenizer_config.json"),
    ("--eos_token '<|im_end|>'", SFT, "eos_token", "write it into tokenizer_config.json"),
    ("--dtype float16", SFT, "dtype", "float16 overflows"),
    ("--dtype auto", SFT.replace("llama", "half"), "dtype", "float16 overflows"),
    ("--model_init_kwargs '{\"a\": 1}'", SFT, "model_init_kwargs", "write model.overrides yourself"),
    ("--dataset_kwargs '{\"a\": 1}'", SFT, "dataset_kwargs", "tokenized by their format"),
    ("--router_aux_loss_coef 0.1", SFT, "router_aux_loss_coef", "a model without experts"),
    ("--load_in_4bit", SFT, "load_in_4bit", "false without use_peft"),
    ("--load_in_4bit", LORA, "use_bnb_nested_quant", "scales are always in 8 bits"),
    ("--load_in_8bit --use_dora", LORA, "load_in_8bit", "choose one"),
    ("--bnb_4bit_quant_type fp4", LORA, "bnb_4bit_quant_type", "the only format of 4 bits"),
    ("--lora_target_modules router", LORA, "lora_target_modules", "some of model.layers.*.self_attn.q_proj"),
    ("--model_name_or_path experts", LORA, "lora_target_modules", "some of model.layers.*.self_attn.q_proj"),
    ("--lora_target_parameters a", LORA, "lora_target_parameters", "nothing for a model without experts"),
    ("--lora_target_modules all-linear", LORA.replace("llama", "experts"), "lora_target_modules", "routers too"),
    ("--lora_modules_to_save router", LORA, "lora_modules_to_save", "some of embed_tokens"),
    ("--lora_task_type SEQ_CLS", LORA, "lora_task_type", "only answers"),
    ("--activation_offloading", SFT, "activation_offloading", "stay on their device"),
    ("--loss_type hinge", DPO, "loss_type", "one of sigmoid, ipo"),
    ("--loss_type sigmoid sft", DPO, "loss_type", "one of sigmoid, ipo"),
    ("--loss_weights 0.5", DPO, "loss_weights", "nothing with one loss"),
    ("--ld_alpha 0.5", DPO, "ld_alpha", "answers are not weighted"),
    ("--use_weighting", DPO, "use_weighting", "answers are not weighted"),
    ("--disable_dropout False", DPO, "disable_dropout", "without dropout"),
    ("--f_divergence_type js_divergence", DPO, "f_divergence_type", "others are not supported"),
    ("--sync_ref_model", DPO, "sync_ref_model", "the reference does not change"),
    ("--beta 0.1", SFT, "beta", "a known option"),
    ("--packing", DPO, "packing", "a known option"),
    ("--max_lenght 64", SFT, "max_lenght", "did you mean max_length?"),
    (
        "--gradient_accumulation_steps 2",
        SFT.replace(" --num_processes 2", ""),
        "gradient_accumulation_steps",
        "--world-size N",
    ),
]


@pytest.mark.parametrize("flags, before, key, message", REFUSED, ids=lambda value: str(value)[:50])
def test_refused(flags, before, key, message):
    faults = {fault.key: str(fault) for fault in import_line(f"{before} {flags}").faults}
    assert message in faults[f"--{key}"]


@pytest.mark.parametrize(
    "entry, message",
    [
        ("a", "tables that have a path"),
        ({"path": "a", "colums": 1}, "did you mean columns?"),
        ({"path": "a", "fraction": 0.5}, "write what it means into"),
        ({"path": "a", "split": "dev"}, "train or validation or test"),
        ({"path": "a", "data_files": ["b"]}, "one path, or a glob"),
        ({"path": "a", "split": ["train"]}, "train or validation or test"),
        ({"path": "a", "name": ["en"]}, 'datasets.name: given ["en"]; allowed: text'),
        ({"path": "a", 1: 2}, "a known key"),
    ],
)
def test_refused_mixtures(entry, message, tmp_path):
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump({"datasets": [entry]}))
    assert message in str(import_line(f"{SFT} --config mixture.yaml").faults[0])


def test_layers_without_an_adapter_are_noted_where_trl_quantizes_them():
    line = f"{LORA} --load_in_8bit --lora_target_modules"
    (note,) = {*import_line(f"{line} q_proj").notes} - {*import_line(f"{line} all-linear").notes}
    assert note.startswith("not the same: linear layers without an adapter keep their exact weights")


def test_texts_of_flags_are_read_as_they_are():
    values = import_line(f"{SFT} --run_name 2026-01-02 --output_dir 010 --dataset_config 2020.10").values
    assert (values["job.description"], values["job.dump_folder"]) == ("2026-01-02", "010")
    assert values["training.sources"][0]["dataset_path"] == "owner/set:2020.10"
    assert import_line(f"{SFT} --seed 010").values["debug.seed"] == 10, "8 in YAML 1.1"
    assert import_line(f"{SFT} --packing on").faults, "true in YAML 1.1"


def test_plain_flags_are_parsed_as_by_argparse():
    """Random texts for arguments of transformers' Trainer. A whole number may have another spelling here, as 8.0."""
    from transformers import HfArgumentParser, TrainingArguments

    parser, draw, num_equal = HfArgumentParser(TrainingArguments), random.Random(0), 0
    known = {action.dest for action in parser._actions}
    names = [name for name, option in ARGUMENTS.items() if option.kind in ("bool", "int", "float") and name in known]
    texts = [
        "010",
        "0x10",
        "1:30",
        "1_000",
        "1e-4",
        "1e3",
        ".5",
        "-3",
        "+5",
        "yes",
        "no",
        "on",
        "off",
        "true",
        "FALSE",
        "0",
        "1",
        "null",
        "~",
        "nan",
        "08",
        "1e400",
        "2026-01-02",
    ]
    for name in names:
        for text in draw.sample(texts, 6):
            value = KINDS[ARGUMENTS[name].kind][1](flag_value(ARGUMENTS[name], text))
            try:
                with contextlib.redirect_stderr(io.StringIO()):
                    expected = getattr(parser.parse_args(["--output_dir", "x", f"--{name}={text}"]), name)
            except SystemExit:
                assert value is None or float(text) == value, (name, text)
            else:
                num_equal += value == expected
                assert value in (expected, None), (name, text)
    assert num_equal > 40


def test_only_mixtures_are_split():
    changed, notes = difference(import_line(SFT), import_line(f"{SFT} --test_split_size 0.1"))
    assert changed == {} and "no effect without datasets: test_split_size" in notes


@pytest.mark.parametrize(
    "line, table", [(SFT, trl.SFT), (DPO, trl.DPO), (REWARD, trl.REWARD)], ids=["sft", "dpo", "reward"]
)
def test_every_argument_is_tried_noted_or_refused_by_a_table(line, table):
    tried = {
        name for flags, before, *_ in (*TRANSLATED, *REFUSED) for name, _ in parse(split([f"{before} {flags}"])).flags
    }
    tried |= {"datasets", *(name.removeprefix("no_") for name in tried)}
    for name, option in table.items():
        if name == "env" or option == trl.ARGUMENTS.get(name):
            continue  # a key of files alone; test_llama_factory.py tries those of the Trainer
        if option.note:
            assert any(name in note for note in import_line(f"{line} --{name} 1").notes), name
        elif name not in tried:
            assert name in ("logging_steps", "learning_rate"), name


def test_recognition():
    for script in ("python trl/scripts/sft.py", "accelerate launch --num_processes 2 sft.py"):
        line = parse(split([f"{script} --model_name_or_path llama --config rate.yaml"]))
        assert programs.program_of(line) == "trl"
    line = "accelerate launch --num_processes 2 --use_fsdp trl/scripts/dpo.py" + DPO.partition("2")[2]
    text, config, _ = translate(parse(split([line])), None)
    assert text.startswith("# Translated from a command line of dpo.py (trl).") and config.dpo.beta == 0.1
    assert config.parallelism.data_parallel_replicate_degree == 1
    zero = import_line(f"{SFT} --accelerate_config zero3 --num_processes 4")
    assert zero.values["parallelism.fsdp_reshard_after_forward"] == "always"
    assert zero.values["training.global_batch_size"] == 32
    for line in ("trl grpo --model_name_or_path a", "rate.yaml"):
        with pytest.raises(JobError, match="torchtitan import 'trl sft --config FILE'"):
            trl.read(parse(split([line])))


WRONG = ["[]", "garbage", "''", "-1", "1e30", ".nan", "True", "{a: 1}"]


@pytest.mark.parametrize(
    "line, table", [(f"{LORA} --eval_strategy epoch", trl.SFT), (DPO, trl.DPO)], ids=["sft", "dpo"]
)
def test_mutations_change_the_job_or_are_noted_or_refused(line, table, is_full_run):
    draw, before = random.Random("trl"), import_line(line)
    counts = {"refused": 0, "noted": 0, "read": 0}
    for name in table if is_full_run else draw.sample(sorted(table), 50):
        for value in WRONG if is_full_run else draw.sample(WRONG, 2):
            job = import_line(f'{line} --{name} "{value}"')
            is_faulty = [*job.faults, *layer_of(job.source, job.values.items()).all_faults()]
            if is_faulty:
                counts["refused"] += 1
            elif any(name in note for note in job.notes):
                counts["noted"] += 1
            elif job.values == before.values:
                option = table[name]
                is_off = value in ("''", "[]", "{a: 1}", "-1") or option.kind in ("any", "bool")
                assert is_off or option.choices or name in OF_OTHERS.split(), (name, value)
            else:
                counts["read"] += 1
    assert counts["refused"] > 20 and counts["noted"] > 0


OF_OTHERS = """bnb_4bit_quant_type eval_steps eval_strategy per_device_eval_batch_size metric_for_best_model
    warmup_ratio dataset_test_split router_aux_loss_coef test_split_size max_steps report_to"""
"""Arguments that have an effect only with others."""
