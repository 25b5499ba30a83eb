"""Files for hosts and readers of the repository: workflow, templates, citation, security."""

import ast
import os
import re

import pytest
import tomli
import yaml

from tests.repository.test_reliability_page import named_tests
from tests.support.jobs import ROOT

PROJECT = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
GITHUB = ROOT / ".github"


def test_the_workflow_runs_what_is_there():
    workflow = yaml.safe_load((GITHUB / "workflows/tests.yml").read_text())
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert ".ci/run" in commands and "./run_tests.sh quick" in commands
    for command in commands:
        program = command.split()[0]
        assert program in ("pip", "ruff", "sed") or os.access(ROOT / program, os.X_OK), command
        assert program != "sed" or re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def test_the_matrix_covers_what_the_project_allows():
    matrix = yaml.safe_load((GITHUB / "workflows/tests.yml").read_text())["jobs"]["quick"]["strategy"]["matrix"]
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert matrix["python"] == [f"3.{minor}" for minor in range(int(oldest.split(".")[1]), 15)]
    (torch,) = [entry for entry in PROJECT["dependencies"] if re.match(r"torch\b", entry)]
    assert matrix["torch"][0].startswith(torch.removeprefix("torch>="))
    assert f"torch=={matrix['torch'][-1]}" in (ROOT / "constraints.txt").read_text().splitlines()


@pytest.mark.parametrize("path", sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem)
def test_issue_templates_are_forms(path):
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert form.keys() == {"blank_issues_enabled"}
        return
    assert form["name"] and form["description"]
    for element in form["body"]:
        attributes = element["attributes"]
        assert element["type"] in ("markdown", "input", "textarea", "checkboxes")
        assert attributes["value"] if element["type"] == "markdown" else attributes["label"] and element["id"]


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["title"] == PROJECT["name"]
    assert citation["version"] == PROJECT["version"] and citation["authors"] and citation["message"]


def test_the_threat_model_names_tests_that_exist():
    text = (ROOT / "SECURITY.md").read_text()
    files = set(re.findall(r"`((?:\w+/)?test_\w+\.py)", text))
    assert len(files) >= 10 and [file for file in files if not (ROOT / "tests" / file).is_file()] == []
    for file, name in named_tests(text):
        functions = [node.name for node in ast.parse((ROOT / "tests" / file).read_text()).body if hasattr(node, "name")]
        assert name in functions, f"{file}::{name}"
    defended = text.split("## What is defended")[1].split("## ")[0]
    rows = [row for row in defended.splitlines() if row.startswith("| ")][1:]
    assert rows and [row for row in rows if "test_" not in row] == []
