"""A release can be made: versions agree, and README's commands are those that it tries."""

import re

from scripts import release
from tests.support.jobs import ROOT
from torchtitan.checkpoint import layout
from torchtitan.config.sections.training import Data


def test_versions_agree():
    assert release.inconsistencies() == []


def test_disagreeing_versions_are_named(monkeypatch):
    monkeypatch.setattr(release, "version", lambda: "9.9.9")
    assert release.inconsistencies() == [
        "CHANGELOG.md has no heading `## 9.9.9`",
        "the version of CITATION.cff is not 9.9.9",
    ]


def test_entries_that_are_not_released_keep_a_commit_from_being_tagged(tmp_path, monkeypatch):
    (tmp_path / "CHANGELOG.md").write_text("## Not released yet\n\n* new\n\n## 1.0.0\n\n* old\n")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(release, "version", lambda: "1.0.0")
    monkeypatch.setattr(release, "output", lambda *command: "")
    assert release.unready() == ["CHANGELOG.md has entries under `## Not released yet`: move them below the version"]
    monkeypatch.setattr(release, "output", lambda *command: "something")
    assert [problem.split()[1] for problem in release.unready()[1:]] == ["tree", "tag"]


def test_the_commands_of_readme_are_tried():
    commands = release.readme_commands()
    assert ["torchtitan", "presets", "ls"] in commands and len(commands) >= 12


def test_an_entry_under_a_version_is_no_list_of_all_commits():
    """A merge has once put the entries that a version sums up back below its summary."""
    for section in re.split(r"^## (?=\d)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]:
        assert len(section.splitlines()) < 130, f"{section[:5]}: move new entries to `## Not released yet`"


def test_changelog_and_page_name_the_formats():
    text = (ROOT / "CHANGELOG.md").read_text()
    newest = re.split(r"^## \d", text, flags=re.MULTILINE)[1]
    assert f'`"format": {layout.FORMAT}`' in newest
    assert f"its format number ({layout.FORMAT})" in (ROOT / "docs/stability.md").read_text()
    assert "`data.tokenization_version` 3" in " ".join(newest.split())
    assert "tokenization_version" in Data.__dataclass_fields__
