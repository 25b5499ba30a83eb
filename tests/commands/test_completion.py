"""Tests of shell completion: every command, option and word, in every shell."""

import shutil
import subprocess

import pytest

from torchtitan import cli
from torchtitan.commands import command_lines, completion
from torchtitan.config.options import options


def test_bash_completes_commands_options_and_words(tmp_path):
    assert shutil.which("bash")
    (tmp_path / "script").write_text(completion.bash())
    for typed, expected in (
        ("torchtitan pre", {"preview", "prepare", "presets"}),
        ("torchtitan presets cp sft_q", {"sft_qlora"}),
        ("torchtitan presets c", {"cat", "convergence_debug", "cp"}),
        ("torchtitan train --training.seq", {"--training.seq_len"}),
        ("torchtitan train --activation_checkpoint.mode f", {"full", "full_keep_comm"}),
        ("torchtitan train debug", {"debug_model"}),
        ("torchtitan train debug_model --ran", {"--ranks"}),
        ("torchtitan train debug_model --ranks a", {"auto"}),
    ):
        parts = " ".join(f"'{argument}'" for argument in typed.split())
        variables = f"COMP_WORDS=({parts}); COMP_CWORD={len(typed.split()) - 1}"
        line = f"source ./script; {variables}; _torchtitan; echo ${{COMPREPLY[@]}}"
        completed = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True, cwd=tmp_path)
        assert set(completed.stdout.split()) == expected


@pytest.mark.parametrize("shell", command_lines.SHELLS)
def test_every_shell_has_every_option(shell, capsys):
    assert completion.main([shell]) == 0
    script = capsys.readouterr().out
    for key in options():
        assert (f"-l {key}" if shell == "fish" else f"--{key}") in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_completion_of_another_shell(capsys):
    assert cli.main(["completion", "tcsh"]) == 2
    assert "given 'tcsh'; allowed: bash, zsh, fish" in capsys.readouterr().err
