"""`torchtitan completion bash|zsh|fish`: print a shell script that completes commands, options and their values.

    torchtitan completion bash > ~/.local/share/bash-completion/completions/torchtitan
    torchtitan completion zsh > "${fpath[1]}/_torchtitan"
    torchtitan completion fish > ~/.config/fish/completions/torchtitan.fish

The script holds all candidates, so completion does not start Python; write it again after an update.
"""

from torchtitan.commands import COMMANDS
from torchtitan.commands.command_lines import PARSERS, parse_command, parser_of
from torchtitan.commands.command_parser import OneOf
from torchtitan.config.options import choices, options
from torchtitan.core.files import shipped_jobs

JOB_COMMANDS = ("train", *(command for command in PARSERS if parser_of(command).takes))


def main(argv: list[str]) -> int:
    shell = parse_command("completion", argv)[0].shell
    print({"bash": bash, "zsh": zsh, "fish": fish}[shell](), end="")
    return 0


def job_options() -> dict[str, list[str]]:
    """Return the options of a job with their allowed values; [] if any value is allowed."""
    return {f"--{key}": choices(option.annotation) for key, option in options().items()}


def command_options(command: str) -> dict[str, list[str]]:
    """Return the options of a command, without the job's, with their allowed values; [] if any value is allowed."""
    if command == "train":
        return {"--ranks": ["auto"]}
    actions = parser_of(command)._option_string_actions if command in PARSERS else {}
    return {
        name: action.type.names if isinstance(action.type, OneOf) else []
        for name, action in actions.items()
        if name.startswith("--")
    }


def arguments_of(command: str) -> list[str]:
    """Return the allowed values of a command's positional arguments: names of jobs, kinds, actions."""
    parser = parser_of(command) if command in PARSERS else None
    names = [
        name
        for action in (parser._get_positional_actions() if parser else [])
        if isinstance(action.type, OneOf)
        for name in action.type.names
    ]
    return [*names, *(shipped_jobs() if command in ("train", "presets") or (parser and parser.takes == "job") else [])]


def bash() -> str:
    values = {f"*' {name}'": candidates for name, candidates in job_options().items()}
    for command in (*PARSERS, "train"):
        values |= {f"'{command} {name}'": candidates for name, candidates in command_options(command).items()}
    value_cases = "".join(
        f"    {pattern}) words='{' '.join(candidates)}' ;;\n" for pattern, candidates in values.items() if candidates
    )
    arguments = {command: " ".join(arguments_of(command)) for command in COMMANDS}
    argument_cases = "".join(
        f"    {command}) words='{candidates}' ;;\n" for command, candidates in arguments.items() if candidates
    )
    option_cases = "".join(
        f"      {command}) words='{' '.join(command_options(command))}' ;;\n" for command in (*PARSERS, "train")
    )
    return f"""\
_torchtitan() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}} words=''
  case $command in
{argument_cases}  esac
  case "$command $before" in
{value_cases}  esac
  [[ $COMP_CWORD == 1 ]] && words='{" ".join(COMMANDS)}'
  if [[ $word == -* ]]; then
    words=''
    case $command in
{option_cases}    esac
    case $command in
      {"|".join(JOB_COMMANDS)}) words="$words {" ".join(job_options())}" ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  [[ ${{#COMPREPLY[@]}} -gt 0 ]] || COMPREPLY=($(compgen -f -- "$word"))
}}
complete -F _torchtitan torchtitan
"""


def zsh() -> str:
    return f"#compdef torchtitan\nautoload -U +X bashcompinit && bashcompinit\n{bash()}"


def fish() -> str:
    lines = [
        f"complete -c torchtitan -n __fish_use_subcommand -a {name} -d '{quoted(summary)}'"
        for name, summary in COMMANDS.items()
    ]
    for command in COMMANDS:
        condition = f"complete -c torchtitan -n '__fish_seen_subcommand_from {command}'"
        if candidates := arguments_of(command):
            lines.append(f"{condition} -a '{' '.join(candidates)}'")
        lines += [
            f"{condition} -l {name[2:]}{_values(candidates)}" for name, candidates in command_options(command).items()
        ]
    takes_job = f"complete -c torchtitan -n '__fish_seen_subcommand_from {' '.join(JOB_COMMANDS)}'"
    lines += [f"{takes_job} -l {name[2:]}{_values(candidates)}" for name, candidates in job_options().items()]
    return "\n".join(lines) + "\n"


def _values(candidates: list[str]) -> str:
    return f" -x -a '{' '.join(candidates)}'" if candidates else ""


def quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")
