"""Checks of a launch's layout before any process starts: whether it fits the processes and the given options."""

from headway.core.config import layout_after_loss, layout_choice, mesh
from headway.core.config.load import COMMAND_LINE, ResolvedSettings
from headway.core.config.mesh import Layout
from headway.errors import ConfigError, UnsupportedError


def resolve_layout(resolved: ResolvedSettings, num_machines: int, num_local: int) -> Layout | None:
    """Return the layout that the settings request.

    Args:
        resolved: Resolved settings.
        num_machines: Number of machines in the run.
        num_local: Number of processes on each machine.

    Returns:
        The layout, or None if the script chooses it or a strategy from another package is named.

    Raises:
        ConfigError: If the strategy is unknown, does not fit the number of processes, or is not supported.
    """
    text = resolved.get("strategy")
    if text is None or mesh.find_entry_point(text) is not None:
        return None
    requested = mesh.parse_layout(text)
    try:
        layout = requested.resolve(num_machines * num_local, num_local)
    except (ConfigError, UnsupportedError) as error:
        raise ConfigError(f"{error} ({resolved.get_origin('strategy')})") from None
    return layout


def check_options(resolved: ResolvedSettings, layout: Layout | None) -> tuple[str, ...]:
    """Raise an error if an option on the command line does not apply to the layout.

    Args:
        resolved: Resolved settings.
        layout: Layout of the run. If None, no option is checked.

    Returns:
        One note for each inapplicable option that comes from a config file or an environment variable. Such an option
            has no effect.

    Raises:
        ConfigError: If an option on the command line does not apply to the layout.
    """
    if layout is None:
        return ()
    strategy, notes = resolved.get("strategy"), []
    for name, what, remedy in layout_choice.list_inapplicable_options(strategy, layout):
        if resolved.config.is_set(name):
            origin = resolved.get_origin(name)
            text = f"{name} ({origin}) needs {what}, but the layout is {strategy}: {layout.describe()}"
            if origin.startswith(COMMAND_LINE):
                raise ConfigError(f"{text}; remove it, or add {remedy}")
            notes.append(f"without effect: {text}")
    return tuple(notes)


def list_layouts_after_losses(
    resolved: ResolvedSettings, layout: Layout | None, num_machines: int, num_local: int
) -> tuple[str, ...]:
    """Return a note for each smaller number of machines with which the run would continue in a different layout.

    Args:
        resolved: Resolved settings. `min_machines` is the smallest number of machines with which the run continues.
        layout: Layout of the full run. If None, there are no notes.
        num_machines: Number of machines in the full run.
        num_local: Number of processes on each machine.
    """
    fewest = min(resolved.get("min_machines", num_machines), num_machines)
    if layout is None or fewest == num_machines:
        return ()
    text, notes = resolved.get("strategy"), []
    for count in reversed(range(fewest, num_machines)):
        remaining_layout = layout_after_loss.shrink_layout(
            mesh.parse_layout(text), num_machines * num_local, count * num_local, num_local
        )
        change = layout_after_loss.describe_change(
            text, remaining_layout, num_machines * num_local, count * num_local, num_local
        )
        notes += [f"with {count} of {num_machines} machines: {change}"] if change else []
    return tuple(notes)


def describe_layout(resolved: ResolvedSettings, layout: Layout | None) -> list[str]:
    """Return the text for the launcher's banner that describes the layout, as a list of one string.

    The list is empty if the script chooses the layout or there is only one rank.
    """
    if layout is None or layout.num_ranks == 1:
        return []
    return [f"layout {resolved.get('strategy')} ({resolved.get_origin('strategy')}): {layout.describe()}"]


def count_data_shards(num_processes: int, layout: Layout | None) -> str:
    """Return text for the launcher's banner, such as "8 processes" or "2 data shards".

    The text gives the number of shards into which the global batch is divided. Processes that read the same data share
    a shard. If the layout is unknown (None), each process counts as a shard.
    """
    if layout is None or layout.num_data_shards == num_processes:
        return f"{num_processes} process{'es' if num_processes > 1 else ''}"
    return f"{layout.num_data_shards} data shard{'s' if layout.num_data_shards > 1 else ''}"
