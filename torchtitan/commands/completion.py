"""`torchtitan completion bash|zsh|fish`: a script with which a shell completes commands, options and their words.

    torchtitan completion bash > ~/.local/share/bash-completion/completions/torchtitan
    torchtitan completion zsh > "${fpath[1]}/_torchtitan"
    torchtitan completion fish > ~/.config/fish/completions/torchtitan.fish

The script holds all words, so that completing starts no Python; write it again after an update.
"""

import sys

from torchtitan.cli import COMMANDS
from torchtitan.config.options import choices, options
from torchtitan.core.presets import jobs

SHELLS = ("bash", "zsh", "fish")


def main(argv: list[str]) -> int:
    if {"--help", "-h"} & set(argv):
        print(__doc__.strip())
        return 0
    if len(argv) != 1 or argv[0] not in SHELLS:
        print(
            f"torchtitan completion: given {' '.join(argv) or 'nothing'}; allowed: {', '.join(SHELLS)}", file=sys.stderr
        )
        return 2
    print({"bash": bash, "zsh": zsh, "fish": fish}[argv[0]](), end="")
    return 0


def words_of_options() -> dict[str, list[str]]:
    """Options, and the words that each takes, where it takes only some."""
    return {f"--{key}": choices(option.annotation) for key, option in options().items()}


def bash() -> str:
    cases = "".join(
        f"    {option}) words='{' '.join(words)}' ;;\n" for option, words in words_of_options().items() if words
    )
    return f"""\
_torchtitan() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=''
  case $before in
{cases}    torchtitan) words='{" ".join(COMMANDS)}' ;;
    presets) words='ls cat cp' ;;
    train|check|preview|cat|cp) words='{" ".join(jobs())}' ;;
  esac
  [[ $word == -* ]] && words='{" ".join(words_of_options())}'
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  [[ ${{#COMPREPLY[@]}} -gt 0 ]] || COMPREPLY=($(compgen -f -- "$word"))
}}
complete -F _torchtitan torchtitan
"""


def zsh() -> str:
    return f"#compdef torchtitan\nautoload -U +X bashcompinit && bashcompinit\n{bash()}"


def fish() -> str:
    lines = [
        f"complete -c torchtitan -n __fish_use_subcommand -a {name} -d '{quoted(COMMANDS[name])}'" for name in COMMANDS
    ]
    for option, words in words_of_options().items():
        takes = f" -x -a '{' '.join(words)}'" if words else ""
        lines.append(f"complete -c torchtitan -l {option.removeprefix('--')}{takes}")
    return "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")
