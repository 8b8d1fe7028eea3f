"""The one exception that this project raises on purpose, and what it says of others'."""


class FadeError(ValueError):
    """A mistake that the user can mend, in one line: what, which value, the remedy.

    The command line prints the line and exits with status 2; ``--debug`` adds the traceback.

    Example:
        >>> raise FadeError("budget 1.5 is not a share; use a float in (0, 1] or a whole number of tokens")
        Traceback (most recent call last):
            ...
        predictor.errors.FadeError: budget 1.5 is not a share; use a float in (0, 1] or a whole number of tokens
    """


def first_line(error: BaseException) -> str:
    r"""The first line of what an exception says, or its type where it says nothing: the reason in a message of ours.

    Example:
        >>> first_line(OSError("no such file\nand a page of advice")), first_line(ValueError())
        ('no such file', 'ValueError')
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0].strip()
