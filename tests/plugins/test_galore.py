"""Import of the GaLore script (--mode, --optimizer, --model): flags, JSON configs, and each combination of these."""

import copy
import json
import math
import re

import pytest
import torch

from tests.support import jobs
from tests.support.galore_steps import ADAM
from tests.support.importing import difference
from tests.support.pool import run_ranks
from tests.support.random_tensors import random
from torchtitan import cli
from torchtitan.commands.check import summary
from torchtitan.config.manager import load
from torchtitan.core.random_draws import clean_name
from torchtitan.job import ResolvedJob
from torchtitan.optimizers.build import build_optimizers
from torchtitan.plugins.importers import parse, split
from torchtitan.plugins.importers.command import translate
from torchtitan.plugins.importers.galore import FLAGS, MODELS, OPTIMIZERS, read
from torchtitan.process.ranks import read_ranks
from torchtitan.rules import Facts, check
from torchtitan.training.trainer import Trainer

LINE = "python main.py --mode pretraining --optimizer galore --model llama_60m"


def import_line(flags="", line=LINE):
    return read(parse(split([f"{line} {flags}"])))


def changes_by(flags):
    values, _ = difference(import_line(), job := import_line(flags))
    return values, " ".join(job.notes)


def test_the_defaults():
    job = import_line()
    assert job.faults == []
    assert job.values == {
        "job.dump_folder": "llama_60m_galore_pretrained",
        "metrics.log_freq": 1,
        "checkpoint.enable": True,
        "model.name": "llama2",
        "model.flavor": "60m",
        "model.tokenizer_path": "t5-base",
        "training.dataset": "c4",
        "training.dataset_path": "allenai/c4:realnewslike",
        "training.local_batch_size": 16,
        "training.seq_len": 512,
        "training.shuffle": True,
        "training.tokens": 10**9,
        "training.dtype": "bfloat16",
        "training.mixed_precision_param": "bfloat16",
        "lr_scheduler.decay_type": "cosine",
        "lr_scheduler.warmup_steps": 0,
        "lr_scheduler.min_lr_factor": 0.0,
        "lr_scheduler.convention": "torchtitan",  # torch's CosineAnnealingLR
        "optimizer.name": "GaLore",
        "optimizer.lr": 4e-4,
        "optimizer.beta2": 0.999,
        "optimizer.weight_decay": 0.01,
        "optimizer.eps": 1e-6,
        "optimizer.options": {"rank": 128, "update_gap": 200, "scale": 0.25, "side": "std", "inner": "adamw"}
        | {"formula": "galore_torch"},
    }


CHANGES = [
    ("--model llama_7b", {"model.flavor": "7b", "job.dump_folder": "llama_7b_galore_pretrained"}, ""),
    ("--batch_size 4", {"training.local_batch_size": 4}, ""),
    ("--max_length 256", {"training.seq_len": 256}, ""),
    ("--num_training_tokens 2e6", {"training.tokens": 2_000_000}, "2,000,000 tokens are read once"),
    ("--num_epochs 60", {"lr_scheduler.t_max": 5 * 10**8, "lr_scheduler.t_max_unit": "token"}, ""),
    ("--tmax 10 --num_epochs 10", {}, ""),
    ("--tmax 15", {"lr_scheduler.t_max": 5 * 10**8}, "the rate does not rise again"),
    ("--shuffle false", {"training.shuffle": False}, ""),
    ("--lr 1e-3", {"optimizer.lr": 1e-3}, ""),
    ("--weight_decay 0", {"optimizer.weight_decay": 0.0}, ""),
    ("--dtype bf16", {}, ""),
    (
        "--test true",
        {"training.dtype": "float32", "training.tokens": 1000, "checkpoint.enable": False},
        "1,000 tokens are read once",
    ),
    ("--optimizer baseline", {"optimizer.name": "AdamW", "optimizer.options": None}, ""),
    (
        """--optimizer galore8bit --galore_config '{"rank": 64, "update_proj_gap": 50, "scale": 1}'""",
        {"optimizer.options": dict(rank=64, update_gap=50, scale=1, side="std", inner="adamw_8bit")},
        "script projected embedding and head, and never trained the norms",
    ),
    (
        "--optimizer lora",
        {"optimizer.name": "AdamW", "adapter.rank": 8, "adapter.alpha": 8.0, "adapter.train_dense_rest": True}
        | {"adapter.dropout": 0.1, "adapter.target": ["*attention.wq", "*attention.wv"]},
        "weight decay is as in the flag",
    ),
    (
        """--optimizer lora --lora_config '{"r": 4, "lora_alpha": 16, "target_modules": ["down_proj"]}'""",
        {"adapter.rank": 4, "adapter.alpha": 16.0, "adapter.target": ["*feed_forward.w2"]},
        "",
    ),
    (
        "--optimizer lora+galore8bit",
        {"optimizer.name": "AdamW8bit", "adapter.kind": "lora"},
        "NO GALORE HERE: its rank",
    ),
    (
        """--optimizer lora+galore8bit --galore_config '{"rank": 2}'""",
        {
            "optimizer.options": dict(rank=2, update_gap=200, scale=0.25, side="std", inner="adamw_8bit")
            | {"targets": ["*lora_A", "*lora_B"]}
        },
        "only the gradients of the adapters' matrices are projected",
    ),
]


@pytest.mark.parametrize("flags, expected, note", CHANGES, ids=[flags for flags, *_ in CHANGES])
def test_flags(flags, expected, note):
    values, notes = changes_by(flags)
    assert {key: values.get(key) for key in expected} == expected and note in notes
    assert values or not expected


REFUSED = [
    ("--mode inference", "mode", "one of pretraining, finetuning"),
    ("--optimizer adam", "optimizer", "one of lora, galore, galore8bit, lora+galore8bit, baseline"),
    ("--model llama_13b", "model", "one of llama_60m"),
    ("--batch_size 0", "batch_size", "at least 1"),
    ("--num_training_tokens nan", "num_training_tokens", "a finite number"),
    ("--num_training_tokens inf", "num_training_tokens", "a finite number"),
    ("--lerning_rate 1", "lerning_rate", "a flag of main.py"),
    ("--dtype fp16", "dtype", "GaLore finds no bases of such gradients; bf16 needs none"),
    ("--optimizer baseline --dtype fp16", "dtype", "float16 overflows without a scaler"),
    ("--shuffle perhaps", "shuffle", "true or false"),
    ("--galore_config nowhere.json", "galore_config", "a file that holds one; nowhere.json cannot be read"),
    ("--galore_config '{\"rank\": '", "galore_config", "a JSON object"),
    ("""--galore_config '{"ranks": 4}'""", "galore_config", "did you mean rank?"),
    ("""--galore_config '{"rank": "4"}'""", "galore_config", "rank such as 128"),
    ("""--optimizer lora --lora_config '{"targets": ["lm_head"]}'""", "lora_config", "targets among q_proj"),
    ("""--optimizer lora --lora_config '{"targets": [["q"]]}'""", "lora_config", "targets such as"),
    ("""--optimizer lora --lora_config '{"dropout": NaN}'""", "lora_config", "dropout such as 0.1"),
]


@pytest.mark.parametrize("flags, flag, message", REFUSED, ids=[flags for flags, *_ in REFUSED])
def test_refused_flags(flags, flag, message):
    (fault,) = import_line(flags).faults
    assert fault.key == f"--{flag}" and message in str(fault)


def test_every_flag_is_tested():
    tested = {
        argument[2:] for flags, *_ in CHANGES + REFUSED for argument in flags.split() if argument.startswith("--")
    }
    assert set(FLAGS) <= tested


def test_missing_flags_are_all_reported():
    faults = import_line(line="python main.py --mode pretraining").faults
    assert [fault.key for fault in faults] == ["--optimizer", "--model"]


def test_a_config_in_a_file(tmp_path):
    (tmp_path / "galore.json").write_text(json.dumps({"rank": 32}))
    assert changes_by(f"--galore_config {tmp_path}/galore.json")[0]["optimizer.options"]["rank"] == 32


SCRIPT_LORA_CONFIG = {
    "r": 4,
    "lora_alpha": 16,
    "lora_dropout": 0.2,
    "target_modules_finetuning": ["query"],
    "target_modules_pretraining": ["k_proj", "v_proj"],
}
"""A config/lora_config.json with the keys that the script's own file has."""


def test_default_files_are_read_where_the_script_reads_them(tmp_path, monkeypatch):
    """They are read from config/ in the current folder, and a comment in the job says so."""
    monkeypatch.chdir(tmp_path)
    galore, lora = LINE, LINE.replace("galore", "lora")
    job = import_line()
    assert job.values["optimizer.options"]["rank"] == 128
    missing = "no --galore_config, and its default config/galore_config.json is not here: the published values"
    assert missing in " ".join(job.notes) and "lora_config" not in " ".join(job.notes)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/galore_config.json").write_text(json.dumps({"rank": 32, "update_proj_gap": 50}))
    (tmp_path / "config/lora_config.json").write_text(json.dumps(SCRIPT_LORA_CONFIG))
    job = import_line(line=galore)
    assert (job.values["optimizer.options"]["rank"], job.values["optimizer.options"]["update_gap"]) == (32, 50)
    assert "no --galore_config: config/galore_config.json is read, which is the script's default" in job.notes
    assert "no --lora_config" not in " ".join(job.notes), "GaLore does not read it"
    job = import_line(line=lora)
    assert job.faults == [] and job.values["adapter.rank"] == 4 and job.values["adapter.alpha"] == 16.0
    assert job.values["adapter.dropout"] == 0.2
    assert job.values["adapter.target"] == ["*attention.wk", "*attention.wv"]
    assert "no --lora_config: config/lora_config.json is read, which is the script's default" in job.notes
    tuned = import_line(line=lora.replace("pretraining", "finetuning").replace("llama_60m", "roberta"))
    assert tuned.values["adapter.target"] == ["*attention.wq"] and tuned.faults == []
    both = import_line(line=LINE.replace("galore", "lora+galore8bit"))
    assert (both.values["adapter.rank"], "NO GALORE HERE: its rank 32" in " ".join(both.notes)) == (4, True)
    explicit = import_line("--galore_config '{\"rank\": 8}'")
    assert explicit.values["optimizer.options"]["rank"] == 8 and "is read" not in " ".join(explicit.notes)
    (tmp_path / "config/galore_config.json").write_text("{")
    (fault,) = import_line().faults
    assert fault.key == "--galore_config" and "config/galore_config.json" in str(fault)


def test_roberta_learns_masked_words(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, config, _ = translate(parse(split([LINE.replace("llama_60m", "roberta")])), None)
    assert (config.task.kind, config.model.name, config.model.flavor) == ("masked_lm", "roberta", "125M")
    assert config.training.dataset_path == "allenai/c4:realnewslike" and "masked words are learned" in text


def test_the_command_recognizes_the_script_by_its_flags(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["import", LINE]) == 2  # the tokenizer is missing
    shown = capsys.readouterr()
    assert "Translated from a command line of main.py (galore)." in shown.out and "t5-base" in shown.err
    (tmp_path / "job.toml").write_text(shown.out)
    config = load(["--job.config_file=job.toml", "--model.tokenizer_path=bytes"])
    facts = Facts(ResolvedJob(config))
    assert check(config, 1, "cpu") == []
    assert f"in {-(-(10**9) // (16 * 512)):,} steps" in summary(facts)


PUBLISHED = {"llama_60m": 58_073_600, "llama_1b": 1_339_082_752, "llama_7b": 6_738_415_616, "gpt2": 124_439_808}
PUBLISHED["roberta"] = 124_697_433  # with the masked-word head, as transformers counts parameters
CLASSES = {"gpt2": 124_439_808 + 2 * 768, "roberta": 124_647_170}
"""Parameters with a head of two classes, as transformers counts them."""


SMALL = dict.fromkeys(MODELS, "{dim = 32, n_layers = 2, n_heads = 4, vocab_size = 260, multiple_of = 16}")
CLASSIC = "{dim = 32, n_layers = 2, n_heads = 4, vocab_size = 260, ffn_dim = 64, max_seq_len = 256}"
SMALL |= dict.fromkeys(("gpt2", "roberta"), CLASSIC)
SHORT_RUN = {"pretraining": "--test true --batch_size 2 --max_length 250"}
SHORT_RUN["finetuning"] = "--test true --batch_size 20 --max_length 250"
"""Flags for 1000 tokens in two steps: of two samples each, or of twenty sentences each."""
LOW_RANK = """--galore_config '{"rank": 4}'"""
"""A rank below the reduced width and below LoRA's rank."""
MASK = "<|reserved_special_token_0|>"
"""A mask token of the tokenizer "debug"; "bytes" has no such token."""


def train_two_steps(argv):
    """Train for two steps; return losses, whether each parameter changed, and the shapes of its optimizer state."""
    trainer = Trainer(load(argv), read_ranks())
    initial = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    trainer.metrics.close()
    states = {p: state for optimizer in trainer.optimizers for p, state in optimizer.state.items()}
    is_changed, state_shapes = {}, {}
    for name, parameter in trainer.model.named_parameters():
        is_changed[clean_name(name)] = not torch.equal(parameter.detach(), initial[name])
        state = states.get(parameter, {})
        state_shapes[clean_name(name)] = {key: tuple(v.shape) for key, v in state.items() if torch.is_tensor(v)}
    return [row["loss"] for row in jobs.logged_steps(trainer.exports.folder)], is_changed, state_shapes


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "lora+galore8bit, projected"])
@pytest.mark.parametrize("mode", FLAGS["mode"].choices)
def test_every_combination_trains(mode, optimizer, model, tmp_path, monkeypatch):
    """Train for two steps at reduced width on local text. The parameter count checks the preset's full size."""
    name, _, projected = optimizer.partition(", ")
    flags = f"{SHORT_RUN[mode]} {LOW_RANK if projected or 'lora' not in name else ''}"
    line = parse(split([f"python main.py --mode {mode} --optimizer {name} --model {model} {flags}"]))
    text, config, _ = translate(line, None)
    classes, masked = mode == "finetuning" and model in CLASSES, (mode, model) == ("pretraining", "roberta")
    assert config.task.kind == ("seq_cls" if classes else "masked_lm" if masked else config.task.kind)
    assert Facts(ResolvedJob(config)).model.args.num_parameters == (CLASSES if classes else PUBLISHED)[model]
    (tmp_path / "job.toml").write_text(re.sub("(?m)^(dataset_path|text_field) = .*$", "", text))
    records = [{"prompt": f"{'not ' * (i % 2)}so bad, number {i}: ", "completion": "good"} for i in range(40)]
    (tmp_path / "sst2.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    sizes = SMALL[model].replace("}", ", n_classes = 2}") if classes else SMALL[model]
    argv = [f"--job.config_file={tmp_path}/job.toml", f"--job.dump_folder={tmp_path}/run", "--metrics.plot=false"]
    if masked:
        argv += ["--model.tokenizer_path=debug", f"--task.mask_token={MASK}"]
        sizes = sizes.replace("vocab_size = 260", "vocab_size = 2048")
    else:
        argv += ["--model.tokenizer_path=bytes"]
    argv += [f"--model.overrides={sizes}"]
    if mode == "pretraining":
        argv += ["--training.dataset=python_stdlib"]
    else:
        argv += ["--training.dataset=sentiment"] if classes else [f"--training.dataset_path={tmp_path}/sst2.jsonl"]
    ((losses, is_changed, state_shapes),) = run_ranks(1, train_two_steps, argv)
    assert len(losses) == 2 and all(map(math.isfinite, losses))
    frozen = [key for key, changed in is_changed.items() if not changed]
    if "lora" in name:
        targets = [key for key in frozen if key.endswith(("wq.weight", "wv.weight"))]
        assert len(targets) == 2 * 2 and (frozen == targets or mode == "finetuning")
        assert not classes or all(is_changed[key] for key in is_changed if key.startswith("output")), "the head learns"
        assert not any(state_shapes[key] for key in frozen)
    else:
        assert not frozen, "norms and biases are trained too, unlike in the script"
    projected_names = [key for key, state in state_shapes.items() if {"left", "right"} & state.keys()]
    if projected:
        assert all("attention" in key for key in projected_names) and {key[-6:] for key in projected_names} == {
            "lora_A",
            "lora_B",
        }
    elif "galore" in name and "lora" not in name:
        assert len(projected_names) == 2 * (7 if model.startswith("llama") else 6)
        assert not any(key.startswith(("output", "tok_embeddings")) for key in projected_names)
    else:
        assert not projected_names


def test_unprojected_parameters_step_as_in_adamw(tmp_path):
    """The script's GaLore did not train the former and projected the latter.

    With scale 0, which freezes projected matrices, all other parameters must step as in AdamW.
    """
    _, config, _ = translate(parse(split([f'{LINE} --galore_config \'{{"rank": 4, "scale": 0.0}}\''])), None)
    model = torch.nn.ModuleDict(
        {
            "tok_embeddings": torch.nn.Embedding(40, 16),
            "attention": torch.nn.Linear(16, 16),
            "norm": torch.nn.LayerNorm(16),
            "output": torch.nn.Linear(16, 40),
        }
    )
    reference = copy.deepcopy(model)
    settings = dict(lr=1e-2, weight_decay=0.0, shared=dict(beta1=0.9, beta2=0.999, eps=1e-8))
    options = config.optimizer.options | {"formula": "torch"}
    galore = build_optimizers([model], name="GaLore", options=options, **settings)
    adamw = build_optimizers([reference], name="AdamW", implementation="for-loop", **settings)
    for step in range(3):
        for optimizers, module in ((galore, model), (adamw, reference)):
            for seed, parameter in enumerate(module.parameters()):
                parameter.grad = random(*parameter.shape, seed=10 * step + seed)
            optimizers.step()
    reference_parameters = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, reference_parameters[name]) != (name == "attention.weight"), name


def test_weight_decay_reaches_adapters(tmp_path):
    """The script did not pass weight decay to LoRA."""
    text, config, _ = translate(parse(split([f"{LINE} --optimizer lora --weight_decay 0.5"])), None)
    assert config.optimizer.weight_decay == 0.5 and config.optimizer.name == "AdamW"
    parameters = torch.nn.ParameterDict({"lora_A": torch.ones(8, 16)})
    (optimizer,) = build_optimizers(
        [parameters], name="AdamW", lr=0.1, weight_decay=config.optimizer.weight_decay, shared=ADAM
    )
    parameters["lora_A"].grad = torch.zeros(8, 16)
    optimizer.step()
    assert torch.allclose(parameters["lora_A"], torch.full((8, 16), 1 - 0.1 * 0.5))
