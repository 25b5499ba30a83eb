"""`torchtitan generate FOLDER --prompt "..."`: continue a text from a checkpoint, to see what was learned.

FOLDER is the job's dump_folder (newest complete checkpoint) or one of its step folders; the model and the tokenizer
come from the config.toml that the run wrote. One device, whole weights. The context is read again for every new
token, which keeps this file independent of the model.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import nn

from torchtitan import build, config_manager
from torchtitan.checkpoint import load_model_for_inference, resolve
from torchtitan.config import JobConfig
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.distributed import device_type
from torchtitan.options import ConfigError
from torchtitan.rules import Facts, known_names, model_sizes, tokenizer_fits

# What a young model writes must not reach the terminal as commands.
CONTROLS = dict.fromkeys([c for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t"], "\ufffd")


def main(argv: list[str]) -> int:
    options = parse(argv)
    sys.stdout.reconfigure(errors="replace")  # what the terminal has no character for
    config, step_folder = find_checkpoint(Path(options.folder), options.config)
    tokenizer = build.tokenizer(config)
    model = load(config, step_folder, torch.device(device_type()))
    print(f"{config.model.name} {config.model.flavor}, {step_folder.name}", file=sys.stderr)
    prompt = tokenizer.encode(options.prompt, bos=True)
    tokens = sample(
        model,
        prompt,
        tokenizer,
        max_new_tokens=options.max_new_tokens,
        context=config.training.seq_len,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    print(options.prompt, end="", flush=True)
    for piece in text_of(tokens, prompt[1:], tokenizer):
        print(piece.translate(CONTROLS), end="", flush=True)
    print()
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="torchtitan generate", description="Continue a text from a checkpoint.")
    parser.add_argument("folder", help="a run's dump_folder, or one of its checkpoint/step-... folders")
    parser.add_argument("--prompt", default="", help="the text to continue (default: a document's beginning)")
    parser.add_argument("--max_new_tokens", type=int, default=200, help="tokens to add (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--top_k", type=int, default=50, help="choose among this many tokens; 0: all (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice (default 0)")
    parser.add_argument("--config", help="the job, when the folder has no config.toml")
    options = parser.parse_args(argv)
    for name, lowest in (("max_new_tokens", 1), ("temperature", 0), ("top_k", 0), ("seed", 0)):
        value = getattr(options, name)
        if not lowest <= value < 2**63:  # so neither is NaN
            parser.error(f"--{name} {value}: must be at least {lowest} and less than 2**63")
    return options


def find_checkpoint(folder: Path, config_path: str | None) -> tuple[JobConfig, Path]:
    """The job, and the step folder: the folder itself or the newest complete one in it. ValueError without either, and
    for a job whose model or tokenizer cannot be built."""
    folder = folder.resolve()
    homes = (folder, folder.parent, folder.parent.parent)
    candidates = [Path(config_path)] if config_path else [home / "config.toml" for home in homes]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise ValueError(
            f"no job found ({', '.join(map(str, candidates))}): give the dump_folder of a run, or --config JOB.toml"
        )
    config = config_manager.load(["--job.config_file", str(found)])
    facts = Facts(config, 1, "cpu")
    if faults := [fault for rule in (known_names, model_sizes, tokenizer_fits) for fault in rule(facts)]:
        raise ConfigError(faults)
    checkpoints = folder / config.checkpoint.folder
    return config, resolve(checkpoints if checkpoints.is_dir() else folder)


def load(config: JobConfig, step_folder: Path, device: torch.device) -> nn.Module:
    model = build.meta_model(config).to(build.DTYPES[config.training.dtype]).to_empty(device=device)
    load_model_for_inference(step_folder, model)
    return model.eval()


@torch.no_grad()
def sample(
    model: nn.Module,
    prompt: list[int],
    tokenizer: Tokenizer,
    *,
    max_new_tokens: int,
    context: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> Iterator[int]:
    """New token ids one by one, up to `max_new_tokens` or the end of the document."""
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    ids = torch.tensor([prompt], device=device)
    for _ in range(max_new_tokens):
        logits = model(ids[:, -context:])[0, -1, : tokenizer.vocab_size].float()
        if temperature == 0:
            choice = logits.argmax(keepdim=True)
        else:
            if 0 < top_k < len(logits):
                logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
            # in double precision and from the largest down, so that no temperature, however low, divides 0 by 0
            scaled = (logits - logits.max()).double() / temperature
            choice = torch.multinomial(torch.softmax(scaled, 0), 1, generator=generator)
        token = int(choice)
        if token == tokenizer.eos_id:
            return
        yield token
        ids = torch.cat([ids, choice[None]], dim=1)


def text_of(tokens: Iterable[int], prompt: list[int], tokenizer: Tokenizer) -> Iterator[str]:
    """What the tokens add to the prompt's text, in pieces of whole characters: one may need several tokens."""
    ids = list(prompt)
    shown = len(tokenizer.decode(ids))
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        if len(text) > shown and not text.endswith("\ufffd"):
            yield text[shown:]
            shown = len(text)
