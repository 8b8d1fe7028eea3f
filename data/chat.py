"""Chats become text: the model's own template, or plain lines of roles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from data.reading import proper
from predictor.errors import FadeError, first_line

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]
TEMPLATES = ("auto", "chat", "raw")
_HERE = "\N{OBJECT REPLACEMENT CHARACTER}"  # stands where the text of a message goes


def role_lines(messages: Sequence[Message]) -> str:
    r"""Write a chat as lines that open with who speaks.

    Example:
        >>> role_lines([{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}])
        'user: 1 + 1?\nassistant: 2\n'
    """
    return "".join(f"{one['role']}: {content(one)}\n" for one in messages)


def chat_renderer(tokenizer: Any, template: str = "auto") -> Render:
    """Return the function that writes a chat as this model reads it.

    Args:
        tokenizer: of the model.
        template: "auto" takes the tokenizer's chat template, or role lines where it has none; "chat" insists on the
            template; "raw" takes role lines.

    Raises:
        FadeError: unknown template, or "chat" for a tokenizer without one.
    """
    if template not in TEMPLATES:
        raise FadeError(f"template {template} is not known; use one of {', '.join(TEMPLATES)}")
    known = getattr(tokenizer, "chat_template", None)
    if template == "chat" and not known:
        raise FadeError("template chat needs a tokenizer with a chat template; use raw, or another model")
    if template == "raw" or not known:
        return role_lines
    return lambda messages: _render(tokenizer, messages)


def chat_frame(tokenizer: Any, add_generation_prompt: bool) -> tuple[list[int], list[int]]:
    """Token ids before and after a text that is put into the chat template as a user's message.

    Args:
        tokenizer: with a chat template.
        add_generation_prompt: end the message and open the assistant's; otherwise nothing follows the text.

    Raises:
        FadeError: a template that changes what a user says.
    """
    rendered = _render(tokenizer, [{"role": "user", "content": _HERE}], add_generation_prompt=add_generation_prompt)
    before, found, after = rendered.partition(_HERE)
    if not found:
        raise FadeError("template chat leaves out or changes the user's text; use raw, or another model")
    ids = tokenizer(before, verbose=False)["input_ids"]
    return ids, tokenizer(after, add_special_tokens=False)["input_ids"] if add_generation_prompt else []


def with_generation_prompt(tokenizer: Any, messages: Sequence[Message]) -> str:
    """Write a chat and open the assistant's next message; in role lines without a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        return f"{role_lines(messages)}assistant:"
    return _render(tokenizer, messages, add_generation_prompt=True)


def is_chat(value: Any) -> TypeGuard[Sequence[Message]]:
    """Tell whether a value is a list of messages with ``role`` and ``content``.

    Example:
        >>> is_chat([{"role": "user", "content": "Hello"}]), is_chat(["Hello"]), is_chat([])
        (True, False, False)
    """
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and len(value) > 0
        and all(isinstance(one, Mapping) and {"role", "content"} <= set(one) for one in value)
    )


def content(message: Message) -> str:
    """The text of a message, whose content may be a text, a list of parts of which some are text, or nothing.

    Raises:
        FadeError: something else in it, or a text with half of a surrogate pair.
    """
    held, whose = message["content"], f"a message of {message['role']}"
    if not isinstance(held, str):
        if not isinstance(held, Sequence | None):
            raise FadeError(f"{whose} has {type(held).__name__} for content; give a text or a list of parts")
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in held or ()]
        held = "\n".join(part for part in parts if isinstance(part, str))
    return proper(held, whose)


def _render(tokenizer: Any, messages: Sequence[Message], **options: Any) -> str:
    plain = [{**one, "content": content(one)} for one in messages]
    try:
        text = tokenizer.apply_chat_template(plain, tokenize=False, **options)
    except Exception as error:  # templates raise what they like, most often about the order of roles
        reason = first_line(error)
        raise FadeError(f"a chat does not fit the chat template: {reason}; mend it, or use template raw") from error
    first = tokenizer.bos_token or ""
    adds_it = tokenizer("", verbose=False)["input_ids"][:1] == [tokenizer.bos_token_id]
    return text.removeprefix(first) if adds_it else text  # once, by the tokenizer
