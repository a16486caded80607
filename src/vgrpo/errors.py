"""The two ways in which a run ends early. The command line turns each into one message and an exit code."""


class UserError(Exception):
    """Something the user can mend: what was expected, what came, what to do. Exit code 2, found before weights load."""


class RunError(Exception):
    """A run that had started had to stop; the last checkpoint is intact. Exit code 1."""
