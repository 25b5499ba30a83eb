"""`torchtitan convert` to a vocabulary of another size.

transformers opens the result and computes the same logits, new rows are the mean of the others, and no generator writes
a row without a token.
"""

import io
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support import jobs
from tests.support.hf_parity import build
from tests.support.pool import run_ranks
from tests.support.tiny_decoders import LLAMA, OPT, QWEN3_MOE
from torchtitan import cli
from torchtitan.checkpoint.base_weights import find_weights
from torchtitan.commands.convert import Resized
from torchtitan.commands.generate import find_checkpoint, sample
from torchtitan.config.manager import load
from torchtitan.core.errors import JobError
from torchtitan.datasets.conversations import end_of_turn_ids
from torchtitan.datasets.tokenizer import build_tokenizer
from torchtitan.datasets.tokenizer.byte_level import ByteTokenizer
from torchtitan.datasets.tokenizer.chat_templates import CHATML
from torchtitan.datasets.tokenizer.hf_json import extended, missing_tokens
from torchtitan.models.hf.config import UNTRAINED, find_config, untrained_token_ids
from torchtitan.models.spec import MODELS
from torchtitan.rules import check
from torchtitan.training import inference_model

NEW = ["<|im_start|>", "<|im_end|>", "<tool>"]
BYTES = ByteTokenizer()
ROWS = 260
"""Rows of the models' embeddings: two more than there are tokens."""
TOKENS = torch.arange(250).view(5, 50)
TOKENIZER = jobs.ROOT / "tests/assets/tokenizer/tokenizer.json"


def save_base_model(folder, family, args):
    """Write a random model in Hugging Face's format, with the byte tokenizer, and return its folder."""
    folder.mkdir()
    hf, args = MODELS[family].hf, type(args)(**vars(args) | {"vocab_size": ROWS})
    hf.save_hf(folder, build(MODELS[family].build, args).state_dict(), args)
    for name, content in BYTES.as_hf_files().items():
        (folder / name).write_bytes(content)
    return folder


FAMILIES = {
    "untied": ("llama3", LLAMA["llama3"]),
    "tied": ("llama3.2", LLAMA["llama3.2"]),
    "experts": ("qwen3_moe", QWEN3_MOE["published"]),
    "learned positions": ("opt", next(iter(OPT.values()))),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    home = tmp_path_factory.mktemp("bases")
    return {name: save_base_model(home / name.replace(" ", "_"), *FAMILIES[name]) for name in FAMILIES}


def convert(*arguments):
    return cli.main(["convert", *map(str, arguments)])


def refusal(capsys, *arguments):
    assert convert(*arguments) == 2
    return capsys.readouterr().err


@torch.no_grad()
def logits_of(folder, tokens=TOKENS):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(tokens).logits


def assert_close(logits, expected, tolerance=1e-5):
    """Compare to a part of the largest logit: matrices of another width sum in another order, and small logits are
    differences of large terms."""
    assert (logits - expected).abs().max() <= tolerance * expected.abs().max()


def embedding_and_head(model):
    return [model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data]


@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_stay_and_new_rows_are_the_mean(kind, bases, tmp_path):
    """Rows 258 and 259 have no token; new tokens take these before rows are added."""
    assert convert(bases[kind], tmp_path / "new", "--add-tokens", *NEW, "--vocab-multiple", 8) == 0
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (bases[kind], tmp_path / "new"))
    num_tokens = BYTES.vocab_size
    assert after.config.vocab_size == 264 == len(embedding_and_head(after)[0])
    for old, new in zip(embedding_and_head(before), embedding_and_head(after), strict=True):
        assert torch.equal(new[:num_tokens], old[:num_tokens])
        mean = old[:num_tokens].double().mean(0).float()
        torch.testing.assert_close(new[num_tokens:], mean.expand(264 - num_tokens, -1), rtol=1e-6, atol=1e-9)
    assert_close(logits_of(tmp_path / "new")[..., :num_tokens], logits_of(bases[kind])[..., :num_tokens])
    assert untrained_token_ids(find_config(tmp_path / "new")) == [258, 259, 260]
    assert after.generation_config.suppress_tokens == [261, 262, 263]
    hf_tokenizer, tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new"), build_tokenizer(tmp_path / "new")
    assert (
        hf_tokenizer.convert_tokens_to_ids(NEW) == [258, 259, 260] == [tokenizer.special_tokens[name] for name in NEW]
    )
    assert hf_tokenizer.encode("a<tool>b", add_special_tokens=False) == [97, 260, 98]
    assert hf_tokenizer.decode([97, 260, 98], skip_special_tokens=True) == "ab"
    assert tokenizer.encode("a <tool>") == BYTES.encode("a <tool>"), "text of users never becomes a special token"


def test_spare_rows_are_removed_and_added(bases, tmp_path, capsys):
    """Spare rows that remain keep their values; new rows stay marked as untrained through further conversions."""
    more, fewer, plain, narrow = (tmp_path / name for name in ("more", "fewer", "plain", "narrow"))
    assert convert(bases["untied"], more, "--vocab-multiple", 7) == 0
    assert "258 tokens, 0 of them new, in 259 rows" in capsys.readouterr().out
    old, new = (embedding_and_head(AutoModelForCausalLM.from_pretrained(folder)) for folder in (bases["untied"], more))
    assert all(torch.equal(after, before[:259]) for before, after in zip(old, new, strict=True))
    assert convert(more, plain, "--add-tokens", NEW[0], NEW[0], "--eos-token", NEW[0]) == 0  # takes a spare row
    assert convert(plain, fewer, "--vocab-multiple", 1, "--add-tokens", NEW[0]) == 0
    assert f"{NEW[0]!r} exists already, with id 258" in capsys.readouterr().err
    for folder in (plain, fewer):
        config, generation = (
            json.loads((folder / f"{name}.json").read_text()) for name in ("config", "generation_config")
        )
        assert config["vocab_size"] == 259 and config[UNTRAINED] == [258] and "suppress_tokens" not in generation
        assert generation["eos_token_id"] == 258 and build_tokenizer(folder).eos_id == 258
    assert convert(fewer, narrow, "--to", "native", "--dtype", "bfloat16") == 0 and find_config(narrow)[UNTRAINED] == [
        258
    ]
    assert convert(narrow, tmp_path / "ours", "--to", "native", "--vocab-multiple", 64) == 0
    assert find_weights(tmp_path / "ours")[0] == "native" and find_config(tmp_path / "ours")["vocab_size"] == 320


def test_rows_without_a_token_are_never_sampled(bases, tmp_path):
    """They are not sampled even with the largest logits. Our generator takes the tokens from its tokenizer."""

    class Ours(torch.nn.Module):
        def forward(self, ids):
            return model(ids).logits

    folder = tmp_path / "new"
    assert convert(bases["untied"], folder, "--add-tokens", *NEW, "--vocab-multiple", 64) == 0
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        model.lm_head.weight[261:] = 1e3 * model.lm_head.weight[:59]  # by far the largest or smallest logits
    prompt = torch.tensor([[256, 100, 101, 102]])
    options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert model.generate(prompt, **options).max() < 261
    assert model.generate(prompt, **options, suppress_tokens=None).max() >= 261, (
        "without suppression such a row is the likeliest"
    )
    ours = Ours()
    ours.model = model
    options = dict(max_new_tokens=12, context=64, top_k=0, seed=0)
    for temperature in (0.0, 5.0):
        generated = sample(ours, prompt[0].tolist(), build_tokenizer(folder), temperature=temperature, **options)
        assert max(generated) < 261


def write_chats(folder):
    """Write conversations that all have the same answer, ended by the template's end of turn."""
    path = folder / "chats.jsonl"
    records = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "yx"}]}
        for question in "abc"
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in records * 20))
    return path


@pytest.mark.parametrize("kind, ranks", [("untied", 2), ("tied", 1)])
def test_new_tokens_are_trained_with_an_adapter_and_exported(kind, ranks, bases, tmp_path, capsys, monkeypatch):
    """Train on tensor-parallel ranks, which can divide the rows after padding; transformers opens the result."""
    base, run, merged = (tmp_path / name for name in ("base", "run", "whole"))
    arguments = ["--add-tokens", *NEW[:2], "--vocab-multiple", 8, "--data.chat_template", "chatml"]
    assert convert(bases[kind], base, *arguments) == 0
    job = dict(
        task__kind="sft", training__seq_len=96, training__steps=8, model__flavor="from_hf", model__overrides="{}"
    )
    job |= dict(model__name=FAMILIES[kind][0], model__hf_folder=base, model__tokenizer_path=base)
    job |= dict(checkpoint__enable=True, checkpoint__initial_load_path=base, checkpoint__initial_load_in_hf=True)
    job |= dict(adapter__kind="lora", adapter__rank=4, adapter__save="alone", parallelism__tensor_parallel_degree=ranks)
    job |= dict(training__local_batch_size=4, training__global_batch_size=4, optimizer__lr=3e-2)
    argv = jobs.arguments(run, write_chats(tmp_path), **job)
    (fault,) = map(str, check(load(argv), ranks, "cpu"))
    ends = ["tok_embeddings.weight"] + ["output.weight"] * (kind == "untied")
    assert "adapter.train_fully: given []; allowed: patterns that match " + " and ".join(ends) in fault
    assert "with rows of 2 new tokens; write [" + ", ".join(f'"{name}"' for name in ends) in fault
    argv.append("--adapter.train_fully=" + json.dumps(ends))
    assert check(load(argv), ranks, "cpu") == []
    steps = run_ranks(ranks, jobs.train, argv)[0][0]
    assert steps[-1]["loss"] < steps[0]["loss"] / 2
    assert cli.main(["export", str(run), "--to", str(merged), "--merge", "--dtype", "float32"]) == 0
    model, _ = inference_model.load_model(*find_checkpoint(run, None), torch.device("cpu"))
    with torch.no_grad():
        # Merging rounds weights by up to 6e-8. After large steps this alone changes logits by 6e-6 of the largest, in
        # float64, and with the sums of float32 by up to 1.1e-5, depending on the machine.
        assert_close(logits_of(merged), model(TOKENS), tolerance=5e-5)
    hf_model = AutoModelForCausalLM.from_pretrained(merged)
    for rows, old in zip(
        embedding_and_head(hf_model), embedding_and_head(AutoModelForCausalLM.from_pretrained(base)), strict=True
    ):
        assert (rows[258:260] - old[258:260]).abs().amax(1).min() > 1e-2, "both rows have learned"
        assert not torch.equal(rows[258], rows[259])
    assert UNTRAINED not in find_config(merged) and hf_model.generation_config.suppress_tokens == [*range(260, 264)]
    assert hf_model.generation_config.eos_token_id == sorted(end_of_turn_ids(build_tokenizer(merged))) == [257, 259]
    assert convert(merged, tmp_path / "small", "--vocab-multiple", 1) == 0
    assert_close(logits_of(tmp_path / "small"), logits_of(merged)[..., :260])
    if kind == "untied":  # the tied model does not learn the answer in so few steps
        capsys.readouterr()
        monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n"))
        assert cli.main(["chat", str(merged), "--apart", "--temperature", "0"]) == 0
        assert capsys.readouterr().out.split() == ["yx", "yx"], "answers end with the new token"


def test_training_removes_the_mark_of_untrained_rows(bases, tmp_path):
    """A trained checkpoint loses the mark of untrained rows; a conversion of its base model keeps it."""
    base, run, ours, hf_folder = (tmp_path / name for name in ("base", "run", "ours", "theirs"))
    assert convert(bases["tied"], base, "--add-tokens", *NEW[:2]) == 0
    job = dict(training__steps=1, model__name="llama3.2", model__flavor="from_hf", model__overrides="{}")
    job |= dict(model__hf_folder=base, model__tokenizer_path=base, checkpoint__enable=True)
    job |= dict(checkpoint__initial_load_path=base, checkpoint__initial_load_in_hf=True)
    run_ranks(1, jobs.train, jobs.arguments(run, jobs.write_texts(tmp_path / "texts"), **job))
    assert convert(run, hf_folder) == 0 and UNTRAINED not in find_config(hf_folder)
    assert convert(base, ours, "--to", "ours") == 0 and find_config(ours)[UNTRAINED] == [258, 259]


def test_other_files_of_a_tokenizer_are_extended_too(tmp_path):
    """Text keeps its ids, and each of the tokenizer's files lists the new tokens."""
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    extra_files = {"tokenizer_config": {"eos_token": "<|end_of_text|>", "added_tokens_decoder": {}}, "added_tokens": {}}
    extra_files["special_tokens_map"] = {"eos_token": "<|end_of_text|>", "pad_token": "<|end_of_text|>"}
    for name, content in extra_files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    before = build_tokenizer(tmp_path, chat_template="chatml")
    files = extended(before, NEW, NEW[1])
    (tmp_path / "new").mkdir()
    for name, content in files.items():
        (tmp_path / "new" / name).write_bytes(content)
    after, contents = (
        build_tokenizer(tmp_path / "new"),
        {name: json.loads(files[f"{name}.json"]) for name in extra_files},
    )
    text = "def f(x):\n    return x <tool>"
    assert after.encode(text) == before.encode(text) and after.chat_template == CHATML
    assert (after.vocab_size, after.eos_id, after.bos_id) == (2051, 2049, 0)
    assert contents["added_tokens"] == dict(zip(NEW, range(2048, 2051), strict=True))
    assert contents["special_tokens_map"] == {"eos_token": NEW[1], "pad_token": "<|end_of_text|>"}
    assert [*contents["tokenizer_config"]["added_tokens_decoder"]] == ["0", "1", "2048", "2049", "2050"]
    assert AutoTokenizer.from_pretrained(tmp_path / "new").eos_token_id == 2049


@pytest.mark.parametrize("name", ["tiktoken.model", "sentencepiece.model"])
def test_a_tokenizer_without_tokenizer_json_gets_one(name, tmp_path):
    ours = build_tokenizer(TOKENIZER.with_name(name))
    for file, content in extended(ours, NEW, None).items():
        (tmp_path / file).write_bytes(content)
    hf_tokenizer, loaded = AutoTokenizer.from_pretrained(tmp_path), build_tokenizer(tmp_path)
    first, second = ("def f(x):", "return x")
    expected = [*ours.encode(first), ours.vocab_size + 2, *ours.encode_after(second)]
    assert hf_tokenizer.convert_tokens_to_ids(NEW[2]) == loaded.special_tokens[NEW[2]] == ours.vocab_size + 2
    assert loaded.encode(first) == ours.encode(first) and loaded.eos_id == ours.eos_id
    if name == "tiktoken.model":  # sentencepiece adds a blank after a special token
        assert hf_tokenizer.encode(f"{first}{NEW[2]}{second}", add_special_tokens=False) == expected


def test_tokens_that_cannot_be_added(tmp_path, monkeypatch):
    tokenizer = build_tokenizer(TOKENIZER)
    for token in ("", "x", " <tool>", "<tool>\n"):
        with pytest.raises(JobError, match="allowed: at least 2 letters, without blanks around them; what people"):
            missing_tokens(tokenizer, [token])
    assert missing_tokens(tokenizer, ["<|end_of_text|>", "<a>", "<a>"]) == ["<a>"]
    with pytest.raises(JobError, match="token 'self': text becomes it already, as number .*; give it another name"):
        extended(tokenizer, ["self"], None)
    with pytest.raises(JobError, match="eos token '<end>': the tokenizer has no such token; add it too"):
        extended(tokenizer, ["<tool>"], "<end>")
    content = json.loads(TOKENIZER.read_text())
    content["model"]["vocab"] = {
        name: number + 7 * (number > 2000) for name, number in content["model"]["vocab"].items()
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(JobError, match="its own are 2048, up to number 2054; number them without gaps"):
        extended(build_tokenizer(tmp_path), ["<tool>"], None)

    def refuse(self):
        raise JobError("it has no such form")

    monkeypatch.setattr(ByteTokenizer, "as_hf_files", refuse)
    with pytest.raises(JobError, match="cannot be given tokens: it has no such form; write its tokenizer.json first"):
        extended(BYTES, ["<tool>"], None)


def test_invalid_arguments_are_refused(bases, tmp_path, capsys):
    error = refusal(capsys, bases["tied"], tmp_path / "a.safetensors", "--vocab-multiple", 8)
    assert "one safetensors file cannot hold the tokenizer that resized weights need; write --to hf" in error
    (tmp_path / "alone").mkdir()
    for name in ("config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json"):
        (tmp_path / "alone" / name).write_bytes((bases["tied"] / name).read_bytes())
    error = refusal(capsys, tmp_path / "alone", tmp_path / "x", "--add-tokens", "<tool>")
    assert "the folder has no tokenizer" in error
    arguments = [
        "--model.name=llama3.1",
        "--model.overrides={dim=32, n_layers=3, n_heads=4, n_kv_heads=2, multiple_of=16}",
    ]
    error = refusal(
        capsys, jobs.ROOT / "tests/assets/torchtitan_v022", tmp_path / "x", "--eos-token", "<t>", *arguments
    )
    assert "the tokens of the model are unknown: give its tokenizer with --model.tokenizer_path" in error
    for multiple in (0, 2**16 + 1):
        assert convert(bases["tied"], tmp_path / "x", "--vocab-multiple", multiple) == 2
        assert "a whole number from 1 to 65536" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_malformed_mark_of_untrained_rows_is_ignored():
    assert (
        untrained_token_ids({})
        == untrained_token_ids({UNTRAINED: "all"})
        == untrained_token_ids({UNTRAINED: [True, "1", None]})
        == []
    )


def test_each_tensor_is_read_once(bases, tmp_path, monkeypatch):
    names = []
    original = Resized.full_tensor
    monkeypatch.setattr(Resized, "full_tensor", lambda self, name: names.append(name) or original(self, name))
    assert convert(bases["tied"], tmp_path / "new", "--add-tokens", "<tool>") == 0
    assert len(names) == len(set(names)) and "output.weight" not in names and "tok_embeddings.weight" in names
