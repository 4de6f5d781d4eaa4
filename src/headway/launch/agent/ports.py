"""Error messages for a port that another program uses."""


def is_port_taken(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, reports that a port is in use."""
    if error is None:
        return False
    names_taken_port = "EADDRINUSE" in str(error) or "address already in use" in str(error).lower()
    return names_taken_port or is_port_taken(error.__cause__)


def describe_taken_port(port: int, free: int) -> str:
    """Return the error message for a rendezvous port that is in use on this machine.

    Args:
        port: Port in use.
        free: Free port to suggest.
    """
    program = _describe_listener(port)
    return (
        f"port {port} of this machine is taken{f' by {program}' if program else ''}; end that program, or choose another port on all "
        f"machines, such as --main_process_port {free}, which is free here now"
    )


def _describe_listener(port: int) -> str:
    """Return a description of the program that listens on a port. Empty if it is unknown.

    An example is "python (pid 12: python -m http.server)".
    """
    import psutil

    try:
        pids = [
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
            and connection.pid is not None  # None without the rights to see it
            and getattr(connection.laddr, "port", None) == port
        ]
        if not pids:
            return ""
        process = psutil.Process(pids[0])
        command = " ".join(process.cmdline())
        shortened_command = command if len(command) <= 80 else f"{command[:80]}..."
        return f"{process.name()} (pid {process.pid}: {shortened_command})"
    except (psutil.Error, OSError):
        return ""
