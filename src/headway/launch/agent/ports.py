"""Error messages for a port that another program uses."""


def is_port_taken(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, reports that a port is in use."""
    if error is None:
        return False
    is_said = "EADDRINUSE" in str(error) or "address already in use" in str(error).lower()
    return is_said or is_port_taken(error.__cause__)


def describe_taken_port(port: int, free: int) -> str:
    """Return the error message for a rendezvous port that is in use on this machine.

    Args:
        port: Port in use.
        free: Free port to suggest.
    """
    holder = _find_holder(port)
    return (
        f"port {port} of this machine is taken{f' by {holder}' if holder else ''}; end that program, or choose another port on all "
        f"machines, such as --main_process_port {free}, which is free here now"
    )


def _find_holder(port: int) -> str:
    """Return a description of the program that listens on a port. Empty if it is unknown.

    An example is "python (pid 12: python -m http.server)".
    """
    import psutil

    try:
        listening = [
            connection
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr
        ]
        found = [
            connection.pid
            for connection in listening
            if getattr(connection.laddr, "port", None) == port and connection.pid is not None
        ]
        if not found:
            return ""
        process = psutil.Process(found[0])
        command = " ".join(process.cmdline())
        return f"{process.name()} (pid {process.pid}: {command[:80]}{'...' if len(command) > 80 else ''})"
    except (psutil.Error, OSError):
        return ""
