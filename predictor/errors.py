"""The one exception that this project raises on purpose."""


class FadeError(ValueError):
    """A mistake that the user can mend, in one line: what, which value, the remedy.

    The command line prints the line and exits with status 2; ``--debug`` adds the traceback.

    Example:
        >>> raise FadeError("budget 1.5 is not a share; use a float in (0, 1] or a whole number of tokens")
        Traceback (most recent call last):
            ...
        predictor.errors.FadeError: budget 1.5 is not a share; use a float in (0, 1] or a whole number of tokens
    """
