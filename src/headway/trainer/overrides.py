"""Check which methods of the Trainer a subclass overrides, and refuse overrides that would have no effect."""

from collections.abc import Iterable

from headway.errors import ConfigError
from headway.trainer.argument_names import GENERAL_ADVICE

_NEVER_CALLED = frozenset(
    """
    _clip_grad_norm _determine_best_metric _evaluate _finalize_training _finish_current_push _get_dataloader
    _get_num_items_in_batch _get_output_dir _hp_search_setup _inner_training_loop _load_best_model
    _load_callback_state _load_from_checkpoint _load_optimizer_and_scheduler _load_rng_state _load_scaler
    _maybe_log_save_evaluate _prepare_for_training _push_from_checkpoint _run_epoch _save_checkpoint
    _save_optimizer_and_scheduler _save_rng_state _save_scaler _wrap_model create_accelerator_and_postprocess
    get_batch_samples init_hf_repo set_initial_training_values
    """.split()  # noqa: SIM905
)
"""Methods of transformers' Trainer that Headway never calls.

An override of such a method would silently have no effect.
"""


def list_overridden(trainer_class: type, names: Iterable[str]) -> list[str]:
    """Return a sorted list of the given names whose methods a subclass of the Trainer overrides.

    Args:
        trainer_class: Subclass of the Trainer.
        names: Names of methods.
    """
    user_classes = [each for each in trainer_class.__mro__ if not each.__module__.startswith("headway.")]
    return sorted(name for name in names if any(name in vars(each) for each in user_classes))


def check_overrides(trainer_class: type) -> None:
    """Raise an error if a subclass overrides methods that Headway never calls.

    Args:
        trainer_class: Subclass of the Trainer.

    Raises:
        ConfigError: If there are such overrides. The message names them.
    """
    overridden = list_overridden(trainer_class, _NEVER_CALLED)
    if overridden:
        raise ConfigError(
            f"{trainer_class.__name__} overrides methods that Headway never calls: {', '.join(overridden)}; use callbacks, "
            f"or one of the methods that may be overridden. {GENERAL_ADVICE}"
        )
