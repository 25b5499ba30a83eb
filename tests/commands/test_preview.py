"""`torchtitan preview` shows the batch that the trainer would get."""

import json
import sys

import pytest
import torch

from torchtitan.assembly.data import JobDatasets
from torchtitan.commands import preview
from torchtitan.config import manager
from torchtitan.core.errors import JobError
from torchtitan.datasets.tokenizer import build_tokenizer
from torchtitan.job import ResolvedJob


@pytest.fixture
def job(tmp_path):
    texts = ["First text.", "Second: äö.", "bell \a and \x1b[31mescape\x9b", "y" * 60] * 2
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    (tmp_path / "job.toml").write_text(
        f'[model]\ntokenizer_path = "bytes"\n[training]\ndataset = "text"\ndataset_path = "{tmp_path}/a.jsonl"\n'
        "seq_len = 64\nshuffle = false\ndocument_mask = true\n"
    )
    return ["--job.config_file", str(tmp_path / "job.toml")]


def test_what_the_model_sees(job, capsys):
    assert preview.main([*job, "--tokens", "104"]) == 0
    shown = capsys.readouterr().out
    assert "\033" not in shown and "\a" not in shown and "\x9b" not in shown  # not a terminal, and text is no command
    assert shown.splitlines()[2:] == [
        "sample 0: 64 tokens, 4 documents, 61 of 64 labels trained",
        "--- document 0: tokens 0-12, positions 0-12 ".ljust(100, "-"),
        "[-<begin>-]First text.<end>",
        "--- document 1: tokens 13-27, positions 0-14 ".ljust(100, "-"),
        "[-<begin>-]Second: äö.<end>",
        "--- document 2: tokens 28-53, positions 0-25 ".ljust(100, "-"),
        "[-<begin>-]bell ␇ and ␛[31mescape\ufffd<end>",
        "--- document 3: tokens 54-63, positions 0-9 ".ljust(100, "-"),
        "[-<begin>-]yyyyyyyyy",
        "",
        "sample 1: 64 tokens, 2 documents, 63 of 64 labels trained",
        "--- document 0: tokens 0-51, positions 0-51, begun in an earlier sample ".ljust(100, "-"),
        "[-y-]" + "y" * 50 + "<end>",
        "--- document 1: tokens 52-63, positions 0-11 ".ljust(100, "-"),
        "[-<begin>-]First text.",
    ]


def test_the_jobs_options_count(job, capsys):
    options = ["--samples", "1", "--training.seq_len", "20", "--tokens", "20"]
    preview.main([*job, *options, "--training.document_mask=false"])
    shown = capsys.readouterr().out
    assert "seq_len 20, seed 0; attention over the whole sample" in shown
    assert "sample 0: 20 tokens, 2 documents, 20 of 20 labels trained" in shown and "sample 1" not in shown
    assert "tokens 13-19, positions 13-19" in shown


def test_colour_on_a_terminal_only(job, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    preview.main(job)
    shown = capsys.readouterr().out
    assert preview.HEAD in shown and preview.MASKED in shown
    preview.main([*job, "--metrics.disable_color_printing=true"])
    assert "\033" not in capsys.readouterr().out


def test_the_shipped_default_job(capsys):
    assert preview.main(["--training.seq_len", "64"]) == 0
    assert "data python_stdlib" in capsys.readouterr().out


def test_long_documents_show_their_ends():
    tokenizer = build_tokenizer("bytes")
    view = preview.View(tokenizer, 10, ids=False, colour=False)
    tokens = tokenizer.encode("abcdefghijklmnop")
    loss_mask = [True] * 16
    assert view._piece(tokens, loss_mask, 8) == "abcdef\n... 8 more tokens ...\nop"
    assert view._piece(tokens[:8], loss_mask[:8], 8) == "abcdefgh"


SEGMENTS = [{"text": "Two? ", "label": False}, {"text": "Four.", "label": True}]


def test_what_is_only_read_is_marked(job, capsys, monkeypatch, tmp_path):
    record = json.dumps({"text": SEGMENTS}) + "\n"
    (tmp_path / "a.jsonl").write_text(record * 8)
    options = [*job, "--samples", "1", "--training.seq_len", "12"]
    preview.main([*options, "--ids"])
    assert capsys.readouterr().out.splitlines()[2:] == [
        "sample 0: 12 tokens, 1 document, 6 of 12 labels trained",
        "--- document 0: tokens 0-11, positions 0-11 ".ljust(100, "-"),
        "[-<begin>Two? -]Four.<end>",
        "ids 256 84 119 111 63 32 70 111 117 114 46 257",
    ]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    preview.main(options)
    special, masked, end = preview.SPECIAL, preview.MASKED, "\033[0m"
    expected = f"{special}<begin>{end}{masked}Two? {end}Four.{special}<end>{end}"
    assert capsys.readouterr().out.splitlines()[-1] == expected


@pytest.mark.parametrize("padding", ["right", "left"])
def test_padding_is_no_document(job, capsys, tmp_path, padding):
    """Padding is shown on its side; a full sample has none."""
    rows = [{"prompt": "Two?", "completion": "Four."}, {"prompt": "a" * 20, "completion": "b" * 11}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--task.kind=sft", "--training.seq_len=32", "--data.packing=off", f"--data.padding={padding}"]
    preview.main([*job, *options, f"--job.dump_folder={tmp_path}"])
    shown = capsys.readouterr().out.splitlines()
    shown = shown[next(n for n, line in enumerate(shown) if line.startswith("sample 0")) :]
    first, second = shown[: shown.index("")], shown[shown.index("") + 1 :]
    text = "[-<begin>Two?-]Four.<end>"
    # the last token of a sample is a label alone, so 32 of 33 are read
    if padding == "right":
        borders = "document 0: tokens 0-10, positions 0-10 ", "padding: tokens 11-31, masked in attention and loss "
        assert first[1:] == [f"--- {borders[0]}".ljust(100, "-"), text, f"--- {borders[1]}".ljust(100, "-")]
    else:
        assert first[1].startswith("--- padding: tokens 0-21, masked in attention and loss -")
        assert first[2].startswith("--- document 1: tokens 22-31, positions 0-9 -")
    assert first[0] == "sample 0: 32 tokens, 1 document, 6 of 32 labels trained"
    assert second[0] == "sample 1: 32 tokens, 1 document, 12 of 32 labels trained"
    assert not any("padding" in line for line in second)


@pytest.mark.parametrize("has_gpu, length", [(False, 16), (True, 64)])
def test_samples_are_padded_as_on_this_machine(job, capsys, tmp_path, monkeypatch, has_gpu, length):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "Two?", "completion": "Four."}) + "\n")
    options = ["--task.kind=sft", "--training.seq_len=128", "--data.packing=off", f"--job.dump_folder={tmp_path}"]
    preview.main([*job, *options, "--samples=1"])
    assert f"sample 0: {length} tokens, 1 document, 6 of {length} labels trained" in capsys.readouterr().out


def test_refusals(job, capsys, tmp_path):
    for name in ("samples", "tokens"):
        with pytest.raises(JobError, match=f"--{name}: given '0'; allowed: a whole number >= 1"):
            preview.main([*job, f"--{name}", "0"])
    with pytest.raises(manager.ConfigError):
        preview.main([*job, "--training.nothing", "1"])
    with pytest.raises(JobError, match="no such file or folder"):
        preview.main([*job, "--training.dataset_path", str(tmp_path / "no")])


TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
REFUSED = {
    "no JSON": ("{", [], r"a\.jsonl:\d: .*JSON"),
    "another field": ('{"body": "a"}', [], r"a\.jsonl:\d: no field 'text'; the record's fields: 'body'"),
    "no text": ('{"text": ""}', [], "no text in 8 epochs"),
    "no template": (json.dumps({"messages": TALK}), [], r"a\.jsonl:1: .*no chat template; give one with data\.chat_"),
    "template": (
        json.dumps({"messages": TALK}),
        ["--data.chat_template={{ raise_exception('never') }}"],
        r"a\.jsonl:1: the chat template refuses this conversation: never",
    ),
    "pairs": (
        '{"prompt": "a", "chosen": "b", "rejected": "c"}',
        [],
        r"a\.jsonl:1: a pair of answers, which task.kind dpo",
    ),
    "too long": (
        json.dumps({"prompt": "a", "completion": "b" * 99}),
        ["--task.kind=sft", "--training.seq_len=32"],
        r"a\.jsonl:1: 102 tokens, but a sample .* has room for 33; raise training\.seq_len",
    ),
    "nothing learned": (
        json.dumps({"text": [{"text": "a", "label": False}]}),
        ["--task.kind=sft"],
        "8 of 8 records have no trained token",
    ),
}


@pytest.mark.parametrize("line, options, message", REFUSED.values(), ids=REFUSED)
def test_data_that_are_refused(line, options, message, job, tmp_path):
    """The message equals the trainer's, whether data are read before the first batch or for it."""
    (tmp_path / "a.jsonl").write_text((line + "\n") * 8)
    with pytest.raises(JobError, match=message):
        preview.main([*job, *options, f"--job.dump_folder={tmp_path}/run"])


def test_a_record_of_a_pack_begins_in_it(tmp_path, capsys):
    """This holds for a template too that writes no token before the record."""
    (tmp_path / "a.jsonl").write_text((json.dumps({"messages": TALK}) + "\n") * 4)
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    arguments = ["--task.kind=sft", "--model.tokenizer_path=bytes", "--training.dataset=text", "--training.seq_len=24"]
    arguments += [f"--training.dataset_path={tmp_path}/a.jsonl", f"--data.chat_template={template}"]
    assert preview.main([*arguments, f"--job.dump_folder={tmp_path}/run", "--samples", "1"]) == 0
    shown = capsys.readouterr().out
    assert "--- document 1: tokens 10-19, positions 0-9 ---" in shown and "begun in an earlier" not in shown


def test_samples_that_are_grouped_by_length_are_those_of_the_first_step(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"prompt": "x" * n, "completion": "y"}) + "\n" for n in range(1, 41))
    )
    arguments = ["--task.kind=sft", "--model.tokenizer_path=bytes", "--training.dataset=text", "--training.seq_len=64"]
    arguments += [f"--training.dataset_path={tmp_path}/a.jsonl", "--data.packing=off", "--data.group_by_length"]
    arguments += ["--training.epochs=1", "--training.local_batch_size=8", f"--job.dump_folder={tmp_path}/run"]
    config, tokenizer = manager.load(arguments), build_tokenizer("bytes")
    one_rank_job = ResolvedJob(config).on_one_rank().config
    trained = next(iter(JobDatasets(ResolvedJob(one_rank_job)).training_loader(tokenizer, 0)))["tokens"]
    shown = preview.first_batch(ResolvedJob(config), tokenizer, 2)["tokens"]
    assert torch.equal(shown[:, :8], trained[:2, :8])
