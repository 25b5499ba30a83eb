"""Options that are lists of tables ([[section.option]]): read, checked, printed and explained like any other.

The tests use a separate job class, so they hold for any option; in the real job training.sources is one.
"""

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated

import pytest
from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from torchtitan.config import layers, manager, options
from torchtitan.config.sections.field_types import STRICT
from torchtitan.config.sections.run import Job
from torchtitan.job import ResolvedJob
from torchtitan.rules.facts import Facts


@dataclass(config=STRICT, kw_only=True)
class Grass:
    wide: bool = False
    """Of the meadow."""


@dataclass(config=STRICT, kw_only=True)
class Sheep:
    name: str
    """What it is called."""
    wool: Annotated[float, Field(gt=0)] = 1.0
    """Kilograms a year."""
    shepherd: str | None = None
    """Unset: none."""
    eats: Grass = field(default_factory=Grass)


@dataclass(config=STRICT, kw_only=True)
class Farm:
    size: int = 1
    """In acres."""
    flock: list[Sheep] = field(default_factory=list)
    """The sheep."""


@dataclass(config=STRICT, kw_only=True)
class FarmJob:
    job: Job = field(default_factory=Job)
    farm: Farm = field(default_factory=Farm)


@pytest.fixture(autouse=True)
def farm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace the job class by one with a farm."""
    caches = (options.options, options.sections, options.columns, options.free_tables)
    monkeypatch.setattr(options, "JobConfig", FarmJob)
    monkeypatch.setattr(layers, "_JOB", TypeAdapter(FarmJob))
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def job(folder, text):
    file = folder / "job.toml"
    file.write_text(text)
    return ["--job.config_file", str(file)]


def faults(argv):
    with pytest.raises(manager.ConfigError) as caught:
        manager.load(argv)
    return [str(fault).partition("job.toml: ")[2] or str(fault) for fault in caught.value.faults]


TWO = """
[[farm.flock]]
name = "Dolly"
[[farm.flock]]
name = "Shaun"
wool = 2
eats = {wide = true}
"""


def test_tables_are_read_and_printed_back(tmp_path):
    config = manager.load(job(tmp_path, TWO))
    assert [(s.name, s.wool, s.eats.wide) for s in config.farm.flock] == [("Dolly", 1.0, False), ("Shaun", 2.0, True)]
    text = manager.to_toml(config)
    reloaded = manager.load(job(tmp_path, text))
    assert reloaded.farm == config.farm and "shepherd" not in text
    assert "flock = []" in manager.to_toml(manager.load([]))


def test_the_command_line_replaces_the_whole_list(tmp_path):
    config = manager.load([*job(tmp_path, TWO), "--farm.flock", '[{name = "Lance", wool = 3}]'])
    assert [(s.name, s.wool) for s in config.farm.flock] == [("Lance", 3.0)]
    (line,) = faults(["--farm.flock", "Lance,Shaun"])
    assert line == (
        'command line: farm.flock: given "Lance,Shaun"; allowed: a list of tables; write [[farm.flock]] for each in a '
        "file, or '[{...}, {...}]' on the command line"
    )


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            '[[farm.flock]]\nnmae = "Dolly"\nwool = 0\n',
            [
                "farm.flock[0].name: given nothing; allowed: text; every [[farm.flock]] needs it",
                "farm.flock[0].wool: given 0; allowed: a number > 0; help: Kilograms a year.",
                'farm.flock[0].nmae: given "Dolly"; allowed: a known option of [[farm.flock]]; did you mean name?',
            ],
        ),
        (
            TWO + 'height = "2"\n[farm]\nsise = 3\n',
            [
                "farm.sise: given 3; allowed: a known option; did you mean farm.size?",
                'farm.flock[1].height: given "2"; allowed: a known option of [[farm.flock]]; there are name, wool, '
                "shepherd, eats.wide",
            ],
        ),
        (
            TWO.replace("true", "1") + "[farm]\nflok = []\n",
            [
                "farm.flok: given []; allowed: a known option; did you mean farm.flock?",
                "farm.flock[1].eats.wide: given 1; allowed: true or false; write true",
            ],
        ),
        (
            '[[farm.flock]]\nname = "a"\nwool = "2.5"\n',
            ['farm.flock[0].wool: given "2.5"; allowed: a number > 0; write 2.5, without quotes'],
        ),
        (
            '[farm.flock]\nname = "Dolly"\n',
            [
                'farm.flock: given {name = "Dolly"}; allowed: a list of tables; write [[farm.flock]] for each in a '
                "file, or '[{...}, {...}]' on the command line"
            ],
        ),
        (
            "[farm]\nflock = [3]\n",
            [
                "farm.flock: given [3]; allowed: a list of tables; write [[farm.flock]] for each in a file, or "
                "'[{...}, {...}]' on the command line"
            ],
        ),
        (
            '[[farm.flock]]\nname = "a\\u0000b"\n',
            [
                'farm.flock: given "a\\u0000b"; allowed: a list of tables; the text must not have NUL characters '
                "(\\u0000) in it"
            ],
        ),
    ],
)
def test_faults_name_their_table(text, expected, tmp_path):
    assert faults(job(tmp_path, text)) == expected


def test_other_options_of_a_job_with_a_wrong_table_are_checked(tmp_path):
    with pytest.raises(manager.ConfigError) as caught:
        manager.load(job(tmp_path, TWO + "wool = 1\n[farm]\nsize = 7\n".replace("wool = 1", "wol = 1")))
    assert caught.value.rest.farm.size == 7 and caught.value.rest.farm.flock == []


def test_rules_can_name_a_table_and_an_option_of_it(tmp_path):
    facts = Facts(ResolvedJob(manager.load(job(tmp_path, TWO))))
    message = str(facts.fault("farm.flock[1].eats.wide", "false", "")).rpartition("job.toml: ")[2]
    assert message == "farm.flock[1].eats.wide: given true; allowed: false"
    message = str(facts.fault("farm.flock[0]", "none", "")).rpartition("job.toml: ")[2]
    assert message == 'farm.flock[0]: given {name = "Dolly", wool = 1.0, eats = {wide = false}}; allowed: none'


def test_help_lists_the_options_of_each_table():
    assert options.help_text().partition("[farm]\n")[2].splitlines() == [
        "  --farm.size  (a whole number; default 1)",
        "      In acres.",
        "  --farm.flock  (a list of tables; default [])",
        "      The sheep.",
        "      under each [[farm.flock]]:",
        "        name  (text; must be given)",
        "          What it is called.",
        "        wool  (a number > 0; default 1.0)",
        "          Kilograms a year.",
        "        shepherd  (text; default unset)",
        "          Unset: none.",
        "        eats.wide  (true or false; default false)",
        "          Of the meadow.",
    ]
