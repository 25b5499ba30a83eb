"""`torchtitan convert` to a vocabulary of another size: what transformers opens has the answers that it had, new rows
are the mean of the others, and what no token has is written by nobody.
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
from torchtitan.commands.generate import find_checkpoint, sample
from torchtitan.commands.resizing import Resized
from torchtitan.config.manager import load
from torchtitan.core.errors import JobError
from torchtitan.datasets.encoding import end_of_turn_ids
from torchtitan.datasets.tokenizer import build_tokenizer
from torchtitan.datasets.tokenizer.byte_level import ByteTokenizer
from torchtitan.datasets.tokenizer.chat_templates import CHATML
from torchtitan.datasets.tokenizer.hf_json import extended, lacking
from torchtitan.models.hf.config import UNTRAINED, config_beside, untrained
from torchtitan.models.spec import MODELS
from torchtitan.rules import check
from torchtitan.training import inference_model

NEW = ["<|im_start|>", "<|im_end|>", "<tool>"]
BYTES = ByteTokenizer()
ROWS = 260
"""Of the models: two more than there are tokens."""
TOKENS = torch.arange(250).view(5, 50)
TOKENIZER = jobs.ROOT / "tests/assets/tokenizer/tokenizer.json"


def folder_of(folder, family, args):
    """A model in the form of Hugging Face, with the bytes as tokens."""
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
    return {name: folder_of(home / name.replace(" ", "_"), *FAMILIES[name]) for name in FAMILIES}


def convert(*words):
    return cli.main(["convert", *map(str, words)])


def refusal(capsys, *words):
    assert convert(*words) == 2
    return capsys.readouterr().err


@torch.no_grad()
def logits_of(folder, tokens=TOKENS):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(tokens).logits


def assert_close(logits, wanted):
    """Sums in another order, as matrices of another width have it, beside the largest logit: small ones are what is
    left of large terms."""
    assert (logits - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def rows_of(model):
    return [model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data]


@pytest.mark.parametrize("kind", FAMILIES)
def test_old_answers_stay_and_new_rows_are_the_mean(kind, bases, tmp_path):
    """Rows 258 and 259 had no token: new ones take them before there are more."""
    assert convert(bases[kind], tmp_path / "new", "--add-tokens", *NEW, "--vocab-multiple", 8) == 0
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (bases[kind], tmp_path / "new"))
    known = BYTES.vocab_size
    assert after.config.vocab_size == 264 == len(rows_of(after)[0])
    for old, new in zip(rows_of(before), rows_of(after), strict=True):
        assert torch.equal(new[:known], old[:known])
        mean = old[:known].double().mean(0).float()
        torch.testing.assert_close(new[known:], mean.expand(264 - known, -1), rtol=1e-6, atol=1e-9)
    assert_close(logits_of(tmp_path / "new")[..., :known], logits_of(bases[kind])[..., :known])
    assert untrained(config_beside(tmp_path / "new")) == [258, 259, 260]
    assert after.generation_config.suppress_tokens == [261, 262, 263]
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "new"), build_tokenizer(tmp_path / "new")
    assert theirs.convert_tokens_to_ids(NEW) == [258, 259, 260] == [ours.special_tokens[name] for name in NEW]
    assert theirs.encode("a<tool>b", add_special_tokens=False) == [97, 260, 98]
    assert theirs.decode([97, 260, 98], skip_special_tokens=True) == "ab"
    assert ours.encode("a <tool>") == BYTES.encode("a <tool>"), "what people write is never a special token"


def test_rows_without_a_token_go_and_come(bases, tmp_path, capsys):
    """Spare rows stay as they are where they stay; what is new stays so through further conversions."""
    more, fewer, plain, narrow = (tmp_path / name for name in ("more", "fewer", "plain", "narrow"))
    assert convert(bases["untied"], more, "--vocab-multiple", 7) == 0
    assert "258 tokens, 0 of them new, in 259 rows" in capsys.readouterr().out
    old, new = (rows_of(AutoModelForCausalLM.from_pretrained(folder)) for folder in (bases["untied"], more))
    assert all(torch.equal(after, before[:259]) for before, after in zip(old, new, strict=True))
    assert convert(more, plain, "--add-tokens", NEW[0], NEW[0], "--eos-token", NEW[0]) == 0  # where a row is free
    assert convert(plain, fewer, "--vocab-multiple", 1, "--add-tokens", NEW[0]) == 0
    assert f"{NEW[0]!r} is there already, as number 258" in capsys.readouterr().err
    for folder in (plain, fewer):
        config, generation = (
            json.loads((folder / f"{name}.json").read_text()) for name in ("config", "generation_config")
        )
        assert config["vocab_size"] == 259 and config[UNTRAINED] == [258] and "suppress_tokens" not in generation
        assert generation["eos_token_id"] == 258 and build_tokenizer(folder).eos_id == 258
    assert convert(fewer, narrow, "--to", "ours", "--dtype", "bfloat16") == 0 and config_beside(narrow)[UNTRAINED] == [
        258
    ]
    assert convert(narrow, tmp_path / "ours", "--to", "ours", "--vocab-multiple", 64) == 0
    assert find_weights(tmp_path / "ours")[0] == "ours" and config_beside(tmp_path / "ours")["vocab_size"] == 320


def test_rows_that_no_token_has_are_written_by_nobody(bases, tmp_path):
    """Though they were the likeliest. Nothing is written without a tokenizer here, which knows its tokens."""

    class Ours(torch.nn.Module):
        def forward(self, ids):
            return model(ids).logits

    folder = tmp_path / "new"
    assert convert(bases["untied"], folder, "--add-tokens", *NEW, "--vocab-multiple", 64) == 0
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        model.lm_head.weight[261:] = 1e3 * model.lm_head.weight[:59]  # far above or far below all others
    prompt = torch.tensor([[256, 100, 101, 102]])
    how = dict(max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert model.generate(prompt, **how).max() < 261
    assert model.generate(prompt, **how, suppress_tokens=None).max() >= 261, "the control"
    ours = Ours()
    ours.model = model
    how = dict(max_new_tokens=12, context=64, top_k=0, seed=0)
    for temperature in (0.0, 5.0):
        written = sample(ours, prompt[0].tolist(), build_tokenizer(folder), temperature=temperature, **how)
        assert max(written) < 261


def chats(folder):
    """One answer to all questions, which is over where the template says so."""
    path = folder / "chats.jsonl"
    asked = [
        {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": "yx"}]} for word in "abc"
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in asked * 20))
    return path


@pytest.mark.parametrize("kind, ranks", [("untied", 2), ("tied", 1)])
def test_new_tokens_are_learned_beside_an_adapter_and_exported(kind, ranks, bases, tmp_path, capsys, monkeypatch):
    """Over tensor-parallel ranks, which divide the rows once they are a multiple; transformers opens the result."""
    base, run, whole = (tmp_path / name for name in ("base", "run", "whole"))
    words = ["--add-tokens", *NEW[:2], "--vocab-multiple", 8, "--data.chat_template", "chatml"]
    assert convert(bases[kind], base, *words) == 0
    job = dict(
        task__kind="sft", training__seq_len=96, training__steps=8, model__flavor="from_hf", model__overrides="{}"
    )
    job |= dict(model__name=FAMILIES[kind][0], model__hf_folder=base, model__tokenizer_path=base)
    job |= dict(checkpoint__enable=True, checkpoint__initial_load_path=base, checkpoint__initial_load_in_hf=True)
    job |= dict(adapter__kind="lora", adapter__rank=4, adapter__save="alone", parallelism__tensor_parallel_degree=ranks)
    job |= dict(training__local_batch_size=4, training__global_batch_size=4, optimizer__lr=3e-2)
    argv = jobs.arguments(run, chats(tmp_path), **job)
    (fault,) = map(str, check(load(argv), ranks, "cpu"))
    ends = ["tok_embeddings.weight"] + ["output.weight"] * (kind == "untied")
    assert "adapter.train_fully: given []; allowed: what fits " + " and ".join(ends) in fault
    assert "with rows of 2 new tokens; write [" + ", ".join(f'"{name}"' for name in ends) in fault
    argv.append("--adapter.train_fully=" + json.dumps(ends))
    assert check(load(argv), ranks, "cpu") == []
    steps = run_ranks(ranks, jobs.train, argv)[0][0]
    assert steps[-1]["loss"] < steps[0]["loss"] / 2
    assert cli.main(["export", str(run), "--to", str(whole), "--merge", "--dtype", "float32"]) == 0
    model, _ = inference_model.filled_model(*find_checkpoint(run, None), torch.device("cpu"))
    with torch.no_grad():
        assert_close(logits_of(whole), model(TOKENS))
    theirs = AutoModelForCausalLM.from_pretrained(whole)
    for rows, old in zip(rows_of(theirs), rows_of(AutoModelForCausalLM.from_pretrained(base)), strict=True):
        assert (rows[258:260] - old[258:260]).abs().amax(1).min() > 1e-2, "both have learned"
        assert not torch.equal(rows[258], rows[259])
    assert UNTRAINED not in config_beside(whole) and theirs.generation_config.suppress_tokens == [*range(260, 264)]
    assert theirs.generation_config.eos_token_id == sorted(end_of_turn_ids(build_tokenizer(whole))) == [257, 259]
    assert convert(whole, tmp_path / "small", "--vocab-multiple", 1) == 0
    assert_close(logits_of(tmp_path / "small"), logits_of(whole)[..., :260])
    if kind == "untied":  # in so few steps
        capsys.readouterr()
        monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n"))
        assert cli.main(["chat", str(whole), "--apart", "--temperature", "0"]) == 0
        assert capsys.readouterr().out.split() == ["yx", "yx"], "and answers end by the new token"


def test_what_a_run_has_learned_is_new_no_more(bases, tmp_path):
    """Its checkpoint is converted as it is exported; a form of the folder that it began from says it further."""
    base, run, ours, theirs = (tmp_path / name for name in ("base", "run", "ours", "theirs"))
    assert convert(bases["tied"], base, "--add-tokens", *NEW[:2]) == 0
    job = dict(training__steps=1, model__name="llama3.2", model__flavor="from_hf", model__overrides="{}")
    job |= dict(model__hf_folder=base, model__tokenizer_path=base, checkpoint__enable=True)
    job |= dict(checkpoint__initial_load_path=base, checkpoint__initial_load_in_hf=True)
    run_ranks(1, jobs.train, jobs.arguments(run, jobs.write_texts(tmp_path / "texts"), **job))
    assert convert(run, theirs) == 0 and UNTRAINED not in config_beside(theirs)
    assert convert(base, ours, "--to", "ours") == 0 and config_beside(ours)[UNTRAINED] == [258, 259]


def test_a_tokenizer_of_another_form_keeps_what_stands_beside_it(tmp_path):
    """Text has the ids that it had; each file that tells of tokens tells of the new ones."""
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    beside = {"tokenizer_config": {"eos_token": "<|end_of_text|>", "added_tokens_decoder": {}}, "added_tokens": {}}
    beside["special_tokens_map"] = {"eos_token": "<|end_of_text|>", "pad_token": "<|end_of_text|>"}
    for name, content in beside.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    before = build_tokenizer(tmp_path, chat_template="chatml")
    files = extended(before, NEW, NEW[1])
    (tmp_path / "new").mkdir()
    for name, content in files.items():
        (tmp_path / "new" / name).write_bytes(content)
    after, said = build_tokenizer(tmp_path / "new"), {name: json.loads(files[f"{name}.json"]) for name in beside}
    text = "def f(x):\n    return x <tool>"
    assert after.encode(text) == before.encode(text) and after.chat_template == CHATML
    assert (after.vocab_size, after.eos_id, after.bos_id) == (2051, 2049, 0)
    assert said["added_tokens"] == dict(zip(NEW, range(2048, 2051), strict=True))
    assert said["special_tokens_map"] == {"eos_token": NEW[1], "pad_token": "<|end_of_text|>"}
    assert [*said["tokenizer_config"]["added_tokens_decoder"]] == ["0", "1", "2048", "2049", "2050"]
    assert AutoTokenizer.from_pretrained(tmp_path / "new").eos_token_id == 2049


@pytest.mark.parametrize("name", ["tiktoken.model", "sentencepiece.model"])
def test_a_tokenizer_without_a_form_of_its_own_gets_one(name, tmp_path):
    ours = build_tokenizer(TOKENIZER.with_name(name))
    for file, content in extended(ours, NEW, None).items():
        (tmp_path / file).write_bytes(content)
    theirs, again = AutoTokenizer.from_pretrained(tmp_path), build_tokenizer(tmp_path)
    first, second = ("def f(x):", "return x")
    wanted = [*ours.encode(first), ours.vocab_size + 2, *ours.encode_after(second)]
    assert theirs.convert_tokens_to_ids(NEW[2]) == again.special_tokens[NEW[2]] == ours.vocab_size + 2
    assert again.encode(first) == ours.encode(first) and again.eos_id == ours.eos_id
    if name == "tiktoken.model":  # the other begins anew behind a token, with a blank of its own
        assert theirs.encode(f"{first}{NEW[2]}{second}", add_special_tokens=False) == wanted


def test_tokens_that_cannot_be_added(tmp_path, monkeypatch):
    tokenizer = build_tokenizer(TOKENIZER)
    for token in ("", "x", " <tool>", "<tool>\n"):
        with pytest.raises(JobError, match="allowed: at least 2 letters, without blanks around them; what people"):
            lacking(tokenizer, [token])
    assert lacking(tokenizer, ["<|end_of_text|>", "<a>", "<a>"]) == ["<a>"]
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

    def formless(self):
        raise JobError("it has no such form")

    monkeypatch.setattr(ByteTokenizer, "as_hf_files", formless)
    with pytest.raises(JobError, match="cannot be given tokens: it has no such form; write its tokenizer.json first"):
        extended(BYTES, ["<tool>"], None)


def test_what_is_refused(bases, tmp_path, capsys):
    said = refusal(capsys, bases["tied"], tmp_path / "a.safetensors", "--vocab-multiple", 8)
    assert "one file holds no tokenizer, which says what the rows are; give a folder" in said
    (tmp_path / "alone").mkdir()
    for name in ("config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json"):
        (tmp_path / "alone" / name).write_bytes((bases["tied"] / name).read_bytes())
    said = refusal(capsys, tmp_path / "alone", tmp_path / "x", "--add-tokens", "<tool>")
    assert "the folder has no tokenizer" in said
    words = ["--model.name=llama3.1", "--model.overrides={dim=32, n_layers=3, n_heads=4, n_kv_heads=2, multiple_of=16}"]
    said = refusal(capsys, jobs.ROOT / "tests/assets/torchtitan_v022", tmp_path / "x", "--eos-token", "<t>", *words)
    assert "which tokens the model has is not known: --model.tokenizer_path says which is its tokenizer" in said
    for multiple in (0, 2**16 + 1):
        assert convert(bases["tied"], tmp_path / "x", "--vocab-multiple", multiple) == 2
        assert "a whole number from 1 to 65536" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_config_that_tells_nothing_of_new_tokens():
    assert untrained({}) == untrained({UNTRAINED: "all"}) == untrained({UNTRAINED: [True, "1", None]}) == []


def test_one_tensor_at_a_time(bases, tmp_path, monkeypatch):
    read = []
    plain = Resized.whole
    monkeypatch.setattr(Resized, "whole", lambda self, name: read.append(name) or plain(self, name))
    assert convert(bases["tied"], tmp_path / "new", "--add-tokens", "<tool>") == 0
    assert len(read) == len(set(read)) and "output.weight" not in read and "tok_embeddings.weight" in read
