"""Preference records: two answers to the same prompt, as texts or as messages, with the prompt in a field of its own or
at the beginning of both answers."""

from collections.abc import Mapping
from typing import Any

from torchtitan.datasets.messages import Context, MessageReader, as_list
from torchtitan.datasets.sources import REMEDY, DataError, Document, Pair, Span

ANSWERS = ("chosen", "rejected")
PROMPTS = ("messages", "conversations", "prompt", "question")
QUESTIONS = ("instruction", "query", "problem", "input")
"""Other names of a prompt, which training.fields can give."""
ASSISTANT_TURN, HUMAN_TURN = "\n\nAssistant:", "\n\nHuman:"
"""Turns of the transcripts of hh-rlhf."""


def read_preference(
    record: Mapping[str, Any], context: Context, columns: Mapping[str, str], location: str, short_location: str
) -> Document:
    """Convert a preference record to a pair of answers.

    `context`: what stands next to both conversations. Answers are texts after the prompt, or messages after the ones in
    `prompt` or `messages`; both answers may repeat these. Raises DataError, which names `location`."""
    answers = {name: _one_or_more(record[name]) for name in ANSWERS}
    prompts = {name: _one_or_more(record[name]) for name in PROMPTS if record.get(name) not in (None, "", [])}
    are_texts = all(isinstance(value, str) for value in (*answers.values(), *prompts.values()))
    if are_texts and context.is_empty and "question" not in prompts:
        if not prompts and (split := _split_transcripts(*answers.values())):
            prompts, answers = {"prompt": split[0]}, dict(zip(ANSWERS, split[1:], strict=True))
        if prompts:
            return Document(_pair_of_texts(next(iter(prompts.values())), answers, short_location), short_location)
    _check_types(answers, prompts, columns, location)
    before = [_turns(value, "user", name, columns, location) for name, value in prompts.items()]
    conversations = _join(before, [_turns(value, "assistant", n, columns, location) for n, value in answers.items()])
    names = f"{location}: fields {columns['chosen']!r} and {columns['rejected']!r}"
    if conversations is None:
        raise DataError(
            f"{names} are not both answers to the same messages; allowed: both repeat prompt or messages, both "
            f"continue them, or both begin with the same message; {REMEDY}"
        )
    if conversations[0][:-1] != conversations[1][:-1] or any(turn[-1]["role"] != "assistant" for turn in conversations):
        raise DataError(
            f"{names} differ in more than their last message, an answer of the assistant, which alone is compared; cut "
            f"both after the first message that differs, or {REMEDY}"
        )
    return Document(Pair(*(Document(context.chat(turns), short_location) for turns in conversations)), short_location)


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value := as_list(value), dict) else value


def _pair_of_texts(prompt: str, answers: Mapping[str, str], short_location: str) -> Pair:
    texts = list(answers.values())
    if all(text.startswith(prompt) and text != prompt for text in texts):  # the answers repeat the prompt
        texts = [text.removeprefix(prompt) for text in texts]
    return Pair(*(Document([Span(prompt, False), Span(text)], short_location) for text in texts))


def _split_transcripts(chosen: str, rejected: str) -> tuple[str, str, str] | None:
    """Return the common prompt of two transcripts of hh-rlhf, up to the last turn, and what each answers."""
    prompts = [text[: text.rfind(ASSISTANT_TURN) + len(ASSISTANT_TURN)] for text in (chosen, rejected)]
    if prompts[0] != prompts[1] or not prompts[0].endswith(ASSISTANT_TURN):
        return None
    answers = [text[len(prompts[0]) :] for text in (chosen, rejected)]
    return None if any(HUMAN_TURN in answer for answer in answers) else (prompts[0], answers[0], answers[1])


def _check_types(
    answers: Mapping[str, Any], prompts: Mapping[str, Any], columns: Mapping[str, str], location: str
) -> None:
    for name, answer in answers.items():
        is_text = isinstance(answer, str) and bool(prompts)
        has_known_types = all(isinstance(prompt, str | list) for prompt in prompts.values())
        if not (is_text or isinstance(answer, list) and answer) or not has_known_types:
            kind = "nothing (null)" if answer is None else type(answer).__name__
            types = " and ".join(type(prompt).__name__ for prompt in prompts.values()) or "nothing"
            raise DataError(
                f"{location}: field {columns[name]!r} holds {kind}, with {types} as prompt; allowed: text after a "
                f"prompt or messages, messages, or transcripts that differ after the last {ASSISTANT_TURN.strip()!r}; "
                f"{REMEDY}"
            )
    if len({type(answer) for answer in answers.values()}) > 1:
        raise DataError(
            f"{location}: one of the fields {columns['chosen']!r} and {columns['rejected']!r} holds text and the other "
            f"messages; both must hold the same; {REMEDY}"
        )


def _turns(
    value: str | list[Any], role: str, name: str, columns: Mapping[str, str], location: str
) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return MessageReader(columns[name], location, name == "conversations").messages(value)


def _join(before: list[list[Any]], turns: list[list[Any]]) -> list[list[Any]] | None:
    """Return both conversations with what stands before them; None if they do not answer the same messages."""
    for prompt in [*before, []]:
        if _begin_with(prompt, turns):
            return turns
        if _continue_from(prompt, turns):
            return [[*prompt, *conversation] for conversation in turns]
        leaves_out_system = bool(prompt) and _role(prompt) == "system" != _role(turns[0])
        if leaves_out_system and _begin_with(prompt[1:-1], turns):
            # `prompt` holds the preferred conversation after a system message, which the answers leave out
            return [[prompt[0], *conversation] for conversation in turns]
        # e.g. `messages` holds the preferred conversation and `prompt` its beginning
    return None


def _begin_with(before: list[Any], turns: list[list[Any]]) -> bool:
    """Return True if both conversations begin with these messages, perhaps after a system message, and continue.

    Without messages: True if both begin with the same message and it is not an answer."""
    if not before:
        return turns[0][0] == turns[1][0] and _role(turns[0]) != "assistant"
    if _role(before) != "system":
        turns = [conversation[1:] if _role(conversation) == "system" else conversation for conversation in turns]
    return all(conversation[: len(before)] == before and len(conversation) > len(before) for conversation in turns)


def _continue_from(before: list[Any], turns: list[list[Any]]) -> bool:
    """Return True if both conversations continue these messages.

    The first speaker of a continuation differs from the last one before it, and a continuation neither repeats the
    messages nor is their end, as the preferred conversation after a system message would be."""
    return bool(before) and all(
        conversation[: len(before)] != before
        and before[-len(conversation) :] != conversation
        and _role(conversation) not in ("system", before[-1]["role"])
        for conversation in turns
    )


def _role(conversation: list[Any]) -> Any:
    return conversation[0]["role"]
