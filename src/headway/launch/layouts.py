"""The layout of a launch, before any process starts: does it fit the processes, and do its options belong to it?"""

from headway.config import layout_choice, mesh
from headway.config.load import COMMAND_LINE, Resolved
from headway.config.mesh import Layout
from headway.errors import ConfigError, UnsupportedError


def layout(resolved: Resolved, num_machines: int, num_local: int) -> Layout | None:
    """The layout that the settings ask for; None where they leave it to the script, or to a strategy of another package.

    Args:
        resolved: the settings.
        num_machines: in this run.
        num_local: processes on each.

    Raises:
        ConfigError: it does not fit the processes, or is not there yet.
    """
    text = resolved.get("strategy")
    if text is None or mesh.find(text) is not None:
        return None
    asked = mesh.parse(text)
    try:
        found = asked.resolve(num_machines * num_local, num_local)
        mesh.check_served(found)
    except (ConfigError, UnsupportedError) as error:
        raise ConfigError(f"{error} ({resolved.origin('strategy')})") from None
    return found


def check_options(resolved: Resolved, found: Layout | None) -> tuple[str, ...]:
    """Refuse options that were typed for another layout.

    Returns:
        A note for each that a weaker layer (a file, a variable) holds, which has no effect.

    Raises:
        ConfigError: the command line gives one.
    """
    if found is None:
        return ()
    strategy, notes = resolved.get("strategy"), []
    for name, what, remedy in layout_choice.options_of_others(strategy, found):
        if resolved.config.is_set(name):
            origin = resolved.origin(name)
            text = f"{name} ({origin}) needs {what}, but the layout is {strategy}: {found.describe()}"
            if origin.startswith(COMMAND_LINE):
                raise ConfigError(f"{text}; remove it, or add {remedy}")
            notes.append(f"without effect: {text}")
    return tuple(notes)


def after_losses(resolved: Resolved, found: Layout | None, num_machines: int, num_local: int) -> tuple[str, ...]:
    """A note for each number of machines with which the run would go on in another layout.

    Args:
        resolved: the settings.
        found: the layout of the whole run.
        num_machines, num_local: as for `layout`.
    """
    fewest = min(resolved.get("min_machines", num_machines), num_machines)
    if found is None or fewest == num_machines:
        return ()
    text, notes = resolved.get("strategy"), []
    for count in reversed(range(fewest, num_machines)):
        left = layout_choice.after_loss(mesh.parse(text), num_machines * num_local, count * num_local, num_local)
        said = layout_choice.changed(text, left, num_machines * num_local, count * num_local, num_local)
        notes += [f"with {count} of {num_machines} machines: {said}"] if said else []
    return tuple(notes)


def in_words(resolved: Resolved, found: Layout | None) -> list[str]:
    """What the banner says of the layout; nothing where it is left to the script or there is nothing to spread."""
    if found is None or found.num_ranks == 1:
        return []
    return [f"layout {resolved.get('strategy')} ({resolved.origin('strategy')}): {found.describe()}"]


def data_shards(num_processes: int, found: Layout | None) -> str:
    """By what the banner multiplies the micro-batch: processes, or groups of them that read the same."""
    if found is None or found.num_data_shards == num_processes:
        return f"{num_processes} process{'es' if num_processes > 1 else ''}"
    return f"{found.num_data_shards} data shard{'s' if found.num_data_shards > 1 else ''}"
