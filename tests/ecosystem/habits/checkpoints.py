"""save_state, load_state, and the files that scripts find in checkpoint folders."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from tests.ecosystem.habits.material import decaying, loss_of, model, prepared, rate, weights


def _step(accelerator, net, optimizer, batch, ticks=None):
    accelerator.backward(loss_of(net, batch))
    optimizer.step()
    if ticks is not None:
        ticks.step()
    optimizer.zero_grad()


def there_and_back():
    """Save, train on, and load."""
    accelerator, net, optimizer, data, ticks = prepared(schedule=decaying)
    batches = iter(data)
    _step(accelerator, net, optimizer, next(batches), ticks)
    accelerator.save_state("state")
    kept = weights(net), rate(optimizer)
    _step(accelerator, net, optimizer, next(batches), ticks)
    accelerator.load_state("state")
    return kept == (weights(net), rate(optimizer)), kept


def names_of_files():
    """List the files in a checkpoint folder."""
    accelerator, _net, _optimizer, _data, _ticks = prepared(schedule=decaying)
    accelerator.save_state("state")
    accelerator.wait_for_everyone()
    expected = ["model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"]
    return [os.path.exists(os.path.join("state", each)) for each in expected]


def named_automatically():
    """Save three times with automatic naming, and read the folders and the iteration."""
    config = ProjectConfiguration(project_dir="there", automatic_checkpoint_naming=True, total_limit=2)
    accelerator, _net, _optimizer, _data, _ = prepared(project_config=config)
    seen = [accelerator.save_iteration]
    for _ in range(3):
        accelerator.save_state()
        seen.append(accelerator.save_iteration)
    accelerator.wait_for_everyone()
    return (
        seen,
        sorted(each for each in os.listdir("there/checkpoints") if each.startswith("checkpoint")),
        accelerator.project_configuration.iteration,
    )


def iteration_set_by_hand():
    """Assign the iteration, as scripts do after a resume, and save."""
    config = ProjectConfiguration(project_dir="there", automatic_checkpoint_naming=True)
    accelerator, *_ = prepared(project_config=config)
    accelerator.project_configuration.iteration = 5
    accelerator.save_state()
    accelerator.wait_for_everyone()
    return sorted(
        each for each in os.listdir("there/checkpoints") if each.startswith("checkpoint")
    ), accelerator.save_iteration


def what_save_state_returns():
    """Read the folder that save_state returns."""
    accelerator, *_ = prepared()
    return os.path.basename(str(accelerator.save_state("state")))


def hooks():
    """Register hooks that run before a save and before a load."""
    accelerator, _net, *_ = prepared()
    seen = []
    saving = accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: seen.append(["save", len(models), len(weights)])
    )
    loading = accelerator.register_load_state_pre_hook(lambda models, folder: seen.append(["load", len(models)]))
    accelerator.save_state("state")
    accelerator.load_state("state")
    saving.remove()
    loading.remove()
    accelerator.save_state("other")
    return seen


def objects_of_the_scripts_own():
    """Save and load a registered object."""

    class Counter:
        def __init__(self):
            self.count = 0

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    accelerator, *_ = prepared()
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    counter.count = 3
    accelerator.save_state("state")
    accelerator.wait_for_everyone()
    counter.count = 0
    accelerator.load_state("state")
    return counter.count, os.path.exists("state/custom_checkpoint_0.pkl")


def an_object_that_does_not_fit():
    """Register an object without a state dict, which raises ValueError."""
    try:
        Accelerator(cpu=True).register_for_checkpointing(3)
    except ValueError:
        return "ValueError"


def saving_a_model():
    """Save a model with save_model."""
    accelerator, net, *_ = prepared()
    accelerator.save_model(net, "weights")
    accelerator.wait_for_everyone()
    return sorted(os.listdir("weights"))


def saving_a_model_in_shards():
    """Save a model with max_shard_size."""
    accelerator = Accelerator(cpu=True)
    net = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(15, 15), torch.nn.Linear(15, 15)))
    accelerator.save_model(net, "weights", max_shard_size="1KB")
    accelerator.wait_for_everyone()
    return sorted(os.listdir("weights"))


def saving_a_model_unsafely():
    """Save a model with safe_serialization=False."""
    accelerator, net, *_ = prepared()
    accelerator.save_model(net, "weights", safe_serialization=False)
    accelerator.wait_for_everyone()
    return sorted(os.listdir("weights"))


def weights_by_name():
    """Read the names that get_state_dict returns."""
    accelerator, net, *_ = prepared()
    return sorted(accelerator.get_state_dict(net))


def loading_the_newest():
    """Load the newest checkpoint with load_state() and automatic naming."""
    config = ProjectConfiguration(project_dir="there", automatic_checkpoint_naming=True)
    accelerator, net, optimizer, data, _ = prepared(project_config=config)
    accelerator.save_state()
    kept = weights(net)
    _step(accelerator, net, optimizer, next(iter(data)))
    accelerator.load_state()
    return kept == weights(net)


def loading_what_is_not_there():
    """Load a folder that does not exist, and return whether the error is a ValueError."""
    accelerator, *_ = prepared()
    try:
        accelerator.load_state("nowhere")
    except (ValueError, OSError) as error:
        return isinstance(error, ValueError)


def the_step_is_kept():
    """Read accelerator.step after a resume."""
    accelerator, net, optimizer, data, _ = prepared(gradient_accumulation_steps=4)
    for _, batch in zip(range(2), data):
        with accelerator.accumulate(net):
            accelerator.backward(loss_of(net, batch))
            optimizer.step()
            optimizer.zero_grad()
    before = accelerator.step
    accelerator.save_state("state")
    accelerator.wait_for_everyone()
    accelerator.step = 0
    accelerator.load_state("state")
    return before, accelerator.step


def without_a_folder():
    """Call save_state() without a folder and without automatic naming."""
    accelerator, *_ = prepared()
    try:
        accelerator.save_state()
    except (TypeError, ValueError):
        return "an error"


def random_numbers():
    """Compare random numbers after a save with those after a load."""
    accelerator, *_ = prepared()
    torch.manual_seed(4 + accelerator.process_index)
    accelerator.save_state("state")
    first = torch.rand(1).item()
    accelerator.load_state("state")
    return first == torch.rand(1).item()


def an_evaluation_model():
    """Save two prepared models."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model(), model(2))
    accelerator.save_state("state")
    accelerator.wait_for_everyone()
    return os.path.exists("state/model.safetensors"), os.path.exists("state/model_1.safetensors")
