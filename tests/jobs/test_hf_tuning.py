"""Compare LoRA fine-tuning with a plain loop over transformers, peft and torch's AdamW.

Token ids and masks come from transformers. Losses and gradient norms are equal, and so are the logits of the exported
folder and peft's model.
"""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.support import jobs
from tests.support.chat_templates import LLAMA3, folder_with, messages
from tests.support.pool import run_ranks
from torchtitan import cli
from torchtitan.models.hf.config import SINGLE

STEPS, ROWS, LR, DECAY, CLIP, BETA = 5, 6, 3e-2, 0.1, 0.5, 0.3
QUESTIONS = ["Hi", "What is two and two?", "And now, after all of that?", "Why", "for x in range(10):", "Who are you?"]
ANSWERS = ["Four.", "Hello, you. How are you today?", "0\n1\n2 and so on", "No", "Nobody", "Because it is so."]
CONVERSATIONS = [
    messages(
        [("user", QUESTIONS[i]), ("assistant", ANSWERS[i])] + [("user", QUESTIONS[-i]), ("assistant", "Bye")] * (i % 2)
    )
    for i in range(ROWS)
]
PAIRS = [{"prompt": QUESTIONS[i] + " ", "chosen": ANSWERS[i], "rejected": ANSWERS[i - 1]} for i in range(ROWS)]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Write a base model with tokenizer by transformers, and an adapter by peft with a nonzero B."""
    home = tmp_path_factory.mktemp("tuning")
    torch.manual_seed(0)
    sizes = dict(vocab_size=2112, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, initializer_range=0.1))
    model.save_pretrained(folder_with(home / "base", LLAMA3))
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(home / "adapter")
    for name, rows in (("talks", [{"messages": talk} for talk in CONVERSATIONS]), ("pairs", PAIRS)):
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home


def train_here(home, folder, rows, **options):
    """Return the logged steps of a run that trains on all rows in each step, so that their order does not matter."""
    settings = dict(model__flavor="from_hf", model__hf_folder=home / "base", model__overrides="{}")
    settings |= dict(model__tokenizer_path=home / "base", training__steps=STEPS, training__max_norm=CLIP)
    settings |= dict(checkpoint__enable=True, checkpoint__initial_load_path=home / "base")
    settings |= dict(checkpoint__initial_load_in_hf=True, adapter__kind="lora", adapter__initial_path=home / "adapter")
    settings |= dict(adapter__rank=4, adapter__alpha=8.0, adapter__target='["all-linear"]', adapter__save="alone")
    settings |= dict(optimizer__lr=LR, optimizer__beta2=0.999, optimizer__weight_decay=DECAY)
    settings |= dict(lr_scheduler__warmup_steps=0, lr_scheduler__decay_type="constant")
    return run_ranks(1, jobs.train, jobs.arguments(folder, home / rows, **settings | options))[0][0]


def train_with_peft(home, loss_of):
    """Train with peft; return the model, and the losses and gradient norms of its steps."""
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(home / "base", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, home / "adapter", is_trainable=True)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=LR, weight_decay=DECAY)
    losses, norms = [], []
    for _ in range(STEPS):
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trainable, CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    return model, losses, norms


def padded(rows):
    """Pad rows of (ids, loss mask) to (ids, attention mask, labels)."""
    fill = lambda lists, value: torch.nn.utils.rnn.pad_sequence(  # noqa: E731
        [torch.tensor(values) for values in lists], batch_first=True, padding_value=value
    )
    ids, mask = (fill(lists, 0) for lists in zip(*rows, strict=True))
    return ids, fill([[1] * len(row) for row, _ in rows], 0), ids.where(mask.bool(), -100)


BATCHINGS = {  # ways to train on six rows in a step
    "padded, by two": dict(data__packing="off", training__local_batch_size=2, training__global_batch_size=6),
    "one pack": dict(training__local_batch_size=1, training__global_batch_size=1),
}


@pytest.mark.parametrize("way", BATCHINGS)
def test_supervised_fine_tuning_equals_peft(way, home, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(home / "base")
    encoded = tokenizer.apply_chat_template(
        CONVERSATIONS, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, read, labels = padded(list(zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)))
    model, losses, norms = train_with_peft(home, lambda model: model(ids, attention_mask=read, labels=labels).loss)
    steps = train_here(home, tmp_path / "run", "talks.jsonl", task__kind="sft", training__seq_len=384, **BATCHINGS[way])
    assert losses[-1] < 0.9 * losses[0] and norms[0] > CLIP
    assert [step["loss"] for step in steps] == pytest.approx(losses, rel=1e-6)
    assert [step["grad_norm"] for step in steps] == pytest.approx(norms, rel=1e-5)

    assert cli.main(["export", str(tmp_path / "run"), "--merge", "--dtype=float32", f"--to={tmp_path / 'out'}"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(merged(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


def test_dpo_equals_the_published_formula(home, tmp_path):
    """The reference is the same model with its adapter disabled."""
    tokenizer = AutoTokenizer.from_pretrained(home / "base")
    rows = []
    for pair in PAIRS:
        prompt, *answers = tokenizer([*pair.values()], add_special_tokens=False).input_ids
        for answer in answers:
            ids = [tokenizer.bos_token_id, *prompt, *answer, tokenizer.eos_token_id]
            rows.append((ids, [i > len(prompt) for i in range(len(ids))]))
    ids, read, labels = padded(rows)

    def log_probabilities(model):
        logs = model(ids, attention_mask=read).logits[:, :-1].log_softmax(-1)
        return -F.nll_loss(logs.mT, labels[:, 1:], reduction="none").sum(-1)  # 0 for tokens without loss

    def loss_of(model):
        with torch.no_grad(), model.disable_adapter():
            reference = log_probabilities(model)
        log_ratios = log_probabilities(model) - reference
        return -F.logsigmoid(BETA * (log_ratios[::2] - log_ratios[1::2])).mean()

    _, losses, norms = train_with_peft(home, loss_of)
    options = dict(task__kind="dpo", dpo__beta=BETA, dpo__reference=home / "base", training__seq_len=64)
    options |= dict(training__local_batch_size=2, training__global_batch_size=ROWS)
    steps = train_here(home, tmp_path, "pairs.jsonl", **options)
    assert losses[-1] < 0.5 * losses[0]
    assert [step["loss"] for step in steps] == pytest.approx(losses, rel=1e-6, abs=1e-6)
    assert [step["grad_norm"] for step in steps] == pytest.approx(norms, rel=1e-4)


FLOAT8 = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}


def test_a_packed_base_is_trained_as_the_numbers_that_it_stands_for(home, tmp_path):
    """Losses, gradients and the export of LoRA on linears in float8 equal those on a plain folder of their numbers."""
    tensors = load_file(home / "base" / SINGLE)
    packed, plain = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if "proj" in name:
            scale = weight.abs().max() / 448
            packed |= {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
            plain[name] = packed[name].float() * scale
    config, results = json.loads((home / "base" / "config.json").read_text()), []
    for kind, content, change in (("plain", plain, {}), ("packed", packed, {"quantization_config": FLOAT8})):
        base = tmp_path / kind
        shutil.copytree(home / "base", base)
        save_file(content, base / SINGLE, metadata={"format": "pt"})
        (base / "config.json").write_text(json.dumps(config | change))
        run, options = tmp_path / f"{kind}_run", dict(task__kind="sft", training__seq_len=384, **BATCHINGS["one pack"])
        options |= dict(model__hf_folder=base, checkpoint__initial_load_path=base)
        steps = train_here(home, run, "talks.jsonl", **options)
        assert cli.main(["export", str(run), "--merge", "--dtype=float32", f"--to={tmp_path / 'out' / kind}"]) == 0
        (file,) = (tmp_path / "out" / kind).glob("*.safetensors")
        results.append(([(step["loss"], step["grad_norm"]) for step in steps], load_file(file)))
    (steps, merged), (steps_of_packed, merged_of_packed) = results
    assert steps == steps_of_packed
    assert all(torch.equal(merged[name], merged_of_packed[name]) for name in merged | merged_of_packed)
