"""Functions of accelerate.utils, used like in scripts."""

import os

import torch
from accelerate import Accelerator, utils


def _rank():
    return Accelerator(cpu=True).process_index


def gathering():
    """Gather tensors and dicts."""
    rank = _rank()
    return (
        utils.gather(torch.tensor([rank, 5])),
        utils.gather({"a": torch.tensor([[rank]])}),
        utils.gather(torch.tensor([1.0 + rank])),
    )


def gathering_by_the_accelerator():
    """Gather a scalar with accelerator.gather."""
    made = Accelerator(cpu=True)
    found = made.gather(torch.tensor(1.0 + made.process_index))
    return found.tolist(), found.ndim


def gathering_objects():
    """Call gather_object."""
    rank = _rank()
    return utils.gather_object([rank, "a"]), utils.gather_object([{"rank": rank}])


def reducing():
    """Reduce with sum and mean."""
    rank = _rank()
    value = torch.tensor([1.0, 2.0]) + rank
    return utils.reduce(value, "sum"), utils.reduce(value.clone(), "mean"), Accelerator(cpu=True).reduce(value.clone())


def broadcasting():
    """Call broadcast and broadcast_object_list."""
    rank = _rank()
    objects = [rank, "x"]
    utils.broadcast_object_list(objects)
    return utils.broadcast(torch.tensor([rank + 3.0])), objects


def padding():
    """Call pad_across_processes."""
    rank = _rank()
    made = Accelerator(cpu=True)
    return made.pad_across_processes(torch.ones(1 + rank, 2), dim=0, pad_index=-1), made.pad_across_processes(
        torch.ones(1, 1 + rank), dim=1, pad_first=True
    )


def moving():
    """Call send_to_device, which preserves containers."""
    from collections import namedtuple

    pair = namedtuple("pair", "a b")
    found = utils.send_to_device({"a": torch.ones(1), "b": [torch.zeros(1), "x"], "c": pair(torch.ones(1), 2)}, "cpu")
    return type(found["c"]).__name__, found["b"][1], found["c"].b


def sizes_of_batches():
    """Call find_batch_size and listify."""
    return (
        utils.find_batch_size({"a": torch.ones(3, 2)}),
        utils.find_batch_size([torch.ones(4)]),
        utils.listify({"a": torch.ones(2)}),
    )


def concatenating():
    """Call concatenate."""
    return utils.concatenate([{"a": torch.ones(1)}, {"a": torch.zeros(2)}])["a"], utils.concatenate(
        [torch.ones(1, 2), torch.zeros(1, 2)], dim=1
    )


def converting():
    """Call convert_to_fp32."""
    return str(utils.convert_to_fp32({"a": torch.ones(1, dtype=torch.bfloat16)})["a"].dtype)


def applying():
    """Call recursively_apply."""
    return utils.recursively_apply(lambda each: each * 2, {"a": torch.ones(1), "b": (torch.ones(1), 3)})


def seeding():
    """Call set_seed, also with device_specific=True."""
    import random

    import numpy as np

    rank = _rank()
    utils.set_seed(7)
    first = torch.rand(1).item(), random.random(), float(np.random.rand())
    utils.set_seed(7, device_specific=True)
    return first, torch.rand(1).item(), rank


def finding_a_batch_size():
    """Call find_executable_batch_size."""
    tried = []

    @utils.find_executable_batch_size(starting_batch_size=16)
    def train(batch_size):
        tried.append(batch_size)
        if batch_size > 12:
            raise RuntimeError("CUDA out of memory.")
        return batch_size

    return train(), tried


def finding_a_batch_size_on_a_cpu():
    """Call find_executable_batch_size with the error "CPU out of memory."."""
    tried = []

    @utils.find_executable_batch_size(starting_batch_size=4)
    def train(batch_size):
        tried.append(batch_size)
        if batch_size > 2:
            raise RuntimeError("CPU out of memory.")
        return batch_size

    return train(), tried


def no_batch_size():
    """Find no batch size, which raises RuntimeError."""

    @utils.find_executable_batch_size(starting_batch_size=2)
    def train(batch_size):
        raise RuntimeError("CUDA out of memory.")

    try:
        train()
    except RuntimeError as error:
        return str(error).split(". ")[0].rstrip(".")


def too_many_arguments_to_find():
    """Pass the batch size as an argument, which raises TypeError."""

    @utils.find_executable_batch_size(starting_batch_size=2)
    def train(batch_size, more):
        return batch_size

    try:
        train(128, "a")
    except TypeError as error:
        return "Batch size was passed into `train`" in str(error)


def another_error_while_finding():
    """Raise another error in find_executable_batch_size, which propagates."""

    @utils.find_executable_batch_size(starting_batch_size=2)
    def train(batch_size):
        raise ValueError("mine")

    try:
        train()
    except ValueError as error:
        return str(error)


def releasing():
    """Call release_memory, which returns Nones."""
    return utils.release_memory(torch.ones(1), 2)


def environments():
    """Call patch_environment and functions that parse environment variables."""
    with utils.patch_environment(MY_WORD="1", other=True):
        inside = (
            os.environ["MY_WORD"],
            os.environ["OTHER"],
            utils.parse_flag_from_env("MY_WORD"),
            utils.get_int_from_env(["NO", "MY_WORD"], 5),
        )
    return inside, "MY_WORD" in os.environ, utils.str_to_bool("yes"), utils.parse_choice_from_env("NO_SUCH", "z")


def merging():
    """Call merge_dicts, convert_bytes and get_pretty_name."""
    return (
        utils.merge_dicts({"a": {"b": 1}}, {"a": {"c": 2}}),
        utils.convert_bytes(2048),
        utils.get_pretty_name(torch.nn.Linear(1, 1)),
        utils.get_pretty_name(torch.nn.Linear),
    )


def versions():
    """Call is_torch_version and compare_versions."""
    return (
        utils.is_torch_version(">=", "2.0"),
        utils.compare_versions("torch", "<", "1.0"),
        __import__("accelerate").__version__,
    )


def saving(tmp="object.bin"):
    """Call accelerator.save, then utils.load."""
    made = Accelerator(cpu=True)
    made.save({"a": torch.ones(2)}, tmp)
    made.wait_for_everyone()
    return utils.load(tmp)["a"]


def saving_safely():
    """Call accelerator.save with safe_serialization=True."""
    made = Accelerator(cpu=True)
    made.save({"a": torch.ones(2)}, "it.safetensors", safe_serialization=True)
    made.wait_for_everyone()
    from safetensors.torch import load_file

    return load_file("it.safetensors")["a"]


def synchronizing_streams():
    """Call synchronize_rng_states."""
    rank = _rank()
    torch.manual_seed(rank)
    utils.synchronize_rng_states(["torch"])
    return torch.rand(1).item()


def enums():
    """Read enums by name and value."""
    return [
        str(utils.DistributedType.MULTI_GPU),
        utils.DistributedType("NO").name,
        utils.PrecisionType.list(),
        utils.RNGType.list(),
        utils.LoggerType.list(),
        [utils.CustomDtype[name].value for name in ("FP8", "INT4", "INT2")],
    ]


def which_are_there():
    """Call functions that check which packages and devices are available."""
    return [
        utils.is_cuda_available() if hasattr(utils, "is_cuda_available") else None,
        utils.is_bf16_available(),
        utils.is_torch_xla_available(),
        bool(utils.is_deepspeed_available()),
        utils.is_npu_available(),
        utils.imports.is_fp8_available(),
        utils.is_mlu_available(),
        utils.is_wandb_available(),
        utils.is_xpu_available(),
    ]


def out_of_memory_texts():
    """Call should_reduce_batch_size with several messages."""
    texts = [
        "CUDA out of memory.",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
        "DefaultCPUAllocator: can't allocate memory",
        "something else",
        "CPU out of memory.",
    ]
    return (
        [utils.memory.should_reduce_batch_size(RuntimeError(each)) for each in texts]
        if hasattr(utils, "memory")
        else None
    )


def sizes_of_files():
    """Call convert_file_size_to_int."""
    from accelerate.utils.modeling import convert_file_size_to_int

    return [convert_file_size_to_int(each) for each in ("1MB", "1MiB", "2GB", "3kb", 7)]


def sizes_of_types():
    """Call dtype_byte_size."""
    from accelerate.utils.modeling import dtype_byte_size

    return [dtype_byte_size(each) for each in (torch.float32, torch.bfloat16, torch.int8, torch.bool)]


def padded_inputs():
    """Call pad_input_tensors."""
    from accelerate.utils import pad_input_tensors

    return list(pad_input_tensors(torch.arange(4.0).reshape(2, 2), 2, 4).shape), list(
        pad_input_tensors({"a": torch.ones(7, 1)}, 7, 4)["a"].shape
    )


def a_recursive_attribute():
    """Call recursive_getattr."""
    from accelerate.utils.other import recursive_getattr

    return recursive_getattr(torch.nn.Sequential(torch.nn.Linear(2, 3)), "0.out_features")


def free_ports():
    """Call is_port_in_use."""
    from accelerate.utils import is_port_in_use

    return is_port_in_use(1)


def of_a_kernel():
    """Call check_os_kernel, which returns None."""
    from accelerate.utils import check_os_kernel

    return check_os_kernel()


def shapes_and_structures():
    """Call get_data_structure and initialize_tensors."""
    from accelerate.utils.operations import get_data_structure, initialize_tensors

    made = initialize_tensors(get_data_structure({"a": torch.ones(2, 3)}))
    return list(made["a"].shape)


def launching():
    """Import debug_launcher and notebook_launcher."""
    from accelerate import debug_launcher, notebook_launcher

    return callable(debug_launcher), callable(notebook_launcher)
