"""Tables with free names, such as optimizer.options, callbacks.options, model.overrides and training.fields.

Their entries can be set on the command line as in TOML, and the code that reads a table validates them.
"""

import json

import pytest

from torchtitan import cli
from torchtitan.commands import bench
from torchtitan.config.manager import ConfigError, load, said_by
from torchtitan.config.options import free_tables
from torchtitan.rules import check

GALORE = ["--optimizer.name=GaLore"]


def faults(*argv: str) -> list[str]:
    try:
        return [str(fault) for fault in check(load(list(argv)), 1, "cpu")]
    except ConfigError as error:
        return str(error).splitlines()


def test_the_tables_with_free_names():
    tables = {"optimizer.options", "task.options", "callbacks.options", "model.overrides", "training.fields"}
    tables |= {"training.template", "adapter.neurocache.retrieval_map"}
    assert set(free_tables()) == tables


@pytest.mark.parametrize("option", ["--optimizer.options.rank=32", "--optimizer.options.rank 32"])
def test_an_entry_is_what_it_is_in_toml(option, tmp_path):
    file = tmp_path / "job.toml"
    file.write_text('[optimizer]\nname = "GaLore"\noptions.rank = 32\n')
    assert load([*GALORE, *option.split()]).optimizer == load([str(file)]).optimizer


def test_entries_have_the_types_of_their_values():
    entries = [
        "rank=32",
        "scale=2.5e-1",
        "side=left",
        "stagger=true",
        'targets=["*attention*", "*feed_forward*"]',
        "basis='svd'",
    ]
    config = load([*GALORE, *(f"--optimizer.options.{entry}" for entry in entries)])
    expected = dict(
        rank=32, scale=0.25, side="left", stagger=True, targets=["*attention*", "*feed_forward*"], basis="svd"
    )
    assert config.optimizer.options == expected and check(config, 1, "cpu") == []
    entries = ["--training.format=alpaca", "--training.template.separator=12", "--training.fields.output=1"]
    training = load(entries).training
    assert (training.template, training.fields) == ({"separator": "12"}, {"output": "1"}), "these tables hold text"


def test_other_entries_of_the_table_stay(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text(
        '[optimizer]\nname = "GaLore"\n[optimizer.options]\nrank = 64\nupdate_gap = 50\n'
        "[model.overrides]\nn_layers = 2\nrope_scaling = {factor = 2.0, original_max_seq_len = 512}\n"
    )
    arguments = [
        "--optimizer.options.rank=128",
        "--model.overrides.rope_scaling.factor=4.0",
        "--model.overrides.dim=128",
    ]
    config = load([str(file), *arguments])
    assert config.optimizer.options == {"rank": 128, "update_gap": 50}
    scaling = {"factor": 4.0, "original_max_seq_len": 512}
    assert config.model.overrides == {"n_layers": 2, "rope_scaling": scaling, "dim": 128}
    replaced = load([str(file), "--optimizer.options={rank = 128}"])
    assert replaced.optimizer.options == {"rank": 128}, "a table that is given whole replaces the other"
    assert said_by([str(file), arguments[0]])["optimizer.options"] == f"{file} + command line"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--optimizer.options.rnak=128"], "optimizer.options: given rnak = 128; allowed: options of GaLore: rank"),
        (["--optimizer.options.rank=many"], 'optimizer.options: given rank = "many"; allowed: rank = a whole number'),
        (
            ["--optimizer.options.targets=*attn*,*mlp*"],
            'targets = a list, each text; write targets = ["*attn*", "*mlp*"]',
        ),
        (["--optimizer.options.rank.x=1"], "optimizer.options: given {rank = {x = 1}}; allowed: a table, each value"),
        (["--optimizer.options.rank"], "optimizer.options.rank: given nothing; allowed: an entry and its value"),
        (["--model.overrides.n_layer=3"], "model.overrides: given n_layer; allowed: sizes of llama3"),
        (["--optimizer.options.rank=1", "--optimizer.options.rank=2"], "given 2 after 1; allowed: once; keep one"),
        (
            ["--optimizer.options={rank = 1}", "--optimizer.options.rank=2"],
            "optimizer.options.rank: given 2 after optimizer.options = {rank = 1}; allowed: once; keep one",
        ),
        (["--optimizer.option.rank=128"], "allowed: a known option; did you mean optimizer.options.rank?"),
        (["--training.rank=128"], 'training.rank: given "128"; allowed: a known option; did you mean adapter.rank?'),
    ],
)
def test_an_entry_is_judged_by_its_table(arguments, expected):
    (line,) = faults(*GALORE, *arguments)
    assert expected in line


def test_entries_are_swept(tmp_path, monkeypatch):
    def measured(combinations, options):
        for each in combinations:
            yield {"options": each.case, "rank": each.config.optimizer.options["rank"], "result": "ok"}

    monkeypatch.setattr(bench, "measure", measured)
    sweep = ["--sweep", "optimizer.options.rank=16,32", "--out", str(tmp_path / "out")]
    assert cli.main(["bench", "--optimizer.name=GaLore", "--model.tokenizer_path=bytes", *sweep]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [row["rank"] for row in rows] == [16, 32]
