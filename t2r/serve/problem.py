"""What is wrong with a request, or with the server: an HTTP status and one message."""

KINDS = {
    400: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}


class Problem(Exception):
    """A request that is refused or has failed; the message names the value and the limit."""

    def __init__(self, status: int, message: str, parameter: str | None = None):
        super().__init__(message)
        self.status, self.message, self.parameter = status, message, parameter

    def body(self) -> dict:
        """The error as OpenAI's clients read it."""
        kind = KINDS.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.parameter, "code": self.status}}
