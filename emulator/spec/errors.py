"""The one kind of error a user causes."""


class JobError(ValueError):
    """What the user wrote cannot be: one line that names the field, the value and what would be right."""


class NotAvailableYetError(JobError):
    """The user asked for something that is named but not built."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is not available yet")
