"""What GPT-2 and OPT share in the form of Hugging Face: a head of words, or one that tells classes apart."""

from collections.abc import Mapping

from torchtitan.models.classic import ClassicArgs
from torchtitan.models.hf.names import Form

WORDS, CLASSES = "lm_head.weight", "score.weight"


def headed_form(
    args: ClassicArgs,
    parts: Mapping[str, str],
    ends: Mapping[str, str],
    layers: str,
    base: str,
    transposed: frozenset[str] = frozenset(),
) -> Form:
    """See names.Form; `ends`: all but the head."""
    return Form(
        parts=parts,
        ends={**ends, "output.weight": CLASSES if args.n_classes else WORDS},
        layers=layers,
        base=base,
        transposed=transposed,
        tied=args.tied_embeddings,
        head=frozenset({"output.weight"}) if args.n_classes else frozenset(),
    )


def is_other_head(name: str, args: ClassicArgs) -> bool:
    """The words of a model that is to tell classes apart."""
    return name == WORDS and args.n_classes > 0
